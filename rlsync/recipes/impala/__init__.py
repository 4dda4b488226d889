"""IMPALA and LASER: an actor-learner with V-trace.

Source: Espeholt et al. 2018, arXiv 1802.01561; Schmitt et al. 2019, arXiv 1909.11583.
"""

from rlsync.recipes.impala.batch import check_batch, concatenate
from rlsync.recipes.impala.collector import UnrollCollector
from rlsync.recipes.impala.envs import AtariEnvs, EnvSpec, GymnasiumEnvs, TorchRLEnvs, make_venv
from rlsync.recipes.impala.loss import ImpalaLoss
from rlsync.recipes.impala.models import Finals, ImpalaNet
from rlsync.recipes.impala.policy_head import Categorical, DiagonalGaussian, PolicyHead
from rlsync.recipes.impala.replay import Drawn, UnrollReplay
from rlsync.recipes.impala.replay_mix import MixCounts, ReplayMix
from rlsync.recipes.impala.supervise import Restarts
from rlsync.recipes.impala.targets import vtrace
from rlsync.recipes.impala.trust import Trust, TrustRegion

__all__ = [
    "ImpalaLoss",
    "ImpalaNet",
    "Finals",
    "PolicyHead",
    "Categorical",
    "DiagonalGaussian",
    "TrustRegion",
    "Trust",
    "vtrace",
    "UnrollCollector",
    "UnrollReplay",
    "Drawn",
    "ReplayMix",
    "MixCounts",
    "Restarts",
    "EnvSpec",
    "GymnasiumEnvs",
    "AtariEnvs",
    "TorchRLEnvs",
    "make_venv",
    "check_batch",
    "concatenate",
]

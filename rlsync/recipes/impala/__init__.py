"""IMPALA and LASER: an actor-learner with V-trace.

Source: Espeholt et al. 2018, arXiv 1802.01561; Schmitt et al. 2019, arXiv 1909.11583.
"""

from rlsync.recipes.impala.heads import Categorical, DiagonalGaussian, PolicyHead, head_for
from rlsync.recipes.impala.loss import ImpalaLoss
from rlsync.recipes.impala.network import Finals, ImpalaNet, ImpalaPlayer
from rlsync.recipes.impala.settings import LossSettings, Trust, TrustRegion, VTraceSettings
from rlsync.recipes.impala.vtrace import vtrace
from rlsync.workers.collector import UnrollCollector
from rlsync.workers.envs.specs import AtariEnvs, EnvSpec, GymnasiumEnvs, TorchRLEnvs, make_venv
from rlsync.workers.frames import check_batch, concatenate
from rlsync.workers.replay.mixing import MixCounts, ReplayMix
from rlsync.workers.replay.unrolls import Drawn, UnrollReplay
from rlsync.workers.supervision import Restarts

__all__ = [
    "ImpalaLoss",
    "ImpalaNet",
    "ImpalaPlayer",
    "Finals",
    "PolicyHead",
    "Categorical",
    "DiagonalGaussian",
    "head_for",
    "TrustRegion",
    "Trust",
    "vtrace",
    "VTraceSettings",
    "LossSettings",
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

"""IMPALA and LASER: an actor-learner with V-trace.

Source: Espeholt et al. 2018, arXiv 1802.01561; Schmitt et al. 2019, arXiv 1909.11583.
"""

from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.specs import AtariEnvs, EnvSpec, GymnasiumEnvs, TorchRLEnvs, make_venv
from rlsync.runs.actors.frames import check_batch, concatenate
from rlsync.runs.actors.replay.mixing import MixCounts, ReplayMix
from rlsync.runs.actors.replay.unrolls import Drawn, UnrollReplay
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.recipes.impala.heads import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    PolicyHead,
    head_for,
)
from rlsync.runs.recipes.impala.loss import ImpalaLoss
from rlsync.runs.recipes.impala.network import Finals, ImpalaNet, ImpalaPlayer
from rlsync.runs.recipes.impala.settings import LossSettings, Trust, TrustRegion, VTraceSettings
from rlsync.runs.recipes.impala.vtrace import vtrace

__all__ = [
    "ImpalaLoss",
    "ImpalaNet",
    "ImpalaPlayer",
    "Finals",
    "PolicyHead",
    "Categorical",
    "DiagonalGaussian",
    "MultiCategorical",
    "head_for",
    "TrustRegion",
    "Trust",
    "vtrace",
    "VTraceSettings",
    "LossSettings",
    "UnrollCollector",
    "CollectSettings",
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

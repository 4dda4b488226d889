"""The Trainer hooks of the recipes. They work with any ``torchrl.trainers.Trainer``."""

from rlsync.recipes.hooks.finite import StopIfNotFinite
from rlsync.recipes.hooks.measuring import InSummary, Load, StalenessHistogram, StatisticsHook
from rlsync.recipes.hooks.steering import (
    EpisodeReturns,
    EpsilonDecay,
    KeepPace,
    MixReplayed,
    ToLearner,
    UnrollReturns,
)

__all__ = [
    "EpisodeReturns",
    "UnrollReturns",
    "StalenessHistogram",
    "StatisticsHook",
    "EpsilonDecay",
    "KeepPace",
    "MixReplayed",
    "Load",
    "InSummary",
    "StopIfNotFinite",
    "ToLearner",
]

"""The Trainer hooks of the recipes, one kind a file. They work with any ``torchrl.trainers.Trainer``."""

from rlsync.recipes.hooks.bottleneck import Bottleneck, InSummary, Load
from rlsync.recipes.hooks.epsilon import EpsilonDecay
from rlsync.recipes.hooks.finite import StopIfNotFinite
from rlsync.recipes.hooks.pace import KeepPace
from rlsync.recipes.hooks.replay import MixReplayed
from rlsync.recipes.hooks.returns import EpisodeReturns, UnrollReturns
from rlsync.recipes.hooks.run_statistics import StatisticsHook
from rlsync.recipes.hooks.staleness import StalenessHistogram
from rlsync.recipes.hooks.to_learner import ToLearner

__all__ = [
    "EpisodeReturns",
    "UnrollReturns",
    "StalenessHistogram",
    "StatisticsHook",
    "EpsilonDecay",
    "KeepPace",
    "MixReplayed",
    "Bottleneck",
    "Load",
    "InSummary",
    "StopIfNotFinite",
    "ToLearner",
]

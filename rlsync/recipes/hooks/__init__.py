"""The Trainer hooks of the recipes. They work with any ``torchrl.trainers.Trainer``."""
# `as` tells a type checker that a name is public.

from rlsync.recipes.hooks.finite import StopIfNotFinite as StopIfNotFinite
from rlsync.recipes.hooks.measuring import InSummary as InSummary
from rlsync.recipes.hooks.measuring import Load as Load
from rlsync.recipes.hooks.measuring import StalenessHistogram as StalenessHistogram
from rlsync.recipes.hooks.measuring import StatisticsHook as StatisticsHook
from rlsync.recipes.hooks.steering import EpisodeReturns as EpisodeReturns
from rlsync.recipes.hooks.steering import EpsilonDecay as EpsilonDecay
from rlsync.recipes.hooks.steering import KeepPace as KeepPace
from rlsync.recipes.hooks.steering import MixReplayed as MixReplayed
from rlsync.recipes.hooks.steering import ToLearner as ToLearner
from rlsync.recipes.hooks.steering import UnrollReturns as UnrollReturns

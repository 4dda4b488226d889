"""All that a recipe is built from, in one module: a recipe outside of rlsync imports from here.

What recipes with a replay buffer share besides is in ``rlsync.recipes.replay``.
"""
# `as` tells a type checker that a name is public.

from rlsync.evaluation.checkpoint import CheckpointPlayer as CheckpointPlayer
from rlsync.recipes.bounds import above_zero as above_zero
from rlsync.recipes.bounds import at_least as at_least
from rlsync.recipes.bounds import fraction as fraction
from rlsync.recipes.bounds import in_buffer as in_buffer
from rlsync.recipes.bounds import in_optimizer as in_optimizer
from rlsync.recipes.bounds import kept as kept
from rlsync.recipes.bounds import learning_rate as learning_rate
from rlsync.recipes.bounds import not_below_zero as not_below_zero
from rlsync.recipes.bounds import one_of as one_of
from rlsync.recipes.checks import check as check
from rlsync.recipes.evaluating import make_evaluator as make_evaluator
from rlsync.recipes.evaluating import register_with_evaluations as register_with_evaluations
from rlsync.recipes.hooks.finite import StopIfNotFinite as StopIfNotFinite
from rlsync.recipes.hooks.measuring import InSummary as InSummary
from rlsync.recipes.hooks.steering import ToLearner as ToLearner
from rlsync.recipes.networks import MixedMLP as MixedMLP
from rlsync.recipes.networks import mlp as mlp
from rlsync.recipes.networks import workers_dtype as workers_dtype
from rlsync.recipes.networks import workers_player as workers_player
from rlsync.recipes.place import started_collector as started_collector
from rlsync.recipes.players import BoxPlayer as BoxPlayer
from rlsync.recipes.players import HeadPlayer as HeadPlayer
from rlsync.recipes.registry import Acting as Acting
from rlsync.recipes.registry import Recipe as Recipe
from rlsync.recipes.run import Run as Run
from rlsync.recipes.settings import CollectorConfig as CollectorConfig
from rlsync.recipes.settings import Config as Config
from rlsync.recipes.settings import EnvConfig as EnvConfig
from rlsync.recipes.settings import RecipeConfig as RecipeConfig
from rlsync.recipes.spaces import ANY as ANY
from rlsync.recipes.spaces import BOX as BOX
from rlsync.recipes.spaces import DISCRETE as DISCRETE
from rlsync.recipes.spaces import Spaces as Spaces
from rlsync.recipes.spaces import making as making
from rlsync.recipes.spaces import naming_env as naming_env
from rlsync.recipes.spaces import probe as probe
from rlsync.recipes.trainer import annealing as annealing
from rlsync.recipes.trainer import register_hooks as register_hooks
from rlsync.recipes.trainer import register_sync as register_sync
from rlsync.recipes.trainer import trainer_settings as trainer_settings

"""All that a recipe is built from, in one module: a recipe outside of rlsync imports from here.

What updates as functions of tensors are made of is in :mod:`rlsync.runs.recipes.pure`.
"""
# `as` tells a type checker that a name is public.

from rlsync.runs.actors.devices import CPU as CPU
from rlsync.runs.evaluation.checkpoint import CheckpointPlayer as CheckpointPlayer
from rlsync.runs.recipes.bounds import above_zero as above_zero
from rlsync.runs.recipes.bounds import at_least as at_least
from rlsync.runs.recipes.bounds import fraction as fraction
from rlsync.runs.recipes.bounds import in_buffer as in_buffer
from rlsync.runs.recipes.bounds import in_optimizer as in_optimizer
from rlsync.runs.recipes.bounds import kept as kept
from rlsync.runs.recipes.bounds import learning_rate as learning_rate
from rlsync.runs.recipes.bounds import not_below_zero as not_below_zero
from rlsync.runs.recipes.bounds import one_of as one_of
from rlsync.runs.recipes.checks import check as check
from rlsync.runs.recipes.evaluating import make_evaluator as make_evaluator
from rlsync.runs.recipes.evaluating import register_with_evaluations as register_with_evaluations
from rlsync.runs.recipes.hooks.finite import StopIfNotFinite as StopIfNotFinite
from rlsync.runs.recipes.hooks.measuring import InSummary as InSummary
from rlsync.runs.recipes.hooks.steering import ToLearner as ToLearner
from rlsync.runs.recipes.networks import MixedMLP as MixedMLP
from rlsync.runs.recipes.networks import Sight as Sight
from rlsync.runs.recipes.networks import mlp as mlp
from rlsync.runs.recipes.networks import workers_dtype as workers_dtype
from rlsync.runs.recipes.networks import workers_player as workers_player
from rlsync.runs.recipes.place import started_collector as started_collector
from rlsync.runs.recipes.place import started_unrolls as started_unrolls
from rlsync.runs.recipes.players import BoxPlayer as BoxPlayer
from rlsync.runs.recipes.players import HeadPlayer as HeadPlayer
from rlsync.runs.recipes.players import WithNoise as WithNoise
from rlsync.runs.recipes.registry import Acting as Acting
from rlsync.runs.recipes.registry import Recipe as Recipe
from rlsync.runs.recipes.replay.building import TWO_CRITICS as TWO_CRITICS
from rlsync.runs.recipes.replay.building import make_trainer as make_trainer
from rlsync.runs.recipes.replay.building import relu_mlp as relu_mlp
from rlsync.runs.recipes.replay.building import twin_critics as twin_critics
from rlsync.runs.recipes.replay.settings import ActorCriticConfig as ActorCriticConfig
from rlsync.runs.recipes.replay.settings import OffPolicyConfig as OffPolicyConfig
from rlsync.runs.recipes.replay.settings import PaceConfig as PaceConfig
from rlsync.runs.recipes.run import Run as Run
from rlsync.runs.recipes.settings import CollectorConfig as CollectorConfig
from rlsync.runs.recipes.settings import Config as Config
from rlsync.runs.recipes.settings import EnvConfig as EnvConfig
from rlsync.runs.recipes.settings import RecipeConfig as RecipeConfig
from rlsync.runs.recipes.spaces import ANY as ANY
from rlsync.runs.recipes.spaces import BOX as BOX
from rlsync.runs.recipes.spaces import CHOICES as CHOICES
from rlsync.runs.recipes.spaces import DISCRETE as DISCRETE
from rlsync.runs.recipes.spaces import NUMBERS as NUMBERS
from rlsync.runs.recipes.spaces import ON_POLICY as ON_POLICY
from rlsync.runs.recipes.spaces import Spaces as Spaces
from rlsync.runs.recipes.spaces import making as making
from rlsync.runs.recipes.spaces import naming_env as naming_env
from rlsync.runs.recipes.spaces import probe as probe
from rlsync.runs.recipes.trainer import annealing as annealing
from rlsync.runs.recipes.trainer import register_hooks as register_hooks
from rlsync.runs.recipes.trainer import register_sync as register_sync
from rlsync.runs.recipes.trainer import trainer_settings as trainer_settings

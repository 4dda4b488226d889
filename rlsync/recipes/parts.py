"""All that a recipe is built from, in one module: a recipe outside of rlsync imports from here.

What recipes with a replay buffer share besides is in ``rlsync.recipes.replay``.
"""

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes.bounds import (
    above_zero,
    at_least,
    fraction,
    in_buffer,
    in_optimizer,
    kept,
    learning_rate,
    not_below_zero,
    one_of,
)
from rlsync.recipes.checks import check
from rlsync.recipes.evaluating import make_evaluator, register_with_evaluations
from rlsync.recipes.hooks import InSummary, StopIfNotFinite, ToLearner
from rlsync.recipes.networks import MixedMLP, mlp, workers_dtype, workers_policy
from rlsync.recipes.place import EXPONENT, started_collector
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import Run
from rlsync.recipes.settings import CollectorConfig, Config, EnvConfig, RecipeConfig
from rlsync.recipes.spaces import ANY, BOX, DISCRETE, Spaces, make_env, making, naming_env, probe
from rlsync.recipes.trainer import annealing, policy_player, register_hooks, register_sync, trainer_settings

__all__ = [
    "ANY",
    "BOX",
    "DISCRETE",
    "EXPONENT",
    "CheckpointPlayer",
    "CollectorConfig",
    "Config",
    "EnvConfig",
    "InSummary",
    "MixedMLP",
    "Recipe",
    "RecipeConfig",
    "Run",
    "Spaces",
    "StopIfNotFinite",
    "ToLearner",
    "above_zero",
    "annealing",
    "at_least",
    "check",
    "fraction",
    "in_buffer",
    "in_optimizer",
    "kept",
    "learning_rate",
    "make_env",
    "make_evaluator",
    "making",
    "mlp",
    "naming_env",
    "not_below_zero",
    "one_of",
    "policy_player",
    "probe",
    "register_hooks",
    "register_sync",
    "register_with_evaluations",
    "started_collector",
    "trainer_settings",
    "workers_dtype",
    "workers_policy",
]

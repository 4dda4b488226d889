"""All that a recipe is built from, in one module: a recipe that is copied imports from here.

The hooks of a Trainer are in ``rlsync.recipes.hooks``, and what recipes with a replay buffer share in
``rlsync.recipes.replay``.
"""

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes.checks import check
from rlsync.recipes.evaluating import make_evaluator, register_with_evaluations
from rlsync.recipes.networks import MixedMLP, mlp, workers_dtype, workers_policy
from rlsync.recipes.place import EXPONENT, started_collector
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import Run
from rlsync.recipes.settings import Config, EnvConfig, RecipeConfig
from rlsync.recipes.spaces import ANY, BOX, DISCRETE, Spaces, make_env, making, naming_env, probe
from rlsync.recipes.trainer import annealing, policy_player, register_hooks, register_sync, trainer_settings

__all__ = [
    "ANY",
    "BOX",
    "DISCRETE",
    "EXPONENT",
    "CheckpointPlayer",
    "Config",
    "EnvConfig",
    "MixedMLP",
    "Recipe",
    "RecipeConfig",
    "Run",
    "Spaces",
    "annealing",
    "check",
    "make_env",
    "make_evaluator",
    "making",
    "mlp",
    "naming_env",
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

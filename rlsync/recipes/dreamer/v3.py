"""DreamerV3: a world model from replayed sequences, an actor and a critic from what it imagines.

Source: Hafner et al. 2023, https://arxiv.org/abs/2301.04104; torchrl.objectives.DreamerV3Loss.
"""

from __future__ import annotations

from torchrl.objectives import SoftUpdate
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.dreamer.building import make_trainer, started_collector
from rlsync.recipes.dreamer.config import DreamerV3Config
from rlsync.recipes.dreamer.v3_networks import make_loss
from rlsync.recipes.evaluating import register_with_evaluations
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import ANY, Spaces


def build(config: Config, spaces: Spaces | None = None) -> Trainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`DreamerV3Config`. Workers hold the player as
            ``policy.player``, with the encoder, the recurrent model and the actor as its three modules.
        spaces: of the environment, from the recipe's probe, if the config has been checked already. None:
            check the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.
    """
    recipe, spaces = ANY.checked(config, DreamerV3Config, spaces)
    parts.seed_everything(config.seed)
    loss = make_loss(recipe, spaces, learner_device(config))
    acting = loss.actor_network
    with started_collector(config, recipe, acting, spaces) as collector:
        optimizer = DreamerV3Optimizer(
            loss.parameters(), lr=recipe.lr, agc=recipe.clip_norm, warmup_steps=recipe.warmup_steps
        )
        stepper = DreamerV3OptimizationStepper(
            loss,
            optimizer,
            SoftUpdate(loss.value_loss, tau=recipe.tau),
            compile_train_step=False,  # on two cores it takes minutes and gains nothing
            cudagraph=False,
        )
        trainer = make_trainer(config, recipe, collector, loss, optimizer, acting, stepper)
        register_with_evaluations(trainer, config, acting, spaces)
    return trainer


def player(config: Config, spaces: Spaces, deterministic: bool) -> CheckpointPlayer:
    """The player of a run's config, for ``rlsync eval``."""
    acting = make_loss(DreamerV3Config.of(config), spaces).actor_network
    return parts.policy_player(config, acting, spaces, deterministic=deterministic)


RECIPE = Recipe("dreamer_v3", DreamerV3Config, ANY.probe, build, player)

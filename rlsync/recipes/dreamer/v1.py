"""DreamerV1: a world model from replayed sequences; the actor's gradient goes through what is imagined.

Source: Hafner et al. 2019, https://arxiv.org/abs/1912.01603; torchrl.objectives.DreamerModelLoss.
"""

from __future__ import annotations

from torch import optim
from torchrl.trainers import Trainer

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.dreamer.building import make_trainer, started_collector
from rlsync.recipes.dreamer.config import DreamerV1Config
from rlsync.recipes.dreamer.v1_networks import make_loss
from rlsync.recipes.evaluating import register_with_evaluations
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import BOX, Spaces


def build(config: Config, spaces: Spaces | None = None) -> Trainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`DreamerV1Config`. Workers hold the player as
            ``policy.player``: encoder, posterior, actor, noise and prior.
        spaces: of the environment, from the recipe's probe, if the config has been checked already. None:
            check the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.
    """
    recipe, spaces = BOX.checked(config, DreamerV1Config, spaces)
    parts.seed_everything(config.seed)
    loss = make_loss(recipe, spaces, learner_device(config))
    acting = loss.actor_network
    with started_collector(config, recipe, acting, spaces) as collector:
        optimizer = optim.Adam(
            [
                {"params": list(loss.model_loss.parameters()), "lr": recipe.lr},
                {"params": list(loss.actor_loss.actor_model.parameters()), "lr": recipe.actor_lr},
                {"params": list(loss.value_loss.parameters()), "lr": recipe.value_lr},
            ]
        )
        trainer = make_trainer(config, recipe, collector, loss, optimizer, acting, within_episodes=True)
        register_with_evaluations(trainer, config, acting, spaces)
    return trainer


def player(config: Config, spaces: Spaces, deterministic: bool) -> CheckpointPlayer:
    """The player of a run's config, for ``rlsync eval``."""
    acting = make_loss(DreamerV1Config.of(config), spaces).actor_network
    return parts.policy_player(config, acting, spaces, deterministic=deterministic)


RECIPE = Recipe("dreamer_v1", DreamerV1Config, BOX.probe, build, player)

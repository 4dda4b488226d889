"""DreamerV1: a world model from replayed sequences; the actor's gradient goes through what is imagined.

Workers hold the player as ``policy.player``: encoder, posterior, actor, noise and prior.

Source: Hafner et al. 2019, https://arxiv.org/abs/1912.01603; torchrl.objectives.DreamerModelLoss.
"""

from __future__ import annotations

from torch import optim
from torchrl.trainers import Trainer

from rlsync.recipes import parts
from rlsync.recipes.dreamer.building import make_trainer, started_collector
from rlsync.recipes.dreamer.config import DreamerV1Config
from rlsync.recipes.dreamer.v1_networks import make_loss


def build(run: parts.Run[DreamerV1Config]) -> Trainer:
    """See :class:`~rlsync.recipes.registry.Recipe`."""
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    acting = loss.actor_network
    with started_collector(run, acting) as collector:
        optimizer = optim.Adam(
            [
                {"params": list(loss.model_loss.parameters()), "lr": recipe.lr},
                {"params": list(loss.actor_loss.actor_model.parameters()), "lr": recipe.actor_lr},
                {"params": list(loss.value_loss.parameters()), "lr": recipe.value_lr},
            ]
        )
        trainer = make_trainer(run, collector, loss, optimizer, acting, within_episodes=True)
        parts.register_with_evaluations(trainer, run, acting)
    return trainer


RECIPE = parts.Recipe(
    "dreamer_v1",
    DreamerV1Config,
    parts.BOX.probe,
    build,
    lambda run: make_loss(run.recipe, run.spaces).actor_network,
)

"""DreamerV3: a world model from replayed sequences, an actor and a critic from what it imagines.

Workers hold the player as ``policy.player``, with the encoder, the recurrent model and the actor as its
three modules.

Source: Hafner et al. 2023, https://arxiv.org/abs/2301.04104; torchrl.objectives.DreamerV3Loss.
"""

from __future__ import annotations

from torchrl.objectives import SoftUpdate
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from rlsync.recipes import parts
from rlsync.recipes.dreamer.building import make_trainer, started_collector
from rlsync.recipes.dreamer.config import DreamerV3Config
from rlsync.recipes.dreamer.v3_networks import make_loss


def build(run: parts.Run[DreamerV3Config]) -> Trainer:
    """See :class:`~rlsync.recipes.registry.Recipe`."""
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    acting = loss.actor_network
    with started_collector(run, acting) as collector:
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
        trainer = make_trainer(run, collector, loss, optimizer, acting, stepper)
        parts.register_with_evaluations(trainer, run, acting)
    return trainer


RECIPE = parts.Recipe(
    "dreamer_v3",
    DreamerV3Config,
    parts.ANY.probe,
    build,
    lambda run: make_loss(run.recipe, run.spaces).actor_network,
)

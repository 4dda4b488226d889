"""SAC with worker processes on a board: TorchRL's trainer, collector and loss.

Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; torchrl.objectives.SACLoss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict.nn import NormalParamExtractor
from torch import nn, optim
from torchrl.modules import TanhNormal
from torchrl.objectives import SACLoss, SoftUpdate
from torchrl.trainers import Trainer

from rlsync.recipes import parts
from rlsync.recipes.bounds import above_zero, in_buffer
from rlsync.recipes.networks import PlainActor, PlainDraw, PlainModule
from rlsync.recipes.replay.building import TWO_CRITICS, make_trainer, relu_mlp, seeing, twin_critics
from rlsync.recipes.replay.settings import ActorCriticConfig
from rlsync.workers.devices import CPU


@dataclass
class SACConfig(ActorCriticConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

    name: str = "sac"
    #: Temperature at the start: what a unit of entropy is worth. It is learned from there.
    alpha_init: float = in_buffer(above_zero(1.0), "alpha_init")


def build(run: parts.Run[SACConfig]) -> Trainer:
    """See :class:`~rlsync.recipes.registry.Recipe`."""
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    acting = loss.actor_network
    with parts.started_collector(run, acting, random_frames=recipe.pace.prefill) as collector:
        trainer = make_trainer(
            run,
            collector,
            loss,
            SoftUpdate(loss, tau=recipe.tau),
            optim.Adam(loss.parameters(), lr=recipe.lr, fused=True),  # the losses share no parameter
            squared_errors=False,
        )
        parts.register_with_evaluations(trainer, run, acting)
    return trainer


def make_loss(recipe: SACConfig, spaces: parts.Spaces, device: torch.device = CPU) -> SACLoss:
    """The loss of an actor, two critics and a temperature, on a device."""
    low, high = spaces.bounds()
    net = nn.Sequential(
        relu_mlp(recipe, spaces.features, 2 * spaces.actions, last_gain=0.01), NormalParamExtractor()
    )
    actor = PlainActor(
        PlainModule(seeing(recipe, spaces, net), in_keys=["observation"], out_keys=["loc", "scale"]),
        PlainDraw(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": low, "high": high, "tanh_loc": False},
        ),
    )
    loss = SACLoss(
        actor.to(device),
        twin_critics(recipe, spaces, device),
        alpha_init=recipe.alpha_init,
        action_spec=spaces.action_spec,
        # The paper's target, minus one nat for each number of an action, is for actions from -1 to 1. The
        # actor's log probabilities are those of the environment's actions, so the target is too.
        target_entropy=float(spaces.half_ranges().log().expand(spaces.actions).sum()) - spaces.actions,
        **TWO_CRITICS,
    )
    loss.make_value_estimator(gamma=recipe.gamma)
    return loss.to(device)


RECIPE = parts.Recipe(
    "sac", SACConfig, parts.BOX.probe, build, lambda run: make_loss(run.recipe, run.spaces).actor_network
)

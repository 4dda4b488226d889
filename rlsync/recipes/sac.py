"""SAC with worker processes on a board: TorchRL's trainer, collector and loss.

Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; torchrl.objectives.SACLoss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn, optim
from torch.nn.functional import softplus
from torchrl.modules import TanhNormal
from torchrl.objectives import SACLoss
from torchrl.objectives.value import TD0Estimator
from torchrl.trainers import Trainer

from rlsync.recipes import parts, pure
from rlsync.recipes.bounds import above_zero, in_buffer
from rlsync.recipes.hooks.stepping import PureStepper
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
    optimizer = optim.Adam(loss.parameters(), lr=recipe.lr, fused=True)  # the losses share no parameter
    target = pure.SoftTargets(loss, tau=recipe.tau)
    with parts.started_collector(run, acting, random_frames=recipe.pace.prefill) as collector:
        trainer = make_trainer(run, collector, loss, target, optimizer, squared_errors=False)
        PureStepper(lambda: pure_update(loss, optimizer)).register(trainer)
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


def pure_update(loss: SACLoss, optimizer: optim.Adam) -> pure.Update:
    """The update as a function of tensors: equations 5, 7 and 18 of arXiv 1812.05905."""
    pure.require(
        loss, SACLoss, value_network_params=None, loss_function="l2", reduction="mean", skip_done_states=False
    )
    pure.require(loss, SACLoss, fixed_alpha=False, min_log_alpha=None, max_log_alpha=None, delay_actor=False)
    pure.require(loss.value_estimator, TD0Estimator, average_rewards=False)
    pi, (actor,) = pure.network(loss.actor_network, loss.actor_network_params)
    q, (critics, targets) = pure.network(
        loss.qvalue_network, loss.qvalue_network_params, loss.target_qvalue_network_params
    )
    bounds = loss.actor_network[-1].distribution_kwargs
    low, high = bounds["low"], bounds["high"]
    middle, half = (low + high) / 2, (high - low) / 2
    normal = next(m for m in loss.actor_network.modules() if isinstance(m, NormalParamExtractor))

    def act(weights: pure.Weights, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions ``[B, A]`` and their log probabilities ``[B]``."""
        loc, scale = normal(pi(weights["actor"], observation))
        before = loc + scale * noise
        lost = 2 * (math.log(2) - before - softplus(-2 * before)) + half.log()  # the log of the derivative
        log_prob = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2 - lost
        return middle + half * pure.tanh_inside(before), log_prob.sum(-1)

    def losses(weights: pure.Weights, batch: pure.Transitions, noise: Sequence[Tensor]) -> pure.Found:
        alpha = weights["log_alpha"][0].detach().exp()
        with torch.no_grad():
            action, log_prob = act(weights, batch.next_observation, noise[0])
            worst = torch.minimum(
                *(q(w, batch.next_observation, action) for w in pure.unstacked(weights["targets"]))
            )
            target = batch.target(weights["gamma"][0], worst.squeeze(-1) - alpha * log_prob)
        errors = [
            q(w, batch.observation, batch.action).squeeze(-1) - target
            for w in pure.unstacked(weights["critics"])
        ]
        action, log_prob = act(weights, batch.observation, noise[1])
        frozen = pure.unstacked(pure.detached(weights["critics"]))
        value = torch.minimum(*(q(w, batch.observation, action) for w in frozen)).squeeze(-1)
        frozen_log_prob = log_prob.detach()
        return {
            "loss_actor": batch.mean(alpha * log_prob - value),
            "loss_qvalue": batch.mean(errors[0].square() + errors[1].square()),
            "loss_alpha": batch.mean(
                -weights["log_alpha"][0] * (frozen_log_prob + weights["target_entropy"][0])
            ),
            "alpha": alpha,
            "entropy": -frozen_log_prob.mean(),
            "td_error": torch.maximum(*(error.detach().abs() for error in errors)),
        }

    return pure.Update(
        (loss.actor_network, loss.qvalue_network),
        {
            "actor": actor,
            "critics": critics,
            "targets": targets,
            "log_alpha": [loss.log_alpha],
            "gamma": [loss.value_estimator.gamma],
            "target_entropy": [loss.target_entropy],
        },
        (pure.Phase(optimizer, losses),),
        pure.Transitions.read,
        lambda batch: [torch.randn_like(batch.action) for _ in range(2)],
    )


RECIPE = parts.Recipe(
    "sac", SACConfig, parts.BOX.probe, build, lambda run: make_loss(run.recipe, run.spaces).actor_network
)

"""SAC with worker processes on a board: TorchRL's trainer, collector and loss.

Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; torchrl.objectives.SACLoss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import NormalParamExtractor
from torch import Tensor, nn, optim
from torch.nn.functional import softplus
from torchrl.modules import TanhNormal
from torchrl.objectives import SACLoss
from torchrl.trainers import Trainer

from rlsync.recipes import parts, pure
from rlsync.recipes.bounds import above_zero, in_buffer, learning_rate
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
    #: Learning rate of the temperature. null: recipe.lr.
    alpha_lr: float | None = learning_rate(None)


def build(run: parts.Run[SACConfig]) -> Trainer:
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    acting = loss.actor_network
    optimizer = make_optimizer(recipe, loss)
    target = pure.SoftTargets(loss, tau=recipe.tau)
    with parts.started_collector(run, acting, random_frames=recipe.pace.prefill) as collector:
        trainer = make_trainer(run, collector, loss, target, optimizer, squared_errors=False)
        pure.PureStepper.of(run, lambda: pure_update(loss, optimizer)).register(trainer)
        parts.register_with_evaluations(trainer, run, acting)
    return trainer


def make_loss(recipe: SACConfig, spaces: parts.Spaces, device: torch.device = CPU) -> SACLoss:
    low, high = spaces.bounds()
    mlp = relu_mlp(recipe, spaces.features, 2 * spaces.actions, last_gain=0.01)
    # The deviation is TorchRL's softplus + 0.01; the paper's code has an exponential between 2e-9 and 7.4. An
    # actor at the floor has -3.2 nats for each number of an action, so the target below, which is -1 in the
    # same units, is within its reach; and no gradient of 1 / deviation is above 100.
    net = nn.Sequential(mlp, NormalParamExtractor())
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


def make_optimizer(recipe: SACConfig, loss: SACLoss) -> optim.Adam:
    """One Adam, because the losses share no parameter, with a group for each learning rate."""
    rates = (
        ([loss.log_alpha], recipe.alpha_lr),
        (loss.actor_network_params.parameters(), recipe.lr),
        (loss.qvalue_network_params.parameters(), recipe.critic_lr),
    )
    groups = [{"params": list(params), "lr": lr or recipe.lr} for params, lr in rates]
    optimizer = optim.Adam(groups, fused=True)
    optimizer.register_load_state_dict_pre_hook(_in_groups)
    return optimizer


def _in_groups(optimizer: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with one group of the same parameters, as earlier checkpoints have it."""
    first, *others = state["param_groups"]
    if others:
        return state
    ids = iter(first["params"])
    groups = [first | {"params": [next(ids) for _ in group["params"]]} for group in optimizer.param_groups]
    return state | {"param_groups": groups}


def pure_update(loss: SACLoss, optimizer: optim.Adam) -> pure.Update:
    """The update as a function of tensors: equations 5, 7 and 18 of arXiv 1812.05905."""
    pi, (actor,) = pure.network(loss.actor_network, loss.actor_network_params)
    q, (critics, targets) = pure.network(
        loss.qvalue_network, loss.qvalue_network_params, loss.target_qvalue_network_params
    )
    gamma, log_alpha, target_entropy = loss.value_estimator.gamma, loss.log_alpha, loss.target_entropy
    low, high = (loss.actor_network[-1].distribution_kwargs[name] for name in ("low", "high"))
    middle, half = (low + high) / 2, (high - low) / 2
    normal = next(m for m in loss.actor_network.modules() if isinstance(m, NormalParamExtractor))

    def act(observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions ``[B, A]`` and their log probabilities ``[B]``."""
        loc, scale = normal(pi(actor, observation))
        x = loc + scale * noise
        log_slope = 2 * (math.log(2) - x - softplus(-2 * x)) + half.log()
        log_prob = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2 - log_slope
        return middle + half * pure.tanh_inside(x), log_prob.sum(-1)

    def losses(b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = act(b["next_observation"], noise[0])
            value = torch.minimum(*q.each(targets, b["next_observation"], action)) - alpha * log_prob
            goal = pure.goal(b, gamma, value)
        errors = [value - goal for value in q.each(critics, b["observation"], b["action"])]
        action, log_prob = act(b["observation"], noise[1])
        value = torch.minimum(*q.each(pure.detached(critics), b["observation"], action))
        entropy = -log_prob.detach()
        return {
            "loss_actor": pure.mean(b, alpha * log_prob - value),
            "loss_qvalue": pure.mean(b, errors[0].square() + errors[1].square()),
            "loss_alpha": pure.mean(b, log_alpha * (entropy - target_entropy)),
            "alpha": alpha,
            "entropy": entropy.mean(),
            "td_error": torch.maximum(errors[0].abs(), errors[1].abs()),
        }

    return pure.Update(
        (loss.actor_network, loss.qvalue_network),
        (pure.Phase(optimizer, losses),),
        noise=lambda b: [torch.randn_like(b["action"]) for _ in range(2)],
    )


RECIPE = parts.Recipe(
    "sac", SACConfig, parts.BOX.probe, build, lambda run: make_loss(run.recipe, run.spaces).actor_network
)

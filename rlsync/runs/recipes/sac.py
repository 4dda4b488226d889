"""SAC and CrossQ: TorchRL's trainer, replay and losses, with workers that adopt from a board.

Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; Bhatt et al. 2024, https://arxiv.org/abs/1902.05605;
torchrl.objectives.SACLoss and CrossQLoss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn, optim
from torch.nn.functional import softplus
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import CrossQLoss, SACLoss, SoftUpdate
from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.devices import CPU
from rlsync.runs.recipes import parts, pure
from rlsync.runs.recipes.networks import NormedLinear
from rlsync.runs.recipes.players import Squashed
from rlsync.runs.recipes.replay.building import (
    TWO_CRITICS,
    make_trainer,
    relu_mlp,
    twin_critics,
)
from rlsync.runs.recipes.replay.settings import ActorCriticConfig


@dataclass
class SoftConfig(ActorCriticConfig):
    #: Temperature at the start: what a unit of entropy is worth. It is learned from there.
    alpha_init: float = parts.in_buffer(parts.above_zero(1.0), "alpha_init")
    #: Learning rate of the temperature. null: recipe.lr.
    alpha_lr: float | None = parts.learning_rate(None)


@dataclass
class SACConfig(SoftConfig):
    """Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905)."""

    name: str = "sac"
    #: How far the target networks move to the trained ones, in each update.
    tau: float = parts.fraction(0.005)


@dataclass
class CrossQConfig(SoftConfig):
    """Batch normalisation in the critics, in place of target networks (Bhatt et al. 2024, arXiv 1902.05605).

    Two differences: the paper's critics are 2,048 wide, and its actor learns at every third update.
    """

    name: str = "crossq"
    lr: float = parts.learning_rate(1e-3)

    def errors(self, config: parts.Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        if self.prioritized:
            problem = "TorchRL's CrossQLoss does not weigh frames that are drawn by priority"
            yield ConfigError(
                problem, "recipe.prioritized", "give recipe.prioritized=false, or recipe=sac"
            )


SoftLoss: TypeAlias = SACLoss | CrossQLoss

BETAS = (0.9, 0.999)  #: Adam's own


def build(run: parts.Run[SACConfig]) -> Trainer:
    loss = make_loss(run.recipe, run.spaces, run.device)
    return soft_trainer(run, loss, pure_update, pure.SoftTargets(loss, tau=run.recipe.tau))


def build_crossq(run: parts.Run[CrossQConfig]) -> Trainer:
    loss = make_crossq_loss(run.recipe, run.spaces, run.device)
    return soft_trainer(run, loss, crossq_update, betas=(0.5, 0.999))


def soft_trainer(
    run: parts.Run[SoftConfig],
    loss: SoftLoss,
    update: Callable[[SoftLoss, optim.Adam], pure.Update],
    target: SoftUpdate | None = None,
    *,
    betas: tuple[float, float] = BETAS,
) -> Trainer:
    optimizer = make_optimizer(run.recipe, loss, betas=betas)
    player = player_of(loss.actor_network, run.spaces)
    with parts.started_collector(run, player, random_frames=run.recipe.pace.prefill) as collector:
        trainer = make_trainer(run, collector, loss, target, optimizer, squared_errors=False)
        pure.PureStepper.of(run, lambda: update(loss, optimizer)).register(trainer)
        greedy = player_of(loss.actor_network, run.spaces, deterministic=True)
        parts.register_with_evaluations(trainer, run, greedy)
    return trainer


def player_of(
    actor: ProbabilisticActor, spaces: parts.Spaces, *, deterministic: bool = False
) -> parts.BoxPlayer:
    return parts.BoxPlayer(actor, actor[0].module, Squashed(deterministic), spaces)


def make_loss(
    recipe: SoftConfig,
    spaces: parts.Spaces,
    device: torch.device = CPU,
    *,
    kind: type[SACLoss | CrossQLoss] = SACLoss,
    layer_class: type[nn.Module] = nn.Linear,
) -> SoftLoss:
    low, high = spaces.bounds()
    sight = parts.Sight.of(recipe, spaces)
    mlp = relu_mlp(recipe, sight.features, 2 * spaces.actions, last_gain=0.01)
    # The deviation is TorchRL's softplus + 0.01, not the paper's exponential: docs/how_to/off_policy.md.
    net = nn.Sequential(mlp, NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(sight.behind(net), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high, "tanh_loc": False},
    )
    # The paper's target, minus one nat for each number of an action, is for actions from -1 to 1. The
    # actor's log probabilities are those of the environment's actions, so the target is too.
    log_volume = float(spaces.half_ranges().log().expand(spaces.actions).sum())
    loss = kind(
        actor.to(device),
        twin_critics(recipe, spaces, device, layer_class=layer_class),
        alpha_init=recipe.alpha_init,
        action_spec=spaces.action_spec,
        target_entropy=log_volume - spaces.actions,
        **TWO_CRITICS,
    )
    loss.make_value_estimator(gamma=recipe.gamma)
    return loss.to(device)


make_crossq_loss = partial(make_loss, kind=CrossQLoss, layer_class=NormedLinear)


def make_optimizer(
    recipe: SoftConfig, loss: SoftLoss, *, betas: tuple[float, float] = BETAS
) -> optim.Adam:
    """One Adam, because the losses share no parameter, with a group for each learning rate."""
    actor = list(loss.actor_network_params.parameters())
    critics = list(loss.qvalue_network_params.parameters())
    groups = [
        {"params": [loss.log_alpha], "lr": recipe.alpha_lr or recipe.lr},
        {"params": actor, "lr": recipe.lr},
        {"params": critics, "lr": recipe.critic_lr or recipe.lr},
    ]
    optimizer = optim.Adam(groups, betas=betas, fused=True)
    optimizer.register_load_state_dict_pre_hook(_in_groups)
    return optimizer


def _in_groups(optimizer: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with one group of the same parameters, as earlier checkpoints have it."""
    first, *others = state["param_groups"]
    if others:
        return state
    ids = iter(first["params"])
    groups = []
    for group in optimizer.param_groups:
        groups.append(first | {"params": list(islice(ids, len(group["params"])))})
    return state | {"param_groups": groups}


#: Of a batch, and of actions after it: each critic's values of the batch's actions, and of these.
Values = Callable[[pure.Batch, Tensor], tuple[Sequence[Tensor], Sequence[Tensor]]]


def pure_update(loss: SoftLoss, optimizer: optim.Adam, values: Values | None = None) -> pure.Update:
    """Equations 5, 7 and 18 of arXiv 1812.05905.

    ``values(batch, action)`` are each critic's, of the batch's actions and of the next ones; by default the
    targets' of these.
    """
    pi, (actor,) = pure.network(loss.actor_network, loss.actor_network_params)
    q, (critics, targets) = pure.network(
        loss.qvalue_network, loss.qvalue_network_params, loss.target_qvalue_network_params
    )
    gamma = loss.value_estimator.gamma
    log_alpha = loss.log_alpha
    target_entropy = loss.target_entropy
    bounds = loss.actor_network[-1].distribution_kwargs
    low = bounds["low"].to(log_alpha.device)
    high = bounds["high"].to(log_alpha.device)
    middle = (low + high) / 2
    half = (high - low) / 2
    normal = next(m for m in loss.actor_network.modules() if isinstance(m, NormalParamExtractor))

    def act(observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions ``[B, A]`` and their log probabilities ``[B]``."""
        loc, scale = normal(pi(actor, observation))
        x = loc + scale * noise
        log_slope = 2 * (math.log(2) - x - softplus(-2 * x)) + half.log()
        log_prob = -noise.square() / 2 - scale.log() - math.log(2 * math.pi) / 2 - log_slope
        return middle + half * pure.tanh_inside(x), log_prob.sum(-1)

    def by_targets(b: pure.Batch, following: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        with torch.no_grad():
            after = q.each(targets, b["next_observation"], following)
        return q.each(critics, b["observation"], b["action"]), after

    def losses(b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            action, log_prob = act(b["next_observation"], noise[0])
        # Q(s, a) is to be r + gamma (min Q'(s', a') - alpha ln pi(a'|s'))
        now, after = (values or by_targets)(b, action)
        goal = pure.goal(b, gamma, torch.minimum(*after) - alpha * log_prob)
        errors = [value - goal for value in now]
        # The actor lowers alpha ln pi(a|s) - min Q(s, a) by its own draws, and alpha holds the entropy.
        action, log_prob = act(b["observation"], noise[1])
        value = torch.minimum(*q.each([c.detach() for c in critics], b["observation"], action))
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
        noise=lambda b: [torch.randn_like(b["action"]), torch.randn_like(b["action"])],
    )


def crossq_update(loss: CrossQLoss, optimizer: optim.Adam) -> pure.Update:
    """The critics see both steps of a transition in one batch: its statistics are those of both."""
    q, (critics,) = pure.network(loss.qvalue_network, loss.qvalue_network_params, training=True)

    def at_once(b: pure.Batch, following: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        observation = torch.cat([b["observation"], b["next_observation"]])
        action = torch.cat([b["action"], following])
        now = []
        after = []
        for both in q.each(critics, observation, action):
            value, next_value = both.chunk(2)
            now.append(value)
            after.append(next_value.detach())
        return now, after

    return pure_update(loss, optimizer, at_once)


def acting(
    make: Callable[[SoftConfig, parts.Spaces], SoftLoss],
    run: parts.Run[SoftConfig],
    deterministic: bool,
) -> parts.Acting:
    actor = make(run.recipe, run.spaces).actor_network
    return parts.Acting(actor, player_of(actor, run.spaces, deterministic=deterministic))


RECIPE = parts.Recipe("sac", SACConfig, parts.NUMBERS.probe, build, partial(acting, make_loss))
CROSSQ = parts.Recipe(
    "crossq", CrossQConfig, parts.NUMBERS.probe, build_crossq, partial(acting, make_crossq_loss)
)

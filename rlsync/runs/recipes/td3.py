"""TD3: TorchRL's trainer, replay, loss and stepper, with workers that adopt from a board.

Source: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477; torchrl.objectives.TD3Loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn, optim
from torchrl.modules import TanhModule
from torchrl.objectives import SoftUpdate, TD3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from rlsync import ConfigError, RlsyncError
from rlsync.runs.recipes import parts, pure


@dataclass
class TD3Config(parts.ActorCriticConfig):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477)."""

    name: str = "td3"
    #: Standard deviation of the noise that workers add to actions, in halves of the range of each number.
    exploration_noise: float = parts.not_below_zero(0.1)
    #: Standard deviation of the noise on the target's actions, in halves of the range of each number.
    target_noise: float = parts.not_below_zero(0.2)
    #: Largest such noise, in halves of the range of each number.
    target_noise_clip: float = parts.not_below_zero(0.5)
    #: The actor is updated, and all target networks move, at every so many updates of the critics.
    actor_every: int = parts.above_zero(2)
    #: How far the target networks move to the trained ones, with each update of the actor.
    tau: float = parts.fraction(0.005)

    def errors(self, config: parts.Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        if self.anneal_lr:
            problem = "td3 cannot lower the learning rate: it has two optimizers"
            yield ConfigError(problem, "recipe.anneal_lr", "give recipe.anneal_lr=false")


def build(run: parts.Run[TD3Config]) -> Trainer:
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    player = player_of(loss.actor_network, run.spaces, recipe.exploration_noise)
    with parts.started_collector(run, player, random_frames=recipe.pace.prefill) as collector:
        target = pure.SoftTargets(loss, tau=recipe.tau)
        stepper = make_stepper(recipe, loss, target)
        trainer = parts.make_trainer(
            run, collector, loss, target, stepper=stepper, moved_by_recipe=True
        )
        pure.PureStepper.of(run, lambda: pure_update(loss, stepper)).register(trainer)
        parts.register_with_evaluations(
            trainer, run, player_of(loss.actor_network, run.spaces, 0.0)
        )
    return trainer


def player_of(actor: TensorDictSequential, spaces: parts.Spaces, noise: float) -> parts.BoxPlayer:
    return parts.BoxPlayer(actor, actor[0].module, parts.WithNoise(noise), spaces)


def make_stepper(recipe: TD3Config, loss: TD3Loss, target: SoftUpdate) -> TD3OptimizationStepper:
    """TorchRL's stepper. The actor's step is the last one of an update; all targets move with it only."""
    actor = _adam(loss.actor_network_params, recipe.lr)
    critics = _adam(loss.qvalue_network_params, recipe.critic_lr or recipe.lr)
    stepper = TD3OptimizationStepper(actor, critics, policy_update_delay=recipe.actor_every)
    stepper.optimizer_actor.register_step_post_hook(lambda *_: target.step())
    return stepper


def pure_update(loss: TD3Loss, stepper: TD3OptimizationStepper) -> pure.Update:
    """The update as a function of tensors: algorithm 1 of arXiv 1802.09477."""
    pi, (actor, target_actor) = pure.network(
        loss.actor_network, loss.actor_network_params, loss.target_actor_network_params
    )
    q, (critics, targets) = pure.network(
        loss.qvalue_network, loss.qvalue_network_params, loss.target_qvalue_network_params
    )
    gamma = loss.value_estimator.gamma
    low = loss.min_action
    high = loss.max_action
    spread = loss.policy_noise
    most = loss.noise_clip

    def act(tensors: Sequence[Tensor], observation: Tensor) -> Tensor:
        return low + (high - low) * (pi(tensors, observation).tanh() + 1) / 2

    def critic_loss(b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        # Q(s, a) is to be r + gamma min Q'(s', pi'(s') + noise)
        with torch.no_grad():
            action = act(target_actor, b["next_observation"])
            action = action + (noise[0] * spread).clamp(-most, most)
            after = q.each(targets, b["next_observation"], action.clamp(low, high))
            goal = pure.goal(b, gamma, torch.minimum(*after))
        now = q.each(critics, b["observation"], b["action"])
        errors = [(value - goal).square() for value in now]
        return {
            "loss_qvalue": pure.mean(b, errors[0] + errors[1]),
            "td_error": torch.maximum(*errors),
        }

    def actor_loss(b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        # The actor raises Q(s, pi(s)) of the first critic, whose weights stay.
        action = act(actor, b["observation"])
        first = [tensor[:1].detach() for tensor in critics]
        return {"loss_actor": -pure.mean(b, q.each(first, b["observation"], action)[0])}

    return pure.Update(
        (loss.actor_network, loss.qvalue_network),
        (
            pure.Phase(stepper.optimizer_critic, critic_loss),
            pure.Phase(stepper.optimizer_actor, actor_loss),
        ),
        noise=lambda b: [torch.randn_like(b["action"])],
        due=lambda: 1 + pure.is_actors_turn(stepper),
        idle={"loss_actor": torch.zeros((), device=low.device)},
    )


def _adam(params: TensorDictBase, lr: float) -> optim.Adam:
    trained = [leaf for leaf in params.values(True, True) if isinstance(leaf, nn.Parameter)]
    return optim.Adam(trained, lr=lr, fused=True)


def make_loss(recipe: TD3Config, spaces: parts.Spaces, device: torch.device = parts.CPU) -> TD3Loss:
    sight = parts.Sight.of(recipe, spaces)
    net = parts.relu_mlp(recipe, sight.features, spaces.actions, last_gain=0.01)
    actor = TensorDictSequential(
        TensorDictModule(sight.behind(net), in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spaces.action_spec),
    )
    half_ranges = spaces.half_ranges().to(device)
    loss = TD3Loss(
        actor.to(device),
        parts.twin_critics(recipe, spaces, device),
        action_spec=spaces.action_spec,
        policy_noise=recipe.target_noise * half_ranges,
        noise_clip=recipe.target_noise_clip * half_ranges,
        **parts.TWO_CRITICS,
    )
    loss.make_value_estimator(gamma=recipe.gamma)
    return loss.to(device)


def acting(run: parts.Run[TD3Config], deterministic: bool) -> parts.Acting:
    actor = make_loss(run.recipe, run.spaces).actor_network
    noise = run.recipe.exploration_noise
    if deterministic:
        noise = 0.0
    return parts.Acting(actor, player_of(actor, run.spaces, noise))


RECIPE = parts.Recipe("td3", TD3Config, parts.NUMBERS.probe, build, acting)

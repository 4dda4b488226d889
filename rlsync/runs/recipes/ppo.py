"""PPO: TorchRL's own PPOTrainer, loss and advantages, with workers that adopt from a board.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; torchrl.trainers.algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn, optim
from torch.distributions import Distribution
from torchrl.data import Composite, LazyTensorStorage
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.modules import (
    IndependentNormal,
    OneHotCategorical,
    ProbabilisticActor,
    ValueOperator,
)
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import PPOTrainer

from rlsync.runs.actors.devices import CPU
from rlsync.runs.compat.replay import RowBuffer
from rlsync.runs.recipes import parts, ppo_unrolls, pure
from rlsync.runs.recipes.impala.heads import (
    Categorical,
    DiagonalGaussian,
    HeadDistribution,
    LocAndScale,
    PolicyHead,
    head_for,
)
from rlsync.runs.recipes.networks import ACTIVATIONS, FreeScale
from rlsync.runs.recipes.normalize import NormalizeOnPolicy
from rlsync.runs.recipes.ppo_objective import objective_of
from rlsync.runs.recipes.settings import PPOConfig


def build(run: parts.Run[PPOConfig]) -> Trainer:
    if run.recipe.model.lstm:
        return ppo_unrolls.build(run)
    return build_of_transitions(run)


def build_of_transitions(run: parts.Run[PPOConfig]) -> PPOTrainer:
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    settings = parts.trainer_settings(run)
    normalize = NormalizeOnPolicy(recipe.normalize, run.spaces.observations, recipe.gamma)
    with parts.started_collector(run, player_of(loss.actor_network, run.spaces)) as collector:
        optimizer = optim.Adam(loss.parameters(), lr=recipe.lr, eps=1e-5, fused=True)
        trainer = PPOTrainer(
            **settings,
            enable_logging=False,  # EpisodeReturns and LogReceipts log what matters here
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            lr_scheduler=parts.annealing(run, optimizer),
            replay_buffer=RowBuffer(
                storage=LazyTensorStorage(collector.requested_frames_per_batch, device=run.device),
                sampler=SamplerWithoutReplacement(),
                batch_size=recipe.batch_size,
            ),
            num_epochs=recipe.num_epochs,
            optim_steps_per_batch=None,  # the whole batch; a number would skip every other epoch
            add_gae=False,  # PPOTrainer would compute them anew in each epoch
        )
        if recipe.normalize.observations or recipe.normalize.rewards:
            normalize.register(trainer)
        pure.PureStepper.of(run, lambda: pure_update(loss, optimizer)).register(trainer)
        parts.ToLearner(run.device).register(trainer)
        advantages = Advantages(
            loss.critic_network, recipe.gamma, recipe.gae_lambda, normalize.scaled
        )
        trainer.register_op("batch_process", advantages)
        greedy = player_of(loss.actor_network, run.spaces, deterministic=True)
        parts.register_with_evaluations(trainer, run, greedy)
    return trainer


def make_loss(recipe: PPOConfig, spaces: parts.Spaces, device: torch.device = CPU) -> ClipPPOLoss:
    # One encoder for actor and critic: pictures are seen once.
    sight = parts.Sight.of(recipe, spaces)
    policy_net = _mlp(recipe, sight, spaces.actions, last_gain=0.01)
    drawing = drawing_of(recipe, sight.choosing(policy_net), spaces)
    actor = ProbabilisticActor(
        TensorDictModule(drawing.network, in_keys=["observation"], out_keys=drawing.parameters),
        in_keys=drawing.parameters,
        spec=Composite(action=spaces.action_spec),
        distribution_class=drawing.distribution,
        distribution_kwargs=drawing.settings,
        return_log_prob=True,
    )
    value_net = _mlp(recipe, sight, 1, last_gain=1.0)
    critic = ValueOperator(sight.behind(value_net), in_keys=["observation"])
    loss = ClipPPOLoss(
        actor.to(device),  # before there is a loss: not all that it holds of them follows it later
        critic.to(device),
        clip_epsilon=recipe.clip_epsilon,
        entropy_bonus=recipe.entropy_coeff > 0,
        entropy_coeff=recipe.entropy_coeff,
        critic_coeff=recipe.critic_coeff,
        loss_critic_type=recipe.critic_loss,
        normalize_advantage=recipe.normalize_advantage,
    )
    return loss.to(device)


def _mlp(recipe: PPOConfig, sight: parts.Sight, outputs: int, *, last_gain: float) -> nn.Module:
    return parts.mlp(
        sight.features,
        outputs,
        sight.hidden,
        last_gain=last_gain,
        activation=ACTIVATIONS[recipe.activation],
        initial_weights=recipe.initial_weights,
    )


class Drawing(NamedTuple):
    """How TorchRL draws an action of what a network computes."""

    network: nn.Module
    parameters: list[str]  #: what it computes, of the distribution
    distribution: type[Distribution]
    settings: dict[str, PolicyHead]  #: of the distribution, beside the parameters


def drawing_of(recipe: PPOConfig, policy_net: nn.Module, spaces: parts.Spaces) -> Drawing:
    """How actions of these spaces are drawn of the outputs ``[..., spaces.actions]`` of a network."""
    head = head_for(spaces.player_actions())
    if isinstance(head, DiagonalGaussian):
        scale = FreeScale(spaces.actions, recipe.initial_log_scale)
        network = nn.Sequential(nn.Sequential(policy_net, scale), LocAndScale(head))
        return Drawing(network, ["loc", "scale"], IndependentNormal, {})
    if isinstance(head, Categorical):
        return Drawing(policy_net, ["logits"], OneHotCategorical, {})
    return Drawing(policy_net, ["params"], HeadDistribution, {"head": head})


def player_of(
    actor: ProbabilisticActor, spaces: parts.Spaces, *, deterministic: bool = False
) -> parts.HeadPlayer:
    head = head_for(spaces.player_actions())
    network = actor[0].module
    if isinstance(head, DiagonalGaussian):
        network = network[0]
    return parts.HeadPlayer(actor, network, head, spaces, deterministic=deterministic)


#: Beyond about so many pictures new memory costs more than a call of the critic.
_VALUED_AT_ONCE = 256


@dataclass
class Advantages:
    """Writes ``advantage`` and ``value_target`` into batches ``[B, T]``, by TorchRL's GAE.

    Once for a batch, before the first epoch, as in algorithm 1 of the paper. One pass of the critic values
    the T + 1 observations of each environment; where an episode has ended within them, what followed it is
    valued in a second, small one. ``scaled`` maps the rewards to those that are learned from.
    """

    critic: ValueOperator
    gamma: float
    lmbda: float
    scaled: Callable[[Tensor], Tensor] = lambda reward: reward

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        after = batch["next"]
        following = after["observation"]
        done = after["done"]
        values = self._values(torch.cat([batch["observation"], following[:, -1:]], 1))
        value = values[:, :-1]
        next_value = values[:, 1:]
        ends = done.squeeze(-1)
        if bool(ends.any()):
            next_value = next_value.clone()
            next_value[ends] = self.critic.module(following[ends])
        advantage, target = ppo_unrolls.estimated_advantages(
            self.gamma,
            self.lmbda,
            value,
            next_value,
            self.scaled(after["reward"]),
            done,
            after["terminated"],
        )
        return batch.set("advantage", advantage).set("value_target", target)

    def _values(self, observations: Tensor) -> Tensor:
        """Those of ``[B, T + 1]`` observations, of a few environments at a time: pictures need much memory."""
        envs = max(1, _VALUED_AT_ONCE // observations.shape[1])
        return torch.cat([self.critic.module(some) for some in observations.split(envs)])


def pure_update(loss: ClipPPOLoss, optimizer: optim.Adam) -> pure.Update:
    """The update as a function of tensors: equations 7 and 9 of arXiv 1707.06347."""
    score = _score_of(loss.actor_network)
    objective = objective_of(loss)
    pi, (actor,) = pure.network(loss.actor_network, loss.actor_network_params)
    v, (critic,) = pure.network(loss.critic_network, loss.critic_network_params)
    # What an encoder finds in pictures serves both.
    shared = pi.eye is not None and pi.eye is v.eye

    def losses(b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        observation = b["observation"]
        looked = pi.sees(actor, observation)
        log_prob, entropies = score(pi.decides(actor, observation, looked), b["action"])
        if not shared:
            looked = v.sees(critic, observation)
        value = v.decides(critic, observation, looked).squeeze(-1)
        log_ratio = log_prob - b["action_log_prob"]
        advantage = b["advantage"].squeeze(-1)
        return objective(log_ratio, entropies, advantage, value, b["value_target"].squeeze(-1))

    keys = ("observation", "action", "action_log_prob", "advantage", "value_target")
    return pure.Update(
        (loss.actor_network, loss.critic_network), (pure.Phase(optimizer, losses),), keys
    )


#: Log-probabilities of actions, and what computes entropies: both ``[B]``.
Scores = tuple[Tensor, Callable[[], Tensor]]


def _score_of(actor: ProbabilisticActor) -> Callable[[Tensor, Tensor], Scores]:
    """How the update scores actions ``[B, ...]`` of the parameters ``[B, width]`` that the actor computes."""
    last = actor[0].module
    if isinstance(last, nn.Sequential) and isinstance(last[-1], LocAndScale):
        return partial(_scored, last[-1].head)
    head = actor[-1].distribution_kwargs.get("head")
    if head is not None:
        return partial(_scored, head)
    return _scored_choices


def _scored_choices(logits: Tensor, action: Tensor) -> Scores:
    log_probs = logits.log_softmax(-1)
    return (log_probs * action).sum(-1), lambda: -(log_probs.exp() * log_probs).sum(-1)


def _scored(head: PolicyHead, params: Tensor, action: Tensor) -> Scores:
    log_prob, entropy = head.score(params, action)
    return log_prob, lambda: entropy


def acting(run: parts.Run[PPOConfig], deterministic: bool) -> parts.Acting:
    if run.recipe.model.lstm:
        return ppo_unrolls.acting(run, deterministic)
    actor = make_loss(run.recipe, run.spaces).actor_network
    return parts.Acting(actor, player_of(actor, run.spaces, deterministic=deterministic))


RECIPE = parts.Recipe("ppo", PPOConfig, parts.ON_POLICY.probe, build, acting)

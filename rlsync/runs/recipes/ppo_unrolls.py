"""PPO with an LSTM: it learns from whole unrolls, with gradients through their steps.

Workers record the state in which an unroll begins. Policy and value come from one torso and LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn, optim
from torchrl.objectives import LossModule
from torchrl.objectives.value.functional import (
    generalized_advantage_estimate,
    vec_generalized_advantage_estimate,
)
from torchrl.trainers import LRSchedulerHook, Trainer

from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.frames import check_batch
from rlsync.runs.actors.player import in_dtype
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.impala.heads import DiagonalGaussian, head_for
from rlsync.runs.recipes.impala.loss import final_index, next_values, unrolled_by
from rlsync.runs.recipes.impala.network import ImpalaNet, Unrolled
from rlsync.runs.recipes.normalize import NormalizeUnrolls
from rlsync.runs.recipes.ppo_objective import objective_of
from rlsync.runs.recipes.settings import PPOConfig
from rlsync.seams import misuse

ADVANTAGE = "advantage"
VALUE_TARGET = "value_target"


def build(run: parts.Run[PPOConfig]) -> Trainer:
    recipe = run.recipe
    network = make_network(recipe, run.spaces)
    loss = UnrollPPOLoss(network, recipe).to(run.device)
    settings = parts.trainer_settings(run)
    normalize = NormalizeUnrolls(recipe.normalize, run.spaces.observations, recipe.gamma)
    with parts.started_unrolls(run, network.player()) as collector:
        optimizer = optim.Adam(loss.parameters(), lr=recipe.lr, eps=1e-5, fused=True)
        trainer = Trainer(
            **settings,
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            num_epochs=recipe.num_epochs,
            optim_steps_per_batch=None,  # as many as Passes has minibatches
        )
        scheduler = parts.annealing(run, optimizer)
        if scheduler is not None:
            LRSchedulerHook(scheduler).register(trainer)
        if recipe.normalize.observations or recipe.normalize.rewards:
            normalize.register(trainer)
        advantages = UnrollAdvantages(network, recipe.gamma, recipe.gae_lambda, normalize.scaled)
        trainer.register_op("batch_process", advantages)
        unrolls = recipe.batch_size // recipe.batches(run.config).steps
        Passes(unrolls).register(trainer)
        dtype = parts.workers_dtype(run.config.sync)
        greedy = in_dtype(network.player(deterministic=True), dtype)
        parts.register_with_evaluations(trainer, run, greedy)
    return trainer


def make_network(recipe: PPOConfig, spaces: parts.Spaces) -> ImpalaNet:
    """ConfigError: pictures are too small for their torso."""
    head = head_for(spaces.player_actions())
    model = recipe.model
    if spaces.observations.pictures:
        torso = model.torso
        hidden = model.hidden
    else:
        torso = "mlp"
        hidden = recipe.hidden
    network = ImpalaNet(
        spaces.observations,
        head,
        torso=torso,
        hidden=hidden,
        numbers=recipe.hidden,
        lstm=model.lstm,
        channels_last=model.channels_last,
        clip=recipe.normalize.clip_of_observations,
    )
    if isinstance(head, DiagonalGaussian):
        with torch.no_grad():
            network.policy.bias[head.size :] = recipe.initial_log_scale
    return network


class UnrollPPOLoss(LossModule):
    """PPO's loss on unrolls, with gradients back to the state in which they begin.

    It takes minibatches ``[T, B]`` of :class:`Passes`, and returns what ``ClipPPOLoss`` returns, under the
    same names. The network keeps its parameters, as that of ``ImpalaLoss`` does.
    """

    actor_network: ImpalaNet

    def __init__(self, actor_network: ImpalaNet, recipe: PPOConfig) -> None:
        super().__init__()
        self.actor_network = actor_network
        # under the names of ClipPPOLoss, by which a resumed run changes them
        self.clip_epsilon = nn.Buffer(torch.tensor(recipe.clip_epsilon))
        self.entropy_coeff = nn.Buffer(torch.tensor(recipe.entropy_coeff))
        self.critic_coeff = nn.Buffer(torch.tensor(recipe.critic_coeff))
        self.entropy_bonus = recipe.entropy_coeff > 0
        self.loss_critic_type = recipe.critic_loss
        self.normalize_advantage = recipe.normalize_advantage
        self.loss_mask_key = None  # an unroll has no padding

    @property
    def functional(self) -> bool:
        """False: the network keeps its parameters."""
        return False

    @property
    def in_keys(self) -> list[str]:
        """The keys of a minibatch that are read."""
        return [
            *(keys.OBSERVATION, keys.IS_INIT, keys.RECURRENT_STATE),
            *(keys.ACTION, keys.BEHAVIOUR_LOG_PROB, ADVANTAGE, VALUE_TARGET),
        ]

    @property
    def out_keys(self) -> list[str]:
        """The losses, whose sum the optimizer minimises, and the scalars to log."""
        names = ["loss_objective", "loss_critic", "clip_fraction", "kl_approx"]
        names += ["explained_variance", "ESS", "max_ratio", "mean_ratio"]
        if self.entropy_bonus:
            names += ["entropy", "loss_entropy"]
        return names

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        batch = tensordict
        network = self.actor_network
        unrolled: Unrolled = network(
            batch.get(keys.OBSERVATION), batch.get(keys.IS_INIT), batch.get(keys.RECURRENT_STATE)
        )
        log_prob, entropy = network.head.score(unrolled.params, batch.get(keys.ACTION))
        log_ratio = log_prob - batch.get(keys.BEHAVIOUR_LOG_PROB)
        terms = objective_of(self)(
            log_ratio.flatten(),
            entropy.flatten,
            batch.get(ADVANTAGE).flatten(),
            unrolled.value.flatten(),
            batch.get(VALUE_TARGET).flatten(),
        )
        return TensorDict(terms)


def estimated_advantages(gamma: float, lmbda: float, *steps: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and targets by TorchRL's GAE, whose faster way ends in an IndexError where the product is 0."""
    estimate = vec_generalized_advantage_estimate
    if not gamma * lmbda:
        estimate = generalized_advantage_estimate
    advantage, target = estimate(gamma, lmbda, *steps)
    return advantage, target


@dataclass
class UnrollAdvantages:
    """Writes ``advantage`` and ``value_target`` ``[T, B]`` into batches of unrolls, by TorchRL's GAE.

    Once for a batch, with the network as it is when the batch arrives. ``scaled`` maps the rewards to those
    that are learned from.
    """

    network: ImpalaNet
    gamma: float
    lmbda: float
    scaled: Callable[[Tensor], Tensor] = lambda reward: reward
    _checked: bool = False

    @torch.no_grad()
    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        if not self._checked:
            check_batch(batch, self.network)
            self._checked = True
        index = final_index(batch)
        unrolled = unrolled_by(self.network, batch, index)
        following = next_values(unrolled.value, unrolled.final_value, index)
        terminated = batch.get(keys.TERMINATED)
        advantage, target = estimated_advantages(
            self.gamma,
            self.lmbda,
            _rows(unrolled.value[:-1]),
            _rows(following),
            _rows(self.scaled(batch.get(keys.REWARD))),
            _rows(terminated | batch.get(keys.TRUNCATED)),
            _rows(terminated),
        )
        batch.set(ADVANTAGE, advantage.squeeze(-1).t())
        batch.set(VALUE_TARGET, target.squeeze(-1).t())
        return batch


def _rows(steps: Tensor) -> Tensor:
    """Steps ``[T, B]`` as TorchRL has them, ``[B, T, 1]``."""
    return steps.t().unsqueeze(-1)


#: What minibatches have of the first T steps ``[T, B]`` of a batch.
_TIMED = (
    keys.OBSERVATION,
    keys.IS_INIT,
    keys.ACTION,
    keys.BEHAVIOUR_LOG_PROB,
    keys.POLICY_VERSION,
    ADVANTAGE,
    VALUE_TARGET,
)


class Passes(misuse.RegistersItself):
    """Cuts each pass over a batch into minibatches of so many whole unrolls, in an order of its own.

    The last one of a pass has those that are left.
    """

    def __init__(self, unrolls: int) -> None:
        self._unrolls = unrolls
        self._left: Iterator[Tensor] = iter(())  # of this pass, the unrolls of each minibatch

    def register(self, trainer: Trainer, name: str = "passes") -> None:
        """Cut every batch; register before hooks that count what is learned from. ``name`` is not used."""
        trainer.register_op("pre_epoch", self._begin)
        trainer.register_op("process_optim_batch", self._next)

    def _begin(self, batch: TensorDictBase) -> TensorDictBase:
        # torch's own random numbers, which checkpoints have
        order = torch.randperm(batch.get(keys.REWARD).shape[1], device="cpu")
        self._left = iter(order.split(self._unrolls))
        return batch

    def _next(self, batch: TensorDictBase) -> TensorDict:
        """The next minibatch; StopIteration, by which Trainer knows it, at the end of the pass."""
        steps = batch.get(keys.REWARD)
        unrolls = next(self._left).to(steps.device)
        minibatch = {}
        for key in _TIMED:
            minibatch[key] = batch.get(key)[: len(steps)].index_select(1, unrolls)
        state = batch.get(keys.RECURRENT_STATE).index_select(0, unrolls)
        return TensorDict({**minibatch, keys.RECURRENT_STATE: state})


def acting(run: parts.Run[PPOConfig], deterministic: bool) -> parts.Acting:
    network = make_network(run.recipe, run.spaces)
    return parts.Acting(network, network.player(deterministic=deterministic))

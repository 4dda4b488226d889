"""ImpalaLoss: the V-trace actor-critic loss as a TorchRL loss module. It runs the network once per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.objectives import LossModule

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.frames import check_batch, recorded_keys
from rlsync.runs.recipes.bounds import fields_as_keywords
from rlsync.runs.recipes.impala.heads import PolicyHead
from rlsync.runs.recipes.impala.network import Finals, ImpalaNet, ImpalaPlayer, Unrolled
from rlsync.runs.recipes.impala.settings import LossSettings, Trust
from rlsync.runs.recipes.impala.vtrace import vtrace_with
from rlsync.runs.recipes.networks import wide


class _Scored(NamedTuple):
    """T steps of an unroll, ``[T, B, ...]``, as the network sees them now."""

    params: Tensor  # of the policy
    log_prob: Tensor  # log pi(a|s) of the actions that were taken
    log_rho: Tensor  # less the one that the workers recorded; without gradient
    entropy: Tensor
    values: Tensor
    next_values: Tensor  # without gradient


class ImpalaLoss(LossModule):
    """The loss of IMPALA, and with a trust region that of LASER, on a batch of unrolls.

    The network runs once, over T+1 observations. Its values also give the V-trace targets, without gradient.
    The ratios come from the log-probabilities that the workers stored with the actions they took. The losses
    of one step, before their coefficients, are::

        policy    -advantage * log pi(action)
        baseline  (target - value)^2 / 2
        entropy   -entropy of pi

    The network stays a plain submodule: TorchRL's ``convert_to_functional`` would keep its parameters
    a second time as ``actor_network_params`` and swap them in and out around each pass. So the
    optimizer, the loss, a copy of the loss and the sync map ``{"policy": "loss_module.actor_network"}``
    all see the same parameters. To compile, use ``loss.compile()`` (batches are then no longer checked) or
    ``loss.actor_network.compile()``: both keep the parameters' names.

    Args:
        actor_network: policy and value in one.
        gamma, rho_bar, c_bar, pg_rho_bar, lam: V-trace's values; see :class:`VTraceSettings`.
        entropy_coeff, baseline_coeff: weights of the losses. They may be assigned during a run.
        reward_clipping, reduction, entropy_on, trust_region: see :class:`LossSettings`, which also has the
            defaults of all options.

    Raises:
        ConfigError: an option is out of its range, or a batch is not what
            :mod:`rlsync.runs.actors.frames` says (the first batch is checked in full).

    Source: IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583; torchrl.objectives.A2CLoss.

    Example:
        >>> from rlsync.runs.recipes.impala import Categorical
        >>> loss = ImpalaLoss(ImpalaNet((4,), Categorical(2)), entropy_coeff=0.01)
        >>> T, B = 5, 3
        >>> no = torch.zeros(T, B, dtype=torch.bool)
        >>> batch = TensorDict({
        ...     "observation": torch.randn(T + 1, B, 4), "is_init": torch.zeros(T + 1, B, dtype=torch.bool),
        ...     "action": torch.zeros(T, B, dtype=torch.int64), "reward": torch.ones(T, B),
        ...     "behaviour_log_prob": torch.full((T, B), 0.5).log(), "terminated": no, "truncated": no,
        ... })
        >>> sorted(key for key in loss(batch).keys() if key.startswith("loss_"))
        ['loss_baseline', 'loss_entropy', 'loss_policy']
    """

    actor_network: ImpalaNet
    #: Maps rewards to those that are learned from, before they are clipped; it may be assigned.
    scaled: Callable[[Tensor], Tensor]

    @fields_as_keywords(LossSettings)
    def __init__(self, actor_network: ImpalaNet, settings: LossSettings) -> None:
        super().__init__()
        region = settings.trust_region
        if region is not None and region.reference == "implied":
            nothing = torch.zeros(actor_network.head.width)
            # some heads refuse: it has no closed form
            actor_network.head.kl_implied(nothing, nothing)
        self.actor_network = actor_network
        self.scaled = _as_they_are
        self.settings = settings
        self.entropy_coeff = settings.entropy_coeff
        self.baseline_coeff = settings.baseline_coeff
        self.loss_mask_key = None  # an unroll has no padding
        if settings.entropy_on == "online":
            self._optional = [keys.REPLAYED]
        else:
            self._optional = []
        self._checked = False

    @property
    def functional(self) -> bool:
        """False: the network keeps its parameters."""
        return False

    @property
    def in_keys(self) -> list[str]:
        """The keys that every batch must have; ``final_observation`` and ``final_index`` are optional."""
        return [*keys.REQUIRED, *recorded_keys(self._player()), *self._optional]

    @property
    def out_keys(self) -> list[str]:
        """The three losses, whose sum the optimizer minimises, and the scalars to log."""
        logged = ["loss_policy", "loss_baseline", "loss_entropy", *DIAGNOSTICS]
        if self.settings.trust_region is not None:
            logged += TRUST_DIAGNOSTICS
        return logged

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The losses, multiplied by their coefficients, and the diagnostics, all as scalars.

        Args:
            tensordict: a batch as :mod:`rlsync.runs.actors.frames` describes it.

        Raises:
            ConfigError: the batch is not as described there.
        """
        if not self._checked and not torch.compiler.is_compiling():
            check_batch(tensordict, self._player(), self._optional)
            self._checked = True
        scored = self._scored(tensordict)
        trust, logged = _trust(
            scored.params.detach(), tensordict, self.actor_network.head, self.settings
        )
        targets, advantages = self._vtrace(tensordict, scored, trust)
        error = (targets - scored.values).square()
        learned = error
        if trust is not None:
            learned = error * trust.accepted
        losses = self._losses(
            tensordict,
            policy=-scored.log_prob * advantages,
            baseline=0.5 * learned,
            entropy=scored.entropy,
        )
        diagnostics = _diagnostics(
            scored.log_rho, scored.entropy.detach(), targets, error.detach(), self.settings
        )
        return TensorDict(losses | logged | diagnostics)

    def _scored(self, batch: TensorDictBase) -> _Scored:
        """What the network says of the unroll now, beside what the workers recorded."""
        index = final_index(batch)
        if torch.is_grad_enabled():
            self.actor_network.follow(batch.get(keys.OBSERVATION))
        unrolled = unrolled_by(self.actor_network, batch, index)
        params = unrolled.params[:-1]
        log_prob, entropy = self.actor_network.head.score(params, batch.get(keys.ACTION))
        log_prob, values, behaviour = wide(
            log_prob, unrolled.value, batch.get(keys.BEHAVIOUR_LOG_PROB)
        )
        return _Scored(
            params=params,
            log_prob=log_prob,
            log_rho=log_prob.detach() - behaviour,
            entropy=entropy,
            values=values[:-1],
            next_values=next_values(values.detach(), unrolled.final_value, index),
        )

    def _vtrace(
        self, batch: TensorDictBase, scored: _Scored, trust: Trust | None
    ) -> tuple[Tensor, Tensor]:
        """Targets and advantages, of rewards as the settings clip them."""
        reward = self.scaled(batch.get(keys.REWARD))
        if self.settings.reward_clipping == "clip":
            reward = reward.clamp(-1.0, 1.0)
        return vtrace_with(
            self.settings,
            scored.log_rho,
            reward,
            scored.values.detach(),
            scored.next_values,
            terminated=batch.get(keys.TERMINATED),
            truncated=batch.get(keys.TRUNCATED),
            trust=trust,
        )

    def _losses(
        self, batch: TensorDictBase, *, policy: Tensor, baseline: Tensor, entropy: Tensor
    ) -> dict[str, Tensor]:
        """The three losses, from those of each step, which are ``[T, B]``."""
        if self.settings.entropy_on == "online":
            entropy = entropy * ~batch.get(keys.REPLAYED)
        reduced: Callable[[Tensor], Tensor] = torch.sum
        if self.settings.reduction == "mean":
            reduced = torch.mean
        return {
            "loss_policy": reduced(policy),
            "loss_baseline": self.baseline_coeff * reduced(baseline),
            "loss_entropy": self.entropy_coeff * reduced(-entropy),
        }

    def _player(self) -> ImpalaPlayer:
        return self.actor_network.player(store_params=self.settings.trust_region is not None)


def _as_they_are(reward: Tensor) -> Tensor:
    return reward


def unrolled_by(network: ImpalaNet, batch: TensorDictBase, index: Tensor | None) -> Unrolled:
    """What a network says of the T + 1 observations of a batch, and of its final ones.

    Args:
        network: runs once, from the state that the workers recorded.
        batch: as :mod:`rlsync.runs.actors.frames` describes it.
        index: the batch's :func:`final_index`.

    Raises:
        ConfigError: a truncation lacks its final observation.
    """
    is_init = batch.get(keys.IS_INIT)
    if network.lstm is None:
        state = network.initial_state(is_init.shape[1])
    else:
        state = batch.get(keys.RECURRENT_STATE)
    last_action = None
    last_reward = None
    if network.takes_last_action:
        last_action = _after(batch.get(keys.LAST_ACTION), batch.get(keys.ACTION))
    if network.takes_last_reward:
        last_reward = _after(batch.get(keys.LAST_REWARD), batch.get(keys.REWARD))
    unrolled: Unrolled = network(
        batch.get(keys.OBSERVATION),
        is_init,
        state,
        last_action,
        last_reward,
        finals=_finals(network, batch, index),
    )
    return unrolled


def _finals(network: ImpalaNet, batch: TensorDictBase, index: Tensor | None) -> Finals | None:
    checked = not torch.compiler.is_compiling()
    if index is None:
        if checked:
            _must_be_as_many(batch, 0)
        return None
    if checked:
        _must_be_as_many(batch, len(index))
    time, env = index.unbind(-1)
    last_action = None
    last_reward = None
    if network.takes_last_action:
        last_action = batch.get(keys.ACTION)[time, env]
    if network.takes_last_reward:
        last_reward = batch.get(keys.REWARD)[time, env]
    return Finals(batch.get(keys.FINAL_OBSERVATION), time, env, last_action, last_reward)


def _after(first: Tensor, rest: Tensor) -> Tensor:
    return torch.cat([first.unsqueeze(0), rest])


def final_index(batch: TensorDictBase) -> Tensor | None:
    """Where the final observations of a batch belong, ``[K, 2]``; None if there are none."""
    # Not get(key, None): torch.compile (2.13) would not notice when a later batch brings the key.
    if keys.FINAL_INDEX not in batch or not len(batch.get(keys.FINAL_INDEX)):
        return None
    return batch.get(keys.FINAL_INDEX)


def _must_be_as_many(batch: TensorDictBase, finals: int) -> None:
    """Checked for every batch: without the final value, the next episode's value would be bootstrapped."""
    truncated = int((batch.get(keys.TRUNCATED) & ~batch.get(keys.TERMINATED)).sum())
    if finals < truncated:
        problem = f"{truncated} steps were truncated, and {finals} final observations are given"
        cure = "keep the last observation of each episode that is truncated; see rlsync.runs.actors.frames"
        raise ConfigError(problem, "batch, 'final_observation' and 'final_index'", cure)


#: The diagnostics of every loss.
DIAGNOSTICS = ("mean_rho", "clipped_fraction", "entropy", "explained_variance", "mean_value_target")
#: further diagnostics where there is a trust region
TRUST_DIAGNOSTICS = ("kl", "rejected_fraction")


def _trust(
    params: Tensor, batch: TensorDictBase, head: PolicyHead, settings: LossSettings
) -> tuple[Trust | None, dict[str, Tensor]]:
    region = settings.trust_region
    if region is None:
        return None, {}
    behaviour = batch.get(keys.BEHAVIOUR_PARAMS)
    if region.reference == "implied":
        kl = head.kl_implied(params, behaviour, settings.rho_bar)
    else:
        kl = head.kl(params, behaviour)
    trust = region.decide(kl)
    return trust, {"kl": kl.mean(), "rejected_fraction": 1 - trust.accepted.to(kl.dtype).mean()}


def next_values(values: Tensor, final_value: Tensor | None, index: Tensor | None) -> Tensor:
    """The value after each step: of the next observation, or of the final one that a truncation hid."""
    if final_value is None or index is None:
        return values[1:]
    time, env = index.unbind(-1)
    return values[1:].index_put((time, env), final_value.to(values.dtype))


@torch.no_grad()
def _diagnostics(
    log_rho: Tensor, entropy: Tensor, targets: Tensor, error: Tensor, settings: LossSettings
) -> dict[str, Tensor]:
    rho = log_rho.exp()
    spread = (targets - targets.mean()).square().mean()
    return {
        "mean_rho": rho.mean(),
        "clipped_fraction": (rho > settings.rho_bar).to(rho.dtype).mean(),
        "entropy": entropy.mean(),
        "explained_variance": 1 - error.mean() / spread.clamp(min=torch.finfo(spread.dtype).tiny),
        "mean_value_target": targets.mean(),
    }

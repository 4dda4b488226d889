"""What a network's policy outputs mean: sampling for workers, log-probabilities for the loss.

The same lines serve both, so that ratios are exactly one while weights agree; torch.distributions is slower.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributions import Distribution

from rlsync import ConfigError
from rlsync.runs.actors.envs.actions import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
)
from rlsync.runs.recipes.impala.settings import VTraceSettings
from rlsync.runs.recipes.networks import wide

_LOG_2PI = math.log(2 * math.pi)


class PolicyHead(ABC):
    """A family of distributions over actions. It has no state: the parameters come from the network.

    ``params`` is [..., width] wherever it appears; all sums are done in float32 or wider. A choice whose logit
    is ``torch.finfo(dtype).min`` is never drawn, and entropies and divergences stay finite.

    Example:
        >>> head: PolicyHead = Categorical(3)
        >>> action, log_prob = head.act(torch.zeros(5, head.width))
        >>> action.shape, log_prob.shape, head.encode(action).shape
        (torch.Size([5]), torch.Size([5]), torch.Size([5, 3]))
    """

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers describe one distribution: the outputs of the network."""

    @property
    @abstractmethod
    def features(self) -> int:
        """How many numbers describe one action as an input of the network."""

    @abstractmethod
    def player_actions(self) -> ActionSpec:
        """What a player with this head chooses; it has no bounds."""

    @property
    @abstractmethod
    def action_shape(self) -> tuple[int, ...]:
        """The shape of one action."""

    @property
    @abstractmethod
    def action_dtype(self) -> torch.dtype:
        """The dtype of an action."""

    @abstractmethod
    def act(self, params: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Draw one action for each distribution; returns it with its log-probability, [...].

        Args:
            params: [..., width].
            generator: of random numbers; by default torch's own.
        """

    @abstractmethod
    def mode(self, params: Tensor) -> Tensor:
        """The likeliest action, ``[..., *action_shape]``.

        Args:
            params: [..., width].
        """

    @abstractmethod
    def score(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of an action and the entropy, both [...], in nats.

        Args:
            params: [..., width].
            action: ``[..., *action_shape]``.
        """

    @abstractmethod
    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        """KL(params || other), [...], in nats.

        Args:
            params: [..., width].
            other: [..., width].
        """

    @abstractmethod
    def kl_implied(
        self, params: Tensor, other: Tensor, rho_bar: float = VTraceSettings.rho_bar
    ) -> Tensor:
        """KL(params || q), [...], in nats; q is the policy whose value V-trace estimates.

        That is ``q = min(rho_bar * other, params)``, normalised.

        Args:
            params: [..., width], the target policy.
            other: [..., width], the behaviour policy.
            rho_bar: V-trace's bound of the ratio in the temporal difference.

        Raises:
            ConfigError: it has no closed form.
        """

    @abstractmethod
    def encode(self, action: Tensor) -> Tensor:
        """Actions as inputs of the network, [..., features].

        Args:
            action: ``[..., *action_shape]``.
        """


@dataclass(frozen=True, slots=True)
class Categorical(PolicyHead):
    """One of ``actions``, from logits [..., actions]; an action is an int64 index.

    Source: torch.distributions.Categorical, to which tests compare it.

    Example:
        >>> log_prob, entropy = Categorical(2).score(torch.zeros(1, 2), torch.tensor([1]))
        >>> log_prob.exp(), entropy.exp()
        (tensor([0.5000]), tensor([2.]))
    """

    action_shape: ClassVar[tuple[int, ...]] = ()
    action_dtype: ClassVar[torch.dtype] = torch.int64
    actions: int  #: how many there are to choose from

    @property
    def width(self) -> int:
        return self.actions

    features = width

    def player_actions(self) -> ActionSpec:
        return DiscreteActions(self.actions)

    def act(self, params: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        log_probs = _log_probs(params)
        # The smallest of exponential waiting times with rates p is k with probability p[k].
        waits = torch.empty_like(log_probs).exponential_(generator=generator)
        action = (log_probs - waits.log_()).argmax(-1)
        return action, _picked(log_probs, action)

    def mode(self, params: Tensor) -> Tensor:
        return params.argmax(-1)

    def score(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = _log_probs(params)
        return _picked(log_probs, action), -(log_probs.exp() * log_probs).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        ours = _log_probs(params)
        theirs = _log_probs(other)
        return (ours.exp() * (ours - theirs)).sum(-1)

    def kl_implied(
        self, params: Tensor, other: Tensor, rho_bar: float = VTraceSettings.rho_bar
    ) -> Tensor:
        ours = _log_probs(params)
        theirs = _log_probs(other)
        implied = torch.minimum(ours, theirs + math.log(rho_bar)).log_softmax(-1)
        return (ours.exp() * (ours - implied)).sum(-1)

    def encode(self, action: Tensor) -> Tensor:
        return F.one_hot(action, self.actions).to(torch.float32)


@dataclass(frozen=True, slots=True)
class MultiCategorical(PolicyHead):
    """Several choices at once, which do not depend on each other; an action is int64 indices ``[..., n]``.

    The parameters are the logits of all choices, one choice behind the other.

    Args:
        nvec: how many there are to choose from, for each of the n choices.

    Raises:
        ConfigError: by :meth:`kl_implied`, which has no closed form: the implied policy of choices that do not
            depend on each other is one in which they do.

    Source: torch.distributions.Categorical, whose sums over choices tests compare it to.

    Example:
        >>> head = MultiCategorical((2, 3))
        >>> log_prob, entropy = head.score(torch.zeros(1, 5), torch.tensor([[1, 2]]))
        >>> log_prob.exp(), entropy.exp()
        (tensor([0.1667]), tensor([6.]))
        >>> head.encode(torch.tensor([1, 2]))
        tensor([0., 1., 0., 0., 1.])
    """

    action_dtype: ClassVar[torch.dtype] = torch.int64
    nvec: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(self.nvec)

    features = width

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    def player_actions(self) -> ActionSpec:
        return MultiDiscreteActions(self.nvec)

    def act(self, params: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        log_probs = _log_probs(self._by_choice(params))
        # As Categorical draws; what fills up a choice has no probability.
        waits = torch.empty_like(log_probs).exponential_(generator=generator)
        action = (log_probs - waits.log_()).argmax(-1)
        return action, _picked(log_probs, action).sum(-1)

    def mode(self, params: Tensor) -> Tensor:
        return self._by_choice(params).argmax(-1)

    def score(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = _log_probs(self._by_choice(params))
        entropy = -(log_probs.exp() * log_probs).sum((-2, -1))
        return _picked(log_probs, action).sum(-1), entropy

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        ours = _log_probs(self._by_choice(params))
        theirs = _log_probs(self._by_choice(other))
        return (ours.exp() * (ours - theirs)).sum((-2, -1))

    def kl_implied(
        self, params: Tensor, other: Tensor, rho_bar: float = VTraceSettings.rho_bar
    ) -> Tensor:
        problem = "the implied policy of several choices at once has no closed form"
        raise ConfigError(problem, "TrustRegion(reference='implied')", "use reference='mu'")

    def encode(self, action: Tensor) -> Tensor:
        choices = zip(action.unbind(-1), self.nvec, strict=True)
        return torch.cat([F.one_hot(*choice) for choice in choices], -1).to(torch.float32)

    def _by_choice(self, params: Tensor) -> Tensor:
        """The logits of each choice, ``[..., n, most]``; those of shorter ones are filled up with the least."""
        most = max(self.nvec)
        if most * len(self.nvec) == sum(self.nvec):
            return params.unflatten(-1, (len(self.nvec), most))
        # One operation for all choices that follow is faster than each operation for each of them.
        least = torch.finfo(params.dtype).min
        choices = params.split(self.nvec, -1)
        filled = [F.pad(each, (0, most - each.shape[-1]), value=least) for each in choices]
        return torch.stack(filled, -2)


@dataclass(frozen=True, slots=True)
class DiagonalGaussian(PolicyHead):
    """``size`` independent normal variables, from [..., 2 * size]: locations, then logarithms of scales.

    Outside ``min_log_scale`` and ``max_log_scale`` the scale stays at the bound, and has no gradient.

    Args:
        size: numbers of an action.
        min_log_scale, max_log_scale: bounds of the scale's natural logarithm.

    Raises:
        ConfigError: by :meth:`kl_implied`, which has no closed form here.

    Source: torch.distributions.Normal, to which tests compare it.

    Example:
        >>> log_prob, _ = DiagonalGaussian(1).score(torch.zeros(1, 2), torch.zeros(1, 1))
        >>> log_prob
        tensor([-0.9189])
    """

    action_dtype: ClassVar[torch.dtype] = torch.float32
    size: int
    min_log_scale: float = -5.0
    max_log_scale: float = 2.0

    @property
    def width(self) -> int:
        return 2 * self.size

    @property
    def features(self) -> int:
        return self.size

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (self.size,)

    def player_actions(self) -> ActionSpec:
        return BoxActions(self.size)

    def act(self, params: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        loc, log_scale = self._split(params)
        noise = torch.empty_like(loc).normal_(generator=generator)
        log_prob = -(0.5 * noise.square() + log_scale + 0.5 * _LOG_2PI).sum(-1)
        return torch.addcmul(loc, noise, log_scale.exp()), log_prob

    def mode(self, params: Tensor) -> Tensor:
        return self._split(params)[0]

    def score(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = self._split(params)
        noise = (action - loc) * (-log_scale).exp()
        constant = log_scale + 0.5 * _LOG_2PI
        return -(0.5 * noise.square() + constant).sum(-1), (constant + 0.5).sum(-1)

    def kl(self, params: Tensor, other: Tensor) -> Tensor:
        loc, log_scale = self._split(params)
        other_loc, other_log_scale = self._split(other)
        shift = (loc - other_loc) * (-other_log_scale).exp()
        wider = log_scale - other_log_scale
        return (0.5 * ((2 * wider).exp() + shift.square() - 1) - wider).sum(-1)

    def kl_implied(
        self, params: Tensor, other: Tensor, rho_bar: float = VTraceSettings.rho_bar
    ) -> Tensor:
        problem = "the implied policy of two Gaussians has no closed form"
        raise ConfigError(problem, "TrustRegion(reference='implied')", "use reference='mu'")

    def encode(self, action: Tensor) -> Tensor:
        return action.to(torch.float32)

    def loc_and_scale(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Location and scale of each number, both ``[..., size]``.

        Args:
            params: [..., width].
        """
        loc, log_scale = self._split(params)
        return loc, log_scale.exp()

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        loc, log_scale = wide(params)[0].split(self.size, -1)
        return loc, log_scale.clamp(self.min_log_scale, self.max_log_scale)


class LocAndScale(nn.Module):
    """The parameters of a :class:`DiagonalGaussian` as location and scale, for TorchRL's distributions."""

    def __init__(self, head: DiagonalGaussian) -> None:
        super().__init__()
        self.head = head

    def forward(self, params: Tensor) -> tuple[Tensor, Tensor]:
        return self.head.loc_and_scale(params)


class HeadDistribution(Distribution):
    """The distributions that parameters ``[..., width]`` describe, as TorchRL's actors and losses ask for them.

    Args:
        params: ``[..., width]``.
        head: what they mean.

    Example:
        >>> distribution = HeadDistribution(torch.zeros(4, 5), MultiCategorical((2, 3)))
        >>> distribution.sample().shape, distribution.entropy().exp()
        (torch.Size([4, 2]), tensor([6., 6., 6., 6.]))
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Tensor, head: PolicyHead) -> None:
        super().__init__(params.shape[:-1], torch.Size(head.action_shape), validate_args=False)
        self._params = params
        self._head = head

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        params = self._params.expand(*sample_shape, *self._params.shape)
        return self._head.act(params.detach())[0]

    def log_prob(self, value: Tensor) -> Tensor:
        params = self._params.expand(*value.shape[: value.ndim - len(self.event_shape)], -1)
        return self._head.score(params, value)[0]

    def entropy(self) -> Tensor:
        # Any action will do: the entropy does not depend on it.
        return self._head.score(self._params, self._head.mode(self._params))[1]

    @property
    def mode(self) -> Tensor:
        return self._head.mode(self._params)

    deterministic_sample = mode


def head_for(actions: ActionSpec) -> PolicyHead:
    """The policy head for the actions of an environment.

    Args:
        actions: of the environment: ``envs.actions``.

    Example:
        >>> head_for(DiscreteActions(3)), head_for(BoxActions(2)).size
        (Categorical(actions=3), 2)
        >>> head_for(MultiDiscreteActions((3, 2)))
        MultiCategorical(nvec=(3, 2))
    """
    if isinstance(actions, DiscreteActions):
        return Categorical(actions.n)
    if isinstance(actions, MultiDiscreteActions):
        return MultiCategorical(actions.nvec)
    return DiagonalGaussian(actions.size)


def _log_probs(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        logits = wide(logits)[0]
    return logits.log_softmax(-1)


def _picked(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

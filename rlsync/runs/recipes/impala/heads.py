"""What a network's policy outputs mean: sampling for workers, log-probabilities for the loss.

The same lines serve both, so that ratios are exactly one while weights agree; torch.distributions is slower.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from rlsync import ConfigError
from rlsync.runs.actors.envs.actions import ActionSpec, DiscreteActions
from rlsync.runs.recipes.impala.settings import VTraceSettings
from rlsync.runs.recipes.networks import wide

_LOG_2PI = math.log(2 * math.pi)


class PolicyHead(ABC):
    """A family of distributions over actions. It has no state: the parameters come from the network.

    ``params`` is [..., width] wherever it appears; all sums are done in float32 or wider.

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


def head_for(actions: ActionSpec) -> PolicyHead:
    """The policy head for the actions of an environment.

    Args:
        actions: of the environment: ``envs.actions``.

    Example:
        >>> from rlsync.runs.actors.envs.actions import BoxActions
        >>> head_for(DiscreteActions(3)), head_for(BoxActions(2)).size
        (Categorical(actions=3), 2)
    """
    if isinstance(actions, DiscreteActions):
        return Categorical(actions.n)
    return DiagonalGaussian(actions.size)


def _log_probs(logits: Tensor) -> Tensor:
    if logits.dtype != torch.float32:
        logits = wide(logits)[0]
    return logits.log_softmax(-1)


def _picked(log_probs: Tensor, action: Tensor) -> Tensor:
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

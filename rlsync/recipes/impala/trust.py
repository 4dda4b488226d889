"""The trust region of LASER: steps whose behaviour policy is too far away teach nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rlsync.core.errors import ConfigError

REFERENCES = ("mu", "implied")


class Trust(NamedTuple):
    """What a trust region decided about the steps of an unroll.

    Args:
        accepted: [T, ...] bool, the steps that lie inside.
        gate_delta: whether a rejected step loses its temporal difference, too.

    Example:
        >>> import torch
        >>> Trust(torch.tensor([True, False]), gate_delta=False).accepted.sum()
        tensor(1)
    """

    accepted: Tensor
    gate_delta: bool


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """Accepts a step when KL(target policy || reference policy) at its observation is below a threshold.

    Args:
        threshold: in nats, above zero.
        reference: ``"mu"``, the behaviour policy; or ``"implied"``, the normalised minimum of behaviour and
            target policy, which is the policy that clipping the ratio at one corrects towards (categorical
            policies only).
        gate_delta: whether a rejected step loses its temporal difference, too.

    Raises:
        ConfigError: the threshold is not above zero, or there is no such reference.

    Source: LASER, arXiv 1909.11583, section on the trust region scheme.

    Example:
        >>> import torch
        >>> TrustRegion(threshold=0.3).decide(torch.tensor([0.1, 0.5])).accepted
        tensor([ True, False])
    """

    threshold: float
    reference: str = "mu"
    gate_delta: bool = False

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise ConfigError(
                f"the threshold of a trust region cannot be {self.threshold!r}",
                "TrustRegion(threshold=...)",
                "give a number of nats above zero, for example 0.3; no trust region at all is None",
            )
        if self.reference not in REFERENCES:
            raise ConfigError(
                f"a trust region has no reference {self.reference!r}",
                "TrustRegion(reference=...)",
                "give 'mu' or 'implied'",
            )

    def decide(self, kl: Tensor) -> Trust:
        """The decision.

        Args:
            kl: [T, ...], the divergence at each step, in nats.
        """
        return Trust(kl < self.threshold, self.gate_delta)

"""The trust region of LASER: the learner ignores steps whose behaviour policy is too far from its own."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, NamedTuple

from rlsync.recipes.bounds import above_zero, bound_errors, one_of, refuse

if TYPE_CHECKING:  # configs refer to TrustRegion and are read without torch
    from torch import Tensor


class Trust(NamedTuple):
    """What a trust region decided about the steps of an unroll.

    Args:
        accepted: [T, ...] bool, true for the steps inside.
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
        reference: ``"mu"``, the behaviour policy; or ``"implied"``, the policy whose value V-trace estimates:
            min(rho_bar * behaviour policy, target policy), normalised (categorical policies only).
        gate_delta: whether a rejected step loses its temporal difference, too.

    Raises:
        ConfigError: the threshold is not above zero, or there is no such reference.

    Source: LASER, arXiv 1909.11583, section on the trust region scheme.

    Example:
        >>> import torch
        >>> TrustRegion(threshold=0.3).decide(torch.tensor([0.1, 0.5])).accepted
        tensor([ True, False])
    """

    threshold: float = above_zero(MISSING)
    reference: str = one_of("mu", "implied")
    gate_delta: bool = False

    def __post_init__(self) -> None:
        refuse(bound_errors(self, "TrustRegion."))

    def decide(self, kl: Tensor) -> Trust:
        """Decide for each step.

        Args:
            kl: [T, ...], the divergence from the reference at each step, in nats.
        """
        return Trust(kl < self.threshold, self.gate_delta)

"""The settings of V-trace and of the IMPALA loss: each default and each range is written here, once.

The recipe's config, :class:`ImpalaLoss` and :func:`vtrace` refer to these classes. No torch is imported
here, so that a config can be read without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsync.recipes.bounds import (
    above_zero,
    bound_errors,
    fraction,
    not_below_zero,
    one_of,
    refuse,
    same_as,
)
from rlsync.recipes.impala.trust import TrustRegion
from rlsync.recipes.settings import RecipeConfig


@dataclass(frozen=True, kw_only=True)
class VTraceSettings:
    """The values of V-trace.

    Args:
        gamma: discount.
        rho_bar: bound of the probability ratio in the temporal difference. It decides which policy's value is
            learned.
        c_bar: bound of the ratio in the trace. It decides how far back a temporal difference reaches.
        pg_rho_bar: bound of the ratio in the advantage.
        lam: the lambda of TD(lambda) and GAE(lambda). 1 is plain V-trace; smaller values give shorter
            returns.

    Raises:
        ConfigError: a value is out of its range.

    Source: IMPALA, arXiv 1802.01561, section 4.

    Example:
        >>> VTraceSettings(rho_bar=2.0).c_bar
        1.0
    """

    gamma: float = same_as(RecipeConfig, "gamma")
    rho_bar: float = above_zero(1.0)
    c_bar: float = above_zero(1.0)
    pg_rho_bar: float = above_zero(1.0)
    lam: float = fraction(1.0)

    def __post_init__(self) -> None:
        refuse(bound_errors(self))


@dataclass(frozen=True, kw_only=True)
class LossSettings(VTraceSettings):
    """The options of :class:`ImpalaLoss`: V-trace's values, and those below.

    Args:
        gamma, rho_bar, c_bar, pg_rho_bar, lam: see :class:`VTraceSettings`.
        entropy_coeff: weight of the entropy bonus.
        baseline_coeff: weight of the baseline's loss. The paper has 0.5; where returns are large, the
            baseline's gradient is then many times the policy's.
        reward_clipping: ``"none"``, or ``"clip"`` to [-1, 1].
        reduction: ``"mean"`` or ``"sum"`` (as in the paper) over the T * B steps.
        entropy_on: ``"all"`` unrolls, or only the ``"online"`` ones, as in LASER.
        trust_region: LASER's, or None. The policy and the baseline do not learn from steps outside.

    Raises:
        ConfigError: a value is out of its range.

    Source: IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583.

    Example:
        >>> LossSettings(lam=0.95, entropy_on="online").reduction
        'mean'
    """

    entropy_coeff: float = not_below_zero(0.01)
    baseline_coeff: float = not_below_zero(0.02)
    reward_clipping: str = one_of("none", "clip")
    reduction: str = one_of("mean", "sum")
    entropy_on: str = one_of("all", "online")
    trust_region: TrustRegion | None = None

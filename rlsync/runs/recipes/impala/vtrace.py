"""V-trace: value targets and advantages from steps that another policy took."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from rlsync import ConfigError
from rlsync.runs.recipes.impala.settings import Trust, VTraceSettings
from rlsync.runs.recipes.networks import wide

# Checking takes a tenth of the time of a small V-trace, and the values are nearly always the same.
_checked = lru_cache(maxsize=64)(VTraceSettings)


class _Unchecked(VTraceSettings):
    """For code that is being compiled: torch.compile (2.13) cannot trace the checks."""

    def __post_init__(self) -> None:
        pass


def vtrace(
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    rho_bar: float = VTraceSettings.rho_bar,
    c_bar: float = VTraceSettings.c_bar,
    pg_rho_bar: float = VTraceSettings.pg_rho_bar,
    lam: float = VTraceSettings.lam,
    trust: Trust | None = None,
) -> tuple[Tensor, Tensor]:
    """V-trace targets and policy-gradient advantages of an unroll, time first.

    With ``rho = min(rho_bar, exp(log_rho))`` and ``c = lam * min(c_bar, exp(log_rho))``::

        delta[t]     = rho[t] * (reward[t] + gamma * next_value[t] - value[t])
        target[t]    = value[t] + delta[t] + gamma * c[t] * (target[t+1] - value[t+1])
        following[t] = lam * target[t+1] + (1 - lam) * next_value[t]
        advantage[t] = min(pg_rho_bar, exp(log_rho[t])) * (reward[t] + gamma * following[t] - value[t])

    At the last step of an episode, and of the unroll, the trace is cut and ``following[t]`` is
    ``next_value[t]``. After a termination there is nothing to bootstrap from, and ``next_value[t]`` is not
    read; a step that is both terminated and truncated counts as terminated. On-policy the advantages are
    those of GAE(lam). No gradient flows through the results.

    Args:
        log_rho: [T, ...], log(target policy / behaviour policy) of the actions taken.
        reward: [T, ...].
        value: [T, ...], the values of the observations at t.
        next_value: [T, ...], the values of the observations that followed; at a truncation of the true one,
            not of the first one of the next episode.
        terminated, truncated: [T, ...] bool, whether the episode ended with this step, and how.
        gamma, rho_bar, c_bar, pg_rho_bar, lam: see :class:`VTraceSettings`.
        trust: the decision of a trust region: a rejected step cuts the trace behind it and has no advantage;
            with ``gate_delta`` it has no temporal difference either.

    Returns:
        targets and advantages, [T, ...], in float32 or wider.

    Raises:
        ConfigError: shapes differ, or a value is out of its range.

    Source: IMPALA, arXiv 1802.01561, section 4; rlax.vtrace_td_error_and_advantage, for ``lam`` in the
    advantage; LASER, arXiv 1909.11583, for ``trust``.

    Example:
        >>> step = torch.tensor([0.0, 0.0])  # on-policy: the targets are discounted sums of rewards
        >>> never = torch.zeros(2, dtype=torch.bool)
        >>> targets, advantages = vtrace(
        ...     step, step + 1, step, step, terminated=never, truncated=never, gamma=0.5
        ... )
        >>> targets, advantages
        (tensor([1.5000, 1.0000]), tensor([1.5000, 1.0000]))
    """
    make: Callable[..., VTraceSettings]
    if torch.compiler.is_compiling():
        make = _Unchecked
    else:
        make = _checked
    return vtrace_with(
        make(gamma=gamma, rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, lam=lam),
        log_rho,
        reward,
        value,
        next_value,
        terminated=terminated,
        truncated=truncated,
        trust=trust,
    )


@torch.no_grad()
def vtrace_with(
    settings: VTraceSettings,
    log_rho: Tensor,
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    *,
    terminated: Tensor,
    truncated: Tensor,
    trust: Trust | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`vtrace` with values that were checked before; ``torch.compile(fullgraph=True)`` takes it."""
    _same_shape(log_rho, reward, value, next_value, terminated, truncated)
    log_rho, reward, value, next_value = wide(log_rho, reward, value, next_value)
    gamma = settings.gamma
    lam = settings.lam
    next_value = next_value.masked_fill(terminated, 0.0)
    ended = terminated | truncated
    ratio = log_rho.exp()
    delta = ratio.clamp(max=settings.rho_bar) * (reward + gamma * next_value - value)
    decay = (gamma * lam * ratio.clamp(max=settings.c_bar)).masked_fill(ended, 0.0)
    if trust is not None:
        decay = decay * trust.accepted
        if trust.gate_delta:
            delta = delta * trust.accepted
    targets = value + _discounted_sums(delta, decay)

    # The advantage looks one step ahead, to a mixture of the next target and the next value.
    following = torch.cat([targets[1:], next_value[-1:]])
    if lam != 1:
        following = lam * following + (1 - lam) * next_value
    following = torch.where(ended, next_value, following)
    advantages = ratio.clamp(max=settings.pg_rho_bar) * (reward + gamma * following - value)
    if trust is not None:
        advantages = advantages * trust.accepted
    return targets, advantages


def _discounted_sums(terms: Tensor, decay: Tensor) -> Tensor:
    """sums[t] = terms[t] + decay[t] * sums[t + 1], along the first dimension."""
    sums = [terms[-1]]
    for term, factor in zip(terms[:-1].flip(0).unbind(), decay[:-1].flip(0).unbind(), strict=True):
        sums.append(torch.addcmul(term, factor, sums[-1]))
    return torch.stack(sums[::-1])


def _same_shape(*tensors: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1 or not shapes[0] or not shapes[0][0]:
        names = ("log_rho", "reward", "value", "next_value", "terminated", "truncated")
        where = ", ".join(map("{} {}".format, names, map(list, shapes)))
        problem = "V-trace takes six tensors of one shape, time first"
        raise ConfigError(problem, where, "give them all as [T, ...] with T > 0")

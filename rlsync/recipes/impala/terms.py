"""The IMPALA loss as one pure function of tensors, which ``torch.compile`` takes whole."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.recipes.impala.heads import PolicyHead
from rlsync.recipes.impala.network import Unrolled
from rlsync.recipes.impala.settings import LossSettings
from rlsync.recipes.impala.trust import Trust
from rlsync.recipes.impala.vtrace import vtrace_with
from rlsync.tensors.device import wide


class Steps(NamedTuple):
    """What the workers recorded, [T, B, ...]; a tensor that no option needs may be None."""

    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    behaviour_log_prob: Tensor
    behaviour_params: Tensor | None = None
    replayed: Tensor | None = None
    final_index: Tensor | None = None


def loss_terms(
    seen: Unrolled, steps: Steps, head: PolicyHead, settings: LossSettings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The policy, baseline and entropy losses before their coefficients, and detached scalars to log.

    These are :data:`DIAGNOSTICS`, and with a trust region :data:`TRUST_DIAGNOSTICS`. It has no branches on
    the values of tensors, so ``torch.compile(fullgraph=True)`` takes it. ConfigError if an option needs a
    tensor that is None in ``steps``.

    Source: IMPALA, arXiv 1802.01561, section 4.2; LASER, arXiv 1909.11583.
    """
    params = seen.params[:-1]
    log_prob, entropy = head.score(params, steps.action)
    log_prob, values, behaviour = wide(log_prob, seen.value, steps.behaviour_log_prob)
    log_rho = log_prob.detach() - behaviour
    trust, diagnostics = _trust(params.detach(), steps, head, settings)
    reward = steps.reward.clamp(-1.0, 1.0) if settings.reward_clipping == "clip" else steps.reward
    targets, advantages = vtrace_with(
        settings,
        log_rho,
        reward,
        values[:-1].detach(),
        _next_values(values.detach(), seen.final_value, steps.final_index),
        steps.terminated,
        steps.truncated,
        trust,
    )
    error = (targets - values[:-1]).square()
    reduced = torch.mean if settings.reduction == "mean" else torch.sum
    losses = {
        "policy": reduced(-log_prob * advantages),
        "baseline": reduced(0.5 * (error if trust is None else error * trust.accepted)),
        "entropy": reduced(-_online(entropy, steps, settings)),
    }
    diagnostics |= _diagnostics(log_rho, entropy.detach(), targets, error.detach(), settings)
    return losses, diagnostics


#: The diagnostics of every loss.
DIAGNOSTICS = ("mean_rho", "clipped_fraction", "entropy", "explained_variance", "mean_value_target")
#: Further diagnostics where there is a trust region.
TRUST_DIAGNOSTICS = ("kl", "rejected_fraction")


def _trust(
    params: Tensor, steps: Steps, head: PolicyHead, settings: LossSettings
) -> tuple[Trust | None, dict[str, Tensor]]:
    region = settings.trust_region
    if region is None:
        return None, {}
    if steps.behaviour_params is None:
        raise ConfigError(
            "a trust region needs the behaviour policy",
            "Steps(behaviour_params=None)",
            "let the workers store their policy's outputs with each step",
        )
    if region.reference == "implied":
        kl = head.kl_implied(params, steps.behaviour_params, settings.rho_bar)
    else:
        kl = head.kl(params, steps.behaviour_params)
    trust = region.decide(kl)
    return trust, {"kl": kl.mean(), "rejected_fraction": 1 - trust.accepted.to(kl.dtype).mean()}


def _online(entropy: Tensor, steps: Steps, settings: LossSettings) -> Tensor:
    if settings.entropy_on == "all":
        return entropy
    if steps.replayed is None:
        raise ConfigError(
            "entropy on online data needs to know which unrolls are replayed",
            "Steps(replayed=None)",
            "give [B] bool, True for unrolls from replay",
        )
    return entropy * ~steps.replayed


def _next_values(values: Tensor, final_value: Tensor | None, final_index: Tensor | None) -> Tensor:
    """The value after each step: of the next observation, or of the final one that a truncation hid."""
    if final_value is None or final_index is None:
        return values[1:]
    time, env = final_index.unbind(-1)
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

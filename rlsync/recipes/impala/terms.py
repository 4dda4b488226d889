"""The numbers of the IMPALA loss: tensors in, tensors out, in one compilable function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.recipes.impala.models import Unrolled
from rlsync.recipes.impala.policy_head import PolicyHead
from rlsync.recipes.impala.precision import wide
from rlsync.recipes.impala.targets import vtrace
from rlsync.recipes.impala.trust import Trust, TrustRegion


class Steps(NamedTuple):
    """What the workers recorded, [T, B, ...]; the optional ones are None where no option asks for them."""

    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    behaviour_log_prob: Tensor
    behaviour_params: Tensor | None = None
    replayed: Tensor | None = None
    final_index: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The options of the loss; :class:`ImpalaLoss` documents them.

    Raises:
        ConfigError: a value is out of its range.
    """

    gamma: float = 0.99
    rho_bar: float = 1.0
    c_bar: float = 1.0
    pg_rho_bar: float = 1.0
    lam: float = 1.0
    reward_clipping: str = "none"
    reduction: str = "mean"
    entropy_on: str = "all"
    trust_region: TrustRegion | None = None

    def __post_init__(self) -> None:
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} cannot be {value!r}", name, "give a number from 0 to 1")
        bounds = (("rho_bar", self.rho_bar), ("c_bar", self.c_bar), ("pg_rho_bar", self.pg_rho_bar))
        for name, value in bounds:
            if not value > 0:
                raise ConfigError(f"{name} cannot be {value!r}", name, "give a number above zero, or inf")
        for name, choice, choices in (
            ("reward_clipping", self.reward_clipping, ("none", "clip")),
            ("reduction", self.reduction, ("mean", "sum")),
            ("entropy_on", self.entropy_on, ("all", "online")),
        ):
            if choice not in choices:
                raise ConfigError(f"{name} cannot be {choice!r}", name, f"give one of {', '.join(choices)}")


def loss_terms(
    seen: Unrolled, steps: Steps, head: PolicyHead, settings: LossSettings
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The losses before their coefficients, and what there is to log (detached scalars).

    Pure, and free of branches on values: ``torch.compile(fullgraph=True)`` takes it.

    Args:
        seen: what the network made of the T+1 observations.
        steps: what the workers recorded of the T steps.
        head: what policy parameters mean.
        settings: the options.

    Raises:
        ConfigError: an option needs one of the optional steps, and it is None.

    Returns:
        ``policy``, ``baseline`` and ``entropy`` losses; and the diagnostics: :data:`DIAGNOSTICS`, with
        :data:`TRUST_DIAGNOSTICS` where there is a trust region.

    Source: IMPALA, arXiv 1802.01561, section 4.2; LASER, arXiv 1909.11583.
    """
    params = seen.params[:-1]
    log_prob, entropy = head.score(params, steps.action)
    log_prob, values, behaviour = wide(log_prob, seen.value, steps.behaviour_log_prob)
    log_rho = log_prob.detach() - behaviour
    trust, diagnostics = _trust(params.detach(), steps, head, settings.trust_region)
    reward = steps.reward.clamp(-1.0, 1.0) if settings.reward_clipping == "clip" else steps.reward
    targets, advantages = vtrace(
        log_rho,
        reward,
        values[:-1].detach(),
        _next_values(values.detach(), seen.final_value, steps.final_index),
        steps.terminated,
        steps.truncated,
        gamma=settings.gamma,
        rho_bar=settings.rho_bar,
        c_bar=settings.c_bar,
        pg_rho_bar=settings.pg_rho_bar,
        lam=settings.lam,
        trust=trust,
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


#: What is logged with every loss.
DIAGNOSTICS = ("mean_rho", "clipped_fraction", "entropy", "explained_variance", "mean_value_target")
#: What is logged beside it where there is a trust region.
TRUST_DIAGNOSTICS = ("kl", "rejected_fraction")


def _trust(
    params: Tensor, steps: Steps, head: PolicyHead, region: TrustRegion | None
) -> tuple[Trust | None, dict[str, Tensor]]:
    if region is None:
        return None, {}
    if steps.behaviour_params is None:
        raise ConfigError(
            "a trust region needs the behaviour policy",
            "Steps(behaviour_params=None)",
            "let workers store the outputs of their policy with each step",
        )
    divergence = head.kl if region.reference == "mu" else head.kl_implied
    kl = divergence(params, steps.behaviour_params)
    trust = region.decide(kl)
    return trust, {"kl": kl.mean(), "rejected_fraction": 1 - trust.accepted.to(kl.dtype).mean()}


def _online(entropy: Tensor, steps: Steps, settings: LossSettings) -> Tensor:
    if settings.entropy_on == "all":
        return entropy
    if steps.replayed is None:
        raise ConfigError(
            "entropy on online data needs to know what is replayed",
            "Steps(replayed=None)",
            "give [B] bool, True for unrolls from replay",
        )
    return entropy * ~steps.replayed


def _next_values(values: Tensor, final_value: Tensor | None, final_index: Tensor | None) -> Tensor:
    """Of what came after each step: the next observation, or the one that a truncation hid."""
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

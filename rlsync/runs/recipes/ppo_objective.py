"""PPO's objective as a function of tensors, for single frames and for the steps of unrolls.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equations 7 and 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, smooth_l1_loss

CRITIC_ERRORS = {"smooth_l1": smooth_l1_loss, "l2": mse_loss}

#: Losses, which are minimised, and what is logged beside them, by name.
Terms = dict[str, Tensor]
#: Takes ``[N]`` each: log(pi / mu) of the actions, the advantages, values and their targets; and what computes
#: entropies.
Objective = Callable[[Tensor, Callable[[], Tensor], Tensor, Tensor, Tensor], Terms]


def objective_of(loss: Any) -> Objective:
    """The objective with the coefficients of a loss, under the names and with the numbers of TorchRL's.

    Args:
        loss: TorchRL's ``ClipPPOLoss``, or one with the same attributes.
    """
    normalizes: bool = loss.normalize_advantage
    bonus: bool = loss.entropy_bonus
    entropy_coeff: Tensor = loss.entropy_coeff
    critic_coeff: Tensor = loss.critic_coeff
    critic_error = CRITIC_ERRORS[loss.loss_critic_type]
    least = 1 - loss.clip_epsilon
    most = 1 + loss.clip_epsilon

    def objective(
        log_ratio: Tensor,
        entropies: Callable[[], Tensor],
        advantage: Tensor,
        value: Tensor,
        target: Tensor,
    ) -> Terms:
        ratio = log_ratio.exp()
        if normalizes:
            deviation = advantage.std().clamp_min(torch.finfo(torch.float).resolution)
            advantage = (advantage - advantage.mean()) / deviation

        # min(r A, clip(r, 1 - epsilon, 1 + epsilon) A), with r = pi(a|s) / mu(a|s)
        gain = torch.minimum(ratio * advantage, ratio.clamp(least, most) * advantage)
        terms = {"loss_objective": -gain.mean()}
        if bonus:
            entropy = entropies().mean()
            terms |= {"entropy": entropy, "loss_entropy": -entropy_coeff * entropy}

        missed = (target - value).var(correction=0)
        spread = target.var(correction=0)
        return terms | {
            "loss_critic": critic_coeff * critic_error(value, target, reduction="none").mean(),
            "clip_fraction": ((ratio < least) | (ratio > most)).to(ratio.dtype).mean(),
            "kl_approx": -log_ratio.mean(),
            "explained_variance": 1 - missed / (spread + torch.finfo(spread.dtype).eps),
            "ESS": ratio.sum().square() / ratio.square().sum() / len(ratio),
            "max_ratio": ratio.max(),
            "mean_ratio": ratio.mean(),
        }

    return objective

"""Dreamer players whose weights are the number of their version, and whose state lists them."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.modules import RSSMPrior, RSSMPriorV3

from rlsync import DreamerPlayer
from tests.tools.dreamer_parts import Dreamer, make_v1, make_v3


class CanaryPriorV3(RSSMPriorV3):
    """Its belief lists the weights that made it, step by step, the newest at the end."""

    def _update_belief(self, state: torch.Tensor, belief: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return _listed(belief, self.rnn)


class CanaryPriorV1(RSSMPrior):
    """The same for DreamerV1."""

    def forward(self, state: torch.Tensor, belief: torch.Tensor, action: torch.Tensor) -> tuple:
        mean, std, drawn, _ = super().forward(state, belief, action)
        return mean, std, drawn, _listed(belief, self.rnn)


def _listed(belief: torch.Tensor, rnn: nn.Module) -> torch.Tensor:
    weight = next(rnn.parameters()).reshape(-1)[:1]
    return torch.cat([belief[..., 1:], weight.expand(*belief.shape[:-1], 1)], -1)


class ShowingPlayer(DreamerPlayer):
    """Writes the range of its weights on each frame, of all modules that a publish brings."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        shown = [p for name, p in self.named_parameters() if ".rnn_to_prior_projector." not in name]
        for key, value in (
            ("canary_min", min(float(p.min()) for p in shown)),
            ("canary_max", max(float(p.max()) for p in shown)),
        ):
            tensordict.set(key, torch.full(tensordict.batch_size, value))
        return super().forward(tensordict)


def make_canary(version: int) -> Dreamer:
    """A learner whose weights are numbers of versions, see :func:`fill`."""
    if version == 1:
        return make_v1(prior_class=CanaryPriorV1)
    return make_v3(prior_class=CanaryPriorV3)


def fill(player: nn.Module, version: int) -> None:
    """Write a number into all weights."""
    with torch.no_grad():
        for parameter in player.parameters():
            parameter.fill_(version)

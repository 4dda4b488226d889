"""TorchRL's world models."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchrl.modules import RSSMPriorV3


class ScaledPrior(RSSMPriorV3):
    """Scales actions by their bounds for TorchRL's, which cuts their numbers to 1. Until TorchRL's does."""

    def __init__(self, actions: int, bounds: tuple[Tensor, Tensor] | None, **settings: Any) -> None:
        settings |= {
            "action_shape": (actions,),
            "action_dim": actions,
            "recurrent_model": "block_gru",
        }
        super().__init__(**settings)
        self.scales = bounds is not None
        if bounds is not None:
            self.register_buffer("middle", (bounds[0] + bounds[1]) / 2)
            self.register_buffer("half_range", (bounds[1] - bounds[0]) / 2)

    def scaled(self, action: Tensor) -> Tensor:
        if self.scales:
            return (action - self.middle) / self.half_range
        return action

    def _update_belief(self, state: Tensor, belief: Tensor, action: Tensor) -> Tensor:
        return super()._update_belief(state, belief, self.scaled(action))

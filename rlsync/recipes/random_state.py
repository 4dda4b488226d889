"""The learner's random numbers in checkpoints, which may be loaded where there are other accelerators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrl.checkpoint import GlobalRNGState

#: TorchRL's keys of accelerators, each with what knows how many there are.
_ACCELERATORS: Mapping[str, Any] = {"torch_cuda": torch.cuda, "torch_xpu": torch.xpu, "torch_mps": torch.mps}


class RandomState(GlobalRNGState):
    """The random numbers of Python, numpy, torch and its accelerators, as far as this machine has these.

    TorchRL's class refuses a checkpoint with the random numbers of a GPU where there is none, or where there
    are fewer. A resumed run may have other devices, so this one leaves those out that are not here.

    Source: torchrl.checkpoint.GlobalRNGState, whose checkpoints it reads and writes.

    Example:
        >>> state = RandomState().state_dict()
        >>> drawn = torch.rand(1)
        >>> RandomState().load_state_dict(state)
        >>> torch.equal(torch.rand(1), drawn)
        True
    """

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set what :meth:`state_dict` returned, here or on another machine."""
        here = dict(state_dict)
        for key, module in _ACCELERATORS.items():
            if key not in here:
                continue
            if not module.device_count():
                del here[key]
            elif not isinstance(here[key], torch.Tensor):  # one for each device
                here[key] = list(here[key])[: module.device_count()]
        super().load_state_dict(here)

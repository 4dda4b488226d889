"""What is kept of a computation with weights, and must not outlive them: packed weights, keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.utils import parametrize


@runtime_checkable
class KeepsDerived(Protocol):
    """A module that keeps what it computed from its weights, and is told when they are others.

    Whatever part of a policy has this method is asked at each adoption, after all weights have arrived and
    before the next call, in the thread that writes them. TorchRL gives its modules the same method from
    version 0.15 on. A module that means to keep what older weights computed, as a memory of the episode,
    says so with a method that does nothing.

    Example:
        >>> class Packed(nn.Linear):
        ...     packed = None
        ...
        ...     def forward(self, x):
        ...         if self.packed is None:
        ...             self.packed = self.weight.detach().t().contiguous()
        ...         return x @ self.packed + self.bias
        ...
        ...     def mark_weight_update(self):
        ...         self.packed = None
        >>> isinstance(Packed(4, 2), KeepsDerived), isinstance(nn.Linear(4, 2), KeepsDerived)
        (True, False)
    """

    def mark_weight_update(self) -> None:
        """Drop what was computed from the weights of before."""


def keepers(modules: Iterable[object]) -> tuple[KeepsDerived, ...]:
    """The parts of some modules that keep what they computed from weights, each once."""
    parts: dict[nn.Module, None] = {}
    for module in modules:
        if isinstance(module, nn.Module):
            parts |= dict.fromkeys(module.modules())
    return tuple(part for part in parts if isinstance(part, KeepsDerived))


def outdate(parts: Sequence[KeepsDerived]) -> None:
    """Drop what was derived from weights that have just been replaced; call it when all have arrived."""
    # Inside torch.autocast(), and parametrize.cached(), torch keeps casts and weights until the block ends.
    torch.clear_autocast_cache()
    parametrize._cache.clear()
    for part in parts:
        part.mark_weight_update()

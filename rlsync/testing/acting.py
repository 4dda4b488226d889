"""Layouts and tensors that tell their version, and what acts with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlsync.tensors.layout import Layout, LeafSpec


def plain_layout(tensors: int = 3, size: int = 1000, *more: str) -> Layout:
    """Float leaves only, ``size`` each, for the destinations "policy" and ``more``."""
    leaves = [LeafSpec(f"w{i}", "parameter", (size,), torch.float32) for i in range(tensors)]
    return Layout.build(dict.fromkeys(("policy", *more), leaves))


def filled(layout: Layout, number: float) -> list[torch.Tensor]:
    """The tensors of a publish, every element ``number``."""
    leaves = [entry.leaf for entry in layout.owned]
    return [torch.full(leaf.shape, number, device="cpu").to(leaf.dtype) for leaf in leaves]


def low_high(tensors: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The least and the greatest number in ``tensors``."""
    ends = [torch.aminmax(tensor) for tensor in tensors if tensor.numel()]
    return float(min(low for low, _ in ends)), float(max(high for _, high in ends))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Acts:
    """What acts in a worker: the views themselves (alias), or memory of its own (copy)."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.version = 0
        self.layout: Layout | None = None
        self.tensors: list[torch.Tensor] = []

    def __call__(self, version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        self.version = version
        self.layout = layout
        if self.mode == "alias":
            self.tensors = list(views)
            return True
        self.tensors = [view.clone() for view in views]
        return False

"""Networks that act with other tensors than their leaves, unless they are told to be right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tensordict import from_module
from torch import Tensor, nn
from torch.func import functional_call

from tests.tools.parts.policies import make_mlp
from tests.tools.parts.sizes import ACTIONS, OBSERVATIONS


class Functional(nn.Module):
    """Computes with a dict of detached parameters that it made at the start: the same memory, or copies."""

    def __init__(self, *, live: bool = False, copies: bool = False) -> None:
        super().__init__()
        self.net, self.live = make_mlp(ACTIONS), live
        detached = {name: tensor.detach() for name, tensor in self.net.named_parameters()}
        self.held = {name: tensor.clone() if copies else tensor for name, tensor in detached.items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if self.live else functional_call(self.net, self.held, (x,))


class Twin(nn.Module):
    """Computes with a detached twin, as LeanRL's scripts do: of the same memory, or of copies."""

    def __init__(self, *, live: bool = False, copies: bool = False) -> None:
        super().__init__()
        self.net, twin = make_mlp(ACTIONS), make_mlp(ACTIONS)
        detached = from_module(self.net).data
        (detached.clone() if copies else detached).to_module(twin)
        self.twin = [self.net if live else twin]

    def forward(self, x: Tensor) -> Tensor:
        return self.twin[0](x)


class Packed(nn.Module):
    """Transposes its weight at the first call, and never again."""

    def __init__(self, *, live: bool = False) -> None:
        super().__init__()
        self.net, self.live = nn.Linear(OBSERVATIONS, ACTIONS), live
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.live:
            return self.net(x)
        if self.packed is None:
            self.packed = self.net.weight.detach().t().contiguous()
        return x @ self.packed + self.net.bias


class Told(Packed):
    """Drops its packed weight when it is told of new ones."""

    def mark_weight_update(self) -> None:
        self.packed = None


class Twice(Packed):
    """Acts with its weight twice: as it is, and as it packed it. It packs anew if the key has changed."""

    def __init__(self, key: Callable[[Tensor], object] | None = None, *, live: bool = False) -> None:
        super().__init__(live=live)
        self.key, self.packed_for = key, None

    def forward(self, x: Tensor) -> Tensor:
        if self.key is not None and self.packed_for != (key := self.key(self.net.weight)):
            self.packed, self.packed_for = None, key
        return super().forward(x) + self.net(x)


class Attention(nn.Module):
    """Attends to all steps so far, and keeps their keys and values, or if it is ``live`` their inputs."""

    def __init__(self, *, live: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(OBSERVATIONS, 8), nn.Linear(OBSERVATIONS, 8)
        self.value, self.live = nn.Linear(OBSERVATIONS, ACTIONS), live
        self.seen: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.live:
            self.seen.append(x.clone())
            self.keys = [self.key(x) for x in self.seen]
            self.values = [self.value(x) for x in self.seen]
        else:
            self.keys.append(self.key(x))
            self.values.append(self.value(x))
        scores = torch.stack([(self.query(x) * key).sum(-1, keepdim=True) for key in self.keys])
        return (scores.softmax(0) * torch.stack(self.values)).sum(0)


class ToldAttention(Attention):
    """Drops its keys and values when it is told of new weights."""

    def mark_weight_update(self) -> None:
        self.keys, self.values = [], []


class Spare(nn.Module):
    """Has a second head, which nobody asks unless it is ``live``."""

    def __init__(self, *, live: bool = False) -> None:
        super().__init__()
        self.net, self.spare, self.live = make_mlp(ACTIONS), nn.Linear(OBSERVATIONS, ACTIONS), live

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + self.spare(x) if self.live else self.net(x)


class Scaled(nn.Module):
    """Has a number, a plain tensor and a dropout, which no version brings."""

    def __init__(
        self, by: float = 1.0, mean: float = 0.0, drops: float = 0.0, inputs: int = OBSERVATIONS
    ) -> None:
        super().__init__()
        self.net, self.by, self.mean = make_mlp(ACTIONS, inputs), by, torch.full((inputs,), mean)
        self.drop = nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        return self.by * self.drop(self.net(x - self.mean))


class Normalised(nn.Module):
    """Has a normalising layer, which takes any number of leading dimensions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.net, self.norm = make_mlp(ACTIONS), norm

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return self.norm(y.reshape(-1, y.shape[-1])).view_as(y)

"""Weights that are made of other tensors, as quantisers make them: they have no memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tests.tools.parts.sizes import ACTIONS, OBSERVATIONS

_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Whole(Tensor):
    """A float tensor that is computed from its parts; operations see the numbers that they stand for."""

    PARTS: tuple[str, ...] = ()

    @staticmethod
    def wrapper(kind: type[Whole], shape: torch.Size) -> Any:
        return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=torch.float32)

    def numbers(self) -> Tensor:
        raise NotImplementedError

    def remade(self, change: Callable[[Tensor], Tensor]) -> Whole:
        raise NotImplementedError

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}{tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DETACH:
            return args[0].remade(lambda part: part)
        if func is torch.ops.aten.clone.default:
            return args[0].remade(torch.clone)
        plain = tree_map(lambda value: value.numbers() if isinstance(value, Whole) else value, args)
        return func(*plain, **(kwargs or {}))


class Quantised(Whole):
    """Whole numbers, a scale, and a shift that is no tensor."""

    def __new__(cls, values: Tensor, scale: Tensor, shift: float = 0.0) -> Quantised:
        return cls.wrapper(cls, values.shape)

    def __init__(self, values: Tensor, scale: Tensor, shift: float = 0.0) -> None:
        self.values, self.scale, self.shift = values, scale, shift

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, float]]:
        return ["values", "scale"], {"shift": self.shift}

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], settings: Any, size: Any, stride: Any) -> Quantised:
        return Quantised(parts["values"], parts["scale"], settings["shift"])

    def numbers(self) -> Tensor:
        return self.values.float() * self.scale + self.shift

    def remade(self, change: Callable[[Tensor], Tensor]) -> Quantised:
        return Quantised(change(self.values), change(self.scale), self.shift)


class Biased(Whole):
    """A quantised tensor inside another one, with a bias of its own."""

    def __new__(cls, inner: Quantised, bias: Tensor) -> Biased:
        return cls.wrapper(cls, inner.shape)

    def __init__(self, inner: Quantised, bias: Tensor) -> None:
        self.inner, self.bias = inner, bias

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "bias"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], settings: Any, size: Any, stride: Any) -> Biased:
        return Biased(parts["inner"], parts["bias"])

    def numbers(self) -> Tensor:
        return self.inner.numbers() + self.bias

    def remade(self, change: Callable[[Tensor], Tensor]) -> Biased:
        return Biased(self.inner.remade(change), change(self.bias))


class Closed(Whole):
    """Holds a tensor, and does not say how it is taken apart."""

    def __new__(cls, hidden: Tensor) -> Closed:
        return cls.wrapper(cls, hidden.shape)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def numbers(self) -> Tensor:
        return self.hidden

    def remade(self, change: Callable[[Tensor], Tensor]) -> Closed:
        return Closed(change(self.hidden))


class Fleeting(Quantised):
    """Makes its values anew whenever they are read."""

    def __init__(self, values: Tensor, scale: Tensor, shift: float = 0.0) -> None:
        self.packed, self.scale, self.shift = values, scale, shift

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        return self.packed.clone()


def quantise(weight: Tensor, shift: float = 0.0) -> Quantised:
    """A tensor of 8-bit numbers near those of ``weight``."""
    weight = weight.detach()
    scale = weight.abs().amax().clamp_min(1e-6) / 127
    return Quantised((weight / scale).round().to(torch.int8), scale, shift)


def quantised(linear: nn.Linear, whole: Callable[[Tensor], Tensor] = quantise) -> nn.Linear:
    """The layer, with a weight that is made of parts."""
    linear.weight = nn.Parameter(whole(linear.weight), requires_grad=False)
    return linear


def make_quantised_mlp(whole: Callable[[Tensor], Tensor] = quantise) -> nn.Sequential:
    """A network with two quantised weights of one shape, between plain layers."""
    square = [quantised(nn.Linear(8, 8), whole) for _ in range(2)]
    ends = nn.Linear(OBSERVATIONS, 8), nn.Linear(8, ACTIONS)
    return nn.Sequential(ends[0], nn.Tanh(), square[0], nn.Tanh(), square[1], ends[1])


def biased(weight: Tensor) -> Biased:
    """A quantised tensor inside another."""
    return Biased(quantise(weight), torch.full((1,), 0.25))


def move(net: nn.Module, seed: int) -> None:
    """Other numbers in every parameter and in every part of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            other = torch.rand(parameter.shape, generator=generator) - 0.5
            match parameter:
                case Biased():
                    fresh = quantise(other)
                    parameter.inner.values.copy_(fresh.values)
                    parameter.inner.scale.copy_(fresh.scale)
                    parameter.bias.fill_(float(other.flatten()[0]))
                case Quantised():
                    fresh = quantise(other)
                    parameter.values.copy_(fresh.values)
                    parameter.scale.copy_(fresh.scale)
                case _:
                    parameter.copy_(other)

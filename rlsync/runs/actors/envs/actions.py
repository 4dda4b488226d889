"""What an action of an environment's space is to a player, and back: the one place that decides it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    OneOf,
    Sequence,
    Space,
    Text,
    Tuple,
)
from numpy.typing import NDArray
from torch import Generator, Tensor

from rlsync import ConfigError

#: What :meth:`sent` does, to arrays.
Translation = Callable[[NDArray[Any]], NDArray[Any]]

#: The dtypes of the numbers of a continuous action that torch has, too.
_FLOATS = ("float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class DiscreteActions:
    """A player chooses an int64 index, 0 to ``n - 1``. What the environment gets is a number of its space.

    Args:
        n: how many actions there are to choose from.
        start: what the environment calls the first of them.
        sent_as: the dtype in which the environment gets it.

    Example:
        >>> DiscreteActions(3).shape, DiscreteActions(3).dtype
        ((), torch.int64)
        >>> DiscreteActions(3, start=-1).sent(torch.tensor([0, 2]))
        tensor([-1,  1])
    """

    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[torch.dtype] = torch.int64
    n: int
    start: int = field(default=0, compare=False)
    sent_as: str = field(default="int64", compare=False)

    def space(self) -> Space[Any]:
        """The space of what players choose, as gymnasium has it."""
        return Discrete(self.n)

    def sent(self, action: Tensor) -> Tensor:
        """The members of the environment's space that a player's actions ``[...]`` stand for.

        Args:
            action: indices, [...].
        """
        number = action
        if self.start:
            number = action + self.start
        return number.to(getattr(torch, self.sent_as))

    def translation(self) -> Translation:
        """What does the same as :meth:`sent` to arrays, a hundred thousand times a second."""
        dtype = np.dtype(self.sent_as)
        start = self.start
        if start:
            return lambda action: (action + start).astype(dtype, copy=False)
        return lambda action: action.astype(dtype, copy=False)

    def chosen(self, sent: Tensor) -> Tensor:
        """The indices that :meth:`sent` makes these of.

        Args:
            sent: members of the environment's space, [...].
        """
        return sent.to(torch.int64) - self.start

    @property
    def choices(self) -> tuple[int, ...]:
        """How many there are to choose from, for each choice of an action."""
        return (self.n,)

    def drawn(
        self,
        count: int,
        generator: Generator,
        device: torch.device,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Indices ``[count]``, all equally likely.

        Args:
            count: how many are drawn.
            generator: of random numbers, on the device.
            device: where the indices are.
            allowed: ``[count, n]`` bool, which may be drawn; None: all.
        """
        if allowed is not None:
            return _drawn_of(allowed, generator)
        return torch.randint(self.n, (count,), generator=generator, device=device)


@dataclass(frozen=True, slots=True)
class MultiDiscreteActions:
    """A player makes several choices at once: int64 indices ``[n]``, the i-th of them 0 to ``nvec[i] - 1``.

    The environment gets numbers of its space, in the shape of its space.

    Args:
        nvec: how many there are to choose from, for each choice.
        start: what the environment calls the first of them, for each choice; empty where it is 0 for all.
        sent_as: the dtype in which the environment gets them.
        sent_shape: the shape in which the environment gets them; None: one axis.

    Example:
        >>> MultiDiscreteActions((3, 2)).shape, MultiDiscreteActions((3, 2)).dtype
        ((2,), torch.int64)
        >>> MultiDiscreteActions((3, 2), start=(-1, 5)).sent(torch.tensor([[0, 0], [2, 1]]))
        tensor([[-1,  5],
                [ 1,  6]])
        >>> MultiDiscreteActions((2,) * 4, sent_as="int8", sent_shape=(2, 2)).sent(torch.tensor([1, 0, 0, 1]))
        tensor([[1, 0],
                [0, 1]], dtype=torch.int8)
    """

    dtype: ClassVar[torch.dtype] = torch.int64
    nvec: tuple[int, ...]
    start: tuple[int, ...] = field(default=(), compare=False)
    sent_as: str = field(default="int64", compare=False)
    sent_shape: tuple[int, ...] | None = field(default=None, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.nvec),)

    def space(self) -> Space[Any]:
        """The space of what players choose, as gymnasium has it."""
        return MultiDiscrete([*self.nvec])

    def sent(self, action: Tensor) -> Tensor:
        """The members of the environment's space that a player's actions stand for.

        Args:
            action: indices, ``[..., n]``.
        """
        numbers = action
        if any(self.start):
            numbers = action + action.new_tensor(self.start)
        numbers = numbers.to(getattr(torch, self.sent_as))
        if self.sent_shape is None:
            return numbers
        return numbers.reshape(*action.shape[:-1], *self.sent_shape)

    def translation(self) -> Translation:
        """What does the same as :meth:`sent` to arrays, a hundred thousand times a second."""
        dtype = np.dtype(self.sent_as)
        start = np.array(self.start or (0,), np.int64)
        shape = self.sent_shape or self.shape

        def numbers(action: NDArray[Any]) -> NDArray[Any]:
            return (action + start).astype(dtype, copy=False).reshape(*action.shape[:-1], *shape)

        return numbers

    def chosen(self, sent: Tensor) -> Tensor:
        """The indices that :meth:`sent` makes these of.

        Args:
            sent: members of the environment's space, ``[..., *sent_shape]``.
        """
        indices = sent.to(torch.int64)
        if self.sent_shape is not None:
            rows = sent.shape[: sent.ndim - len(self.sent_shape)]
            indices = indices.reshape(*rows, *self.shape)
        if any(self.start):
            indices = indices - indices.new_tensor(self.start)
        return indices

    @property
    def choices(self) -> tuple[int, ...]:
        """How many there are to choose from, for each choice of an action."""
        return self.nvec

    def drawn(
        self,
        count: int,
        generator: Generator,
        device: torch.device,
        allowed: Tensor | None = None,
    ) -> Tensor:
        """Indices ``[count, n]``, all equally likely.

        Args:
            count: how many actions are drawn.
            generator: of random numbers, on the device.
            device: where the indices are.
            allowed: ``[count, sum(nvec)]`` bool, which may be drawn; None: all.
        """
        if allowed is not None:
            each = allowed.split(list(self.nvec), -1)
            return torch.stack([_drawn_of(of_one, generator) for of_one in each], -1)
        # No number of choices comes near to 2^62, so what is left of the division has no bias to speak of.
        numbers = torch.randint(1 << 62, (count, *self.shape), generator=generator, device=device)
        return numbers % torch.tensor(self.nvec, device=device)


@dataclass(frozen=True, slots=True)
class BoxActions:
    """A player chooses a float32 vector. The environment gets what is nearest to it within the bounds.

    Args:
        size: the numbers in one action.
        low, high: the bounds of each number; empty where there are none. They are not compared.
        sent_as: the dtype in which the environment gets them.

    Example:
        >>> BoxActions(2, (-1.0, -1.0), (1.0, 1.0)).shape, BoxActions(1) == BoxActions(1, (-2.0,), (2.0,))
        ((2,), True)
        >>> BoxActions(1, (-1.0,), (1.0,), "float64").sent(torch.tensor([3.0]))
        tensor([1.], dtype=torch.float64)
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    choices: ClassVar[tuple[int, ...]] = ()
    size: int
    low: tuple[float, ...] = field(default=(), compare=False)
    high: tuple[float, ...] = field(default=(), compare=False)
    sent_as: str = field(default="float32", compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    def space(self) -> Space[Any]:
        """The space of what players choose, as gymnasium has it."""
        if self.low:
            return Box(np.array(self.low, np.float32), np.array(self.high, np.float32))
        return Box(-np.inf, np.inf, self.shape)

    def sent(self, action: Tensor) -> Tensor:
        """The members of the environment's space that are nearest to a player's actions.

        Args:
            action: ``[..., size]``.
        """
        numbers = action.to(getattr(torch, self.sent_as))
        if not self.low:
            return numbers
        # In the dtype of the environment: a bound of float64 may lie between two numbers of float32.
        return numbers.clamp(numbers.new_tensor(self.low), numbers.new_tensor(self.high))

    def translation(self) -> Translation:
        """What does the same as :meth:`sent` to arrays, a hundred thousand times a second."""
        dtype = np.dtype(self.sent_as)
        if not self.low:
            return lambda action: action.astype(dtype, copy=False)
        low = np.array(self.low, dtype)
        high = np.array(self.high, dtype)

        def within(action: NDArray[Any]) -> NDArray[Any]:
            raised: NDArray[Any] = np.maximum(action.astype(dtype, copy=False), low)
            return np.minimum(raised, high, out=raised)

        return within

    def chosen(self, sent: Tensor) -> Tensor:
        """What a player may have chosen to send these.

        Args:
            sent: members of the environment's space, ``[..., size]``.
        """
        return sent.to(torch.float32)


ActionSpec = DiscreteActions | MultiDiscreteActions | BoxActions


def actions_of(space: Space[Any], name: str) -> ActionSpec:
    """The actions of a gymnasium space; a ConfigError if players have none like these.

    Args:
        space: of the actions of one environment.
        name: the environment's, for errors.
    """
    match space:
        case Discrete():
            return DiscreteActions(int(space.n), int(space.start), space.dtype.name)
        case MultiDiscrete():
            nvec = tuple(map(int, space.nvec.flat))
            start = tuple(map(int, space.start.flat))
            return MultiDiscreteActions(nvec, start, space.dtype.name, several_axes(space.shape))
        case MultiBinary():
            nvec = (2,) * math.prod(space.shape)
            return MultiDiscreteActions(nvec, (), space.dtype.name, several_axes(space.shape))
        case Box(shape=(size,)) if space.dtype.name in _FLOATS:
            low = tuple(map(float, space.low))
            high = tuple(map(float, space.high))
            return BoxActions(int(size), low, high, space.dtype.name)
        case Box() if space.dtype.kind in "iub":
            problem = f"{name!r} takes actions of {space}: they are whole numbers, and players choose fractions"
            cure = "wrap it (gymnasium.wrappers.TransformAction): take floats and round them, or one of n"
            raise ConfigError(problem, "environment", cure)
    raise unusable_actions(space, repr(name))


def _drawn_of(allowed: Tensor, generator: Generator) -> Tensor:
    """An index ``[N]`` of each row ``[N, n]`` of what is allowed, all equally likely."""
    ranks = torch.rand(allowed.shape, generator=generator, device=allowed.device)
    return (ranks + 1).mul(allowed).argmax(-1)


def several_axes(shape: Iterable[int]) -> tuple[int, ...] | None:
    """A shape, or None if it has one axis: ``sent_shape`` of :class:`MultiDiscreteActions`."""
    sizes = tuple(map(int, shape))
    if len(sizes) == 1:
        return None
    return sizes


def unusable_actions(space: object, name: str) -> ConfigError:
    """The error of actions that players do not have, with the wrapper that helps."""
    match space:
        case Dict() | Tuple():
            cure = "wrap it so that an action is one vector or one of n: gymnasium.wrappers.TransformAction in "
            cure += "a wrapper of yours, which sends gymnasium.spaces.unflatten(space, vector); see env.wrappers"
        case Text() | Sequence() | Graph() | OneOf():
            cure = "wrap it so that an action is one of n members that you list (Discrete(n)): "
            cure += (
                "gymnasium.wrappers.TransformAction in a wrapper of yours; env.wrappers names it"
            )
        case _:
            cure = "wrap it so that an action is one of n, several choices, or a vector of numbers"
    return ConfigError(f"{name} takes actions of {space}", "environment", cure)

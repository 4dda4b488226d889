"""What an action of an environment's space is to a player, and back: the one place that decides it."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from torch import Tensor

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


ActionSpec = DiscreteActions | BoxActions


def actions_of(space: Space[Any], name: str) -> ActionSpec:
    """The actions of a gymnasium space; a ConfigError if players have none like these.

    Args:
        space: of the actions of one environment.
        name: the environment's, for errors.
    """
    match space:
        case Discrete():
            return DiscreteActions(int(space.n), int(space.start), space.dtype.name)
        case Box(shape=(size,)) if space.dtype.name in _FLOATS:
            low = tuple(map(float, space.low))
            high = tuple(map(float, space.high))
            return BoxActions(int(size), low, high, space.dtype.name)
        case Box() if space.dtype.kind in "iub":
            problem = f"{name!r} takes actions of {space}: they are whole numbers, and players choose fractions"
            cure = "wrap it (gymnasium.wrappers.TransformAction): take floats and round them, or one of n"
            raise ConfigError(problem, "environment", cure)
    raise unusable_actions(space, repr(name))


def choices_of(space: Space[Any]) -> tuple[int, ...]:
    """How many choices there are for each number of an action; empty if actions are no choices.

    Args:
        space: of the actions of one environment.

    Example:
        >>> choices_of(Discrete(4)), choices_of(MultiBinary(2)), choices_of(Box(-1, 1, (3,)))
        ((4,), (2, 2), ())
    """
    match space:
        case Discrete():
            return (int(space.n),)
        case MultiDiscrete():
            return tuple(space.nvec.reshape(-1).tolist())
        case MultiBinary():
            return (2,) * math.prod(space.shape)
    return ()


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
            cure = "wrap it so that an action is one of n, or a vector of numbers"
    return ConfigError(f"{name} takes actions of {space}", "environment", cure)

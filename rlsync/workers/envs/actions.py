"""What kind of actions an environment takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from gymnasium.spaces import Box, Discrete, Space

from rlsync.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DiscreteActions:
    """An action is an int64 index, 0 to ``n - 1``.

    Example:
        >>> DiscreteActions(3).shape, DiscreteActions(3).dtype
        ((), torch.int64)
    """

    shape: ClassVar[tuple[int, ...]] = ()
    dtype: ClassVar[torch.dtype] = torch.int64
    n: int  #: how many actions there are to choose from


@dataclass(frozen=True, slots=True)
class BoxActions:
    """An action is a float32 vector. Bounds are not compared: environments clip what lies outside of theirs.

    Args:
        size: the numbers in one action.
        low, high: the bounds of each number; empty where there are none.

    Example:
        >>> BoxActions(2, (-1.0, -1.0), (1.0, 1.0)).shape, BoxActions(1) == BoxActions(1, (-2.0,), (2.0,))
        ((2,), True)
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    size: int
    low: tuple[float, ...] = field(default=(), compare=False)
    high: tuple[float, ...] = field(default=(), compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)


ActionSpec = DiscreteActions | BoxActions


def actions_of(space: Space[Any], name: str) -> ActionSpec:
    """The actions of a gymnasium space; ``name`` is the environment's in errors."""
    match space:
        case Discrete():
            return DiscreteActions(int(space.n))
        case Box(shape=(size,)):
            low, high = (tuple(map(float, bound)) for bound in (space.low, space.high))
            return BoxActions(int(size), low, high)
    raise unusable_actions(space, repr(name))


def unusable_actions(space: object, name: str) -> ConfigError:
    what = f"{name} takes actions of {space}"
    return ConfigError(what, "environment", "wrap it so that an action is one of n, or a vector of numbers")

"""What an observation of an environment's space is to a player: the one place that decides it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from numpy.typing import NDArray
from torch import Tensor

from rlsync import ConfigError


@dataclass(frozen=True, slots=True)
class Observations:
    """What players see of an environment's arrays.

    Numbers are float32, as they are, whatever their dtype in the environment. Bytes of pictures stay uint8,
    with the channels of a picture first.

    Example:
        >>> observations_of(Box(0, 255, (96, 80, 3), np.uint8), "mine").shape
        (3, 96, 80)
        >>> observations_of(Box(0, 255, (128,), np.uint8), "mine").dtype
        torch.float32
    """

    shape: tuple[int, ...]  #: of one of them
    dtype: torch.dtype = torch.float32
    channels_last: bool = False  #: whether the environment gives them so
    #: why they are neither vectors nor pictures; empty: they are one of these
    why_neither: str = ""

    @property
    def are_pictures(self) -> bool:
        """Whether they are bytes ``[channels, height, width]``."""
        return len(self.shape) == 3 and not self.why_neither

    def seen(self, array: NDArray[Any]) -> Tensor:
        """What players see of the environment's arrays, ``[..., *shape]``.

        Args:
            array: ``[..., *obs]``; what is returned may share its memory.
        """
        tensor = torch.as_tensor(array, device="cpu").to(self.dtype)
        if self.channels_last:
            return tensor.movedim(-1, -3)
        return tensor

    def space(self, of: Any) -> Space[Any]:
        """The space of what players see.

        Args:
            of: the environment's, a Box.
        """
        low = self.seen(of.low).numpy()
        high = self.seen(of.high).numpy()
        return Box(low, high, dtype=low.dtype.type)


def are_choices(space: Space[Any]) -> bool:
    """Whether observations are one or several of a number of choices, in a tuple or not.

    Players see them as a vector of zeros and ones, in the order of :func:`gymnasium.spaces.flatten`.

    Args:
        space: of the observations of one environment.

    Example:
        >>> are_choices(Tuple((Discrete(3), Discrete(2)))), are_choices(Box(0, 1, (3,)))
        (True, False)
    """
    if isinstance(space, Tuple):
        return all(map(are_choices, space.spaces))
    return isinstance(space, Discrete | MultiDiscrete | MultiBinary)


def observations_of(space: Space[Any], name: str) -> Observations:
    """The observations of a gymnasium space; a ConfigError if they are no arrays.

    Args:
        space: of the observations of one environment.
        name: the environment's, for errors.
    """
    if not isinstance(space, Box):
        cure = "wrap it so that they are arrays (gymnasium.wrappers.FlattenObservation)"
        raise ConfigError(f"{name!r} gives observations of {space}", "environment", cure)
    shape = space.shape
    if len(shape) == 1:
        return Observations(shape)
    if len(shape) < 3:
        return Observations(shape, why_neither="a vector has one axis, and a picture three")
    if space.dtype != np.uint8:
        return Observations(shape, why_neither=f"pixels are uint8, and these numbers {space.dtype}")
    low = space.low.min()
    high = space.high.max()
    if (low, high) != (0, 255):
        why = f"pixels go from 0 to 255, and these numbers from {low} to {high}"
        return Observations(shape, why_neither=why)
    if len(shape) > 3:
        return Observations(shape, torch.uint8, why_neither="a picture has three axes")
    first, middle, last = shape
    if first < min(middle, last):
        return Observations(shape, torch.uint8)
    if last < min(first, middle):
        return Observations((last, first, middle), torch.uint8, channels_last=True)
    why = "a picture has fewer channels, first or last, than rows and columns"
    return Observations(shape, torch.uint8, why_neither=why)


def require_vector_or_picture(observations: Observations, name: str) -> None:
    """Raise ConfigError for observations that no network of a recipe takes."""
    if observations.why_neither:
        shape = [*observations.shape]
        problem = f"{name!r} gives observations of shape {shape}, neither vectors nor pictures: "
        cure = "gymnasium.wrappers.FlattenObservation makes vectors of the same numbers"
        raise ConfigError(problem + observations.why_neither, "env.id", cure)

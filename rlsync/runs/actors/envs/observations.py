"""What an observation of an environment's space is to a player: the one place that decides it.

An observation is one row of memory, whatever its space is, so that rings, replays and checkpoints have one array
of it. A row holds the **parts** of the space, the boxes and choices that it is made of, as networks see them:

============ ======================= ==================================================================
kind         shape                   what
============ ======================= ==================================================================
``numbers``  [n] float32             a box; a choice of n, or several, as zeros and ones
``mask``     [n] float32             1 for each choice that an action may be, 0 for each that it may not
``picture``  [C, H, W] uint8         a box of bytes from 0 to 255, channels first
============ ======================= ==================================================================

A row is a float32 vector, the numbers before the mask. A picture alone is itself. Pictures and other parts lie in
one row of bytes, the pictures last. :meth:`Observations.split` gives the parts of rows, as views of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Tuple,
)
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from rlsync import ConfigError

WHOLE = "observation"  #: the name of the only part of a space that is a box or a choice
MASK = "action_mask"  #: the key of a mask, in a space and in an info

Kind = Literal["numbers", "mask", "picture"]

_BYTES = 4  #: of a float32: where rows are bytes, they are a multiple of it
#: A box of bytes with two axes is a grey picture from so many rows and columns on; smaller ones are boards.
_LEAST_GREY = 32
NUMBERS = "fiub"  #: kinds of numpy's dtypes: floats, whole numbers, bools


class OutsideSpace(ValueError):
    """What is wrong with a part of an answer, in words."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box or a choice of the space, as players see it.

    Example:
        >>> part = part_of(("speed",), Discrete(3, start=1))
        >>> part.shape, part.row(np.array(2), ()).tolist()
        ((3,), [0.0, 1.0, 0.0])
    """

    path: tuple[str | int, ...]  #: its keys in the space; () where the space is this part alone
    kind: Kind
    shape: tuple[int, ...]  #: of what players see
    space: Space[Any] = field(compare=False, repr=False)  #: as the environment has it
    channels_last: bool = False  #: whether the environment gives a picture so
    choices: tuple[int, ...] = ()  #: how many there are for each number of an action, of a mask

    @property
    def name(self) -> str:
        """Its keys, with dots between them."""
        if self.is_in_info:
            return MASK
        return ".".join(map(str, self.path)) or WHOLE

    @property
    def is_in_info(self) -> bool:
        """Whether it is a mask that the info has, and the observation does not."""
        return self.kind == "mask" and not self.path

    @property
    def size(self) -> int:
        """The numbers or bytes in it."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.kind == "picture" else torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in a row of bytes."""
        return self.size if self.kind == "picture" else _BYTES * self.size

    @property
    def is_flattened(self) -> bool:
        """Whether it has several axes in the environment, and one in a row."""
        return isinstance(self.space, Box) and self.kind != "picture" and len(self.space.shape) != 1

    def row(self, answer: Any, lead: tuple[int, ...]) -> NDArray[Any]:
        """What players see of answers, ``[*lead, *shape]``.

        Args:
            answer: ``[*lead, *of the space]``.
            lead: how many environments there are, or ().

        Raises:
            OutsideSpace: the space promises something else.
        """
        array = _array(answer)
        wanted = (*lead, *(self.space.shape or ()))
        if array.dtype.kind not in NUMBERS or array.shape != wanted:
            raise OutsideSpace(f"{list(array.shape)} of {array.dtype}")
        match self.space:
            case Discrete(n=n, start=start):
                return _one_hot(array, start, np.array([n]), lead)
            case MultiDiscrete(nvec=nvec, start=start):
                return _one_hot(array, start, nvec, lead)
            case MultiBinary() if not np.isin(array, (0, 1)).all():
                raise OutsideSpace(f"numbers from {array.min()} to {array.max()}")
        try:
            array = as_promised(array, np.dtype(self.space.dtype))
        except OutsideSpace as error:
            raise OutsideSpace(f"{list(array.shape)} of {array.dtype}{error}") from None
        if self.kind == "picture":
            if self.channels_last:
                return np.moveaxis(array, -1, -3)
            return array.reshape(*lead, *self.shape)
        return array.astype(np.float32).reshape(*lead, self.size)


def as_promised(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A copy in the dtype of its space: floats are rounded, whole numbers become floats.

    OutsideSpace, with the values in words: it promises whole numbers, and cannot hold these, or they are
    floats.
    """
    cast = array.astype(dtype)
    if array.dtype == dtype or dtype.kind == "f":
        return cast
    if array.dtype.kind == "f":
        raise OutsideSpace("")
    if not np.array_equal(cast, array):
        raise OutsideSpace(f", with values from {array.min()} to {array.max()}")
    return cast


def _array(answer: Any) -> NDArray[Any]:
    try:
        return np.asarray(answer)
    except (TypeError, ValueError) as error:  # lists of different lengths; a tensor elsewhere
        raise OutsideSpace(type(answer).__name__) from error


def _one_hot(
    array: NDArray[Any], start: Any, counts: NDArray[Any], lead: tuple[int, ...]
) -> NDArray[np.float32]:
    """Choices as zeros and ones, ``[*lead, counts.sum()]``."""
    index = (array - start).reshape(*lead, -1)
    counts = counts.reshape(-1)
    if array.dtype.kind == "f" or (index < 0).any() or (index >= counts).any():
        raise OutsideSpace(f"numbers from {array.min()} to {array.max()}, of {array.dtype}")
    firsts = np.cumsum(counts) - counts
    row = np.zeros((*lead, int(counts.sum())), np.float32)
    np.put_along_axis(row, index.astype(np.int64) + firsts, 1.0, -1)
    return row


@dataclass(frozen=True)
class Observations:
    """What players see of an environment: rows of ``shape`` and ``dtype``, made of ``parts``.

    Args:
        parts: numbers first, then a mask, then pictures.
        nested: whether the environment answers with something else than the array of the one part.

    Example:
        >>> space = Dict(speed=Box(-1, 1, (2,)), camera=Box(0, 255, (8, 8, 3), np.uint8))
        >>> observations = observations_of(space, "mine")
        >>> observations.shape, observations.dtype
        ((200,), torch.uint8)
        >>> rows = torch.zeros(5, 200, dtype=torch.uint8)
        >>> {name: [*part.shape] for name, part in observations.split(rows).items()}
        {'speed': [5, 2], 'camera': [5, 3, 8, 8]}
    """

    parts: tuple[Part, ...]
    nested: bool = False
    # What follows from the parts, once: networks that are compiled read it at every call.
    shape: tuple[int, ...] = field(init=False, compare=False)  #: of a row
    dtype: torch.dtype = field(init=False, compare=False)  #: of a row
    pictures: tuple[Part, ...] = field(init=False, compare=False)
    #: whether a row is a picture, ``[channels, height, width]``, and nothing else
    are_pictures: bool = field(init=False, compare=False)
    features: int = field(init=False, compare=False)  #: the numbers in a row, but for a mask
    #: the part that says which actions there are
    mask: Part | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        pictures = tuple(part for part in self.parts if part.kind == "picture")
        alone = len(self.parts) == len(pictures) == 1
        shape: tuple[int, ...] = (sum(part.size for part in self.parts),)
        if alone:
            shape = pictures[0].shape
        elif pictures:
            used = sum(part.nbytes for part in self.parts)
            shape = (-(-used // _BYTES) * _BYTES,)
        derived = {
            "shape": shape,
            "dtype": torch.uint8 if pictures else torch.float32,
            "pictures": pictures,
            "are_pictures": alone,
            "features": sum(part.size for part in self.parts if part.kind == "numbers"),
            "mask": next((part for part in self.parts if part.kind == "mask"), None),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def split(self, rows: Tensor | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The parts of rows by name, ``[..., *part]``: views where memory allows it.

        Args:
            rows: ``[..., *shape]``; or their parts by name, which stay as they are.
        """
        if not isinstance(rows, Tensor):
            return rows
        if self.are_pictures:
            return {self.parts[0].name: rows}
        views = {}
        at = 0
        for part in self.parts:
            size = part.size if rows.dtype != torch.uint8 else part.nbytes
            view = rows[..., at : at + size]
            if rows.dtype == torch.uint8 and part.kind != "picture":
                view = view.view(torch.float32)
            elif part.kind == "picture":
                view = view.unflatten(-1, part.shape)
            views[part.name] = view
            at += size
        return views

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Rows of these parts, ``[..., *shape]``: what :meth:`split` takes apart.

        Args:
            parts: ``[..., *part]`` by name, all of them, in the dtypes that players see.
        """
        if len(self.parts) == 1:
            return parts[self.parts[0].name]
        flat = []
        for part in self.parts:
            tensor = parts[part.name]
            tensor = tensor.flatten(tensor.ndim - len(part.shape))
            if self.dtype is torch.uint8:
                tensor = tensor.contiguous().view(torch.uint8)
            flat.append(tensor)
        rows = torch.cat(flat, -1)
        return functional.pad(rows, (0, math.prod(self.shape) - rows.shape[-1]))

    def numbers(self, rows: Tensor | Mapping[str, Tensor]) -> Tensor:
        """The numbers of rows, ``[..., features]``: of rows a view of them, where memory allows it.

        Args:
            rows: ``[..., *shape]``; or their parts by name, which have some numbers.
        """
        if not isinstance(rows, Tensor):
            names = [part.name for part in self.parts if part.kind == "numbers"]
            return torch.cat([rows[name] for name in names], -1)
        if self.are_pictures:
            return rows.new_zeros((*rows.shape[:-3], 0), dtype=torch.float32)
        if rows.dtype == torch.uint8:
            return rows[..., : _BYTES * self.features].view(torch.float32)
        return rows[..., : self.features]

    def allowed(self, rows: Tensor | Mapping[str, Tensor]) -> Tensor | None:
        """Which choices an action may be, ``[..., n]`` bool; None where there is no mask.

        Args:
            rows: ``[..., *shape]``, or their parts by name.
        """
        if self.mask is None:
            return None
        return self.split(rows)[self.mask.name] > 0

    def seen(self, answer: Any) -> Tensor:
        """What players see of the answers of environments, ``[..., *shape]``.

        Args:
            answer: ``[..., *of the space]``; rows, if they are nested. What is returned may share its memory.
        """
        tensor = torch.as_tensor(answer, device="cpu").to(self.dtype)
        if self.nested:
            return tensor
        (part,) = self.parts
        if part.channels_last:
            return tensor.movedim(-1, -3)
        axes = len(part.space.shape or ())
        if axes == len(part.shape):
            return tensor
        return tensor.reshape(*tensor.shape[: tensor.ndim - axes], *part.shape)

    def lead_of(self, answer: Any) -> tuple[int, ...]:
        """``(N,)`` of the answers of N environments, () of that of one.

        Args:
            answer: by the keys of the space.

        Raises:
            OutsideSpace: the first part is missing.
        """
        part = self.parts[0]
        with _naming(part):
            array = _array(_at(answer, part.path))
        return array.shape[: array.ndim - len(part.space.shape or ())]

    def row(self, answer: Any, lead: tuple[int, ...] = (), mask: Any = None) -> NDArray[Any]:
        """The rows of answers that are nested, ``[*lead, *shape]``.

        Args:
            answer: what the environments answer, by the keys of the space.
            lead: how many environments there are, or ().
            mask: of actions, where the info has it.

        Raises:
            OutsideSpace: the space promises something else; it names the part.
        """
        rows = []
        for part in self.parts:
            source = mask if part.is_in_info else answer
            with _naming(part):
                rows.append(part.row(_at(source, part.path), lead))
        if self.are_pictures:
            return rows[0]
        if self.dtype is torch.float32:
            return np.concatenate(rows, -1)
        row = np.zeros((*lead, *self.shape), np.uint8)
        at = 0
        for part, array in zip(self.parts, rows, strict=True):
            flat = np.ascontiguousarray(array).view(np.uint8).reshape(*lead, -1)
            row[..., at : at + part.nbytes] = flat
            at += part.nbytes
        return row


class Rows(Box):
    """The space of rows: a Box that knows what they are made of."""

    def __init__(self, observations: Observations) -> None:
        if observations.dtype is torch.uint8:
            super().__init__(0, 255, observations.shape, np.uint8)
        else:
            super().__init__(-np.inf, np.inf, observations.shape, np.float32)
        #: what answers are rows already
        self.observations = replace(observations, nested=True)

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and getattr(other, "observations", None) == self.observations

    __hash__ = None  # type: ignore[assignment]


def observations_of(
    space: Space[Any],
    name: str,
    *,
    pictures: bool = True,
    choices: tuple[int, ...] = (),
    mask_in_info: bool = False,
) -> Observations:
    """The observations of a gymnasium space.

    Args:
        space: of the observations of one environment.
        name: the environment's, for errors.
        pictures: whether bytes in the form of a picture are one; otherwise they are numbers.
        choices: how many there are for each number of an action. The part ``action_mask`` then is a mask;
            otherwise it is numbers.
        mask_in_info: whether the info has a mask.

    Raises:
        ConfigError: a part of it can be no array, or the mask has another length than there are choices.
    """
    if isinstance(space, Rows):
        return space.observations
    parts = []
    if mask_in_info and isinstance(space, Dict) and MASK in space.spaces:
        problem = f"{name!r} has a mask in its observations, and one in its info is asked for"
        raise ConfigError(problem, "env.action_mask=info", "give env.action_mask=observation")
    for path, leaf in leaves(space):
        if choices and path == (MASK,):
            parts.append(_mask(path, leaf, name, choices))
        else:
            parts.append(part_of(path, leaf, name, pictures=pictures))
    if mask_in_info:
        parts.append(_mask((), MultiBinary(sum(choices)), name, choices))
    order: list[Kind] = ["numbers", "mask", "picture"]
    parts.sort(key=lambda part: order.index(part.kind))
    nested = len(parts) > 1 or not isinstance(space, Box)
    return Observations(tuple(parts), nested)


def like(shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Observations:
    """The observations that are rows of one part: a vector, or a picture ``[C, H, W]``.

    Args:
        shape: of a row.
        dtype: of a row; None: bytes where there are three axes, and otherwise numbers.

    Example:
        >>> like((4,)).features, like((3, 64, 64)).dtype
        (4, torch.uint8)
    """
    if len(shape) == 3 and dtype in (None, torch.uint8):
        return Observations((Part((), "picture", shape, Box(0, 255, shape, np.uint8)),))
    return Observations((Part((), "numbers", shape, Box(-np.inf, np.inf, shape)),))


def part_of(
    path: tuple[str | int, ...],
    space: Space[Any],
    of: str = "",
    *,
    pictures: bool = True,
) -> Part:
    """What players see of a box or of choices.

    Args:
        path: its keys.
        space: the box or choices, without further parts.
        of: the environment's name, for errors.
        pictures: whether bytes in the form of a picture are one.

    Raises:
        ConfigError: it can be no array.
    """
    match space:
        case Box(shape=shape) if pictures and (picture := _picture(space)) is not None:
            turned = len(shape) == len(picture) and shape != picture
            return Part(path, "picture", picture, space, channels_last=turned)
        case Box() | MultiBinary():
            size = math.prod(space.shape or ())
        case Discrete(n=n):
            size = int(n)
        case MultiDiscrete(nvec=nvec):
            size = int(nvec.sum())
        case _:
            name = ".".join(map(str, path)) or WHOLE
            problem = f"{of!r} gives observations of {space}, as {name!r}: no array of numbers"
            cure = "wrap it so that they are arrays (gymnasium.wrappers.TransformObservation)"
            raise ConfigError(problem, "environment", cure)
    return Part(path, "numbers", (size,), space)


def _mask(
    path: tuple[str | int, ...], space: Space[Any], name: str, choices: tuple[int, ...]
) -> Part:
    size = math.prod(space.shape or ())
    if size != sum(choices):
        problem = f"{name!r} has a mask of {size} entries for {sum(choices)} choices"
        cure = "let it have one for each choice, those of each number of an action behind those of the one before"
        raise ConfigError(problem, f"its observation space, {MASK!r}", cure)
    return Part(path, "mask", (size,), space, choices=choices)


def _picture(space: Box) -> tuple[int, int, int] | None:
    """The shape of a picture, with its channels first; None: the box is none."""
    shape = space.shape
    if len(shape) not in (2, 3) or space.dtype != np.uint8:
        return None
    if (space.low.min(), space.high.max()) != (0, 255):
        return None
    if len(shape) == 2:
        return (1, *shape) if min(shape) >= _LEAST_GREY else None
    first, middle, last = shape
    if first < min(middle, last):
        return (first, middle, last)
    if last < min(first, middle):
        return (last, first, middle)
    return None


def leaves(
    space: Space[Any], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Space[Any]]]:
    """The spaces that a space is made of, by their keys: boxes, choices, and what can be no array."""
    match space:
        case Dict(spaces=spaces):
            for key, each in spaces.items():
                yield from leaves(each, (*path, key))
        case Tuple(spaces=several):
            for number, each in enumerate(several):
                yield from leaves(each, (*path, number))
        case _:
            yield path, space


@contextmanager
def _naming(part: Part) -> Iterator[None]:
    """Let an OutsideSpace inside name the part."""
    try:
        yield
    except OutsideSpace as error:
        raise OutsideSpace(f"{part.name!r} is {error}; its space is {part.space}") from None


def _at(answer: Any, path: tuple[str | int, ...]) -> Any:
    """What stands in an answer at these keys."""
    try:
        for key in path:
            answer = answer[key]
    except (KeyError, IndexError, TypeError):
        answer = None
    if answer is None:
        raise OutsideSpace("missing")
    return answer

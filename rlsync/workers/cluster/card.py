"""What an agent says of itself to a learner that may take it over."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from rlsync.core.ledger import Stamp
from rlsync.transport.ring.watch import RingCounters


@dataclass(frozen=True, slots=True)
class Card:
    """An agent at one moment.

    Args:
        node_id: Ray's id of its node.
        seat: its number among the nodes of the learner that started it.
        pid: its process.
        likeness: what it does, as digests by name; see :func:`likeness`.
        stamp: the newest version on its board.
        counters: of its ring.
        ready: whether its workers were ready once, and it has not given up.
        alone: whether its learner is gone.
        first_call: the number of the first call of the next learner.
    """

    node_id: str
    seat: int
    pid: int
    likeness: Mapping[str, str]
    stamp: Stamp
    counters: RingCounters
    ready: bool
    alone: bool
    first_call: int


def likeness(**things: Any) -> dict[str, str]:
    """Digests of things, which are alike in all processes. Values of tensors do not count.

    Args:
        things: by name; each can be pickled.

    Example:
        >>> here = likeness(env=("CartPole-v1", {"a": 1, "b": 2}), steps=20)
        >>> there = likeness(env=("CartPole-v1", {"b": 2, "a": 1}), steps=30)
        >>> [name for name in here if here[name] != there[name]]
        ['steps']
    """
    return {name: hashlib.sha256("\n".join(_words(it)).encode()).hexdigest() for name, it in things.items()}


def _words(thing: Any, within: tuple[int, ...] = ()) -> Iterator[str]:
    """What a thing consists of, line by line."""
    if id(thing) in within:
        yield "itself"
        return
    within = (*within, id(thing))
    match thing:
        case None | bool() | int() | float() | str() | bytes():
            yield repr(thing)
        case type() | FunctionType() | BuiltinFunctionType():
            yield f"{thing.__module__}.{thing.__qualname__}"
        case Tensor():
            yield f"{thing.dtype} {tuple(thing.shape)}"
        case torch.dtype() | torch.device():
            yield str(thing)
        case Mapping():
            yield f"{type(thing).__qualname__} {len(thing)}"
            for key, value in sorted(thing.items(), key=lambda item: str(item[0])):
                yield repr(key)
                yield from _words(value, within)
        case Set():
            yield from sorted("\n".join(_words(it, within)) for it in thing)
        case Sequence():
            yield f"{type(thing).__qualname__} {len(thing)}"
            for it in thing:
                yield from _words(it, within)
        case _:
            made = thing.__reduce_ex__(4)  # what pickle would write
            parts = [made] if isinstance(made, str) else made
            yield from _words([list(it) if isinstance(it, Iterator) else it for it in parts], within)

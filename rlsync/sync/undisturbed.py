"""A block after which random numbers, and what modules hold, are what they were."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlsync.tensors.device import Covered
from rlsync.tensors.digest import digest
from rlsync.tensors.leaves import is_tensordict
from rlsync.tensors.parts import memory_of


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Afterwards random numbers, and buffers and attributes of ``module``, are what they were."""
    numbers = random_states()
    put_back = present_memory(module)
    try:
        yield
    finally:
        put_back()
        set_random_states(numbers)


def present_memory(module: nn.Module) -> Callable[[], None]:
    """What gives buffers and attributes of ``module`` their present content, as often as it is called."""
    restores: list[Callable[[], object]] = []
    known: set[int] = set()
    leaves = Covered(module.parameters())
    for part in module.modules():
        restores += _restores(vars(part), leaves, known)
        restores += _restores(list(part._buffers.values()), leaves, known)

    def put_back() -> None:
        for restore in restores:
            restore()

    return put_back


_GENERATOR = type(torch.default_generator)


def _restores(  # noqa: C901 - a case for each kind
    value: Any, leaves: Covered, known: set[int]
) -> Iterator[Callable[[], object]]:
    """What gives an attribute back the content that it has now, also inside of containers.

    Of a view of the parameters, that is theirs.
    """
    if id(value) in known:
        return
    known.add(id(value))
    inside: list[Any] = []
    match value:
        # containers: their order and number, and what is inside of them
        case dict():
            inside = list(value.values())
            yield partial(_refill, value, dict(value))
        case list() | deque():
            inside = list(value)
            yield partial(_refill_list, value, inside)
        case tuple():
            inside = list(value)
        case set():
            yield partial(_refill, value, set(value))

        # numbers, which are written to in place
        case np.ndarray() if value.flags.writeable:
            yield partial(np.copyto, value, value.copy())
        case _ if isinstance(value, _GENERATOR):
            yield partial(value.set_state, value.get_state())
        case Tensor():
            if value.layout is torch.strided and not isinstance(value, nn.Parameter):
                for part in memory_of(value):
                    if part not in leaves:
                        yield partial(_put_back, part, part.detach().clone())
        case _ if is_tensordict(value):
            inside = list(value.values(True, True))
    for item in inside:
        yield from _restores(item, leaves, known)


def _refill(held: Any, content: Any) -> None:
    held.clear()
    held.update(content)


def _refill_list(held: Any, content: list[Any]) -> None:
    held.clear()
    held.extend(content)


@torch.no_grad()
def _put_back(tensor: Tensor, values: Tensor) -> None:
    if tensor.shape != values.shape or digest([tensor]) != digest([values]):
        tensor.data = values.clone()


def random_states() -> tuple[Any, ...]:
    cuda = None
    if torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def set_random_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state_all(states[1])
    np.random.set_state(states[2])
    random.setstate(states[3])

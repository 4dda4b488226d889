"""Devices and their memory: copies on streams of their own, events that say when they are done, precision.

An accelerator works through its queues (streams) later than the host fills them. So whatever copies weights
from or to one has to say in which order the copies and other work happen, and when the host may read the
result. On a CPU every call is done when it returns, and there is nothing to order.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from rlsync.tensors.parts import address, memory_of

#: Devices whose copies are done when the call returns: torch has no streams for them.
_WITHOUT_STREAMS = frozenset({"cpu", "meta", "mps"})

_READ_ONLY = 8  #: the flag of cudaHostRegister for memory that this process must not write to

_log = logging.getLogger(__name__)
_is_cpu = attrgetter("is_cpu")


def is_queued(device: torch.device) -> bool:
    """Whether a device works off queues, so that a copy may go on after the call that asked for it."""
    return device.type not in _WITHOUT_STREAMS


def all_on_cpu(tensors: Iterable[Tensor]) -> bool:
    """Whether all of ``tensors`` are on the CPU; cheap, for it is asked at every publish and rollout."""
    return all(map(_is_cpu, tensors))


def queued_devices(tensors: Iterable[Tensor]) -> frozenset[torch.device]:
    """The devices with queues that hold some of ``tensors``."""
    return frozenset(t.device for t in tensors if not t.is_cpu and is_queued(t.device))


class Moment:
    """A moment in the queues of some devices: all that was put into their current streams before it."""

    def __init__(self, events: Mapping[torch.device, Any]) -> None:
        self._events = events

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> Moment:
        """The present moment of this thread's current streams on ``devices``."""
        return cls({device: _current(device).record_event() for device in devices})

    def order(self) -> None:
        """Let what this thread queues from now on run after the moment. The host does not wait."""
        for device, event in self._events.items():
            _current(device).wait_event(event)

    def wait(self) -> None:
        """Wait, on the host, until the moment has come."""
        for event in self._events.values():
            event.synchronize()


NOTHING_QUEUED = Moment({})


class Packing:
    """Memory on devices with the places of tensors on the host, so that one copy takes all over the bus."""

    def __init__(self) -> None:
        self._made: dict[torch.device, tuple[object, Tensor, list[Tensor]]] = {}

    def of(
        self, memory: Tensor, host: Sequence[Tensor], device: torch.device
    ) -> tuple[Tensor, list[Tensor]]:
        """As much on the device as the host's ``memory``, flat, and views of it at the places of ``host``.

        It is the same memory at each call.
        """
        first = memory.data_ptr()
        places = [
            (t.data_ptr() - first if t.nbytes else 0, t.nbytes, t.dtype, t.shape) for t in host
        ]
        if device not in self._made or self._made[device][0] != places:
            flat = torch.empty(len(memory), dtype=torch.uint8, device=device)
            views = [flat[at : at + n].view(dtype).view(shape) for at, n, dtype, shape in places]
            self._made[device] = places, flat, views
        return self._made[device][1:]


class Lanes:
    """One stream for copies on each device, beside the streams that compute."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._packing = Packing()

    @torch.no_grad()
    def copy(
        self, into: Sequence[Tensor], tensors: Sequence[Tensor], after: Moment | None = None
    ) -> Moment:
        """Queue copies after ``after``, or now; until the returned moment, leave both sides alone."""
        pairs: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for pair in zip(into, tensors, strict=True):
            device = next(tensor.device for tensor in reversed(pair) if is_queued(tensor.device))
            pairs.setdefault(device, []).append(pair)
        begin = Moment.now(pairs) if after is None else after
        done = {}
        for device, mine in pairs.items():
            module = torch.get_device_module(device)
            if device not in self._streams:
                self._streams[device] = module.Stream(device=device)
            with module.stream(self._streams[device]):
                begin.order()
                to, of = (list(side) for side in zip(*mine, strict=True))
                if len(of) > 1 and all_on_cpu(of) and (memory := shared_memory(of)) is not None:
                    pin(memory, device, read_only=True)
                    packed, of = self._packing.of(memory, of, device)
                    packed.copy_(memory, non_blocking=True)
                torch._foreach_copy_(to, of, non_blocking=True)
                done[device] = self._streams[device].record_event()
        return Moment(done)


def shared_memory(tensors: Iterable[Tensor]) -> Tensor | None:
    """The memory from the first tensor to the last, flat, if they are of one storage."""
    full = [tensor for tensor in tensors if tensor.nbytes]
    if len({tensor.untyped_storage().data_ptr() for tensor in full}) != 1:
        return None
    first = min(t.data_ptr() for t in full)
    end = max(t.data_ptr() + t.nbytes for t in full)
    storage = full[0].untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.set_(storage, first - storage.data_ptr(), (end - first,))  # type: ignore[call-overload]


_mapped: set[int] = set()  #: where memory begins that was mapped, and stays until :func:`unmapped`

#: Whether CUDA took mapped memory that was to be pinned, by process (a child inherits none) and address.
_asked_to_pin: dict[tuple[int, int], bool] = {}


def mapped(address: int) -> None:
    """Say that tensors of a storage that begins there may be pinned."""
    _mapped.add(address)


def pin(memory: Tensor | None, device: torch.device, *, read_only: bool = False) -> bool:
    """Let CUDA access mapped memory by itself until it is unmapped; all its pages are made.

    Returns whether it does; the first refusal is logged.
    """
    if (
        device.type != "cuda"
        or memory is None
        or memory.untyped_storage().data_ptr() not in _mapped
    ):
        return False
    key = os.getpid(), memory.data_ptr()
    if key not in _asked_to_pin:
        error = int(
            torch.cuda.cudart().cudaHostRegister(key[1], len(memory), _READ_ONLY * read_only)
        )
        if error:
            with suppress(RuntimeError):
                torch.ones(1, device=device)  # CUDA keeps the error for the next call that asks
            if all(_asked_to_pin.values()):
                _log.warning(
                    "CUDA pins no shared memory (error %d): copies wait for the host", error
                )
        _asked_to_pin[key] = not error
    return _asked_to_pin[key]


def unmapped(address: int, size_bytes: int) -> None:
    """Take back what was pinned in a mapping, before it ends."""
    _mapped.discard(address)
    for pid, first in list(_asked_to_pin):
        if (
            address <= first < address + size_bytes
            and _asked_to_pin.pop((pid, first))
            and pid == os.getpid()
        ):
            torch.cuda.cudart().cudaHostUnregister(first)


def _current(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)


class Covered:
    """The memory of some tensors: ``tensor in covered`` says whether a tensor overlaps it, as views do."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._ends: dict[torch.device, list[int]] = {}
        spans = [span for tensor in tensors for span in _spans(tensor)]
        for start, end, device in sorted(spans, key=lambda span: span[0]):
            starts = self._starts.setdefault(device, [])
            ends = self._ends.setdefault(device, [])
            if ends and start < ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, tensor: Tensor) -> bool:
        return any(self._covers(*span) for span in _spans(tensor))

    def _covers(self, start: int, end: int, device: torch.device) -> bool:
        if device not in self._starts:
            return False
        at = bisect_right(self._ends[device], start)  # the first span that ends after it begins
        return at < len(self._starts[device]) and self._starts[device][at] < end


def _spans(tensor: Tensor) -> Iterator[tuple[int, int, torch.device]]:
    """Where the memory of a tensor begins and ends, or that of each of its parts."""
    for part in memory_of(tensor):
        if part.is_meta or not part.numel() or not (start := address(part)):
            continue
        last = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
        yield start, start + (last + 1) * part.element_size(), part.device


def return_freed_memory() -> None:
    """Return unused memory to the host now, also what the C library keeps; it takes some ten milliseconds."""
    gc.collect()
    with suppress(AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def bfloat16_instructions() -> list[str] | None:
    """This CPU's bfloat16 instructions, without which convolutions take ten times as long; None: unknown."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    capabilities = torch.cpu.get_capabilities()
    return [name for name in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(name)]

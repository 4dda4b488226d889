"""Devices: copies on streams of their own, events that say when they are done, precision.

An accelerator works through its queues (streams) later than the host fills them. So whatever copies weights
from or to one has to say in which order the copies and other work happen, and when the host may read the
result. On a CPU every call is done when it returns, and there is nothing to order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

#: Devices whose copies are done when the call returns: torch has no streams for them.
_WITHOUT_STREAMS = frozenset({"cpu", "meta", "mps"})

_is_cpu = attrgetter("is_cpu")


def is_queued(device: torch.device) -> bool:
    """Whether a device works off queues, so that a copy may go on after the call that asked for it.

    Example:
        >>> is_queued(torch.device("cpu")), is_queued(torch.device("cuda", 0))
        (False, True)
    """
    return device.type not in _WITHOUT_STREAMS


def all_on_cpu(tensors: Iterable[Tensor]) -> bool:
    """Whether all of ``tensors`` are on the CPU; cheap, for it is asked at every publish and rollout.

    Example:
        >>> all_on_cpu([torch.zeros(2)]), all_on_cpu([torch.zeros(2, device="meta")])
        (True, False)
    """
    return all(map(_is_cpu, tensors))


def queued_devices(tensors: Iterable[Tensor]) -> frozenset[torch.device]:
    """The devices with queues that hold some of ``tensors``."""
    return frozenset(t.device for t in tensors if not t.is_cpu and is_queued(t.device))


class Moment:
    """A moment in the queues of some devices: all that was put into their current streams before it.

    Example:
        >>> moment = Moment.now(queued_devices([torch.zeros(2)]))
        >>> moment.order(); moment.wait()  # nothing to wait for: the tensor is on the CPU
    """

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


class Lanes:
    """One stream for copies on each device, beside the streams that compute."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    @torch.no_grad()
    def copy(self, into: Sequence[Tensor], tensors: Sequence[Tensor], after: Moment | None = None) -> Moment:
        """Queue copies, and return the moment at which all of them are done.

        One side of each pair is on a device with queues; that device copies. Until the returned moment,
        nobody may write to ``tensors``, and nobody may read ``into``. The copies begin after the moment
        ``after``; by default after what the current streams hold now.
        """
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
                torch._foreach_copy_([to for to, _ in mine], [of for _, of in mine], non_blocking=True)
                done[device] = self._streams[device].record_event()
        return Moment(done)


def pinned(size_bytes: int) -> Tensor:
    """Flat ``uint8`` host memory that an accelerator accesses by itself; ordinary where torch cannot pin."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except (NotImplementedError, RuntimeError):  # this backend has no allocator for it, or none is left
        return torch.empty(size_bytes, dtype=torch.uint8)


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype: float32, or a wider one if a tensor has it.

    Example:
        >>> [t.dtype for t in wide(torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1))]
        [torch.float32, torch.float32]
    """
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def bfloat16_instructions() -> list[str] | None:
    """The bfloat16 instructions of this CPU; ``None`` if torch does not tell (before 2.10).

    Without such instructions bfloat16 is emulated, and convolutions are about ten times slower than in
    float32.

    Example:
        >>> set(bfloat16_instructions() or []) <= {"amx_bf16", "avx512_bf16", "bf16"}
        True
    """
    if not hasattr(torch.cpu, "get_capabilities"):
        return None
    capabilities = torch.cpu.get_capabilities()
    return [name for name in ("amx_bf16", "avx512_bf16", "bf16") if capabilities.get(name)]


def _current(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)

"""Accelerators: copies on a stream of their own, and events that say when they are done.

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

    Args:
        events: by device, the event that marks it.

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
        """Queue copies. One side of each pair is on a device with queues; that device copies.

        Until the returned moment, nobody may write to ``tensors``, and nobody may read ``into``.

        Args:
            into: what is written to.
            tensors: what is read, one for each.
            after: the copies begin after this moment; by default after what the current streams hold now.

        Returns:
            The moment at which all of them are done.
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
    """Host memory that an accelerator reads and writes by itself; ordinary memory where torch cannot pin.

    Args:
        size_bytes: its length, as flat ``uint8``.
    """
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except (NotImplementedError, RuntimeError):  # this backend has no allocator for it, or none is left
        return torch.empty(size_bytes, dtype=torch.uint8)


def _current(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device)

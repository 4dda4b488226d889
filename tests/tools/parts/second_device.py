"""A second device without a GPU: tensors in this machine's memory that report another device.

It stands on PyTorch's Python backend for PrivateUse1. That backend (torch 2.13) carries dispatch. It carries
neither memory (its tensors have empty storage), nor streams and events (those of ``torch.Stream`` do
nothing), nor pinned memory. So memory comes from the CPU and is relabelled by DLPack; operations run on the
CPU, over the same bytes; and the device's module brings streams and events of its own, as ``torch.cuda`` and
``torch.xpu`` do.

The device is as late as a device may be: a write, and a copy with ``non_blocking=True``, waits in the queue
of its stream until somebody waits for it. So code that reads too early finds the old bytes, every time.

A process cannot get rid of such a device: use it in programs of their own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

NAME = "second"
_CPU, _EXTENSION = 1, 12  # kDLCPU and kDLExtDev, which torch takes for PrivateUse1


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _relabelled(tensor: Tensor, device_type: int) -> Tensor:
    """The same memory on another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    _DLTensor.from_address(_pointer(capsule, b"dltensor")).device_type = device_type
    return torch._C._from_dlpack(capsule)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor) and value.device.type == NAME:
        return _relabelled(value, _CPU)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _on_second(value: Any) -> Any:
    return _relabelled(value, _EXTENSION) if isinstance(value, Tensor) else value


# ------------------------------------------------------------------------------------ streams

_lock = threading.RLock()
_thread = threading.local()


class Stream:
    """A queue of work. Work begins when somebody waits for it, or for something after it."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._queue: list[Callable[[], object]] = []
        self._begun = 0  # how much was ever taken from the queue

    @property
    def _end(self) -> int:
        return self._begun + len(self._queue)

    def put(self, work: Callable[[], object]) -> None:
        with _lock:
            self._queue.append(work)

    def run_to(self, end: int) -> None:
        with _lock:
            while self._queue and self._begun < end:
                work = self._queue.pop(0)
                self._begun += 1
                work()

    def synchronize(self) -> None:
        self.run_to(self._end)

    def query(self) -> bool:
        return not self._queue

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A place in the queue of a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._stream, self._at = Stream(), 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or _module.current_stream()
        self._at = self._stream._end

    def query(self) -> bool:
        return self._stream._begun >= self._at

    def synchronize(self) -> None:
        self._stream.run_to(self._at)


_default = Stream()


class _Module:
    """What ``torch.cuda`` is for CUDA."""

    Stream, Event = Stream, Event

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Its random numbers are the CPU's."""

    def current_stream(self, device: object = None) -> Stream:
        return _thread.__dict__.get("stream", _default)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, _thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            _thread.stream = before

    def synchronize(self, device: object = None) -> None:
        self.current_stream().synchronize()


_module = _Module()

# --------------------------------------------------------------------------------- operations


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Every operation with a tensor on this device."""
    stream = _module.current_stream()
    if op.is_view:
        return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    on_cpu_args, on_cpu_kwargs = pytree.tree_map(_on_cpu, (args, kwargs))
    if op is torch.ops.aten._copy_from.default:
        return _copy_from(stream, args, *on_cpu_args, **on_cpu_kwargs)
    written = [i for i, a in enumerate(op._schema.arguments) if a.alias_info and a.alias_info.is_write]
    if written == [0] and len(op._schema.returns) == 1:
        stream.put(lambda: op(*on_cpu_args, **on_cpu_kwargs))
        return args[0]
    stream.synchronize()
    fresh = {name for name, out in on_cpu_kwargs.items() if isinstance(out, Tensor) and not out.numel()}
    on_cpu_kwargs |= {name: torch.empty(0, dtype=kwargs[name].dtype) for name in fresh}
    given = [*zip(on_cpu_args, args, strict=True), *((on_cpu_kwargs[name], kwargs[name]) for name in kwargs)]
    result = op(*on_cpu_args, **on_cpu_kwargs)
    for name in fresh:  # an "out" that gets its size now
        kwargs[name].data = _on_second(on_cpu_kwargs[name])
    theirs = {id(mine): tensor for mine, tensor in given if isinstance(tensor, Tensor)}
    return pytree.tree_map(lambda out: theirs[id(out)] if id(out) in theirs else _on_second(out), result)


def _copy_from(
    stream: Stream, args: tuple[Any, ...], source: Tensor, into: Tensor, non_blocking: bool = False
) -> Tensor:
    stream.put(lambda: into.copy_(source))
    with_the_host = not all(given.device.type == NAME for given in args[:2])
    if with_the_host and not non_blocking:
        stream.synchronize()
    result: Tensor = args[1]
    return result


def _clone(tensor: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    copied = _relabelled(torch.empty_like(_relabelled(tensor, _CPU), memory_format=memory_format), _EXTENSION)
    return copied.copy_(tensor)


def _item(tensor: Tensor) -> Any:
    _module.synchronize()
    return _relabelled(tensor, _CPU).item()


_libraries: list[torch.library.Library] = []


def register() -> torch.device:
    """Give this process the second device."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, _module)
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(_run, "PrivateUse1")
        aten = torch.library.Library("aten", "IMPL")
        aten.impl("_local_scalar_dense", _item, "PrivateUse1")
        aten.impl("clone", _clone, "PrivateUse1")
        _libraries.extend((everything, aten))
    return torch.device(NAME, 0)

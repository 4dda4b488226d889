"""Wire: short messages and bytes between two processes of one learner, where every wait has an end."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import Any, cast

import torch
from torch import Tensor

_HEAD = struct.Struct("!I")
_READ_BYTES = 1 << 16


class Wire:
    """JSON messages over a stream socket, which it closes, and raw bytes where both sides expect them.

    A message that does not arrive in time is not lost: a later call returns it. The other end is gone when a
    call raises EOFError, and so is this connection after a TimeoutError of :meth:`send` or
    :meth:`receive_into`.

    Example:
        >>> here, there = map(Wire, socket.socketpair())
        >>> here.send({"say": "skip"}, timeout_s=1.0)
        >>> there.receive(timeout_s=1.0), there.receive(timeout_s=0.0)
        ({'say': 'skip'}, None)
        >>> here.close(); there.close()
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = bytearray()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def has_message(self) -> bool:
        """Whether a whole message was read from the connection, and not returned yet."""
        read = self._read
        return len(read) >= _HEAD.size and len(read) >= _HEAD.size + _HEAD.unpack_from(read)[0]

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send a message. EOFError: the other side is gone. TimeoutError: it reads nothing."""
        text = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(memoryview(_HEAD.pack(len(text)) + text), timeout_s)

    def send_bytes(self, data: memoryview, timeout_s: float) -> None:
        """Send raw bytes; see :meth:`send`."""
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(data)
        except TimeoutError:
            raise
        except OSError as gone:
            raise EOFError(str(gone)) from gone

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message; ``None`` when there is none in time; EOFError when the other side is gone."""
        deadline = time.monotonic() + timeout_s
        while (message := self._whole()) is None:
            if not self._more(max(0.0, deadline - time.monotonic())):
                return None
        return message

    def receive_into(self, data: memoryview, timeout_s: float) -> None:
        """Fill contiguous memory with raw bytes. EOFError, TimeoutError: they did not come."""
        ready = min(len(self._read), len(data))
        data[:ready] = self._read[:ready]
        del self._read[:ready]
        deadline = time.monotonic() + timeout_s
        while ready < len(data):
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            try:
                count = self._connection.recv_into(data[ready:])
            except TimeoutError:
                raise
            except OSError as gone:
                raise EOFError(str(gone)) from gone
            if not count:
                raise EOFError("the connection was closed")
            ready += count

    def close(self) -> None:
        self._connection.close()

    def _whole(self) -> dict[str, Any] | None:
        """A message that is here as a whole."""
        if not self.has_message:
            return None
        end = _HEAD.size + _HEAD.unpack_from(self._read)[0]
        message: dict[str, Any] = json.loads(self._read[_HEAD.size : end])
        del self._read[:end]
        return message

    def _more(self, timeout_s: float) -> bool:
        """Read what is there, after waiting for it; whether anything was."""
        try:
            if not _readable([self._connection.fileno()], timeout_s):
                return False
            data = self._connection.recv(_READ_BYTES)
        except OSError as gone:
            raise EOFError(str(gone)) from gone
        if not data:
            raise EOFError("the connection was closed")
        self._read += data
        return True


def first_ready(wires: list[Wire], timeout_s: float) -> list[Wire]:
    """Those of some wires of which there is something to read, after waiting until there is one."""
    here = [wire for wire in wires if wire.has_message]
    if here:
        return here
    readable = _readable([wire.fileno() for wire in wires], timeout_s)
    return [wire for wire in wires if wire.fileno() in readable]


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes.

    Example:
        >>> bytes(raw(torch.tensor([1, 2], dtype=torch.int8)))
        b'\\x01\\x02'
    """
    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))


def _readable(descriptors: list[int], timeout_s: float) -> set[int]:
    poll = select.poll()  # select() takes no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1e3)}

"""How the ranks of a learner find each other and talk, where every wait has an end.

Each leaves a note in the store of its process group, without waiting. The rank that owns the board reads the
notes of the others, with a deadline, and connects to them. ``torch.distributed`` is used for nothing else: a
rank that is late or dead breaks no process group.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError, LayoutMismatch, PublishError
from rlsync.core.path import parse
from rlsync.tensors.sharded import Block, Sharding, part_of
from rlsync.transport.board.format import process_state
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.rules import Key
from rlsync.transport.shared_file import kind

if TYPE_CHECKING:
    from torch.distributed import Store

_HEAD = struct.Struct("!I")


class Wire:
    """JSON messages over a stream socket, which it closes, and raw bytes where both sides expect them.

    EOFError: the other end is gone. A TimeoutError while it sends, or receives raw bytes, ends this one.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = bytearray()
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Send a message. EOFError: the other side is gone. TimeoutError: it reads nothing."""
        text = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(memoryview(_HEAD.pack(len(text)) + text), timeout_s)

    def send_bytes(self, data: memoryview, timeout_s: float) -> None:
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
        while left := self._left():
            if not _readable([self.fileno()], max(0.0, deadline - time.monotonic())):
                return None
            data = bytearray(left)  # and nothing of what follows: raw bytes are received elsewhere
            self._read += data[: self._received(memoryview(data))]
        message: dict[str, Any] = json.loads(self._read[_HEAD.size :])
        self._read.clear()
        return message

    def receive_into(self, data: memoryview, timeout_s: float) -> None:
        """Fill contiguous memory with raw bytes. EOFError, TimeoutError: they did not come."""
        deadline = time.monotonic() + timeout_s
        while len(data):
            self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
            data = data[self._received(data) :]

    def close(self) -> None:
        self._connection.close()

    def _left(self) -> int:
        """How many bytes are not here of a message's head, or of the whole message once its head is."""
        size = _HEAD.size
        if len(self._read) >= _HEAD.size:
            size += _HEAD.unpack_from(self._read)[0]
        return size - len(self._read)

    def _received(self, data: memoryview) -> int:
        """Read what is there; returns how many bytes were."""
        try:
            count = self._connection.recv_into(data)
        except TimeoutError:
            raise
        except OSError as gone:
            raise EOFError(str(gone)) from gone
        if not count:
            raise EOFError("the connection was closed")
        return count


def first_ready(wires: list[Wire], timeout_s: float) -> list[Wire]:
    """Those of some wires of which there is something to read, after waiting until there is one."""
    readable = _readable([wire.fileno() for wire in wires], timeout_s)
    return [wire for wire in wires if wire.fileno() in readable]


def raw(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, as bytes."""
    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))


def _readable(descriptors: list[int], timeout_s: float) -> set[int]:
    poll = select.poll()  # select() takes no descriptor above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(timeout_s * 1e3)}


TIMEOUT_S = 60.0  #: how long ranks wait for each other, unless they say otherwise
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class RankNote:
    """What a rank tells the owner of the board; ``leaves`` are its sharded leaves by :func:`full_name`."""

    rank: int
    pid: int
    host: str  #: as its kind of shared file calls it
    address: tuple[str, int]
    token: str  #: what the owner must say first
    timeout_s: float  #: how long it waits for the owner, and the owner for it
    leaves: dict[str, Sharding]

    @classmethod
    def from_json(cls, text: str | bytes) -> RankNote:
        fields = json.loads(text)
        fields["address"] = tuple(fields["address"])
        for name, sharding in fields["leaves"].items():
            fields["leaves"][name] = Sharding.from_json(sharding)
        return cls(**fields)


def process_group() -> object:
    """The default process group, by which one learner is told from the next; ConfigError if there is none."""
    from torch import distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        problem = "this process is no rank: torch.distributed has no process group"
        cure = (
            "start the learner with torchrun, and call torch.distributed.init_process_group first"
        )
        raise ConfigError(problem, "weights that are sharded over ranks", cure)
    return dist.group.WORLD


def own_rank() -> int:
    process_group()
    from torch import distributed as dist

    return dist.get_rank()


def listen() -> socket.socket:
    """A socket for other ranks, on the address by which this host reaches the group's master."""
    master = os.environ.get("MASTER_ADDR", "")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # A datagram socket sends nothing here.
            probe.connect((master or socket.gethostname(), 9))
            host = probe.getsockname()[0]
    except OSError:
        host = "127.0.0.1"
    return socket.create_server((host, 0))


def leave_note(note: RankNote) -> None:
    store = _store()
    number = store.add(f"rlsync/notes/{note.rank}", 1)
    store.set(_key(note.rank, number), json.dumps(asdict(note)))


def next_meeting() -> int:
    """The number of a meeting that this owner calls: it reads the ranks' notes of that number."""
    return int(_store().add(f"rlsync/meetings/{own_rank()}", 1))


def read_notes(meeting: int, ranks: Iterable[int], timeout_s: float) -> list[RankNote]:
    """The notes that other ranks left for a meeting; a PublishError names all that left none in time."""
    store = _store()
    deadline = time.monotonic() + timeout_s
    missing = sorted(ranks)
    notes: dict[int, RankNote] = {}
    while missing:
        for rank in list(missing):
            if store.check([_key(rank, meeting)]):
                notes[rank] = RankNote.from_json(store.get(_key(rank, meeting)))
                missing.remove(rank)
        if missing and time.monotonic() >= deadline:
            where = f"weights sharded over {len(missing) + len(notes) + 1} ranks, rank {own_rank()} publishes"
            cure = "on every rank that does not publish: shards = rlsync.SendShards({'policy': policy})"
            raise PublishError(
                f"{named(missing)} made no SendShards within {timeout_s:g} s", where, cure
            )
        if missing:
            time.sleep(_LOOK_EVERY_S)
    return [notes[rank] for rank in sorted(notes)]


def named(ranks: list[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 1, 3``."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def _key(rank: int, number: int) -> str:
    return f"rlsync/notes/{rank}/{number}"


def _store() -> Store:
    process_group()
    # torch has no public name for it
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@dataclass
class Other:
    """Another rank, as the owner knows it."""

    note: RankNote
    wire: Wire | None = None  #: before the first message there is none
    #: whether it writes into the board; unknown before it has answered
    in_place: bool | None = None
    gone: str = ""  #: how it was lost

    @property
    def state(self) -> str:
        """``"running"``, ``"stopped"`` or ``"dead"``; empty for a process of another host."""
        if not self.note.host or self.note.host != kind().host():  # empty: hidden from that process
            return ""
        return process_state(self.note.pid) or "dead"

    def send(self, message: dict[str, Any], board: BoardHandle) -> None:
        """Send a message; before the first one, connect, and say where the board is. EOFError: it is gone."""
        timeout_s = self.note.timeout_s
        try:
            if self.wire is None:
                self.wire = Wire(socket.create_connection(self.note.address, timeout_s))
                hello = {"token": self.note.token, "owner": own_rank(), "board": asdict(board)}
                self.wire.send(hello, timeout_s)
            self.wire.send(message, timeout_s)
        except OSError as gone:  # a TimeoutError is one, too
            raise EOFError(str(gone)) from gone

    def receive(self) -> dict[str, Any]:
        """What the rank has said; empty when that is nothing."""
        assert self.wire is not None
        message = self.wire.receive(0.0) or {}
        self.in_place = message.get("in_place", self.in_place)
        return message

    @torch.no_grad()
    def receive_blocks(self, view: Tensor, blocks: Sequence[Block], timeout_s: float) -> None:
        """Read blocks of a leaf that the rank sends; raises what :meth:`Wire.receive_into` does."""
        assert self.wire is not None
        for block in blocks:
            place = part_of(view, block)
            into = place
            if not place.is_contiguous():
                into = torch.empty(place.shape, dtype=place.dtype, device="cpu")
            self.wire.receive_into(raw(into), timeout_s)
            if into is not place:
                place.copy_(into)

    def lose(self, how: str) -> None:
        """Give this rank up for good."""
        self.gone = how
        if self.wire is not None:
            self.wire.close()

    def check_alike(self, name: str, sharding: Sharding) -> None:
        """Refuse a leaf that this rank does not have, or has sharded in another way (LayoutMismatch)."""
        theirs = self.note.leaves.get(name)
        if theirs != sharding:
            rank = self.note.rank
            owner = own_rank()
            where = f"rank {rank}: {theirs or 'no such sharded leaf'}; rank {owner}: {sharding}"
            cure = "build and shard the module alike on all ranks, and give SendShards the map's destinations"
            raise LayoutMismatch(
                f"{name} is not on rank {rank} as it is on rank {owner}", where, cure
            )

    def __str__(self) -> str:
        known = f"pid {self.note.pid}"
        if self.state:
            known += f", {self.state}"
        return f"rank {self.note.rank} ({known})"


def full_name(key: Key) -> str:
    """The name under which all ranks know a leaf: ``("policy", "0.weight")`` is ``policy.0.weight``."""
    return f"{parse(key[0]).leaf_prefix()}.{key[1]}"

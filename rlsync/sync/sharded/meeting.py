"""How the ranks of a learner find each other: each leaves a note in the store of its process group.

A note is left without waiting. The rank that owns the board reads the notes of the others, with a deadline.
``torch.distributed`` is used for nothing else: a rank that is late or dead breaks no process group.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlsync.core.errors import ConfigError, PublishError
from rlsync.tensors.sharded import Sharding
from rlsync.transport.shared_file import this_host

#: How long ranks wait for each other, unless they say otherwise.
TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class RankNote:
    """What a rank tells the owner of the board; ``leaves`` are its sharded leaves by destination and name."""

    rank: int
    pid: int
    host: str  #: as :func:`rlsync.transport.shared_file.this_host` calls it
    address: tuple[str, int]
    token: str  #: what the owner must say first
    timeout_s: float  #: how long it waits for the owner, and the owner for it
    leaves: dict[str, dict[str, Sharding]]

    @classmethod
    def here(
        cls, address: tuple[str, int], timeout_s: float, leaves: dict[str, dict[str, Sharding]]
    ) -> RankNote:
        return cls(own_rank(), os.getpid(), this_host(), address, secrets.token_hex(16), timeout_s, leaves)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankNote:
        told = json.loads(text)
        told["address"] = tuple(told["address"])
        told["leaves"] = {
            destination: {name: Sharding.from_json(how) for name, how in leaves.items()}
            for destination, leaves in told["leaves"].items()
        }
        return cls(**told)


def process_group() -> object:
    """The default process group, by which one learner is told from the next; ConfigError if there is none."""
    from torch import distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "this process is no rank: torch.distributed has no process group",
            "weights that are sharded over ranks",
            "start the learner with torchrun, and call torch.distributed.init_process_group first",
        )
    return dist.group.WORLD


def own_rank() -> int:
    process_group()
    from torch import distributed as dist

    return dist.get_rank()


def listen() -> socket.socket:
    """A socket for other ranks, on the address by which this host reaches the group's master."""
    master = os.environ.get("MASTER_ADDR", "")
    try:
        with socket.socket(
            socket.AF_INET, socket.SOCK_DGRAM
        ) as probe:  # a datagram socket sends nothing here
            probe.connect((master or socket.gethostname(), 9))
            host = probe.getsockname()[0]
    except OSError:
        host = "127.0.0.1"
    return socket.create_server((host, 0))


def leave_note(note: RankNote) -> None:
    """Leave this rank's note; the first one of a process group, the second one, and so on."""
    store = _store()
    number = store.add(f"rlsync/notes/{note.rank}", 1)
    store.set(_key(note.rank, number), note.to_json())


def next_meeting() -> int:
    """The number of a meeting that this owner calls: it reads the ranks' notes of that number."""
    return int(_store().add(f"rlsync/meetings/{own_rank()}", 1))


def read_notes(meeting: int, ranks: Iterable[int], timeout_s: float) -> list[RankNote]:
    """The notes that other ranks left for a meeting; a PublishError names all that left none in time."""
    store, deadline = _store(), time.monotonic() + timeout_s
    missing = sorted(ranks)
    found: dict[int, RankNote] = {}
    while missing:
        for rank in list(missing):
            if store.check([_key(rank, meeting)]):
                found[rank] = RankNote.from_json(store.get(_key(rank, meeting)))
                missing.remove(rank)
        if missing and time.monotonic() >= deadline:
            raise PublishError(
                f"{named(missing)} made no SendShards within {timeout_s:g} s",
                f"weights sharded over {len(missing) + len(found) + 1} ranks, rank {own_rank()} publishes",
                "on every rank that does not publish: shards = rlsync.SendShards({'policy': policy})",
            )
        if missing:
            time.sleep(_LOOK_EVERY_S)
    return [found[rank] for rank in sorted(found)]


def named(ranks: list[int]) -> str:
    """Ranks in words.

    Example:
        >>> named([1]), named([1, 3])
        ('rank 1', 'ranks 1, 3')
    """
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _key(rank: int, number: int) -> str:
    return f"rlsync/notes/{rank}/{number}"


def _store() -> Any:
    process_group()
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public name for it

    return _get_default_store()

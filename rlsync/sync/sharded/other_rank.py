"""Another rank of the learner, and what it is asked for, as the rank that owns the board knows them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlsync.core.errors import LayoutMismatch
from rlsync.core.path import parse
from rlsync.sync.sharded.meeting import RankNote, own_rank
from rlsync.sync.sharded.wire import Wire, raw
from rlsync.tensors.layout import Layout
from rlsync.tensors.sharded import Block, Sharding, part_of
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.board.watch import process_state
from rlsync.transport.rules import Key
from rlsync.transport.shared_file import this_host


@dataclass
class Other:
    """Another rank, as the owner knows it."""

    note: RankNote
    wire: Wire | None = None  #: before the first message there is none
    in_place: bool | None = None  #: whether it writes into the board; unknown before it has answered
    gone: str = ""  #: how it was lost

    def __post_init__(self) -> None:
        self._leaves = {
            full_name((destination, leaf)): how
            for destination, leaves in self.note.leaves.items()
            for leaf, how in leaves.items()
        }

    @property
    def state(self) -> str:
        """``"running"``, ``"stopped"`` or ``"dead"``; empty for a process of another host."""
        if not self.note.host or self.note.host != this_host():  # empty: hidden from that process
            return ""
        return process_state(self.note.pid) or "dead"

    def send(self, message: dict[str, Any], board: BoardHandle) -> None:
        """Send a message; before the first one, connect, and say where the board is.

        EOFError: the rank is gone, or takes no messages.
        """
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
        """What the rank has said; empty when that is nothing; EOFError when it is gone."""
        assert self.wire is not None
        message = self.wire.receive(0.0) or {}
        self.in_place = message.get("in_place", self.in_place)
        return message

    @torch.no_grad()
    def receive_blocks(self, view: Tensor, blocks: Sequence[Block], timeout_s: float) -> None:
        """Read blocks of a leaf that the rank sends; at most one is held besides the leaf.

        EOFError: the rank is gone. TimeoutError: a block did not arrive in time.
        """
        assert self.wire is not None
        for block in blocks:
            place = part_of(view, block)
            into = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
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
        theirs = self._leaves.get(name)
        if theirs != sharding:
            rank, owner = self.note.rank, own_rank()
            raise LayoutMismatch(
                f"{name} is not on rank {rank} as it is on rank {owner}",
                f"rank {rank}: {theirs or 'no such sharded leaf'}; rank {owner}: {sharding}",
                "build and shard the module alike on all ranks, and give SendShards the map's destinations",
            )

    def __str__(self) -> str:
        return f"rank {self.note.rank} ({', '.join(filter(None, (f'pid {self.note.pid}', self.state)))})"


@dataclass
class Roster:
    """The sharded leaves of one layout: the DTensors as they were when it was made, and who brings what."""

    layout: Layout
    tensors: list[Tensor]
    shardings: list[Sharding]
    blocks: dict[int, list[list[Block]]] = field(default_factory=dict)

    def of(self, rank: int, owner: int) -> list[list[Block]]:
        """The blocks that a rank brings, for each leaf."""
        if rank not in self.blocks:
            self.blocks[rank] = [sharding.blocks(rank, owner) for sharding in self.shardings]
        return self.blocks[rank]

    def is_for(self, layout: Layout, tensors: Sequence[Tensor]) -> bool:
        """Whether this was made for these tensors in this layout."""
        same = self.layout is layout and len(self.tensors) == len(tensors)
        return same and all(one is other for one, other in zip(self.tensors, tensors, strict=True))


def full_name(key: Key) -> str:
    """The name under which all ranks know a leaf.

    Example:
        >>> full_name(("policy", "0.weight"))
        'policy.0.weight'
    """
    return f"{parse(key[0]).leaf_prefix()}.{key[1]}"

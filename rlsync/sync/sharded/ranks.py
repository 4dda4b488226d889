"""Ranks: the rank that owns the board calls the others to each publish of sharded leaves."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlsync.core.errors import LayoutMismatch, PublishError, RlsyncError
from rlsync.core.ledger import Stamp
from rlsync.core.plan import Route
from rlsync.sync.processes import LOOK_EVERY_S
from rlsync.sync.sharded import meeting
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaf
from rlsync.tensors.sharded import Block, Sharding, is_sharded, write_blocks
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.board.slots import SlotPlace, copy
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Transport
from rlsync.transport.rules import Key


def require_board(leaves: Sequence[Leaf], transport: Transport, where: str) -> None:
    """Refuse sharded leaves on a transport that no other rank can write to (LayoutMismatch)."""
    if isinstance(transport, BoardWriter):
        return
    for leaf in leaves:
        if is_sharded(leaf.read()):
            raise _without_board(f"{leaf.name} is", where)


def require_shards(leaves: Sequence[Leaf], route: Route) -> None:
    """Refuse what was sharded and is whole now: optimizers write to the shards, and not to this."""
    for leaf in leaves:
        if not is_sharded(leaf.read()):
            problem = f"{route.source}.{leaf.name} is not sharded now: FSDP has gathered it for a "
            problem += "forward pass, and optimizer steps do not reach it"
            cure = "call module.reshard() before the publish, or publish after the backward pass"
            raise PublishError(problem, f"sync map {route}", cure)


class OneRank:
    """A learner that has no other ranks: nobody has to be told of its publishes."""

    def begin(self) -> None:
        pass

    def tell(self, error: BaseException | None) -> None:
        pass


class Ranks:
    """Fills a board's slots with the parts of all ranks.

    At each call of the owner's hook and each publish, every other rank is told one thing: bring your parts,
    or nothing is published now. Ranks here write into the slot, others send. One that is dead, fails or is
    late aborts the version, whose number is not used up. LayoutMismatch: ``board`` is another transport.
    """

    def __init__(self, board: Transport) -> None:
        if not isinstance(board, BoardWriter):
            raise _without_board("the weights are", type(board).__name__)
        self.finite = False  #: whether a rank refuses to bring numbers that are not finite
        self._board: BoardHandle = board.handle
        self._group: object = None
        self._meeting = 0
        self._others: dict[int, meeting.Other] = {}
        # of the publish, or the word that there is none, which the others wait for
        self._number = 1
        self._filled: Stamp | None = None
        self._roster: Roster | None = None
        board.fill_with(self.fill)

    # ---------------------------------------------------------------------------- who takes part

    def meet(self, leaves: Mapping[Key, Tensor]) -> None:
        """Find the ranks that hold parts. PublishError: one is missing. LayoutMismatch: one differs."""
        shardings = _shardings(leaves)
        group = meeting.process_group()
        me = meeting.own_rank()
        if group is not self._group:  # also after a new init_process_group
            self._group = group
            self._meeting = meeting.next_meeting()
            self._others = {}
            self._roster = None
        for other in self._others.values():
            if other.gone:
                raise self._without(other)
        wanted: set[int] = set()
        for sharding in shardings.values():
            wanted.update(sharding.mesh_ranks)
        unmet = wanted - {me} - self._others.keys()
        for note in meeting.read_notes(self._meeting, unmet, meeting.TIMEOUT_S):
            self._others[note.rank] = meeting.Other(note)
        for name, sharding in shardings.items():
            for rank in sharding.mesh_ranks:
                if rank != me:
                    self._others[rank].check_alike(name, sharding)

    def _where(self) -> str:
        ranks = meeting.named(sorted({meeting.own_rank(), *self._others}))
        return f"weights sharded over {ranks}; rank {meeting.own_rank()} publishes"

    def _without(self, other: meeting.Other) -> PublishError:
        cure = "restart the learner, whose weights are not whole now; workers go on with the version before"
        return PublishError(
            f"{other} is lost ({other.gone}); nothing was published", self._where(), cure
        )

    # ---------------------------------------------------------------------------- what they are told

    def begin(self) -> None:
        """A publish begins. It ends with :meth:`tell`."""
        self._number += 1
        self._filled = None

    def tell(self, error: BaseException | None) -> None:
        """Tell the other ranks what this publish has come to: a version, none, or an error."""
        if error is None:
            version = None if self._filled is None else self._filled.version
            words = {"say": "done", "version": version}
        else:
            if not isinstance(error, RlsyncError):
                error = RlsyncError(f"{type(error).__name__}: {error}")
            words = {"say": "failed", "what": error.what, "where": error.where, "cure": error.cure}
        for other in self._others.values():
            # the next publish refuses to do without those that are lost
            with suppress(PublishError):
                self._send(other, {"number": self._number, **words})

    def _send(self, other: meeting.Other, message: dict[str, Any]) -> None:
        if not other.gone:
            try:
                other.send(message, self._board)
            except EOFError as gone:
                other.lose(str(gone))
        if other.gone:
            raise self._without(other)

    # ---------------------------------------------------------------------------- a publish

    def fill(
        self, place: SlotPlace, stamp: Stamp, views: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        """Fill a slot with the parts of all ranks. PublishError: one is dead or late, or fails."""
        sharded = [i for i, tensor in enumerate(tensors) if is_sharded(tensor)]
        if not sharded:
            copy(views, tensors)
            return
        roster = self._roster_for(place.layout, sharded, [tensors[i] for i in sharded])
        call = {
            "say": "publish",
            "number": self._number,
            "version": stamp.version,
            "finite": self.finite,
            "slot": place.slot,
            "at": place.at,
            "size_bytes": place.size_bytes,
        }
        for other in self._others.values():
            self._send(other, call)

        # The others bring their parts meanwhile.
        plain = sorted(set(range(len(tensors))).difference(sharded))
        copy([views[i] for i in plain], [tensors[i] for i in plain])
        whole = [views[i] for i in sharded]
        mine = roster.of(meeting.own_rank(), meeting.own_rank())
        for view, tensor, blocks in zip(whole, roster.tensors, mine, strict=True):
            write_blocks(view, tensor, blocks)
        self._collect(stamp, roster, whole)
        self._filled = stamp

    def _roster_for(
        self, layout: Layout, places: Sequence[int], tensors: Sequence[Tensor]
    ) -> Roster:
        """What the others must know of these leaves; they are told when it is new."""
        known = self._roster
        if known is not None and known.is_of(layout, tensors):
            return known
        leaves: dict[Key, Tensor] = {}
        rows: list[list[object]] = []
        for place, tensor in zip(places, tensors, strict=True):
            entry = layout.owned[place]
            key = (entry.destination, entry.leaf.name)
            leaves[key] = tensor
            rows.append([meeting.full_name(key), entry.offset, entry.leaf.dtype_name])
        self.meet(leaves)
        for other in self._others.values():
            self._send(other, {"say": "roster", "leaves": rows})
        self._roster = Roster(layout, list(tensors), list(_shardings(leaves).values()))
        return self._roster

    def _collect(self, stamp: Stamp, roster: Roster, views: Sequence[Tensor]) -> None:
        """Wait until every other rank has brought its parts; see :meth:`fill`."""
        missing = dict(self._others)
        timeout_s = max((other.note.timeout_s for other in missing.values()), default=0.0)
        deadline = time.monotonic() + timeout_s
        while missing:
            by_wire = {other.wire: other for other in missing.values() if other.wire is not None}
            for wire in meeting.first_ready(list(by_wire), LOOK_EVERY_S):
                other = by_wire[wire]
                try:
                    if self._brought(other, roster, views, deadline):
                        del missing[other.note.rank]
                except (EOFError, OSError) as gone:
                    other.lose(str(gone))
            for other in missing.values():
                if other.state == "dead" and not other.gone:
                    other.lose("its process has ended")
                if other.gone:
                    raise self._without(other)
            if missing and time.monotonic() >= deadline:
                raise self._too_late(list(missing.values()), stamp, timeout_s)

    def _brought(
        self, other: meeting.Other, roster: Roster, views: Sequence[Tensor], deadline: float
    ) -> bool:
        """Hear a rank; whether it has brought its parts now."""
        message = other.receive()
        if message.get("number") != self._number:
            # a greeting, or about an earlier publish, for which this rank was too late
            return False
        if message["say"] == "failed":
            raise PublishError(message["what"], message["where"], message["cure"])
        if message["say"] == "sends":
            parts = roster.of(other.note.rank, meeting.own_rank())
            for view, blocks in zip(views, parts, strict=True):
                other.receive_blocks(view, blocks, max(1e-3, deadline - time.monotonic()))
        return True

    def _too_late(
        self, missing: Sequence[meeting.Other], stamp: Stamp, timeout_s: float
    ) -> PublishError:
        late = ", ".join(map(str, missing))
        for other in missing:
            if other.in_place is False:  # it may be in the middle of sending
                other.lose("it did not send its parts in time")
        return PublishError(
            f"{late} did not bring the parts of version {stamp.version} within {timeout_s:g} s; nothing was "
            "published",
            self._where(),
            "look where that rank is: every rank calls its SendShards wherever this one publishes. Workers "
            "go on with the version before",
        )


def _shardings(leaves: Mapping[Key, Tensor]) -> dict[str, Sharding]:
    """How those leaves are sharded that are, by the name under which all ranks know them."""
    shardings: dict[str, Sharding] = {}
    for key, tensor in leaves.items():
        if is_sharded(tensor):
            destination, name = key
            shardings[meeting.full_name(key)] = Sharding.of(tensor, name, destination)
    return shardings


def _without_board(subject: str, where: str) -> LayoutMismatch:
    problem = f"{subject} sharded over ranks, and only a board takes the parts of a leaf"
    cure = "use a process collector with a BoardScheme; "
    cure += "or gather it first (full_tensor, or a full state dict), and name the gathered module"
    return LayoutMismatch(problem, where, cure)


@dataclass
class Roster:
    """The sharded leaves of one layout: the DTensors as they were when it was made, and who brings what."""

    layout: Layout
    tensors: list[Tensor]
    shardings: list[Sharding]
    blocks: dict[int, list[list[Block]]] = field(default_factory=dict)

    def is_of(self, layout: Layout, tensors: Sequence[Tensor]) -> bool:
        """Whether it was made for this layout, and for these very tensors."""
        return self.layout is layout and list(map(id, self.tensors)) == list(map(id, tensors))

    def of(self, rank: int, owner: int) -> list[list[Block]]:
        """The blocks of each leaf that a rank brings."""
        if rank not in self.blocks:
            self.blocks[rank] = [sharding.blocks(rank, owner) for sharding in self.shardings]
        return self.blocks[rank]

"""A board whose workers adopt what a plan says: each rollout acts with the version that it had elsewhere.

Nothing else of the protocol differs. A version stays the newest until every rollout that the plan makes with
it, or with an older one, has begun: so a worker that waits for its version finds exactly that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import Tensor

from rlsync.core.errors import AdoptionTimeout, BoardClosed
from rlsync.core.ledger import Stamp
from rlsync.core.schedule import Rollout
from rlsync.transport.board import format as fmt
from rlsync.transport.board.reader import BoardHandle, BoardReader
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Apply
from rlsync.transport.rules import pauses
from rlsync.transport.shared_file import PAGE_BYTES, FileAddress, Mark, SharedFile, whole_pages

_MAGIC = 0x4E414C50_4C52  # "RLPLAN"
_FORMAT = 1
_BEGUN = PAGE_BYTES // 8  # a word for each worker: how many rollouts of its plan have begun
_BYTES = whole_pages((_BEGUN + fmt.MAX_READERS) * 8)


#: By worker: its rollouts, in order: in which life of the worker, with which version. Versions do not fall.
Plan = Mapping[int, Sequence[Rollout]]


@dataclass(frozen=True, slots=True)
class PlannedHandle:
    """How a worker finds such a board, its own plan, and where it counts how far it is."""

    board: BoardHandle
    address: FileAddress
    mark: Mark
    plan: Plan
    stays: bool

    def subscribe(self, apply: Apply, reader: int | None = None) -> BoardReader:
        # An evaluator takes the newest version whenever it likes.
        if reader is None or reader not in self.plan:
            return self.board.subscribe(apply, reader)
        return PlannedReader(self, apply, reader)


class PlannedReader(BoardReader):
    """Begins each rollout with the version of the plan, and waits until that is published.

    When the plan of its life is over, BoardClosed ends the worker: with ``stays`` not before the learner has
    closed the board, unless a later life follows. Without ``stays`` it acts on with the newest version.
    """

    def __init__(self, handle: PlannedHandle, apply: Apply, reader: int) -> None:
        self._plan, self._stays = handle.plan[reader], handle.stays
        self._own, self._counts = handle.mark.open(handle.address, _BYTES, "plan of a rerun")
        self._at = _BEGUN + reader
        first = self._counts[self._at]
        self._life = self._plan[first].life if first < len(self._plan) else None
        self._acts = False
        super().__init__(handle.board, apply, reader)

    def adopt(self) -> int:
        """The newest version, until the first rollout has begun; then what acts goes on."""
        return self.version if self._acts else super().adopt()

    def begin(self) -> int:
        begun = self._counts[self._at]
        planned = self._plan[begun] if begun < len(self._plan) else None
        if planned is not None and planned.life != self._life:
            raise BoardClosed("the recorded life of this worker ends here", f"worker {self.reader}", "")
        if planned is None and not self._stays:
            return super().adopt()
        for pause_s in pauses():
            if self.closed_by_learner:
                if self._stays:
                    raise BoardClosed("the learner has ended the rerun", f"worker {self.reader}", "")
                return self.version
            if planned is not None and planned.version in (self.version, self.newest):
                break
            time.sleep(pause_s)
            self._words[self._line + fmt.READER_HEARTBEAT_NS] = time.monotonic_ns()
        assert planned is not None, "it waits for the learner to close"
        if planned.version != self.version:
            super().adopt()
        self._acts = True
        self._counts[self._at] = begun + 1
        return self.version

    def close(self) -> None:
        self._own.close()
        super().close()


class PlannedBoard(BoardWriter):
    """The learner's end; a publish waits for the plan. For ``stays`` see :class:`PlannedReader`."""

    def __init__(self, plan: Plan, *, stays: bool, timeout_s: float) -> None:
        super().__init__()
        self._plan, self._stays, self._timeout_s = plan, stays, timeout_s
        self._counted = SharedFile.create("rlsync-plan")
        self._counted.resize(_BYTES)
        self._counts = self._counted.words(_BYTES, 0)
        self._plan_mark = Mark.write(self._counts, _MAGIC, _FORMAT)
        self.look: Callable[[], object] = bool  #: looks after the workers while a publish waits for them

    @property
    def handle(self) -> PlannedHandle:  # type: ignore[override]
        return PlannedHandle(super().handle, self._counted.address, self._plan_mark, self._plan, self._stays)

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        """Publish when all rollouts of older versions have begun; AdoptionTimeout if one does not begin."""
        deadline = time.monotonic() + self._timeout_s
        for pause_s in pauses():
            late = [worker for worker in self._plan if not self._may_leave(worker, stamp.version)]
            if not late:
                break
            self.look()
            if time.monotonic() >= deadline:
                began = ", ".join(f"worker {w} began {self._counts[_BEGUN + w]}" for w in late)
                raise AdoptionTimeout(
                    f"rollouts that act with older versions than {stamp.version} were not begun within "
                    f"{self._timeout_s:g} s",
                    f"rerun: {began} of its recorded rollouts",
                    "look at what the worker does (py-spy dump --pid PID); a run that ends otherwise than it "
                    "was recorded is not the same run",
                )
            time.sleep(pause_s)
        return super().publish(tensors, later, stamp=stamp)

    def next_life(self, worker: int) -> int | None:
        """The life in which a worker makes its next rollout; None if its plan is over."""
        plan, begun = self._plan[worker], self._counts[_BEGUN + worker]
        return plan[begun].life if begun < len(plan) else None

    def close(self) -> None:
        super().close()
        self._counted.close()

    def _may_leave(self, worker: int, version: int) -> bool:
        """Whether a worker needs nothing older than this version any more."""
        plan, begun = self._plan[worker], self._counts[_BEGUN + worker]
        return begun >= len(plan) or plan[begun].version >= version

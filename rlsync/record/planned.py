"""A board whose workers adopt what a plan says: each rollout acts with the version that is laid down for it.

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
from rlsync.record.schedule import FixedLag, Rollout
from rlsync.transport.bell import Bell
from rlsync.transport.board import format as fmt
from rlsync.transport.board.reader import BoardHandle, BoardReader
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Apply
from rlsync.transport.shared_file import PAGE_BYTES, FileAddress, Mark, SharedFile, whole_pages

_MAGIC = 0x4E414C50_4C52  # "RLPLAN"
_FORMAT = 2
_TURN = PAGE_BYTES // 8  # a word: how often the learner has asked for a batch
_OVER = _TURN + 1  # a word: whether the learner has given up the plan
_CALLED = _OVER + 1  # a bell: the learner has published, asked for a batch, or ended
_BEGAN = _CALLED + 1  # a bell: a worker has begun a rollout
_BEGUN = _BEGAN + 1  # a word for each worker: how many rollouts of its plan have begun
# Words for each worker: with which version the newest of them began, and which rollout that was.
_VERSION = _BEGUN + fmt.MAX_READERS
_NUMBER = _VERSION + fmt.MAX_READERS
_BYTES = whole_pages((_NUMBER + fmt.MAX_READERS) * 8)

#: By worker: its rollouts, in order: in which life of the worker, with which version. Versions do not fall. A
#: FixedLag numbers the learner's turns in their place: a rollout acts with what is the newest in that turn.
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


def _rollout_at(number: int, plan: Sequence[Rollout]) -> Rollout | None:
    if number < len(plan):
        return plan[number]
    return None


class PlannedReader(BoardReader):
    """Begins each rollout with the version of the plan, and waits until that is published.

    When the plan of its life is over, BoardClosed ends the worker: with ``stays`` not before the learner has
    closed the board, unless a later life follows. Without ``stays`` it acts on with the newest version.
    """

    def __init__(self, handle: PlannedHandle, apply: Apply, reader: int) -> None:
        self._plan = handle.plan[reader]
        self._stays = handle.stays
        self._by_turn = isinstance(self._plan, FixedLag)
        self._own, self._counts = handle.mark.open(handle.address, _BYTES, "plan of rollouts")
        self._at = _BEGUN + reader
        self._called = Bell(self._counts, _CALLED)
        self._began = Bell(self._counts, _BEGAN)
        first = _rollout_at(self._counts[self._at], self._plan)
        self._life: int | None = None
        if first is not None:
            self._life = first.life
        self._acts = False
        #: Is called while this reader waits for its version, with the time since when, in ns; returns that of
        #: now. A sign of life for whoever watches the process, and the wait for whoever counts it.
        self.waiting: Callable[[int], int] = int
        super().__init__(handle.board, apply, reader)

    def adopt(self) -> int:
        """The newest version, until the first rollout has begun; then what acts goes on."""
        if self._acts:
            return self.version
        return super().adopt()

    def begin(self) -> int:
        begun = self._counts[self._at]
        planned = _rollout_at(begun, self._plan)
        if planned is not None and planned.life != self._life:
            raise BoardClosed(
                "the recorded life of this worker ends here", f"worker {self.reader}", ""
            )
        if planned is None and not self._stays:
            return super().adopt()
        waited_from = time.monotonic_ns()
        while True:
            heard = self._called.read()
            if self.closed_by_learner or self._counts[_OVER]:
                if self._stays:
                    raise BoardClosed("the learner has ended", f"worker {self.reader}", "")
                return self.version
            if self._by_turn:
                now = self._counts[_TURN]
            else:
                now = self.newest
            if planned is not None and planned.version <= now:
                break
            self._called.wait(heard)
            self._words[self._line + fmt.READER_HEARTBEAT_NS] = time.monotonic_ns()
            waited_from = self.waiting(waited_from)
        self._adopt_for(begun)
        self._acts = True
        self._counts[self._at] = begun + 1
        self._began.ring()
        return self.version

    def _adopt_for(self, number: int) -> None:
        """Adopt the version of a rollout: the newest, or that with which a process that died had begun it."""
        version = _VERSION + self.reader
        begun_before = self._counts[version] and self._counts[_NUMBER + self.reader] == number
        if begun_before and self.adopt_version(self._counts[version]):
            return
        super().adopt()
        self._counts[version] = self.version
        self._counts[_NUMBER + self.reader] = number

    def close(self) -> None:
        self._own.close()
        super().close()


class PlannedBoard(BoardWriter):
    """The learner's end; a publish waits for the plan. For ``stays`` see :class:`PlannedReader`."""

    def __init__(
        self, plan: Plan, *, stays: bool, timeout_s: float = 0.0, order: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self._plan = plan
        self._stays = stays
        self.timeout_s = timeout_s
        self._order = order
        lags = [rollouts for rollouts in plan.values() if isinstance(rollouts, FixedLag)]
        self._lag = lags[0] if lags else None  # that of all workers
        self._counted = SharedFile.create("rlsync-plan")
        self._counted.allocate(0, _BYTES)
        self._counts = self._counted.words(_BYTES, 0)
        self._called = Bell(self._counts, _CALLED)
        self._began = Bell(self._counts, _BEGAN)
        self._plan_mark = Mark.write(self._counts, _MAGIC, _FORMAT)
        self._slots.kept = self._begun_with
        #: Looks after the workers while a publish waits for them; whether the patience with them begins anew.
        self.look: Callable[[], bool] = bool

    @property
    def handle(self) -> PlannedHandle:  # type: ignore[override]
        return PlannedHandle(
            super().handle, self._counted.address, self._plan_mark, self._plan, self._stays
        )

    def order_of_arrival(self, silent_s: float | None) -> Sequence[int]:
        self.timeout_s = silent_s or float("inf")
        return self._order

    def turn(self) -> None:
        """The learner has learned from a batch, and asks for the next one."""
        self._counts[_TURN] += 1
        if self._lag is None or self._lag.begins_with(self._counts[_TURN]):
            self._called.ring()

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        """Publish when all rollouts of older versions have begun; AdoptionTimeout if one does not begin."""
        deadline = time.monotonic() + self.timeout_s
        if self._lag is None:
            now = stamp.version - 1
        else:
            now = self._counts[_TURN]
        while True:
            heard = self._began.read()
            late = self._late(now)
            if not late or self._counts[_OVER]:
                break
            if self.look():
                deadline = time.monotonic() + self.timeout_s
            if time.monotonic() >= deadline:
                began = [
                    f"worker {worker} began {self._counts[_BEGUN + worker]}" for worker in late
                ]
                problem = f"rollouts that act with older versions than {stamp.version} were not begun within "
                problem += f"{self.timeout_s:g} s"
                where = f"{', '.join(began)} of its planned rollouts"
                cure = "look at what the worker does (py-spy dump --pid PID)"
                raise AdoptionTimeout(problem, where, cure)
            self._began.wait(heard)
        version = super().publish(tensors, later, stamp=stamp)
        self._tell_of_version()
        return version

    def join(self) -> None:
        super().join()
        self._tell_of_version()  # what was copied meanwhile can be seen now

    def _tell_of_version(self) -> None:
        if self._lag is None:
            self._called.ring()

    def _begun_with(self) -> Set[int]:
        """The versions with which the workers' newest rollouts began: who dies leaves one to be made again."""
        return set(self._counts[_VERSION : _VERSION + len(self._plan)])

    def _late(self, version: int) -> list[int]:
        """The workers that have yet to begin a rollout with this version or an older one."""
        if self._lag is None:
            next_ones = ((worker, self.next(worker)) for worker in self._plan)
            return [
                worker for worker, its in next_ones if its is not None and its.version <= version
            ]
        # All workers have one plan, and most are equally far.
        begun = self._counts[_BEGUN : _BEGUN + len(self._plan)].tolist()
        late = {number for number in set(begun) if self._lag[number].version <= version}
        return [worker for worker, number in enumerate(begun) if number in late]

    def next(self, worker: int) -> Rollout | None:
        """The rollout that a worker begins next; None if its plan is over."""
        return _rollout_at(self._counts[_BEGUN + worker], self._plan[worker])

    def go_back(self, worker: int, number: int) -> None:
        """Let a worker's next process begin with this rollout: if it was begun before, with that version."""
        self._counts[_BEGUN + worker] = number

    def let_go(self) -> None:
        """Give up the plan: workers that do not stay go on with what they have, and no publish waits."""
        self._counts[_OVER] = not self._stays
        self._called.ring()

    def close(self) -> None:
        super().close()
        self._called.ring()
        self._counted.close()

"""The endpoint of process collectors whose schemes are on one board, or whose workers read one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from rlsync.core.errors import DestinationNotFound, WorkerLost
from rlsync.core.path import Path, did_you_mean, nearest_name, parse
from rlsync.core.plan import no_destination
from rlsync.tensors.layout import LeafSpec
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.check import BoardCheck
from rlsync.torchrl_plugin.sender import BoardCollector, BoardSender, Key
from rlsync.torchrl_plugin.waits import worker_ends
from rlsync.transport.board_format import ReaderStatus
from rlsync.transport.board_watch import worker_lost


class BoardEndpoint:
    """Process collectors whose schemes are on one board."""

    def __init__(self, sender: BoardSender, adopt: str) -> None:
        self.sender = sender
        self._adopt = adopt

    @property
    def transport(self) -> str:
        workers = self.sender.collector.num_workers
        return f"board: {workers} worker processes, adopted by {self._adopt}, one copy a publish"

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def stamped(self) -> bool:
        return True

    @property
    def version(self) -> int:
        return self.sender.board.version

    def connect(self, publish_default: Callable[[], object]) -> None:
        self.sender.publish_default = publish_default

    def locate(self, path: Path, where: str) -> Key:
        offered = self.sender.destinations
        inside = [d for d in offered if path.startswith(parse(d))]
        if not inside:
            raise no_destination(str(path), where, offered, nearest_name(str(path), offered))
        destination = max(inside, key=len)
        prefix = path.below(parse(destination)).leaf_prefix()
        self._check_prefix(destination, prefix, path, where)
        return destination, prefix

    def _check_prefix(self, destination: str, prefix: str, path: Path, where: str) -> None:
        specs = self.specs(destination)
        if not prefix or specs is None:
            return
        if not any(s.name == prefix or s.name.startswith(prefix + ".") for s in specs):
            parents = {s.name.rpartition(".")[0] for s in specs} - {""}
            near = nearest_name(prefix, parents)
            raise DestinationNotFound(
                f"no leaves under {prefix!r} in {destination!r}",
                f"path {str(path)!r}, {where}",
                did_you_mean(near) + f"modules: {', '.join(sorted(parents))}",
            )

    def specs(self, destination: str) -> list[LeafSpec] | None:
        return self.sender.specs(destination)

    def tensors(self, destination: str) -> None:
        return None

    @property
    def publishes_in_background(self) -> bool:
        return True

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int | None:
        return self.sender.publish(leaves, steady)

    def join(self) -> None:
        self.sender.join()

    def advance_to(self, version: int) -> None:
        self.sender.board.advance_to(version)

    def acting_versions(self) -> list[int]:
        count = self.sender.collector.num_workers  # others may read along: an evaluator
        readers = self.sender.board.status()
        return [worker.adopted_version for worker in readers if worker.alive and worker.reader < count]

    @property
    def in_flight(self) -> bool:
        collector = self.sender.collector
        return isinstance(collector, BoardCollector) or compat.collects_in_the_background(collector)

    def wait(self, timeout_s: float) -> None:
        self.join()
        board = self.sender.board
        try:
            board.wait(board.version, timeout_s, range(self.sender.collector.num_workers))
        except WorkerLost as lost:  # the board does not know how its readers ended
            raise lost_workers(self.sender, board.status(), lost.where) or lost from None

    def check(self) -> BoardCheck:
        return BoardCheck(self.sender)


def lost_workers(sender: BoardSender, workers: Iterable[ReaderStatus], where: str) -> WorkerLost | None:
    """What to raise for the workers that are dead now, with how they ended; ``None`` while all live.

    Args:
        sender: the learner's side.
        workers: what the board says of them.
        where: what they are needed for.
    """
    known = {status.reader: status for status in workers}
    unlocked = {worker for worker, status in known.items() if not status.alive}
    ends = worker_ends(sender.collector, unlocked)
    dead = {
        known[worker]: end or "dead"
        for worker, end in ends.items()
        if worker in known and (end or worker in unlocked)
    }
    return worker_lost(dead, where) if dead else None

"""The worker processes, and what happens when one ends: it is started again, or the run ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from rlsync.core.errors import AdoptionTimeout, ConfigError, WorkerLost
from rlsync.torchrl_plugin.waits import ending
from rlsync.transport.rollout_ring import RolloutRing

_log = logging.getLogger(__name__)

#: How long the learner waits at a stretch; it looks at the workers in between.
LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often, and how soon, a worker that ended is started again.

    Args:
        at_most: times for each worker within ``window_s``; the next time the run ends.
        window_s: seconds after which a start is forgotten.
        first_pause_s: before the first start again; each further pause is twice as long.
        longest_pause_s: no pause is longer.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [Restarts().pause_s(already) for already in range(4)]
        [0.5, 1.0, 2.0, 4.0]
    """

    at_most: int = 5
    window_s: float = 600.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0

    def __post_init__(self) -> None:
        if self.at_most < 0 or min(self.window_s, self.first_pause_s, self.longest_pause_s) < 0:
            raise ConfigError("a number is below zero", str(self), "at_most=0 never starts a worker again")

    def pause_s(self, already: int) -> float:
        """Seconds before the next start, after so many within the window."""
        return float(min(self.longest_pause_s, self.first_pause_s * 2.0**already))


class Workers:
    """Starts worker processes and keeps them running.

    A worker that ends by an error, or is killed, is started again after a pause; it adopts the newest
    version, and the others go on meanwhile. The run ends when one ends too often, or when all were killed.

    Args:
        start: starts the worker of a number; the second number says how often that was done before.
        count: how many.
        ring: where they write, and leave their last words.
        restarts: how often.
    """

    def __init__(
        self, start: Callable[[int, int], BaseProcess], count: int, ring: RolloutRing, restarts: Restarts
    ) -> None:
        self._start = start
        self._ring = ring
        self._restarts = restarts
        self._lives = [0] * count
        self._ended: list[list[float]] = [[] for _ in range(count)]
        self._due: dict[int, float] = {}
        self.procs: list[BaseProcess] = []
        for worker in range(count):
            ring.expect(worker)
            self.procs.append(start(worker, 0))

    @property
    def restarts(self) -> int:
        """How many workers were started again."""
        return sum(self._lives)

    def await_start(self, timeout_s: float) -> None:
        """Wait until all stand.

        Raises:
            WorkerLost: one has ended; it is not started again, since nothing has ever worked.
            AdoptionTimeout: one does not stand in time.
        """
        deadline = time.monotonic() + timeout_s
        for worker, process in enumerate(self.procs):
            while not self._ring.writer(worker).stands:
                if process.exitcode is not None:
                    raise WorkerLost(f"{self._told(worker)} before it stood", "starting the workers", _CURE)
                if time.monotonic() >= deadline:
                    raise AdoptionTimeout(
                        f"worker {worker} (pid {process.pid}) does not stand after {timeout_s:g} s",
                        "starting the workers",
                        f"look where it hangs (py-spy dump --pid {process.pid}), or give it more time "
                        "(start_timeout_s)",
                    )
                time.sleep(LOOK_EVERY_S / 10)

    def look(self) -> None:
        """See who has ended, and start again who is due.

        Raises:
            WorkerLost: one ended too often, or none is left.
        """
        for worker, process in enumerate(self.procs):
            if worker not in self._due and process.exitcode is not None:
                self._note_end(worker)
        if self._due:
            self._require_one_left()
            for worker in [w for w, due in self._due.items() if time.monotonic() >= due]:
                del self._due[worker]
                self._lives[worker] += 1
                self.procs[worker].close()
                self._ring.expect(worker)
                self.procs[worker] = self._start(worker, self._lives[worker])
                _log.warning("worker %d was started again (pid %s)", worker, self.procs[worker].pid)

    def _note_end(self, worker: int) -> None:
        now, kept = time.monotonic(), self._restarts
        recent = [at for at in self._ended[worker] if now - at < kept.window_s]
        if len(recent) >= kept.at_most:
            often = f", {len(recent) + 1} times within {kept.window_s:g} s" if recent else ""
            raise WorkerLost(self._told(worker, often), "collecting rollouts", _CURE)
        pause_s = kept.pause_s(len(recent))
        _, _, words = self._ring.writer(worker).last_words.partition("\n")
        told = self._told(worker)
        _log.warning("%s; it is started again in %g s%s", told, pause_s, f"\n{words}" if words else "")
        self._ended[worker] = [*recent, now]
        self._due[worker] = now + pause_s

    def _require_one_left(self) -> None:
        if len(self._due) < len(self.procs):
            return
        codes = [process.exitcode for process in self.procs]
        if all(code is not None and code < 0 for code in codes):
            told = "; ".join(self._told(worker) for worker in range(len(self.procs)))
            raise WorkerLost(f"no worker is left: {told}", "collecting rollouts", _CURE)

    def _told(self, worker: int, when: str = "") -> str:
        process, words = self.procs[worker], self._ring.writer(worker).last_words
        said = f": {words.splitlines()[0]}" if words else ""
        return f"worker {worker} (pid {process.pid}) {ending(process.exitcode or 0)}{when}{said}"

    def silent(self, timeout_s: float) -> AdoptionTimeout:
        """What to raise when nobody has delivered for so long."""
        lines = [self._ring.writer(worker) for worker in range(len(self.procs))]
        told = ", ".join(
            f"worker {line.writer} (pid {line.pid}, {'alive' if line.alive else 'dead'}, last seen "
            f"{line.heartbeat_age_s:.1f} s ago)"
            for line in lines
        )
        return AdoptionTimeout(
            f"no rollout was completed for {timeout_s:g} s by {told}",
            "collecting rollouts",
            "find out who stopped them, or where they hang (py-spy dump --pid PID); rollouts that take that "
            "long need a longer silent_timeout_s",
        )

    def end(self, timeout_s: float) -> None:
        """Wait for all to leave, then end them."""
        deadline = time.monotonic() + timeout_s
        for process in self.procs:
            process.join(max(0.0, deadline - time.monotonic()))
        _end_each([p for p in self.procs if p.exitcode is None], BaseProcess.terminate)
        _end_each([p for p in self.procs if p.exitcode is None], BaseProcess.kill)
        for process in self.procs:
            process.close()
        self.procs = []


def _end_each(processes: Sequence[BaseProcess], how: Callable[[BaseProcess], None]) -> None:
    for process in processes:
        how(process)
    for process in processes:
        process.join(2.0)


_CURE = (
    "look at the worker's own error above, or in the kernel's log if memory was short; then resume the run"
)

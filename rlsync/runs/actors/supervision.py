"""The worker processes, and what happens when one ends: it is started again, or the run ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

from rlsync import AdoptionTimeout, ConfigError, WorkerLost
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.seams import families, processes, starting

_log = logging.getLogger(__name__)

_Who = TypeVar("_Who")

LEAVE_TIMEOUT_S = 5.0  #: how long workers may take to complete a step and leave

#: How long workers may take to end, all together. SIGTERM does not end a stopped one.
_AFTER_SIGTERM_S = 1.0
_AFTER_SIGKILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Restarts:
    """How often, and how soon, a worker that ended is started again.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [Restarts().pause_s(already) for already in range(4)]
        [0.5, 1.0, 2.0, 4.0]
    """

    #: restarts of one worker within ``window_s``; if it ends once more, the run ends
    at_most: int = 5
    #: restarts in a row after the same error and as many rollouts: such an error comes again and again
    alike_at_most: int = 1
    window_s: float = 600.0  #: seconds after which a restart no longer counts
    #: seconds before the first restart; each further pause is twice as long
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0  #: upper limit of a pause, seconds

    def __post_init__(self) -> None:
        if (
            min(self.at_most, self.alike_at_most) < 0
            or min(self.window_s, self.first_pause_s, self.longest_pause_s) < 0
        ):
            raise ConfigError(
                "a number is below zero", str(self), "at_most=0 never starts a worker again"
            )

    def pause_s(self, already: int) -> float:
        """Seconds to wait before the next restart of a worker.

        Args:
            already: its restarts within the window.
        """
        return float(min(self.longest_pause_s, self.first_pause_s * 2.0**already))


class Pauses(Generic[_Who]):
    """Who has ended, and when it is started again: :class:`Restarts` at work, for workers and for nodes."""

    def __init__(self, restarts: Restarts) -> None:
        self.restarts = restarts
        # the ends within the window, times of the monotonic clock
        self._ended: dict[_Who, list[float]] = {}
        self.due: dict[_Who, float] = {}  # when to start it; whoever does so takes it out

    def note_end(self, who: _Who) -> float | None:
        """The seconds until it is due; ``None``: it has ended too often, and is not."""
        now = time.monotonic()
        restarts = self.restarts
        recent = [at for at in self._ended.get(who, []) if now - at < restarts.window_s]
        self._ended[who] = [*recent, now]
        if len(recent) >= restarts.at_most:
            return None
        pause_s = restarts.pause_s(len(recent))
        self.due[who] = now + pause_s
        return pause_s

    def how_often(self, who: _Who) -> str:
        """How often it has ended within the window, if more than once."""
        times = len(self._ended[who])
        if times > 1:
            return f", {times} times within {self.restarts.window_s:g} s"
        return ""


@dataclass(frozen=True, slots=True)
class _Alike:
    """How the newest lives of a worker ended: with the same error after as many rollouts."""

    headline: str
    made: int  # rollouts of each
    times: int


class Supervisor:
    """Starts worker processes and keeps them running.

    One that ends is started again after a pause, and a silent one is killed. The run ends when one ends too
    often or too often alike, all of several were killed at once, or all are silent. Silence counts while
    :meth:`look` is called, and not for one that waits for a slot; life 0 is a first start.
    """

    def __init__(
        self,
        start: Callable[[int, int], BaseProcess],
        count: int,
        ring: RolloutRing,
        restarts: Restarts,
        silent_timeout_s: float,
    ) -> None:
        self._start = start
        self._ring = ring
        self._pauses = Pauses[int](restarts)
        self._silence = processes.Silence(silent_timeout_s)
        self._silenced: set[int] = set()
        self._lives = [0] * count
        self._written = [0] * count  # rollouts that a worker had made when its life began
        self._alike: list[_Alike | None] = [None] * count
        self.procs: list[BaseProcess] = []
        for worker in range(count):
            ring.expect(worker)
            self.procs.append(start(worker, 0))

    @property
    def restarts(self) -> int:
        return sum(self._lives)

    def await_start(self, timeout_s: float, logs: starting.StartLogs) -> None:
        """Wait until all are ready. AdoptionTimeout: one is late. WorkerLost: one ended, and stays so."""

        def last_words(worker: int) -> str:
            logs.show(worker)
            return self._headline(worker)

        try:
            processes.await_ready(self.procs, self._ready, timeout_s, last_words, logs.doing)
        finally:
            logs.close()

    def _ready(self, worker: int, seconds: float) -> bool:
        if not self._ring.writer(worker).ready:
            time.sleep(min(seconds, processes.LOOK_EVERY_S / 10))
        return self._ring.writer(worker).ready

    def look(self) -> bool:
        """Note ends, kill the silent, start who is due; whether there was one of these. Else it raises."""
        ended = [worker for worker in self._not_due() if self.procs[worker].exitcode is not None]
        for worker in ended:
            self._note_end(worker)
        if self._pauses.due:
            self._require_one_left()
        silent = self._end_silent()
        due = [worker for worker, at in self._pauses.due.items() if time.monotonic() >= at]
        for worker in due:
            self._start_again(worker)
        return bool(ended or silent or due)

    def _not_due(self) -> list[int]:
        """The workers whose end was not noted."""
        return [worker for worker in range(len(self.procs)) if worker not in self._pauses.due]

    def _end_silent(self) -> list[int]:
        ages_s = self._ring.heartbeat_ages_s()
        over = self._silence.look({worker: ages_s[worker] for worker in self._not_due()})
        # the next look notes an end
        silent = [worker for worker in over if not self._has_ended(worker)]
        if len(silent) == len(self.procs):
            raise self._nothing_came(self._silence.timeout_s)
        for worker in silent:
            self._silenced.add(worker)
            families.end_group(self.procs[worker])
        return silent

    def _has_ended(self, worker: int) -> bool:
        return processes.has_ended(self.procs[worker], dying=bool(self._headline(worker)))

    def _start_again(self, worker: int) -> None:
        del self._pauses.due[worker]
        self._silenced.discard(worker)
        self._lives[worker] += 1
        self._ring.expect(worker)
        ended = self.procs[worker]
        self.procs[worker] = self._start(worker, self._lives[worker])
        ended.close()
        _log.warning("worker %d was started again (pid %s)", worker, self.procs[worker].pid)

    def _note_end(self, worker: int) -> None:
        families.end_group(self.procs[worker])
        pause_s = self._pauses.note_end(worker)
        if pause_s is None or self._ended_alike(worker) > self._pauses.restarts.alike_at_most:
            end = self._how_it_ended(worker, self._pauses.how_often(worker))
            raise WorkerLost(end, "collecting rollouts", _CURE)
        _, _, words = self._ring.writer(worker).last_words.partition("\n")
        end = self._how_it_ended(worker)
        if words:
            words = f"\n{words}"
        _log.warning("%s; it is started again in %g s%s", end, pause_s, words)

    def _ended_alike(self, worker: int) -> int:
        """The number of newest lives that ended with this error after as many rollouts; 0: no error."""
        headline = self._headline(worker)
        written = self._ring.writer(worker).written
        rollouts = written - self._written[worker]
        before = self._alike[worker]
        self._written[worker] = written
        if not headline:
            self._alike[worker] = None
            return 0
        times = 1
        if before is not None and (before.headline, before.made) == (headline, rollouts):
            times += before.times
        self._alike[worker] = _Alike(headline, rollouts, times)
        return times

    def _require_one_left(self) -> None:
        # Several at once: the machine has no room for them. One alone may have had an accident.
        if len(self._pauses.due) < max(2, len(self.procs)):
            return
        codes = [process.exitcode for process in self.procs]
        if all(code is not None and code < 0 for code in codes):
            ends = "; ".join(self._how_it_ended(worker) for worker in range(len(self.procs)))
            raise WorkerLost(f"no worker is left: {ends}", "collecting rollouts", _CURE)

    def _how_it_ended(self, worker: int, when: str = "") -> str:
        process = self.procs[worker]
        words = self._headline(worker)
        if worker in self._silenced:
            why = f" after {self._silence.timeout_s:g} s of silence"
        else:
            why = ""
        end = f"worker {worker} (pid {process.pid}) {processes.ending(process.exitcode or 0)}{why}{when}"
        if words:
            return f"{end}: {words}"
        return end

    def _headline(self, worker: int) -> str:
        return self._ring.writer(worker).last_words.partition("\n")[0]

    def silent(self, timeout_s: float) -> AdoptionTimeout | None:
        """The error that nothing came for so long; None: one has just ended, which :meth:`look` tells."""
        if any(map(self._has_ended, self._not_due())):
            return None
        return self._nothing_came(timeout_s)

    def _nothing_came(self, timeout_s: float) -> AdoptionTimeout:
        workers = "; ".join(map(self._how_it_is, range(len(self.procs))))
        problem = f"no rollout was completed for {timeout_s:g} s: {workers}"
        cure = "look what stopped them, or where they hang (py-spy dump --pid PID); if a rollout takes that "
        cure += "long, give a longer silent_timeout_s"
        return AdoptionTimeout(problem, "collecting rollouts", cure)

    def _how_it_is(self, worker: int) -> str:
        if worker in self._pauses.due:
            return self._how_it_ended(worker)
        pid = self.procs[worker].pid or 0
        seen_s = self._ring.writer(worker).heartbeat_age_s
        state = processes.process_state(pid) or "running"
        return f"worker {worker} (pid {pid}, {state}, last seen {seen_s:.1f} s ago)"

    def end(self, timeout_s: float) -> None:
        """Wait until all workers have left; after ``timeout_s`` end those that have not."""
        deadline = time.monotonic() + timeout_s
        for process in self.procs:
            process.join(max(0.0, deadline - time.monotonic()))
        _end_each(
            [p for p in self.procs if p.exitcode is None], BaseProcess.terminate, _AFTER_SIGTERM_S
        )
        _end_each(self.procs, families.end_group, _AFTER_SIGKILL_S)
        for process in self.procs:
            process.close()
        self.procs = []


def _end_each(
    processes: Sequence[BaseProcess], how: Callable[[BaseProcess], None], timeout_s: float
) -> None:
    for process in processes:
        how(process)
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


_CURE = (
    "look at the worker's own error above, or in the kernel's log if memory was short; then resume"
)

"""The view of ``rlsync status --watch``: reads what a run writes of itself, until the run has ended."""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from rlsync.runs.life.accounts import told_with_account
from rlsync.runs.life.state import EVERY_S, HAS_ENDED, KILLED, PLAIN_EVERY_S, RunStatus, status_of
from rlsync.runs.recipes.run_files import STATISTICS, RunStatistics
from rlsync.seams import printable


def watch(run: Path) -> int:
    """Show a run until it has ended, then tell how. Returns 0 if it ended well, else 1."""
    console = Console()
    view = View(run)
    live = None
    every_s = PLAIN_EVERY_S
    if console.is_terminal and not console.is_dumb_terminal:
        live = Live(console=console, auto_refresh=False)
        every_s = EVERY_S
    with live or nullcontext():
        while (status := status_of(run)).state not in (HAS_ENDED, KILLED):
            text = printable(view.of(status))
            if live is None:
                print(text, flush=True)
            else:
                learner, _, rows = text.partition("\n")
                live.update(
                    Group(Text(learner), Text(rows, no_wrap=True, overflow="ellipsis")),
                    refresh=True,
                )
            time.sleep(every_s)
    print(printable(told_with_account(run, status)))
    if status.ended is not None and status.ended.status == 0:
        return 0
    return 1


class View:
    """The learner's line, and one for each worker. Rates are those of the newest ten statistics."""

    def __init__(self, run: Path) -> None:
        self._file = run / STATISTICS
        self._newest: deque[RunStatistics] = deque(maxlen=10)

    def of(self, status: RunStatus) -> str:
        if status.agents:
            return status.told
        statistics = status.statistics
        learner = "no batch yet"
        rates: dict[str, float] = {}
        if statistics is not None:
            learner, rates = self._learner(statistics)
        lines = [f"learner  {learner}"]
        if not status.workers:
            return "\n".join([*lines, status.told.splitlines()[0]])
        if len({worker.reader for worker in status.workers}) < len(status.workers):
            rates = {}  # on a cluster the workers of each node are numbered from 0
        lines.append("worker       pid    state  version   lag  frames/s       age")
        for worker in status.workers:
            rate = "-"
            if worker.state == "running" and str(worker.reader) in rates:
                rate = f"{rates[str(worker.reader)]:,.0f}"
            lines.append(
                f"{worker.reader:>6}{worker.pid:>10}{worker.state:>9}{worker.adopted_version:>9}"
                f"{worker.lag_versions:>6}{rate:>10}{worker.heartbeat_age_s:>8.1f} s"
            )
        return "\n".join(lines)

    def _learner(self, now: RunStatistics) -> tuple[str, dict[str, float]]:
        """What the run says of itself, and the frames a second of each worker by its number."""
        newest = self._newest
        if newest and now.seconds < newest[-1].seconds:
            newest.clear()  # another life of the run
        if not newest or now != newest[-1]:
            newest.append(now)
        first = newest[0]
        frames = Counter(now.frames_by_worker or {})
        seconds = now.seconds
        if first is not newest[-1]:
            frames.subtract(first.frames_by_worker or {})
            seconds -= first.seconds
            now = replace(now, frames_per_s=(now.frames - first.frames) / seconds)
        age_s = time.time() - self._file.stat().st_mtime
        if now.updates_per_frame is None:
            pace = ""
        else:
            pace = f"  updates/frame {now.updates_per_frame:.3g}"
        rates = {worker: frames[worker] / seconds for worker in frames}
        return f"{now.progress()}{pace}  {age_s:.0f} s ago", rates

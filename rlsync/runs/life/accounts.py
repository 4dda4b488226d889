"""What became of the frames that a run's workers made, over all its lives: none is lost unseen, or taken twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsync import ConfigError
from rlsync.runs.life.state import RunStatus, repeated_in
from rlsync.runs.recipes.run_files import SCHEDULE
from rlsync.seams import schedule

#: A longer schedule is not read: it would take seconds.
_LONGEST_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class Account:
    """Frames, by what became of them; those of rollouts that nobody took when a life ended were not counted."""

    taken: int  #: by the learner, in all lives
    learned: int  #: once, in what the run is now
    again: int  #: were made again after a death
    waiting: int  #: of a batch that is not complete
    dropped: int
    twice: int  #: of rollouts that were taken twice
    missing: int  #: of rollouts between two that were taken, which were neither taken nor dropped

    def __str__(self) -> str:
        parts = [f"{self.learned:,} learned from", f"{self.again:,} made again"]
        if self.waiting:
            parts.append(f"{self.waiting:,} of a batch that is not complete")
        line = f"frames taken {self.taken:,} = {' + '.join(parts)}; {self.dropped:,} dropped"
        if self.twice or self.missing:
            line += f"; {self.twice:,} TAKEN TWICE, {self.missing:,} MISSING"
        return line


def told_with_account(run: Path, status: RunStatus) -> str:
    """What a status tells, and the account of the run: it reads the whole schedule, so not at every look."""
    if status.statistics is None:
        return status.told
    # Where a run began again, the schedule of before was set aside, too.
    again = sum(each.frames for each in repeated_in(run) if each.from_frames)
    account = account_of(run, status.statistics.frames, again)
    if account is None:
        return status.told
    return f"{status.told}\n{account}"


def account_of(run: Path, frames: int, again: int) -> Account | None:
    """The account of a run that has learned from so many frames now, of which ``again`` were made again.

    None: it has no schedule, or one that an earlier rlsync wrote, or a long one.
    """
    file = run / SCHEDULE
    if not file.is_file() or file.stat().st_size > _LONGEST_BYTES:
        return None
    try:
        lives = schedule.lives_in(file)
    except ConfigError:  # it has no rollouts yet, or is damaged
        return None
    size = lives[-1].facts.get("rollout_frames")
    if size is None or any(life.facts.get("rollout_frames") != size for life in lives):
        return None
    counts = Counter[str]()
    for life in lives:
        counts.update(_counted(life.rollouts))
    all_taken = counts["taken"] * size
    # It began in another folder, whose frames are not in this schedule; or its numbers are older than that is.
    if lives[0].facts.get("resumed") or all_taken < frames + again:
        return None
    return Account(
        taken=all_taken,
        learned=frames,
        again=again,
        waiting=all_taken - frames - again,
        dropped=counts["dropped"] * size,
        twice=counts["twice"] * size,
        missing=counts["missing"] * size,
    )


def _counted(rollouts: Sequence[schedule.Rollout]) -> Counter[str]:
    """How many rollouts of a life were taken, dropped, taken twice, and are missing between others."""
    counts = Counter[str]()
    numbers: dict[int, set[int]] = {}
    for rollout in rollouts:
        counts["dropped" if rollout.dropped else "taken"] += 1
        seen_before = numbers.setdefault(rollout.worker, set())
        counts["twice"] += rollout.number in seen_before
        seen_before.add(rollout.number)
    for each in numbers.values():
        counts["missing"] += max(each) + 1 - len(each)
    return counts

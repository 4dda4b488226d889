"""What a run has come to, read from its folder: how it ended, its returns, its policy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsync import RlsyncError
from rlsync.runs.evaluation.process import Evaluated, read_evaluations
from rlsync.runs.life.policy import Which, load_policy
from rlsync.runs.life.state import TARGET_REACHED, ended
from rlsync.runs.recipes.run_files import EVALUATIONS, best_agent, statistics_in
from rlsync.runs.recipes.settings import (
    AUTO,
    BEST,
    FRAMES_TO_TARGET,
    RETURN,
    SECONDS_TO_TARGET,
)

if TYPE_CHECKING:
    from rlsync.runs.evaluation.policy import Policy


class NoObjective(RlsyncError):
    """A run has no number that says how good it is."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the run in a folder has come to; while it goes on, what it has come to so far.

    Of a population, the returns are those of its best agent.

    Example:
        >>> from rlsync.runs import train
        >>> result = train("recipe=dqn", "recipe.total_frames=2000")  # doctest: +SKIP
        >>> result.how, result.last_return  # doctest: +SKIP
        ('total_frames collected', 21.4)
        >>> policy = result.load_policy("best")  # doctest: +SKIP
    """

    #: The run's folder.
    folder: Path
    #: Why it ended: "total_frames collected", "target return reached", "interrupted", "terminated" or "failed";
    #: "not ended" while it goes on, or if it was killed.
    how: str
    #: The exit status that ``rlsync train`` has for this end; None: it has not ended.
    status: int | None = None
    #: Collected frames; None before the first batch.
    frames: int | None = None
    #: The newest published version; None before the first batch.
    version: int | None = None
    #: Seconds that the run took in the process that ended it; None: it has not ended.
    seconds: float | None = None
    #: Mean return of the newest training episodes; None if none has ended, or it is not a finite number.
    last_return: float | None = None
    #: Mean return of the best evaluation; None if there is none.
    best_return: float | None = None
    #: All evaluations, oldest first; each has ``version``, ``return_mean`` and more.
    evaluations: tuple[Evaluated, ...] = ()

    @classmethod
    def of(cls, folder: str | Path) -> RunResult:
        """What the run in this folder has come to.

        Args:
            folder: as ``rlsync train`` prints it.

        Raises:
            ConfigError: a file of the run cannot be read.
        """
        folder = Path(folder).absolute()
        agent = best_agent(folder)
        result = cls(folder, "not ended", evaluations=tuple(read_evaluations(agent / EVALUATIONS)))
        best = max(result.evaluations, key=lambda each: each.rank, default=None)
        if best is not None and math.isfinite(best.return_mean):
            result = replace(result, best_return=best.return_mean)
        numbers = statistics_in(agent)
        if numbers is not None:
            result = replace(
                result,
                frames=numbers.frames,
                version=numbers.version,
                last_return=numbers.return_mean,
            )
        end = ended(folder)
        if end is None:
            return result
        result = replace(result, how=end.how, status=end.status, seconds=end.seconds)
        if end.frames is not None:
            result = replace(result, frames=end.frames)
        if end.version is not None:
            result = replace(result, version=end.version)
        return result

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, as ``rlsync train --json`` prints it."""
        return asdict(self) | {"folder": str(self.folder)}

    def load_policy(self, which: Which = "last", *, greedy: bool = True) -> Policy:
        """The policy that the run trained, on the CPU, as :func:`rlsync.load_policy` returns it.

        Args:
            which: "last", "best" or the number of a version.
            greedy: take the likeliest action in place of drawing one.

        Raises:
            ConfigError: the run has no such version, or it cannot be loaded.
        """
        return load_policy(self.folder, which, greedy=greedy)

    def objective(self, kind: str = AUTO) -> float:
        """One finite number that says how good the run is; the larger, the better.

        Args:
            kind: which number, as the key ``objective`` names it.

        Raises:
            NoObjective: the run does not have it.
        """
        value = self._number(kind)
        if value is not None and math.isfinite(value):
            return value
        lacks, cure = _LACKS[kind]
        raise NoObjective(f"the run has {lacks}", f"{self.folder}, objective={kind}", cure)

    def _number(self, kind: str) -> float | None:
        reached = self.how == TARGET_REACHED
        if kind == FRAMES_TO_TARGET:
            return -self.frames if reached and self.frames is not None else None
        if kind == SECONDS_TO_TARGET:
            return -self.seconds if reached and self.seconds is not None else None
        if kind == BEST or (kind == AUTO and self.best_return is not None):
            return self.best_return
        return self.last_return


_MORE = "give more frames, so that an episode ends"
_TARGET = ("not reached its target return", "give recipe.target_return, and more frames")

#: By objective: what a run without it lacks, and what to do.
_LACKS = {
    AUTO: ("neither an evaluation nor an episode with a finite return", _MORE),
    BEST: (
        "no evaluation with a finite return",
        "give recipe.evaluation.every_frames, or more frames",
    ),
    RETURN: ("no episode with a finite return", _MORE),
    FRAMES_TO_TARGET: _TARGET,
    SECONDS_TO_TARGET: _TARGET,
}

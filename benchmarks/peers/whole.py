"""How long whole runs took, and their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from peers.rounds import beside, markdown, median, shown
from peers.watch import Sample

#: the figure that stands for those of all rounds
Pick = Callable[[Iterable[float | None]], float | None]


@dataclass(frozen=True, slots=True)
class Whole:
    """One run.

    Args:
        process_s: from the start of its process to the end, with all imports; without evaluations for which
            the learner stood still.
        seconds: from before its first frame to its last update, without such evaluations.
        cpu_s: processor time of the contender's process tree in these seconds.
        frames: collected.
        updates: optimizer steps; passes over a batch where the contender counts these.
        reached: whether it ended at its target return.
        start_s: processor time before the first frame.
    """

    process_s: float
    seconds: float
    cpu_s: float
    frames: int
    updates: int
    reached: int
    start_s: float


def whole(samples: Sequence[Sample]) -> Whole:
    """What a run that reports at its beginning and at its end took.

    Raises:
        RuntimeError: there are too few reports.
    """
    reports = [sample for sample in samples if "steps" in sample.said]
    if len(reports) < 2:
        raise RuntimeError(f"{len(reports)} reports are too few")
    first, last = reports[0], reports[-1]
    evaluating_s = last.said.get("evaluating_s", 0.0)
    reached = [sample.said["reached"] for sample in samples if "reached" in sample.said]
    return Whole(
        process_s=samples[-1].at_s - samples[0].at_s - evaluating_s,
        seconds=last.said["seconds"] - first.said["seconds"] - evaluating_s,
        cpu_s=last.cpu_s - first.cpu_s - evaluating_s,
        frames=int(last.said["steps"]),
        updates=int(last.said["updates"]),
        reached=int(reached[-1]) if reached else 0,
        start_s=first.cpu_s,
    )


def least(values: Iterable[float | None]) -> float | None:
    """The least of those that are known: of equal runs, that which other load disturbed least."""
    return min((value for value in values if value is not None), default=None)


#: The columns of the table; those of times have one more, which puts them beside the peer.
FIGURES = ("process_s", "seconds", "cpu_s", "start_s", "frames", "updates")
TIMES = ("process_s", "seconds", "cpu_s")
COUNTS = ("frames", "updates")


def whole_table(measured: Mapping[str, Sequence[Whole]], peer: str, pick: Pick = median) -> str:
    """What each contender took, as a Markdown table.

    Args:
        measured: the runs of each contender.
        peer: the contender beside which the columns of times put the others.
        pick: ``least`` for runs that all do the same, ``median`` for runs with seeds of their own. The last
            column has the seconds of all.
    """
    heads = [name.replace("_", " ") for name in FIGURES]
    times = [f"{name.replace('_', ' ')} x {peer}" for name in TIMES]
    columns = (*heads, *times, "reached", "seconds of each run")
    rows = [("contender", *columns), ("---", *("---:" for _ in columns))]
    other = _picked(measured.get(peer, ()), pick)
    for contender, runs in measured.items():
        own = _picked(runs, pick)
        found = [shown(own[name], 0 if name in COUNTS else 1) for name in FIGURES]
        compared = [beside(own[name], other[name]) for name in TIMES]
        reached = f"{sum(one.reached for one in runs)} of {len(runs)}"
        each = " ".join(shown(one.seconds, 1) for one in runs)
        rows.append((contender, *found, *compared, reached, each))
    return markdown(rows)


def _picked(runs: Sequence[Whole], pick: Pick) -> dict[str, float | None]:
    found = [asdict(one) for one in runs]
    return {name: pick(one[name] for one in found) for name in FIGURES}

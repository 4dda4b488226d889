"""How long whole runs took, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from peers.rounds import beside, markdown, medians, shown
from peers.watch import Sample


@dataclass(frozen=True, slots=True)
class Whole:
    """One run, from before its first frame to its end.

    Args:
        seconds: without evaluations for which the learner stood still.
        cpu_s: processor time of the contender's process tree.
        frames: collected.
        updates: optimizer steps; passes over a batch where the contender counts these.
        reached: whether it ended at its target return.
        start_s: processor time before the first frame.
    """

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
    if len(samples) < 2:
        raise RuntimeError(f"{len(samples)} reports are too few")
    first, last = samples[0], samples[-1]
    return Whole(
        seconds=last.at_s - first.at_s - last.said.get("evaluating_s", 0.0),
        cpu_s=last.cpu_s - first.cpu_s - last.said.get("evaluating_s", 0.0),
        frames=int(last.said["steps"]),
        updates=int(last.said["updates"]),
        reached=int(last.said["reached"]),
        start_s=first.cpu_s,
    )


def whole_table(measured: Mapping[str, Sequence[Whole]], peer: str) -> str:
    """The medians over the rounds, as a Markdown table; the last two columns put them beside the peer."""
    names = [field.name for field in fields(Whole) if field.name != "reached"]
    heads = [
        *(name.replace("_", " ") for name in names),
        "reached",
        *(f"{n} x {peer}" for n in ("seconds", "cpu s")),
    ]
    rows = [("contender", *heads), ("---", *("---:" for _ in heads))]
    other = medians(measured.get(peer, ()), names)
    for contender, runs in measured.items():
        own = medians(runs, names)
        times = [beside(own[name], other[name]) for name in ("seconds", "cpu_s")]
        reached = f"{sum(one.reached for one in runs)} of {len(runs)}"
        rows.append((contender, *(shown(own[name], 1) for name in names), reached, *times))
    return markdown(rows)

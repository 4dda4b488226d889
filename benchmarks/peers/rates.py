"""Frames and updates per second of runs that learn from a replay buffer, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from peers.rounds import beside, markdown, medians, shown
from peers.watch import Sample, figures


@dataclass(frozen=True, slots=True)
class Rates:
    """What one run did, without its first third.

    Args:
        frames_per_s: environment frames per second.
        updates_per_s: optimizer steps per second.
        updates_per_frame: the ratio of the two.
        updates_per_cpu_s: optimizer steps per second of processor time.
        cpu_per_s: processor seconds per second, of the contender's process tree.
        others_cpu_per_s: processor seconds per second of everything else on the machine.
    """

    frames_per_s: float
    updates_per_s: float
    updates_per_frame: float
    updates_per_cpu_s: float
    cpu_per_s: float
    others_cpu_per_s: float


def rates(samples: Sequence[Sample]) -> Rates:
    """The rates of the part of a run that learns.

    Raises:
        RuntimeError: there are too few reports.
    """
    learning = [sample for sample in samples if sample.said.get("updates")]
    steady = figures(learning)
    window = [sample for sample in learning if sample.at_s >= learning[-1].at_s - steady.window_s]
    updates = window[-1].said["updates"] - window[0].said["updates"]
    return Rates(
        frames_per_s=steady.steps_per_s,
        updates_per_s=updates / steady.window_s,
        updates_per_frame=updates / steady.steps,
        updates_per_cpu_s=updates / steady.window_s / steady.cpu_per_s,
        cpu_per_s=steady.cpu_per_s,
        others_cpu_per_s=steady.others_cpu_per_s,
    )


def table(measured: Mapping[str, Sequence[Rates]], peer: str) -> str:
    """The medians over the rounds, as a Markdown table.

    Args:
        measured: the runs of each contender.
        peer: the contender beside which the last two columns put the others.
    """
    names = [field.name for field in fields(Rates)]
    compared = ("updates_per_s", "updates_per_cpu_s")
    heads = [name.replace("_per_", "/").replace("_", " ") for name in names]
    ratios = [f"{heads[names.index(name)]} x {peer}" for name in compared]
    rows = [("contender", *heads, *ratios), ("---", *("---:" for _ in (*heads, *ratios)))]
    other = medians(measured.get(peer, ()), names)
    for contender, runs in measured.items():
        own = medians(runs, names)
        found = [shown(own[name], 2) for name in names]
        rows.append((contender, *found, *(beside(own[name], other[name]) for name in compared)))
    return markdown(rows)

"""What runs that differ in their seeds alone have come to together: rliable's interquartile mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlsync.runs.life.run_folder import Curve, Numbers, RunFolder

BOOTSTRAPS = 10_000
_PERCENT = (2.5, 97.5)

#: Points of a curve over seeds.
POINTS = 60

#: A legend names so many keys in which runs differ.
MOST_KEYS = 3

Settings = tuple[tuple[str, str], ...]  #: a run's keys and values, besides its seed


@dataclass(frozen=True, slots=True)
class OverSeeds:
    """One number of several runs: mean, interquartile mean, and its 95 % interval.

    The interquartile mean leaves a quarter of the values out at each end, rounded down. The interval is that of
    10,000 bootstraps over runs, drawn by a generator of a fixed seed.

    Example:
        >>> eight = OverSeeds.of([0, 1, 2, 3, 4, 5, 6, 100])
        >>> eight.mean, eight.iqm
        (15.125, 3.5)
        >>> OverSeeds.of([7.0, 7.0])
        OverSeeds(mean=7.0, iqm=7.0, low=7.0, high=7.0)
    """

    mean: float
    iqm: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | Numbers) -> OverSeeds:
        """Of one number of each run."""
        numbers = np.asarray(values, dtype=float)
        drawn = np.random.default_rng(0).choice(numbers, (BOOTSTRAPS, len(numbers)))
        low, high = np.percentile(_interquartile_means(drawn), _PERCENT)
        (iqm,) = _interquartile_means(numbers[None])
        return cls(float(numbers.mean()), float(iqm), float(low), float(high))


def _interquartile_means(rows: Numbers) -> NDArray[np.float64]:
    cut = rows.shape[1] // 4
    middle = np.sort(rows, axis=1)[:, cut : rows.shape[1] - cut]
    means: NDArray[np.float64] = middle.mean(axis=1)
    return means


def curve_over_seeds(curves: Sequence[Curve]) -> tuple[Numbers, list[OverSeeds]]:
    """Frames that all curves have, and what the runs had come to there, between the points of their curves.

    There are none if a curve is empty, or no frames are common to all.
    """
    if not all(len(curve.frames) for curve in curves):
        return np.empty(0), []
    first = max(curve.frames[0] for curve in curves)
    last = min(curve.frames[-1] for curve in curves)
    if first >= last:
        return np.empty(0), []
    frames = np.linspace(first, last, POINTS)
    columns = [np.interp(frames, curve.frames, curve.values) for curve in curves]
    return frames, [OverSeeds.of(row) for row in np.array(columns).T]


def groups_of(runs: dict[str, RunFolder]) -> dict[str, dict[str, RunFolder]]:
    """Runs that differ in their seeds alone, by what the legend calls them."""
    alike: dict[Settings, dict[str, RunFolder]] = {}
    for name, run in runs.items():
        alike.setdefault(tuple(run.all_but_seed.items()), {})[name] = run
    differing = _differing([*alike])
    groups = {}
    for settings, members in alike.items():
        first, *others = members
        about = members[first].about
        if not others:
            label = f"{first}: {members[first].describe()}"
        elif differing:
            values = [f"{key}={value}" for key, value in settings if key in differing]
            label = f"{about}, {' '.join(values)}, {len(members)} seeds"
        else:
            label = f"{first} to {others[-1]}: {about}, {len(members)} seeds"
        groups[label] = members
    return groups


def _differing(groups: Sequence[Settings]) -> set[str]:
    """The keys of which groups have different values; none if they are too many for a legend."""
    values: dict[str, set[str]] = {}
    for settings in groups:
        for key, value in settings:
            values.setdefault(key, set()).add(value)
    keys = {key for key, of_key in values.items() if len(of_key) > 1}
    if len(keys) > MOST_KEYS:
        return set()
    return keys

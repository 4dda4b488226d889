"""The pictures of ``rlsync plot`` and ``rlsync timeline``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from rlsync import ConfigError
from rlsync.runs.cli.over_seeds import curve_over_seeds, groups_of
from rlsync.runs.life.run_folder import Curve, NotRecorded, RunFolder
from rlsync.seams import schedule, whole_file

#: The palette of Okabe and Ito, for colour-blind readers, without its yellow, which is too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: different dashes, so that both lines can be seen where they overlap
DASHES = ("-", "--", "-.", ":")

#: A curve with more points is drawn as medians of groups, with a band from the 5th to the 95th percentile.
MOST_POINTS = 150
GROUPS = 60
#: An axis of whole numbers goes up to this at least: with fewer, ticks would fall between them.
LEAST_TOP = 4


@dataclass(frozen=True, slots=True)
class Style:
    colour: str
    dashes: str
    alone: bool


@dataclass(frozen=True, slots=True)
class Layer:
    """Curves that are read from runs and drawn; a note says what is ``expected`` and missing."""

    read: Callable[[RunFolder], Curve]
    draw: Callable[[Axes, Sequence[Curve], Style], None]
    expected: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture in the figure; ``x`` and ``y`` label the axes with quantity or unit."""

    title: str
    x: str
    y: str
    layers: tuple[Layer, ...]
    # sets scale and ticks, after everything is drawn
    scale: Callable[[Axes], object] = lambda axes: None


@dataclass(frozen=True, slots=True)
class Reading:
    """The curves of runs that differ in their seeds alone, for one layer; most groups are of one run."""

    panel: Panel
    layer: Layer
    group: str
    curves: tuple[Curve, ...]


def check_file(out: Path) -> None:
    whole_file.check_folder(out)
    known = Figure().canvas.get_supported_filetypes()
    if out.suffix.removeprefix(".") not in known:
        problem = f"no picture format {out.suffix!r}"
        raise ConfigError(problem, str(out), f"end it in .png; also: {', '.join(known)}")


def draw(runs: dict[str, RunFolder]) -> tuple[Figure, list[str]]:
    """Draw all runs, given by name, in one figure. Returns it with notes on what is left out.

    Runs that differ in their seeds alone have a thin line each, and together that of their interquartile mean
    with its 95 % interval, as far as all of them have come.
    """
    (figure,), notes = draw_each(runs, (2,))
    return figure, notes


def draw_each(runs: dict[str, RunFolder], columns: Sequence[int]) -> tuple[list[Figure], list[str]]:
    """The figure with each number of columns; the runs are read once."""
    groups = groups_of(runs)
    readings, notes = _read(groups)
    if not readings:
        raise ConfigError(
            "there is nothing to draw", "; ".join(notes), "name a run that has published"
        )
    styles = {}
    for group, colour, dashes in zip(groups, itertools.cycle(COLOURS), itertools.cycle(DASHES)):
        styles[group] = Style(colour, dashes, alone=len(groups) == 1)
    return [_drawn(readings, styles, number) for number in columns], notes


def _drawn(readings: list[Reading], styles: dict[str, Style], columns: int) -> Figure:
    panels = list(dict.fromkeys(reading.panel for reading in readings))
    figure, axes = _laid_out(panels, columns)
    for reading in readings:
        reading.layer.draw(axes[reading.panel], reading.curves, styles[reading.group])
    for panel in panels:
        _finish(axes[panel], panel)
    _name_groups(figure, styles, readings, columns)
    return figure


def write_below(figure: Figure, notes: list[str]) -> None:
    """Write into the figure what is left out of it."""
    if notes:
        figure.supxlabel(
            "left out: " + "\n".join(notes), x=0.01, ha="left", fontsize="small", color="0.4"
        )


def _laid_out(panels: list[Panel], columns: int) -> tuple[Figure, dict[Panel, Axes]]:
    """A figure with axes for each panel; the first, and a last without a partner, fill a row."""
    last = len(panels) - 1
    rows = [[0] * columns]
    for left in range(1, len(panels), columns):
        rows.append([min(left + column, last) for column in range(columns)])
    size = (5 * columns, 1.2 + 2.6 * len(rows))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    places: dict[int, Axes] = figure.subplot_mosaic(rows)  # type: ignore[arg-type]
    axes = {panel: places[place] for place, panel in enumerate(panels)}
    over_frames = [axes[panel] for panel in panels if panel.x == FRAMES]
    for other in over_frames[1:]:
        other.sharex(over_frames[0])
    return figure, axes


def _read(groups: dict[str, dict[str, RunFolder]]) -> tuple[list[Reading], list[str]]:
    readings = []
    notes = []
    for panel in PANELS:
        for layer in panel.layers:
            for group, runs in groups.items():
                curves = []
                for name, run in runs.items():
                    try:
                        curves.append(layer.read(run))
                    except NotRecorded as lacking:
                        if layer.expected:
                            notes.append(f"{panel.title}, run {name}: {lacking}")
                if curves:
                    readings.append(Reading(panel, layer, group, tuple(curves)))
    return readings, notes


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(EngFormatter())
    panel.scale(axes)


def _name_groups(
    figure: Figure, styles: dict[str, Style], readings: list[Reading], columns: int
) -> None:
    handles = []
    for group, style in styles.items():
        handles.append(Line2D([], [], color=style.colour, ls=style.dashes, label=group))
    alone = [reading.curves[0] for reading in readings if len(reading.curves) == 1]
    if len(alone) < len(readings):
        label = "interquartile mean of seeds, 95 % interval"
        handles.append(Line2D([], [], color="0.8", lw=6, label=label))
    evaluated = [len(each.curves) for each in readings if each.layer is EVALUATIONS]
    if evaluated:
        label = "evaluations of each seed"
        if 1 in evaluated:
            label = "evaluations, ± standard deviation"
        handles.append(Line2D([], [], color="0.3", marker="o", mfc="white", ls="none", label=label))
    if any(len(curve.frames) > MOST_POINTS for curve in alone):
        label = "5th to 95th percentile, around the median"
        handles.append(Line2D([], [], color="0.8", lw=6, label=label))
    figure.legend(
        handles=handles,
        loc="outside upper left",
        frameon=False,
        ncols=min(len(handles), columns),
    )


def _line(axes: Axes, curves: Sequence[Curve], style: Style) -> None:
    if len(curves) > 1:
        _band(axes, [_thinned(curve) for curve in curves], style)
        return
    (curve,) = curves
    thinned = _thinned(curve)
    if thinned is not curve:
        groups = np.array_split(curve.values, GROUPS)
        low, high = np.array([np.percentile(group, (5, 95)) for group in groups]).T
        axes.fill_between(thinned.frames, low, high, color=style.colour, alpha=0.2, lw=0)
    marker = None
    if len(thinned.frames) <= 30:
        marker = "o"
    # Not clipped: a line of zeros lies on the axis.
    axes.plot(
        thinned.frames,
        thinned.values,
        c=style.colour,
        ls=style.dashes,
        lw=1.4,
        marker=marker,
        ms=3.5,
        clip_on=False,
    )


def _thinned(curve: Curve) -> Curve:
    """The medians of groups of a curve's points, if it has many; else the curve itself."""
    if len(curve.frames) <= MOST_POINTS:
        return curve
    frames = [group.mean() for group in np.array_split(curve.frames, GROUPS)]
    values = [np.median(group) for group in np.array_split(curve.values, GROUPS)]
    return Curve(np.array(frames), np.array(values))


def _band(axes: Axes, curves: Sequence[Curve], style: Style) -> None:
    """Each curve as a thin line, and what they have come to together."""
    for curve in curves:
        axes.plot(curve.frames, curve.values, c=style.colour, lw=0.6, alpha=0.35)
    frames, together = curve_over_seeds(curves)
    rows = [(over.low, over.iqm, over.high) for over in together]
    low, middle, high = np.array(rows).reshape(-1, 3).T
    axes.fill_between(frames, low, high, color=style.colour, alpha=0.2, lw=0)
    axes.plot(frames, middle, c=style.colour, ls=style.dashes, lw=2, clip_on=False)


def _points(axes: Axes, curves: Sequence[Curve], style: Style) -> None:
    for curve in curves:
        spread = None
        if len(curves) == 1:  # of several it would hide how far the seeds are apart
            spread = curve.spread
        axes.errorbar(
            curve.frames, curve.values, spread, fmt="o", c=style.colour, mfc="white", zorder=3
        )


def _histogram(axes: Axes, curves: Sequence[Curve], style: Style) -> None:
    ages = np.concatenate([curve.frames for curve in curves])
    steps = np.concatenate([curve.values for curve in curves])
    oldest = max(int(ages.max()), LEAST_TOP)
    width = 1 + oldest // GROUPS  # more bars than pixels would make a pattern that is not there
    edges = np.arange(0, oldest + width + 1, width) - 0.5
    percent, _ = np.histogram(ages, edges, weights=100 * steps / steps.sum())
    if style.alone:
        middles = edges[:-1] + width / 2
        of_bar = float(width)
        if width == 1:
            of_bar = 0.8
        axes.bar(middles, percent, of_bar, color=style.colour)
    else:
        axes.stairs(percent, edges, color=style.colour, ls=style.dashes, lw=1.4)


def _ages(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def _whole_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_ylim(0, max(axes.get_ylim()[1], LEAST_TOP))


def _bytes(axes: Axes) -> None:
    _whole_numbers(axes)
    axes.yaxis.set_major_formatter(EngFormatter("B"))


def _decades(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


FRAMES = "collected frames"
RETURN = Layer(lambda run: run.metric("return"), _line)
EVALUATIONS = Layer(RunFolder.evaluations, _points, expected=False)
LAG = Layer(lambda run: run.metric("sync/lag_versions"), _line)
STALENESS = Layer(RunFolder.staleness, _histogram)
MILLISECONDS = Layer(lambda run: run.of_receipts(lambda receipt: 1e3 * receipt.duration_s), _line)
BYTES = Layer(lambda run: run.of_receipts(lambda receipt: receipt.copied_bytes), _line)

PANELS = (
    Panel("Return of the newest episodes", FRAMES, "mean", (RETURN, EVALUATIONS)),
    Panel("Policy lag of the slowest worker", FRAMES, "versions", (LAG,), _whole_numbers),
    Panel("Staleness of consumed steps", "versions", "% of steps", (STALENESS,), _ages),
    Panel("Duration of a publish", FRAMES, "ms", (MILLISECONDS,), _decades),
    Panel("Bytes copied by a publish", FRAMES, "bytes", (BYTES,), _bytes),
)


def lanes(lives: Mapping[str, schedule.Life]) -> Figure:
    """A lane for each worker, its rollouts coloured by the version that acted; publishes below."""
    heights = [1.5 + 0.5 * len(_workers(life)) for life in lives.values()]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    rows = figure.subplots(len(lives), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, life) in zip(rows, lives.items(), strict=True):
        _draw_life(axes, life)
        if len(lives) > 1:
            axes.set_title(name, loc="left", fontsize="medium")
    lines = (
        "hatched: a worker's later life, crossed: dropped, dotted: checkpoint, end, or another note"
    )
    rows[-1].set_xlabel(f"seconds; {lines}")
    return figure


def _draw_life(axes: Axes, life: schedule.Life) -> None:
    workers = _workers(life)
    for rollout, begin_ms in life.spans():
        hatch = None
        if rollout.dropped:
            hatch = "xx"
        elif rollout.life % 2:
            hatch = "//"
        axes.barh(
            y=workers.index(rollout.worker) + 1,
            width=(rollout.ms - begin_ms) / 1000,
            height=0.8,
            left=begin_ms / 1000,
            color=COLOURS[rollout.version % len(COLOURS)],
            edgecolor="white",
            hatch=hatch,
            lw=0.3,
        )
    seconds = [publish.ms / 1000 for publish in life.publishes]
    axes.plot(seconds, [0] * len(seconds), "|", color="black", ms=12)
    for note in life.notes:
        axes.axvline(note["ms"] / 1000, color="grey", lw=0.5, ls=":")
    axes.set_yticks(range(len(workers) + 1), ["publishes", *map(schedule.named, workers)])


def _workers(life: schedule.Life) -> list[int]:
    return sorted({rollout.worker for rollout in life.rollouts})

"""The pictures of ``rlsync plot`` and ``rlsync timeline``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from rlsync import ConfigError
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
    """A curve that is read from a run and drawn. If it is ``expected`` and missing, a note says so."""

    read: Callable[[RunFolder], Curve]
    draw: Callable[[Axes, Curve, Style], None]
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


Reading = tuple[Panel, Layer, str, Curve]  #: the curve of the run of this name for one layer


def check_file(out: Path) -> None:
    whole_file.check_folder(out)
    known = Figure().canvas.get_supported_filetypes()
    if out.suffix.removeprefix(".") not in known:
        problem = f"no picture format {out.suffix!r}"
        raise ConfigError(problem, str(out), f"end it in .png; also: {', '.join(known)}")


def draw(runs: dict[str, RunFolder]) -> tuple[Figure, list[str]]:
    """Draw all runs, given by name, in one figure. Returns it with notes on what is left out."""
    readings, notes = _read(runs)
    panels = list(dict.fromkeys(panel for panel, *_ in readings))
    if not panels:
        raise ConfigError(
            "there is nothing to draw", "; ".join(notes), "name a run that has published"
        )
    styles = {}
    for name, colour, dashes in zip(runs, itertools.cycle(COLOURS), itertools.cycle(DASHES)):
        styles[name] = Style(colour, dashes, alone=len(runs) == 1)
    figure, axes = _laid_out(panels)
    for panel, layer, name, curve in readings:
        layer.draw(axes[panel], curve, styles[name])
    for panel in panels:
        _finish(axes[panel], panel)
    _name_runs(figure, runs, styles, readings)
    if notes:
        figure.supxlabel(
            "left out: " + "\n".join(notes), x=0.01, ha="left", fontsize="small", color="0.4"
        )
    return figure, notes


def _laid_out(panels: list[Panel]) -> tuple[Figure, dict[Panel, Axes]]:
    """A figure with axes for each panel, two in a row; the first, and a last without a partner, fill one."""
    last = len(panels) - 1
    rows = [[0, 0]]
    for left in range(1, len(panels), 2):
        rows.append([left, min(left + 1, last)])
    figure = Figure(figsize=(10, 1.2 + 2.6 * len(rows)), dpi=120, layout="constrained")
    places: dict[int, Axes] = figure.subplot_mosaic(rows)  # type: ignore[arg-type]
    axes = {panel: places[place] for place, panel in enumerate(panels)}
    over_frames = [axes[panel] for panel in panels if panel.x == FRAMES]
    for other in over_frames[1:]:
        other.sharex(over_frames[0])
    return figure, axes


def _read(runs: dict[str, RunFolder]) -> tuple[list[Reading], list[str]]:
    readings = []
    notes = []
    for panel in PANELS:
        for layer in panel.layers:
            for name, run in runs.items():
                try:
                    readings.append((panel, layer, name, layer.read(run)))
                except NotRecorded as lacking:
                    if layer.expected:
                        notes.append(f"{panel.title}, run {name}: {lacking}")
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


def _name_runs(
    figure: Figure, runs: dict[str, RunFolder], styles: dict[str, Style], readings: list[Reading]
) -> None:
    handles = []
    for name, run in runs.items():
        style = styles[name]
        label = f"{name}: {run.describe()}"
        handles.append(Line2D([], [], color=style.colour, ls=style.dashes, label=label))
    if any(layer.draw is _points for _, layer, _, _ in readings):
        label = "evaluations, ± standard deviation"
        handles.append(Line2D([], [], color="0.3", marker="o", mfc="white", ls="none", label=label))
    if any(len(curve.frames) > MOST_POINTS for *_, curve in readings):
        label = "5th to 95th percentile, around the median"
        handles.append(Line2D([], [], color="0.8", lw=6, label=label))
    columns = min(len(handles), 2)
    figure.legend(handles=handles, loc="outside upper left", frameon=False, ncols=columns)


def _line(axes: Axes, curve: Curve, style: Style) -> None:
    frames = curve.frames
    values = curve.values
    if len(frames) > MOST_POINTS:
        percentiles = []
        for group in np.array_split(values, GROUPS):
            percentiles.append(np.percentile(group, (5, 50, 95)))
        low, values, high = np.array(percentiles).T
        frames = np.array([group.mean() for group in np.array_split(frames, GROUPS)])
        axes.fill_between(frames, low, high, color=style.colour, alpha=0.2, lw=0)
    marker = None
    if len(frames) <= 30:
        marker = "o"
    # Not clipped: a line of zeros lies on the axis.
    axes.plot(
        frames,
        values,
        c=style.colour,
        ls=style.dashes,
        lw=1.4,
        marker=marker,
        ms=3.5,
        clip_on=False,
    )


def _points(axes: Axes, curve: Curve, style: Style) -> None:
    axes.errorbar(
        curve.frames, curve.values, curve.spread, fmt="o", c=style.colour, mfc="white", zorder=3
    )


def _histogram(axes: Axes, curve: Curve, style: Style) -> None:
    oldest = max(int(curve.frames.max()), LEAST_TOP)
    width = 1 + oldest // GROUPS  # more bars than pixels would make a pattern that is not there
    edges = np.arange(0, oldest + width + 1, width) - 0.5
    percent, _ = np.histogram(curve.frames, edges, weights=100 * curve.values / curve.values.sum())
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

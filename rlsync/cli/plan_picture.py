"""The picture of ``rlsync plan --plot``, in the style of ``rlsync plot``."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from rlsync.cli.panels import COLOURS, FRAMES, check_format
from rlsync.recipes.timeline import Timeline

__all__ = ["check_format", "draw"]

#: The rows of a plan, from top to bottom.
ROWS = ("prefill", "learning", "evaluation", "checkpoint")
#: More marks than these in a row are drawn as a bar, whose length says from when to when.
MOST_MARKS = 200


def draw(titles: Sequence[str], plans: Sequence[Timeline]) -> Figure:
    """One panel for each plan: its phases as bars, its evaluations and checkpoints as marks, over frames.

    Args:
        titles: one for each plan.
        plans: one or more.

    Example:
        >>> from rlsync.recipes.settings import Config
        >>> from rlsync.recipes.timeline import timeline
        >>> figure = draw(["ppo"], [timeline(Config())])
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['prefill', 'learning', 'evaluation', 'checkpoint']
    """
    figure = Figure(figsize=(10, 2.4 * len(plans)), dpi=120, layout="constrained")
    panels = figure.subplots(len(plans), squeeze=False)[:, 0]
    for axes, title, plan in zip(panels, titles, plans, strict=True):
        _draw(axes, title, plan)
    return figure


def _draw(axes: Axes, title: str, plan: Timeline) -> None:
    for phase in plan.phases:
        row = ROWS.index(phase.name)
        wide = phase.last_frame + 1 - phase.first_frame
        axes.barh(row, wide, 0.6, left=phase.first_frame, color=COLOURS[row])
        told = f" {phase.rounds:,} rounds, {phase.updates:,} updates"
        axes.text(phase.first_frame, row, told, va="center", fontsize="small", clip_on=True)
    _marks(axes, "evaluation", plan.evaluation_every_frames, plan.frames)
    _marks(axes, "checkpoint", plan.checkpoint_every_frames, plan.frames, at_the_end=True)
    published = "" if plan.publishes is None else f", {plan.publishes:,} publishes"
    axes.set_title(
        f"{title}: {plan.updates:,} updates{published}", loc="left", fontsize="medium", fontweight="bold"
    )
    axes.set_yticks(range(len(ROWS)), ROWS)
    axes.set_ylim(len(ROWS) - 0.5, -0.5)  # the first row on top
    axes.set_xlim(0, plan.frames * 1.01)
    axes.set_xlabel(FRAMES)
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.spines[["top", "right"]].set_visible(False)


def _marks(axes: Axes, name: str, every: int, frames: int, *, at_the_end: bool = False) -> None:
    """Marks at the first frames at which something may happen; it waits for the end of a batch."""
    row = ROWS.index(name)
    places = list(range(every, frames, every)) if every else []
    places += [frames] if at_the_end else []
    if len(places) > MOST_MARKS:
        axes.barh(row, places[-1] - places[0], 0.2, left=places[0], color=COLOURS[row])
    else:
        axes.plot(places, [row] * len(places), "|", color=COLOURS[row], ms=12, mew=2, clip_on=False)

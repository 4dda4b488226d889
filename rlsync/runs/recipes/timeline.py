"""What a run will do, and when: asked of the same settings that the run keeps to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlsync import ConfigError
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.sync_settings import trigger
from rlsync.seams import Counters, Trigger

_MOST_ROUNDS = 2_000_000  #: of a plan: they are counted one by one, and kept


@dataclass(frozen=True, slots=True)
class Iteration:
    """One round of the learner: it takes a batch, and updates as often as the pace allows."""

    frames: int  # collected when the batch has arrived
    updates: int  # done when the round is over


def rounds(config: Config) -> Iterator[Iteration]:
    """All rounds of a run that is not ended early; ConfigError if the recipe has no plan of its steps."""
    recipe = config.recipe
    updates = 0
    for frames in _batches(config):
        due = recipe.updates_after(config, frames, updates)
        if due is None:
            problem = f"the recipe {recipe.name!r} does not say how many updates follow a batch"
            raise ConfigError(
                problem, "recipe", f"give {type(recipe).__name__} the method updates_after"
            )
        updates += due
        yield Iteration(frames, updates)


def _batches(config: Config) -> range:
    """How many frames are collected when a batch arrives, for each batch of a run."""
    per_batch = config.collector.frames_per_batch
    count = -(-config.recipe.total_frames // per_batch)
    return range(per_batch, (count + 1) * per_batch, per_batch)


def publishes(when: Trigger, run: Iterable[Iteration]) -> Iterator[float]:
    """The versions that a run publishes after its first one, each by the frames collected until then.

    The trigger is asked after an optimizer step if it counts these, and after a batch if it counts anything
    else; the steps of a round lie evenly between its frames. Nothing is said of one that looks at the time.
    """
    units = when.units()
    last = Counters()
    before = Iteration(0, 0)
    for batches, after in enumerate(run):
        if "optim_steps" in units:
            steps = range(before.updates + 1, after.updates + 1)
        else:
            steps = range(0)
        while steps:
            first = bisect_left(
                steps, True, key=lambda s: when.due(last, Counters(batches, after.frames, s))
            )
            if first == len(steps):
                break
            last = Counters(batches, after.frames, steps[first])
            part = (steps[first] - before.updates) / (after.updates - before.updates)
            yield before.frames + part * (after.frames - before.frames)
            steps = steps[first + 1 :]
        now = Counters(batches + 1, after.frames, after.updates)
        if units - {"optim_steps"} and when.due(last, now):
            last = now
            yield float(after.frames)
        before = after


@dataclass(frozen=True, slots=True)
class RunPhase:
    """Rounds of one kind that follow each other."""

    name: str  # "prefill": no update; "learning": updates after every batch, as the pace allows
    first_frame: int  # from 0
    last_frame: int  # included
    rounds: int  # batches that the learner takes
    updates: int  # of all rounds together
    fewest: int  # updates in one round
    most: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a run will do if it is not ended early."""

    phases: list[RunPhase]
    frames: int  # at the end
    updates: int  # at the end
    ratio: float  # updates for each frame after the prefill
    publishes: int | None  # versions after the first one; None where time decides
    publish_every: str  # in words
    evaluation_every_frames: int  # at least; 0: never
    checkpoint_every_frames: int  # one more is written at the end
    update: str = ""  # what one update trains, and on what, where that is not plain


def timeline(config: Config) -> Timeline:
    """The plan of a run; ConfigError if the recipe does not tell enough, see :func:`rounds`."""
    if _batches(config)[_MOST_ROUNDS:]:
        problem = f"a plan of more than {_MOST_ROUNDS:,} rounds takes too long to make"
        raise ConfigError(
            problem, f"recipe.total_frames={config.recipe.total_frames}", "give fewer frames"
        )
    run = list(rounds(config))
    phases = _phases(run, config.collector.frames_per_batch)
    last = run[-1]
    learned = last.frames - config.recipe.prefill_frames()
    every_frames = config.recipe.evaluations().every_frames
    when = trigger(config.sync.when)
    ratio = 0.0
    if learned > 0:
        ratio = last.updates / learned
    versions = None
    if "seconds" not in when.units():
        versions = len(list(publishes(when, run)))
    return Timeline(
        phases=phases,
        frames=last.frames,
        updates=last.updates,
        ratio=ratio,
        publishes=versions,
        publish_every=str(when),
        evaluation_every_frames=every_frames,
        checkpoint_every_frames=config.frames_between_checkpoints,
        update=config.recipe.update_facts(),
    )


def _phases(run: list[Iteration], frames_per_batch: int) -> list[RunPhase]:
    waiting = [each for each in run if each.updates == 0]
    phases = []
    for name, those in (("prefill", waiting), ("learning", run[len(waiting) :])):
        if not those:
            continue
        updates = []  # of each round
        before = 0
        for each in those:
            updates.append(each.updates - before)
            before = each.updates
        phase = RunPhase(
            name=name,
            first_frame=those[0].frames - frames_per_batch,
            last_frame=those[-1].frames - 1,
            rounds=len(those),
            updates=sum(updates),
            fewest=min(updates),
            most=max(updates),
        )
        phases.append(phase)
    return phases

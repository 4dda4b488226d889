"""What a run will do, and when: asked of the same settings that the run keeps to.

``rlsync plan`` prints it, and a test holds it against the trace of a run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

from rlsync.core.errors import ConfigError
from rlsync.core.trigger import Counters, Trigger
from rlsync.recipes.settings import Config
from rlsync.recipes.sync_settings import trigger
from rlsync.workers.replay.pacing import Pace


@dataclass(frozen=True, slots=True)
class Iteration:
    """One round of the learner: it takes a batch, and updates as often as the pace allows."""

    frames: int  # collected when the batch has arrived
    updates: int  # done when the round is over


def iterations(pace: Pace, frames_per_batch: int, total_frames: int) -> Iterator[Iteration]:
    """All rounds of a run with a pace that is not ended early: the last batch reaches ``total_frames``."""
    return _rounds(pace.due, frames_per_batch, total_frames)


def _rounds(due: Callable[[int, int], int], frames_per_batch: int, total_frames: int) -> Iterator[Iteration]:
    updates = 0
    for batch in range(1, math.ceil(total_frames / frames_per_batch) + 1):
        frames = batch * frames_per_batch
        updates += due(frames, updates)
        yield Iteration(frames, updates)


def publishes(when: Trigger, rounds: Iterable[Iteration]) -> Iterator[float]:
    """The versions that a run publishes after its first one: each by the frames collected until then.

    The trigger is asked where ``SyncWeights`` asks it: after an optimizer step if it counts these, and after
    a batch if it counts anything else. The steps of a round are taken to lie evenly between its frames.
    Nothing is said of a trigger that looks at the time.

    Example:
        >>> from rlsync import Every
        >>> list(publishes(Every(3, "optim_steps"), [Iteration(100, 4), Iteration(200, 8)]))
        [75.0, 150.0]
    """
    units, last, before = when.units(), Counters(), Iteration(0, 0)
    for batches, after in enumerate(rounds):
        steps = range(before.updates + 1, after.updates + 1) if "optim_steps" in units else range(0)
        while steps:
            first = bisect_left(
                steps, True, key=lambda step: when.due(last, Counters(batches, after.frames, step))
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
class Phase:
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

    phases: list[Phase]
    frames: int  # at the end
    updates: int  # at the end
    ratio: float  # updates for each frame after the prefill
    publishes: int | None  # versions after the first one; None where time decides
    publish_every: str  # in words
    evaluation_every_frames: int  # at least; 0: never
    evaluation_every_versions: int  # the same in versions; 0: never
    checkpoint_every_frames: int  # one more is written at the end
    update: str = ""  # what one update trains, and on what, where that is not plain


def timeline(config: Config) -> Timeline:
    """The plan of a run; ConfigError if the recipe cannot tell how many optimizer steps follow a batch.

    Example:
        >>> from rlsync.recipes.settings import CollectorConfig
        >>> from rlsync.recipes.sac import SACConfig
        >>> plan = timeline(Config(recipe=SACConfig(), collector=CollectorConfig(frames_per_batch=100)))
        >>> [(phase.name, phase.first_frame, phase.updates) for phase in plan.phases]
        [('prefill', 0, 0), ('learning', 1000, 99000)]
        >>> [(phase.name, phase.fewest, phase.most) for phase in timeline(Config()).phases]  # ppo
        [('learning', 64, 64)]
    """
    rounds = list(_rounds(_due(config), config.collector.frames_per_batch, config.recipe.total_frames))
    phases, last = _phases(rounds, config.collector.frames_per_batch), rounds[-1]
    learned = last.frames - config.recipe.prefill_frames()
    every_frames, when = config.recipe.evaluations().every_frames, trigger(config.sync.when)
    return Timeline(
        phases=phases,
        frames=last.frames,
        updates=last.updates,
        ratio=last.updates / learned if learned > 0 else 0.0,
        publishes=None if "seconds" in when.units() else sum(1 for _ in publishes(when, rounds)),
        publish_every=str(when),
        evaluation_every_frames=every_frames,
        evaluation_every_versions=versions_between_evaluations(config) if every_frames else 0,
        checkpoint_every_frames=config.checkpoint_every_frames,
        update=config.recipe.update_facts(),
    )


def _due(config: Config) -> Callable[[int, int], int]:
    """How many optimizer steps follow a batch, by frames and updates so far."""

    def due(frames: int, updates: int) -> int:
        found = config.recipe.updates_after(config, frames, updates)
        if found is None:
            raise ConfigError(
                f"the recipe {config.recipe.name!r} does not say how many updates follow a batch",
                "recipe",
                f"give {type(config.recipe).__name__} the method updates_after",
            )
        return found

    return due


def _phases(rounds: list[Iteration], frames_per_batch: int) -> list[Phase]:
    waiting = [round_ for round_ in rounds if round_.updates == 0]
    found = []
    for name, those in (("prefill", waiting), ("learning", rounds[len(waiting) :])):
        if those:
            made = [after - earlier for earlier, after in pairwise([0, *(r.updates for r in those)])]
            first = those[0].frames - frames_per_batch
            last = those[-1].frames - 1
            found.append(Phase(name, first, last, len(those), sum(made), min(made), max(made)))
    return found


def versions_between_evaluations(config: Config) -> int:
    """How many versions lie in ``evaluation.every_frames`` frames, as far as the config tells.

    Example:
        >>> from rlsync.recipes.settings import CollectorConfig
        >>> from rlsync.recipes.settings import EvaluationConfig
        >>> from rlsync.recipes.sac import SACConfig
        >>> recipe = SACConfig(evaluation=EvaluationConfig(every_frames=1_000))
        >>> config = Config(recipe=recipe, collector=CollectorConfig(frames_per_batch=100))
        >>> versions_between_evaluations(config)  # one version for each batch
        10
    """
    when, frames = trigger(config.sync.when), config.recipe.evaluations().every_frames
    if "seconds" in when.units():
        return 1
    per_batch, recipe = config.collector.frames_per_batch, config.recipe
    tells = recipe.updates_after(config, per_batch, 0) is not None
    if not tells and "optim_steps" in when.units():
        return max(1, round(frames / per_batch))  # as if each batch brought a version
    rounds = _rounds(_due(config) if tells else lambda *_: 0, per_batch, recipe.total_frames)
    # The round in which the prefill ends has fewer updates for its frames than those after it.
    settled = publishes(when, rounds)
    end_of_prefill = math.ceil(recipe.prefill_frames() / per_batch + 1) * per_batch
    at = list(islice((position for position in settled if position > end_of_prefill), 1_000))
    if len(at) < 2:
        return 1
    return max(1, round(frames * (len(at) - 1) / (at[-1] - at[0])))

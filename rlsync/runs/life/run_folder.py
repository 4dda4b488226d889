"""Reads the files of a run's folder, also while the run goes on."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from rlsync import ConfigError, Receipt
from rlsync.runs.config.trust import config_in
from rlsync.runs.life.state import name_it
from rlsync.runs.recipes.run_files import (
    AGENTS,
    EVALUATIONS,
    METRICS,
    OF_ONE_RUN,
    RECEIPTS,
    RESOLVED,
    SCALARS,
    SCHEDULE,
    STALENESS,
)
from rlsync.seams import schedule

Numbers = NDArray[np.float64]


class RecordedRun:
    """A run as its schedule has recorded it, opened by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.schedule = folder / SCHEDULE

    @cached_property
    def lives(self) -> list[schedule.Life]:
        """All its lives, oldest first; ConfigError if they cannot be read, or have no rollouts."""
        return schedule.lives_in(self.schedule)

    def tell_without_end(self, life: schedule.Life) -> None:
        """Say on stderr how far the schedule goes if this life has no end, as that of a killed run."""
        if any(note["event"] == "end" for note in life.notes):
            return
        newest = max((publish.version for publish in life.publishes), default=0)
        why = "the run goes on or was killed, or the file was cut off"
        print(f"{self.schedule} stops at version {newest}, without an end: {why}", file=sys.stderr)


class NotRecorded(Exception):
    """A run did not record what is asked for; the message says why."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values over collected frames, oldest first; ``spread`` is their standard deviation, if known."""

    frames: Numbers
    values: Numbers
    spread: Numbers | None = None


class RunFolder:
    """A run's folder, else ConfigError. Newer points replace those of frames that a resumed run did again."""

    def __init__(self, path: Path) -> None:
        if not (path / RESOLVED).is_file():
            lacks = "no folder"
            if path.is_dir():
                lacks = f"it has no {RESOLVED}"
            runs = sorted(str(file.parent) for file in path.glob(f"[!.]*/{RESOLVED}"))
            if runs:
                cure = f"it holds runs, name these: {' '.join(runs)}"
            else:
                cure = name_it(path)
            raise ConfigError(f"{path} is not the folder of a run: {lacks}", f"run {path}", cure)
        self.path = path

    def describe(self) -> str:
        return f"{self.about}, seed {OmegaConf.select(self._config, 'seed')}"

    @property
    def about(self) -> str:
        """Recipe and environment."""
        config = self._config
        recipe = OmegaConf.select(config, "recipe.name")
        env = OmegaConf.select(config, "env.make") or OmegaConf.select(config, "env.id")
        if OmegaConf.select(config, "recipe.replay.ratio"):
            recipe = f"{recipe} with replay"
        return f"{recipe} on {env}"

    @property
    def all_but_seed(self) -> dict[str, str]:
        """What decides the run besides its seed: runs that have this in common are samples of one thing."""
        if self.path.absolute().parent.name == AGENTS:
            return {AGENTS: str(self.path)}  # it learns from the frames of others, too
        config = self._config
        for key in ("seed", *OF_ONE_RUN):
            config.pop(key, None)
        return dict(_keys(OmegaConf.to_container(config)))

    @property
    def _config(self) -> DictConfig:
        return config_in(self.path / RESOLVED)

    def metric(self, name: str) -> Curve:
        """A metric that the run's logger wrote, for example ``"sync/lag_versions"``."""
        file = self.path / METRICS / SCALARS / f"{name}.csv"
        if file.is_file():
            rows = [line.split(",") for line in _whole_lines(file)]
            return _curve(*_numbers(rows, file))
        if not any((self.path / METRICS).glob("events.out.tfevents.*")):
            if (self.path / METRICS / "wandb").is_dir():
                sent = "; its metrics are in wandb"
            else:
                sent = ""
            raise NotRecorded(f"no metric {name!r}{sent}")
        if name not in self._events:
            raise NotRecorded(f"no metric {name!r} in the TensorBoard events")
        return self._events[name]

    def receipts(self) -> list[Receipt]:
        """The record of every publish, oldest first."""
        file = self.path / RECEIPTS
        receipts = []
        for number, line in enumerate(_whole_lines(file), 1):
            try:
                receipts.append(Receipt(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise _unreadable(file, f"line {number}: {error}") from error
        return receipts

    def of_receipts(self, number: Callable[[Receipt], float]) -> Curve:
        rows = [(receipt.frames, number(receipt)) for receipt in self.receipts()]
        if not rows:
            raise NotRecorded(f"no publish in {RECEIPTS}")
        return _curve(*np.array(rows, dtype=float).T)

    def staleness(self) -> Curve:
        """The number of consumed steps by their age; ``frames`` holds the ages, in versions."""
        columns = _columns(self.path / STALENESS)
        return Curve(columns["staleness_versions"], columns["steps"])

    def evaluations(self) -> Curve:
        """Mean return of the evaluated versions, at the frames at which they were published."""
        columns = _columns(self.path / EVALUATIONS, leave_out="run_id")
        published = sorted((receipt.version, receipt.frames) for receipt in self.receipts())
        # A version without a receipt is the one that the workers were started with.
        versions, frames = np.array([(0, 0), *published], dtype=float).T
        at = frames[np.searchsorted(versions, columns["version"], side="right") - 1]
        return _curve(at, columns["return_mean"], columns["return_std"])

    @cached_property
    def _events(self) -> dict[str, Curve]:
        try:
            from tensorboard.backend.event_processing.event_accumulator import (
                SCALARS,
                EventAccumulator,
            )
        except ImportError as error:
            cure = "pip install 'rlsync[tensorboard]'"
            raise NotRecorded(
                f"metrics are TensorBoard events, which {cure} lets rlsync read"
            ) from error
        events = EventAccumulator(str(self.path / METRICS), size_guidance={SCALARS: 0})
        events.Reload()
        curves = {}
        for name in events.Tags()[SCALARS]:
            rows = [(event.step, event.value) for event in events.Scalars(name)]
            curves[name] = _curve(*np.array(rows, dtype=float).T)
        return curves


def _keys(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a config in one row, each with its value."""
    for name, value in sorted(section.items()):
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def _unreadable(file: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot read what a run wrote: {why}", str(file), "remove or repair the file"
    )


def _whole_lines(file: Path) -> list[str]:
    """The complete lines of a file. The run may be writing it: a last line without an end is left out."""
    if not file.is_file():
        raise NotRecorded(f"no {file.name}")
    text = file.read_text(errors="replace")
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _numbers(rows: list[list[str]], file: Path) -> Numbers:
    if not rows:
        raise NotRecorded(f"{file.name} is empty")
    try:
        return np.array(rows, dtype=float).T
    except ValueError as error:
        raise _unreadable(file, str(error)) from error


def _columns(file: Path, leave_out: str = "") -> dict[str, Numbers]:
    reader = csv.DictReader(_whole_lines(file))
    names = [name for name in reader.fieldnames or [] if name != leave_out]
    rows = []
    for row in reader:
        rows.append([row[name] for name in names])
    return dict(zip(names, _numbers(rows, file), strict=True))


def _curve(frames: Numbers, values: Numbers, spread: Numbers | None = None) -> Curve:
    """A curve without points that are not numbers, and without those that a resumed run did again."""
    good = (frames <= np.minimum.accumulate(frames[::-1])[::-1]) & np.isfinite(values)
    if spread is not None:
        spread = spread[good]
    return Curve(frames[good], values[good], spread)

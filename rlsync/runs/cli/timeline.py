"""``rlsync timeline``: draw the schedule of a run, or write it in a format that trace viewers open."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlsync import ConfigError
from rlsync.runs.cli.main import parser_of
from rlsync.runs.cli.pictures import panels_for
from rlsync.runs.life.run_folder import RecordedRun
from rlsync.runs.recipes.run_files import TIMELINE
from rlsync.seams import schedule, whole_file

_EXAMPLES = """examples:
  rlsync timeline runs/2026-11-20/18-00-00-000000
  rlsync timeline runs/2026-11-20/18-00-00-000000 --from 60 --to 90 --out part.svg
  rlsync timeline runs/2026-11-20/18-00-00-000000 --trace out.json     for ui.perfetto.dev
  rlsync timeline runs/a runs/a/rerun-1                                one below the other

A run may still be running. Of a run that was resumed, its newest life is drawn. A bar lasts from one rollout
of a worker that the learner took until the next, and has the colour of the version that acted.

exit status: 0 drawn or written, 2 no schedule, nothing to draw, a wrong file, or no matplotlib
"""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    runs = [RecordedRun(folder) for folder in dict.fromkeys(options.run)]
    newest = [run.lives[-1] for run in runs]
    lives = {}
    for run, life in zip(runs, newest, strict=True):
        part = life.between(options.begin * 1e3, options.end * 1e3)
        if not part.events:
            raise ConfigError(
                "nothing was recorded in that time", str(run.schedule), "give another time"
            )
        lives[str(run.folder)] = part
    if options.trace is None:
        done = "drawn"
        file = options.out or options.run[0] / TIMELINE
        panels_for("rlsync timeline", file).lanes(lives).savefig(file)
    else:
        done = "written"
        file = options.trace
        whole_file.check_folder(file)
        file.write_text(json.dumps({"traceEvents": list(events(lives))}))
    for run, life in zip(runs, newest, strict=True):
        run.tell_without_end(life)
    print(f"{done}     {file}")
    return 0


def _parser() -> argparse.ArgumentParser:
    about = "Draw who made which rollout with which version, and when each publish fell."
    parser = parser_of("timeline", about, _EXAMPLES)
    run = "the run's folder, as rlsync train prints it; of several, the picture lies in the first"
    parser.add_argument("run", type=Path, nargs="+", help=run)
    begin = "seconds, from here"
    parser.add_argument("--from", type=float, default=0.0, metavar="S", dest="begin", help=begin)
    parser.add_argument(
        "--to", type=float, default=float("inf"), metavar="S", dest="end", help="until here"
    )
    form = parser.add_mutually_exclusive_group()
    out = f"or .svg; default: {TIMELINE} in the run"
    form.add_argument("--out", type=Path, metavar="FILE.png", help=out)
    trace = "write Chrome's trace format in place of a picture; Perfetto opens millions of events"
    form.add_argument("--trace", type=Path, metavar="FILE.json", help=trace)
    return parser


#: The threads of a trace. Viewers keep number 0 for the machine itself.
_LEARNER = 1
_WORKERS = 2


def events(lives: Mapping[str, schedule.Life]) -> Iterator[dict[str, Any]]:
    """The events of a trace, of one or several runs by their names."""
    for number, (name, life) in enumerate(lives.items(), 1):
        yield from _events_of(number, name, life)


def _events_of(run: int, name: str, life: schedule.Life) -> Iterator[dict[str, Any]]:
    """A process for the run, in it a thread for the learner and for each worker."""

    def event(
        phase: str, thread: int, ms: float, name: str, args: dict[str, Any]
    ) -> dict[str, Any]:
        return {"ph": phase, "pid": run, "tid": thread, "ts": ms * 1000, "name": name, "args": args}

    yield event("M", _LEARNER, 0, "process_name", {"name": name})
    yield event("M", _LEARNER, 0, "thread_name", {"name": "learner"})
    for worker in sorted({rollout.worker for rollout in life.rollouts}):
        yield event("M", _WORKERS + worker, 0, "thread_name", {"name": schedule.named(worker)})
    for rollout, begin_ms in life.spans():
        title = f"version {rollout.version}"
        if rollout.dropped:
            title += ", dropped"
        facts = {"life": rollout.life, "number": rollout.number}
        bar = event("X", _WORKERS + rollout.worker, begin_ms, title, facts)
        yield bar | {"dur": (rollout.ms - begin_ms) * 1000}
    for publish in life.publishes:
        steps = {"optimizer steps": publish.optim_steps}
        yield event("i", _LEARNER, publish.ms, f"publish {publish.version}", steps) | {"s": "t"}
    for note in life.notes:
        yield event("i", _LEARNER, note["ms"], note["event"], {}) | {"s": "t"}

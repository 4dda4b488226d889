"""``rlsync timeline``: draw the schedule of a run, or write it in a format that trace viewers open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlsync import ConfigError
from rlsync.core.whole_file import check_folder
from rlsync.record.schedule import Life, lives_in, named
from rlsync.runs.cli.main import parser_of
from rlsync.runs.cli.pictures import panels_for
from rlsync.runs.life.run_folder import tell_without_end
from rlsync.runs.recipes.run_files import SCHEDULE, TIMELINE

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
    about = "Draw who made which rollout with which version, and when each publish fell."
    parser = parser_of("timeline", about, _EXAMPLES)
    told = "the run's folder, as rlsync train prints it; of several, the picture lies in the first"
    parser.add_argument("run", type=Path, nargs="+", help=told)
    begin = "seconds, from here"
    parser.add_argument("--from", type=float, default=0.0, metavar="S", dest="begin", help=begin)
    parser.add_argument(
        "--to", type=float, default=float("inf"), metavar="S", dest="end", help="until here"
    )
    out = parser.add_mutually_exclusive_group()
    out.add_argument(
        "--out", type=Path, metavar="FILE.png", help=f"or .svg; default: {TIMELINE} in the run"
    )
    trace = "write Chrome's trace format in place of a picture; Perfetto opens millions of events"
    out.add_argument("--trace", type=Path, metavar="FILE.json", help=trace)
    given = parser.parse_args(arguments)
    lives = {}
    newest = {run: lives_in(run / SCHEDULE)[-1] for run in given.run}
    for run, last in newest.items():
        life = lives[str(run)] = last.between(given.begin * 1e3, given.end * 1e3)
        if not life.events:
            raise ConfigError(
                "nothing was recorded in that time", str(run / SCHEDULE), "give another time"
            )
    written = given.trace or given.out or given.run[0] / TIMELINE
    if given.trace is not None:
        check_folder(given.trace)
        found = [
            event
            for n, (name, life) in enumerate(lives.items(), 1)
            for event in events(n, name, life)
        ]
        given.trace.write_text(json.dumps({"traceEvents": found}))
    else:
        panels_for("rlsync timeline", written).lanes(lives).savefig(written)
    for run, last in newest.items():
        tell_without_end(run, last)
    print(f"{'drawn' if given.trace is None else 'written'}     {written}")
    return 0


#: The threads of a trace. Viewers keep number 0 for the machine itself.
_LEARNER = 1
_WORKERS = 2


def events(run: int, name: str, life: Life) -> Iterator[dict[str, Any]]:
    """The events of a trace: a process for the run, in it a thread for the learner and for each worker."""

    def event(
        phase: str, thread: int, ms: float, name: str, args: dict[str, Any]
    ) -> dict[str, Any]:
        return {"ph": phase, "pid": run, "tid": thread, "ts": ms * 1000, "name": name, "args": args}

    yield event("M", _LEARNER, 0, "process_name", {"name": name})
    yield event("M", _LEARNER, 0, "thread_name", {"name": "learner"})
    for worker in sorted({rollout.worker for rollout in life.rollouts}):
        yield event("M", _WORKERS + worker, 0, "thread_name", {"name": named(worker)})
    for rollout, begin_ms in life.spans():
        version = f"version {rollout.version}{', dropped' if rollout.dropped else ''}"
        told = {"life": rollout.life, "number": rollout.number}
        whole = event("X", _WORKERS + rollout.worker, begin_ms, version, told)
        yield whole | {"dur": (rollout.ms - begin_ms) * 1000}
    for publish in life.publishes:
        told = {"optimizer steps": publish.optim_steps}
        yield event("i", _LEARNER, publish.ms, f"publish {publish.version}", told) | {"s": "t"}
    for note in life.notes:
        yield event("i", _LEARNER, note["ms"], note["event"], {}) | {"s": "t"}

"""Kill the processes of runs with a lag at random moments, and compare what they learn with undisturbed runs.

    python benchmarks/kills_same.py [CASE ...] [--kills 300] [--seconds 1500] [--seed 0] [--out kills_same.json]

Each case is trained once undisturbed. Then it is trained again and again: at random moments SIGKILL goes to a
worker, the evaluator or the learner, which goes on by ``resume=auto``. At its end each run must have published
the same weights after every optimizer step, evaluated the same ones with the same scores, written the same
returns, and counted the same frames and steps.

The seed decides who is killed, and after how long; at what step that finds a process, it does not. The exit
status is 1 if a run was not the same, or if fewer processes were killed than ``--kills`` says. Runs of one
worker have no other that could go on meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kills import ROLES, Life, until

from rlsync.record.schedule import Comparison, lives_in, runs_compared
from rlsync.runs.cli.compare import EvaluationsCompared
from rlsync.runs.evaluation.process import read_evaluations
from rlsync.runs.recipes.run_files import EVALUATIONS

COMMON = (
    "recipe.target_return=null",
    "recipe.compile=off",
    "recipe.evaluation.episodes=1",
    "sync.digest_every=1",
    "run_dir=it",
    "resume=auto",
)
ON_POLICY = (
    "recipe=ppo",
    "recipe.total_frames=16384",
    "recipe.evaluation.every_frames=4096",
    "collector.frames_per_batch=512",
    "checkpoint_every_frames=4096",
)
OFF_POLICY = (
    "recipe.total_frames=2400",
    "recipe.evaluation.every_frames=600",
    "recipe.hidden=[32,32]",
    "recipe.pace.prefill=300",
    "checkpoint_every_frames=600",
)
UNROLLS = (
    "collector.lag=1",
    "recipe.total_frames=16000",
    "recipe.evaluation.every_frames=4000",
    "checkpoint_every_frames=4000",
)
CASES = {
    "ppo": ON_POLICY,
    "ppo, lag 2": (*ON_POLICY, "collector.lag=2"),
    "ppo, lag 0": (*ON_POLICY, "collector.lag=0"),
    "ppo, lstm": (*ON_POLICY, "recipe.model.lstm=16", "recipe.batch_size=256"),
    "dqn": ("recipe=dqn", *OFF_POLICY),
    "sac": ("recipe=sac", *OFF_POLICY),
    "td3": ("recipe=td3", *OFF_POLICY),
    "crossq": ("recipe=crossq", *OFF_POLICY),
    "impala": ("recipe=impala", *UNROLLS),
    "laser": ("recipe=laser", "recipe.replay.checkpointed=true", *UNROLLS),
    "dreamer_v3": (
        *("recipe=dreamer_v3", "env=cartpole", "recipe.cells=16", "recipe.belief=16"),
        *("recipe.batch_size=2", "recipe.sequence_length=8", "recipe.horizon=3"),
        *("recipe.pace.prefill=100", "recipe.total_frames=800", "checkpoint_every_frames=200"),
        "recipe.evaluation.every_frames=200",
    ),
}
WITHIN_S = 300.0


@dataclass
class Found:
    """What became of the runs of a case."""

    undisturbed_s: float
    runs: int = 0
    same: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    differs: list[str] = field(default_factory=list)


def undisturbed(folder: Path, words: tuple[str, ...]) -> float:
    """Train once; returns how long that took."""
    folder.mkdir()
    began = time.monotonic()
    life = Life(folder, words)
    if not until(lambda: life.over, WITHIN_S) or life.process.exitcode:
        raise SystemExit(f"the undisturbed run failed:\n{life.output()}")
    return time.monotonic() - began


def killed_often(folder: Path, words: tuple[str, ...], found: Found, chance: random.Random) -> str:
    """Train, and kill; returns what went wrong, or nothing."""
    folder.mkdir()
    life = Life(folder, words)
    try:
        while True:
            moment_s = chance.uniform(0.0, found.undisturbed_s * 0.6)
            if until(lambda life=life: life.over, moment_s):  # type: ignore[misc]
                if life.process.exitcode == 0:
                    return ""
                # All workers were killed, or one before it was ready: the run ends, and goes on if asked to.
                if "killed by SIGKILL" not in life.output():
                    return life.output()[-2000:]
                life = Life(folder, words)
                continue
            role = chance.choice(ROLES)
            pid = life.pid_of(role, chance)
            if pid is None:
                continue
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                found.killed[role] += 1
            if role == "learner":
                life.process.join()
                if not until(lambda life=life: not life.left(), 60.0):  # type: ignore[misc]
                    return f"processes were left: {life.left()}"
                life = Life(folder, words)
    finally:
        life.destroy()


def difference(one: Path, other: Path) -> str:
    """How two runs differ, in words; nothing: they do not."""
    compared: Comparison = runs_compared(
        lives_in(one / "schedule.bin"), lives_in(other / "schedule.bin")
    )
    if not compared.is_equal:
        return str(compared)
    scores = EvaluationsCompared.of(one, other)
    if scores.unequal_after is not None or len(read_evaluations(one / EVALUATIONS)) != scores.both:
        return f"the evaluations differ: {scores}"
    returns = Path("metrics", "scalars", "return.csv")
    if (one / returns).read_bytes() != (other / returns).read_bytes():
        return "the returns differ"
    counts = []
    for run in (one, other):
        last = json.loads((run / "receipts.jsonl").read_text().splitlines()[-1])
        counts.append((last["batches"], last["frames"], last["optim_steps"]))
    if counts[0] != counts[1]:
        return f"batches, frames and steps were {counts[0]}, and are {counts[1]}"
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"by default all: {', '.join(CASES)}")
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument(
        "--seconds", type=float, default=1500.0, help="no new run begins after this"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    chance = random.Random(options.seed)
    began = time.monotonic()
    results: dict[str, Found] = {}
    killed = 0
    with tempfile.TemporaryDirectory() as place:
        for number in range(10**6):
            names = options.cases or list(CASES)
            if killed >= options.kills or time.monotonic() - began > options.seconds:
                break
            name = names[number % len(names)]
            words = (*CASES[name], *COMMON)
            whole = Path(place, f"{name} undisturbed")
            if name not in results:
                results[name] = Found(undisturbed(whole, words))
            found = results[name]
            folder = Path(place, f"{name} {number}")
            wrong = killed_often(folder, words, found, chance)
            wrong = wrong or difference(whole / "it", folder / "it")
            found.runs += 1
            found.same += not wrong
            if wrong:
                found.differs.append(wrong)
                print(f"{name}: {wrong}", flush=True)
            killed = sum(sum(each.killed.values()) for each in results.values())
    table = {
        name: {
            "runs": each.runs,
            "same": each.same,
            "killed": dict(each.killed),
            "differs": each.differs,
        }
        for name, each in results.items()
    }
    runs = sum(each.runs for each in results.values())
    same = sum(each.same for each in results.values())
    print(json.dumps(table, indent=1))
    print(f"{same} of {runs} runs are the same, in which {killed} processes were killed")
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1))
    return 0 if same == runs and killed >= options.kills else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Kill and stop the processes of runs at random moments, resume them, and look at what is left.

    python benchmarks/kills.py [RECIPE ...] [--kills 200] [--seconds 540] [--seed 0] [--out kills.json]

Short runs of every recipe by turns, with two workers that collect while the learner learns, and an
evaluating process. At a random moment, from the start of the process on, one signal goes to a sampler, the
evaluator or the learner: SIGKILL, or SIGSTOP and later SIGCONT. Afterwards a run must go on (impala and laser
replace a sampler), or end with an error in three lines. Whenever one has ended, no process and no file of
shared memory may be left, its checkpoint must be whole, and the run that resumes it in the same folder must
go on from there: with higher versions, at its pace, no frame counted twice. Of runs on Ray,
``benchmarks/ray_cluster.py storm`` shows the same.

A ``population`` is three learners that share a replay. They are killed one after the other: those that live
must go on, and when none does, the run must name them and be resumed.

The seed decides what happens, and after how long. The exit status is 1 if a count under ``bad`` is not zero,
if fewer signals were sent in time than ``--kills`` says, or if no run was resumed.
The script gives itself a /dev/shm of its own. Where it may not (it needs the right to mount), files of shared
memory are counted on the whole machine, other programs' too.

Updates are not compiled: that would take longer than most lives here. (A C++ compiler that a killed learner
has started ends by itself, seconds later.)

Learners and samplers of TorchRL's collectors are forked from this process, which has the imports loaded: many
runs fit into a few minutes.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch

from rlsync.runs.cli import train  # noqa: F401  # loaded once, for all runs
from rlsync.runs.cli.main import main as rlsync_main

WITHIN_S = 120.0  # no wait is longer, also on a loaded machine
WORKERS, PREFILL, RATIO = 2, 128, "0.5"
COMMON = (
    f"collector.num_workers={WORKERS}",
    "recipe.total_frames=10000000",
    "recipe.target_return=null",
    "recipe.compile=off",
    "recipe.evaluation.every_frames=256",
    "recipe.evaluation.episodes=1",
    "logger=none",
    "stop_within_s=20",
    "run_dir=it",
)
ASYNC = ("collector.lag=null", "collector.frames_per_batch=64", "checkpoint_every_frames=256")
REPLAY = (
    *ASYNC,
    "recipe.hidden=[16]",
    "recipe.batch_size=16",
    "recipe.buffer_frames=20000",
    f"recipe.pace.prefill={PREFILL}",
    f"recipe.pace.ratio={RATIO}",
)
UNROLLS = (
    "collector.frames_per_batch=64",
    "checkpoint_every_frames=2048",
    "recipe.unroll_length=8",
    "recipe.batch_size=8",
)
DREAMER = (
    *ASYNC,
    "env=pendulum",
    "recipe.buffer_frames=20000",
    "recipe.batch_size=2",
    "recipe.sequence_length=8",
    "recipe.horizon=3",
    "recipe.belief=16",
    "recipe.cells=16",
    "recipe.pace.prefill=128",
    "recipe.pace.ratio=0.05",
)


@dataclass(frozen=True)
class Kind:
    """Runs of one recipe: their words, and which laws they have beside those of all runs."""

    words: tuple[str, ...]
    replay: bool = False  # rows of the buffer are frames, and updates keep the pace RATIO
    replaces_workers: bool = False


RECIPES = {
    "dqn": Kind(("recipe=dqn", *REPLAY), replay=True),
    "impala": Kind(("recipe=impala", *UNROLLS), replaces_workers=True),
    "sac": Kind(("recipe=sac", "env=pendulum", *REPLAY), replay=True),
    "ppo": Kind(("recipe=ppo", *ASYNC)),
    "laser": Kind(("recipe=laser", *UNROLLS), replaces_workers=True),
    "td3": Kind(("recipe=td3", "env=pendulum", *REPLAY), replay=True),
    "dreamer_v3": Kind(("recipe=dreamer_v3", *DREAMER)),
    "dreamer_v1": Kind(("recipe=dreamer_v1", *DREAMER)),
    "population": Kind(("recipe=laser", *UNROLLS)),
}
AGENTS = 3
POPULATION = (
    f"recipe.agents={AGENTS}",
    "collector.num_workers=1",
    "recipe.evaluation.every_frames=0",
)
ROLES = ("sampler", "evaluator", "learner")
LIVES = 5  # of one run, at most; then another one begins
LONGEST_DELAY_S, LONGEST_STOP_S = 2.0, 1.5


# -------------------------------------------------------------------------------- one life of a run


def _train(folder: Path, words: tuple[str, ...]) -> None:
    os.setsid()
    os.chdir(folder)
    with (folder / "output").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    multiprocessing.set_start_method("fork", force=True)  # a server imports torch anew in each life
    sys.exit(rlsync_main(["train", *words]))


class Life:
    """One process of ``rlsync train`` in a folder, and its children."""

    def __init__(self, folder: Path, words: tuple[str, ...]) -> None:
        self.folder = folder
        self.run = folder / "it"
        self.said, self.published = len(self.output(0)), 0
        self.published = len(self.receipts())
        self.process: BaseProcess = multiprocessing.get_context("fork").Process(
            target=_train, args=(folder, words)
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def output(self, since: int | None = None) -> str:
        """What it has printed; the file has that of the lives before, too."""
        file = self.folder / "output"
        text = file.read_text(errors="replace") if file.exists() else ""
        return text[self.said if since is None else since :]

    def receipts(self, since: int | None = None) -> list[dict]:
        """Those of this life; the file has those of the lives before, too."""
        file = self.run / "receipts.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        found = []
        for line in lines:
            with suppress(json.JSONDecodeError):  # the last one may be half written
                found.append(json.loads(line))
        return found[self.published if since is None else since :]

    def pid_of(self, role: str, chance: random.Random) -> int | None:
        """The process of a role, if it runs already.

        Samplers and the evaluator lead process groups, and may come from a fork server, a child of the
        learner; the evaluator has a lower priority.
        """
        if role == "learner":
            return self.pid
        children = _children(self.pid)
        from_servers = [child for server in children for child in _children(server)]
        leaders = sorted(child for child in (*children, *from_servers) if _leads_a_group(child))
        with suppress(OSError):  # one has ended meanwhile
            usual = os.getpriority(os.PRIO_PROCESS, self.pid)
            evaluators = [pid for pid in leaders if os.getpriority(os.PRIO_PROCESS, pid) > usual]
            samplers = [pid for pid in leaders if pid not in evaluators]
            choices = (
                samplers if role == "sampler" else evaluators if len(samplers) == WORKERS else []
            )
            return chance.choice(choices) if choices else None
        return None

    @property
    def over(self) -> bool:
        return self.process.exitcode is not None

    def left(self) -> list[int]:
        """The living processes of this life's session."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                pid = int(entry.name)
                if os.getsid(pid) == self.pid and _state(pid) not in ("Z", ""):
                    found.append(pid)
        return found

    def destroy(self) -> None:
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()


def _lines(agent: Path) -> int:
    """How many publishes an agent has recorded."""
    file = agent / "receipts.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def what_is(pid: int) -> str:
    """A process in words: what it runs, and the processor time that it has had."""
    with suppress(OSError):
        user, system = map(
            int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        )
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
        return f"{pid} {command[:120]!r} {(user + system) / os.sysconf('SC_CLK_TCK'):.1f} s"
    return f"{pid}, which has just ended"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return [child for child in found if _state(child) not in ("Z", "")]


def _leads_a_group(pid: int) -> bool:
    with suppress(ProcessLookupError):
        return os.getpgid(pid) == pid
    return False


def until(true: Callable[[], bool], within_s: float = WITHIN_S) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


# ------------------------------------------------------------------------------- what must be true


class Checkpoint:
    """What a run's checkpoint says, read from its files."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        _look_at_digests(folder)
        parts = json.loads((folder / "manifest.json").read_text())["components"]
        at = {name: folder / part["path"] for name, part in parts.items()}
        self.frames = int(_mapping(at["trainer_state"])["collected_frames"])
        if not kind.replay:
            return
        pace = _mapping(at["trainer_module.keep_pace"])
        self.counted, self.updates = int(pace["frames"]), int(pace["updates"])
        self.written = int(
            json.loads((at["replay_buffer"] / "writer" / "metadata.json").read_text())[
                "write_count"
            ]
        )
        frames = _frames(at["replay_buffer"] / "storage")
        self.stored = len(frames)
        self.twice = self.stored - len(np.unique(frames, axis=0))


def _look_at_digests(folder: Path) -> None:
    """Every file of the list has the size and the digest that the list says."""
    for name, said in json.loads((folder / "digests.json").read_text())["files"].items():
        held = (folder / name).read_bytes()
        if (len(held), hashlib.blake2b(held, digest_size=20).hexdigest()) != (
            said["bytes"],
            said["blake2b"],
        ):
            raise ValueError(f"{name} is not what was written")


def _frames(storage: Path) -> np.ndarray:
    """The observations of all stored rows, each beside the one after it."""
    index = json.loads((storage / "rows.json").read_text())
    parts = []
    for segment in index["segments"]:
        rows = torch.load(storage / segment["file"], mmap=True, weights_only=True)
        pairs = torch.cat([rows["observation"], rows["next"]["observation"]], -1)
        parts.append(pairs[max(0, index["first"] - segment["first"]) :])
    return torch.cat(parts).numpy()


def _mapping(component: Path) -> dict[str, object]:
    items = json.loads((component / "state.json").read_text())["items"]
    return {key["value"]: value.get("value") for key, value in items}


def checkpoint_of(life: Life, kind: Kind) -> Checkpoint | None:
    """The checkpoint of a run; None if it has written none. A killed writer may leave the one before."""
    interrupted = sorted(life.run.glob(".checkpoint.backup-*"))
    for folder in (life.run / "checkpoint", *interrupted):
        if (folder / "manifest.json").exists():
            return Checkpoint(folder, kind)
    return None


BAD = (
    "runs that hung",
    "runs that ended without a clear error",
    "runs that ended although nothing was killed",
    "processes left",
    "files of shared memory left",
    "checkpoints that are lost or damaged",
    "runs that could not be resumed",
    "updates off the pace",
    "frames counted twice",
    "versions that did not rise",
)


class Trial:
    """Runs one after the other, and counts what happens to them."""

    def __init__(self, folder: Path, seed: int, recipes: list[str]) -> None:
        self.chance = random.Random(seed)
        self.folder = folder
        self.recipes = recipes
        self.counts: Counter[str] = Counter()
        self.bad: Counter[str] = Counter(dict.fromkeys(BAD, 0))
        self.notes: list[str] = []
        self.shm = {path.name for path in Path("/dev/shm").iterdir()}
        self._runs = 0
        self._roles: list[str] = []  # whose turn it is; each has as many

    def kills(self) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith("SIG"))

    def run(self, deadline: float, kills: int) -> None:
        """One run and those that resume it."""
        recipe = self.recipes[self._runs % len(self.recipes)]
        self.kind = RECIPES[recipe]
        folder = self.folder / f"{self._runs}-{recipe}"
        folder.mkdir()
        self._runs += 1
        self.counts[f"runs of {recipe}"] += 1
        if recipe == "population":
            self._population(folder, deadline, kills)
            return
        before: Checkpoint | None = None
        for number in range(LIVES):
            if time.monotonic() > deadline or self.kills() >= kills:
                return
            resume = ("resume=it",) if before is not None else ()
            if before is None and number:  # nothing to go on from: the folder holds another run
                return
            words = (*resume, "run_dir=it") if resume else (*self.kind.words, *COMMON)
            life = Life(folder, words)
            try:
                events = self._torment(life, before)
                told = f"{folder.name}, life {number}: {events}"
                before = self._look(life, before, told)
            finally:
                life.destroy()

    def _population(self, folder: Path, deadline: float, kills: int) -> None:
        """A population and those that resume it; its agents are killed until none is left."""
        frames = dict.fromkeys(range(AGENTS), 0)
        for number in range(LIVES):
            if time.monotonic() > deadline or self.kills() >= kills:
                return
            words = (
                ("resume=it", "run_dir=it") if number else (*self.kind.words, *COMMON, *POPULATION)
            )
            life, told = Life(folder, words), f"{folder.name}, life {number}"
            self.counts["lives"] += 1
            try:
                self._kill_agents(life, told)
                if not until(lambda: not life.left()):  # noqa: B023
                    self._note("processes left", f"{told}: {[what_is(pid) for pid in life.left()]}")
                for agent, before in frames.items():
                    frames[agent] = self._frames_of(life.run / "agents" / str(agent), before, told)
                self.counts["resumed"] += number > 0
            finally:
                life.destroy()

    def _kill_agents(self, life: Life, told: str) -> None:
        agents = [life.run / "agents" / str(agent) for agent in range(AGENTS)]
        known = [_lines(agent) for agent in agents]

        def go_on(which: list[int]) -> bool:
            return life.over or all(_lines(agents[agent]) > known[agent] + 1 for agent in which)

        living = list(range(AGENTS))
        if not until(lambda: go_on(living)) or life.over:
            self._note("runs that hung", f"{told} has not begun: {life.output()[-600:]}")
            return
        while living:
            time.sleep(self.chance.uniform(0, LONGEST_DELAY_S))
            victim = living.pop(self.chance.randrange(len(living)))
            os.kill(
                json.loads((agents[victim] / "board.json").read_text())["address"]["pid"],
                signal.SIGKILL,
            )
            self.counts["SIGKILL: agent"] += 1
            known = [_lines(agent) for agent in agents]
            if living and (not until(lambda: go_on(living)) or life.over):
                self._note("runs that hung", f"{told}, after the end of agent {victim}")
                return
        if not until(lambda: life.over):
            self._note("runs that hung", f"{told}: {life.output()[-600:]}")
        error = life.output().rpartition("\n  where  ")[0].rpartition("\n")[2]
        named = re.findall(r"agent (\d) killed by SIGKILL", error)
        if life.process.exitcode != 1 or len(set(named)) < AGENTS:
            self._note("runs that ended without a clear error", f"{told}: {life.output()[-900:]}")

    def _frames_of(self, agent: Path, before: int, told: str) -> int:
        """The frames of an agent's checkpoint, which is whole and not older than the one before."""
        replaced = sorted(agent.glob(".checkpoint.backup-*"))
        folders = [
            at for at in (agent / "checkpoint", *replaced) if (at / "manifest.json").exists()
        ]
        try:
            frames = Checkpoint(folders[0], self.kind).frames
        except Exception as error:  # noqa: BLE001
            self._note(
                "checkpoints that are lost or damaged", f"{told}: {type(error).__name__}: {error}"
            )
            return before
        self.counts["checkpoints read"] += 1
        if frames < before:
            self._note("runs that could not be resumed", f"{told}: {frames} frames after {before}")
        return frames

    def _torment(self, life: Life, before: Checkpoint | None) -> str:
        """Signals at random moments, until the run ends; what was sent."""
        events: list[str] = []
        self.counts["lives"] += 1
        if self.chance.random() < 0.7:  # else from the start of the process on
            until(lambda: life.over or bool(life.receipts()))
        for _ in range(3):
            time.sleep(self.chance.uniform(0, LONGEST_DELAY_S))
            self._roles = self._roles or self.chance.sample(ROLES, len(ROLES))
            role, kill = self._roles.pop(), self.chance.random() < 0.6
            pause_s = self.chance.uniform(0.05, LONGEST_STOP_S)
            pid = life.pid_of(role, self.chance)
            if life.over or pid is None:
                continue
            name = "SIGKILL" if kill else "SIGSTOP and SIGCONT"
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kill else signal.SIGSTOP)
                events.append(f"{name} of the {role}")
                self.counts[f"{name}: {role}"] += 1
                if not kill:
                    time.sleep(pause_s)
                    os.kill(pid, signal.SIGCONT)
            fatal = kill and (
                role == "learner" or (role == "sampler" and not self.kind.replaces_workers)
            )
            if not self._settled(life, fatal, events):
                return ", ".join(events)
            if life.over:
                return ", ".join(events)
        with suppress(ProcessLookupError):
            os.kill(life.pid, signal.SIGTERM)
            events.append("SIGTERM at the end")
        if not until(lambda: life.over):
            self._note("runs that hung", f"{events} {life.output()[-600:]}")
        # else it had not begun to listen
        elif life.process.exitcode not in (0, 143) and life.output():
            self._note(
                "runs that ended although nothing was killed", f"{events} {life.output()[-900:]}"
            )
        return ", ".join(events)

    def _settled(self, life: Life, fatal: bool, events: list[str]) -> bool:
        """The run has ended, or goes on."""
        known = len(life.receipts())
        if fatal:
            ended = until(lambda: life.over)
            if not ended:
                self._note("runs that hung", f"{events} {life.output()[-600:]}")
            elif "learner" not in events[-1]:
                self._look_at_error(life, events)
            return ended
        went_on = until(lambda: life.over or len(life.receipts()) > known + 1)
        if life.over:
            self._note(
                "runs that ended although nothing was killed", f"{events} {life.output()[-900:]}"
            )
        elif not went_on:
            self._note("runs that hung", f"{events} {life.output()[-600:]}")
        return went_on

    def _look_at_error(self, life: Life, events: list[str]) -> None:
        said = life.output()
        clear = re.search(
            r"worker \d .*(killed by SIGKILL|SIGKILL).*\n  where  .+\n  cure   ", said
        )
        if life.process.exitcode != 1 or clear is None:
            self._note(
                "runs that ended without a clear error",
                f"{events}, status {life.process.exitcode}: {said[-900:]}",
            )

    def _look(self, life: Life, before: Checkpoint | None, told: str) -> Checkpoint | None:
        if not until(lambda: not life.left()):
            self._note("processes left", f"{told}: {[what_is(pid) for pid in life.left()]}")
        new = {path.name for path in Path("/dev/shm").iterdir()} - self.shm
        published = life.receipts(0)  # of all lives of the run, however this one ended
        versions = [receipt["version"] for receipt in published]
        if (
            versions != sorted(set(versions))
            or len({receipt["run_id"] for receipt in published}) > 1
        ):
            self._note("versions that did not rise", f"{told}: {versions}")
        self.counts["receipts read"] += len(versions)
        if new:
            self._note("files of shared memory left", f"{told}: {sorted(new)}")
            self.shm |= new
        try:
            found = checkpoint_of(life, self.kind)
        except Exception as error:  # noqa: BLE001
            self._note(
                "checkpoints that are lost or damaged", f"{told}: {type(error).__name__}: {error}"
            )
            return None
        if before is not None and found is None:
            self._note("checkpoints that are lost or damaged", f"{told}: it is gone")
        if before is not None:
            self._look_at_resume(life, before, told)
        self.counts["checkpoints read"] += found is not None
        if found is not None and self.kind.replay:
            self._look_at(found, told)
        return found

    def _look_at_resume(self, life: Life, before: Checkpoint, told: str) -> None:
        said = life.output()
        if f"frames {before.frames:,}" not in said:
            if said and "SIGKILL of the" not in told:  # it was not ended before it could say so
                self._note("runs that could not be resumed", f"{told}: {said[-900:]}")
            return
        self.counts["resumed"] += 1

    def _look_at(self, found: Checkpoint, told: str) -> None:
        allowed = math.floor(Fraction(RATIO) * max(0, found.counted - PREFILL))
        if abs(allowed - found.updates) > 1:
            self._note(
                "updates off the pace",
                f"{told}: {found.updates} of {allowed}, {found.counted} frames",
            )
        if found.twice or found.written != found.counted:
            self._note(
                "frames counted twice",
                f"{told}: {found.counted} counted, {found.written} written, {found.twice} rows are equal",
            )

    def _note(self, what: str, told: str) -> None:
        self.bad[what] += 1
        self.notes.append(f"{what}: {told}")
        print(self.notes[-1], file=sys.stderr, flush=True)


def own_shared_memory() -> bool:
    """Give this process, and all that it starts, a /dev/shm of its own; False where it may not."""
    new_mounts, all_of_them, private = 0x20000, 0x4000, 0x40000
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(new_mounts) == 0
        and libc.mount(b"none", b"/", None, all_of_them | private, None) == 0
        and libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None) == 0
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", default=[], help=f"of {', '.join(RECIPES)}"
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=540.0, help="no new run begins after this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if unknown := set(given.recipes) - set(RECIPES):
        parser.error(f"no recipe {', '.join(sorted(unknown))}: there are {', '.join(RECIPES)}")
    whose = "its own" if own_shared_memory() else "the machine's"
    print(f"seed {given.seed}, /dev/shm is {whose}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        trial = Trial(Path(folder), given.seed, given.recipes or list(RECIPES))
        while trial.kills() < given.kills and time.monotonic() - began < given.seconds:
            trial.run(began + given.seconds, given.kills)
            print(f"{trial.kills()} signals in {time.monotonic() - began:.0f} s", flush=True)
    found = {
        "seed": given.seed,
        "seconds": round(time.monotonic() - began, 1),
        "kills": trial.kills(),
        "counts": dict(sorted(trial.counts.items())),
        "bad": dict(trial.bad),
        "notes": trial.notes,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")
    print(
        json.dumps({name: found[name] for name in ("seconds", "kills", "counts", "bad")}, indent=2)
    )
    enough = trial.kills() >= given.kills and trial.counts["resumed"] > 0
    return 0 if enough and not sum(trial.bad.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

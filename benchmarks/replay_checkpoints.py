"""What a replay buffer costs as it grows, and what its checkpoints cost beside TorchRL's.

    python benchmarks/replay_checkpoints.py [--vectors 100000 1000000 10000000] [--pictures 10000 100000 1000000]
                                            [--whole 10000 100000] [--rows 100000 1000000]
                                            [--new 1000 10000 50000] [--times 5] [--folder .] [--json FILE]
                                            [--table FILE]

**Growth.** The memory that ``recipe=dqn`` makes, for CartPole-v1 (``--vectors``) and for an Atari game, four grey
pictures of 84 x 84 at once (``--pictures``; with ``--whole`` every row has its own, as before frames were
stored once). Batches come from slots as workers fill them, 64 steps each of two, with random contents: no two
frames are equal, and an episode ends after 200 steps on average. The buffer is full, but for a thousandth, when
a batch, a draw of 256 and checkpoints after 5,000 new frames are timed. Another process then resumes. Medians,
and processor time beside them: a busy machine makes wall times longer. Memory is what this adds to the process.

**Beside TorchRL.** Rows are those that ``recipe=sac`` stores of HalfCheetah-v5, with random contents. The buffer
is full. Each time, some rows are added, and the buffer is saved by ``torchrl.checkpoint.Checkpoint``: with
TorchRL's own checkpointer, which writes the whole storage, and with RowSegments, which writes the new rows and
waits until they are on disk. The two take turns, so that a busy machine is busy for both. Medians; compare the
columns, not the milliseconds. Bytes are those of files that the checkpoint before did not have.

A list without numbers leaves its part out. A million pictures need 8 GB of memory and of disk in ``--folder``,
a hundred thousand whole ones 6.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor
from torchrl.checkpoint import Checkpoint
from torchrl.data import (
    LazyTensorStorage,
    OneHot,
    TensorDictReplayBuffer,
    TensorStorageCheckpointer,
)

from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.observations import observations_of
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.ring.reader import TakenRollout
from rlsync.runs.actors.transitions import Transitions
from rlsync.runs.recipes.checkpoints import WholeCheckpoint, require_whole
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.env_settings import AtariConfig, EnvConfig
from rlsync.runs.recipes.replay.building import step_memory
from rlsync.runs.recipes.replay.memory import StepMemory
from rlsync.runs.recipes.replay.row_segments import RowSegments
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.spaces import Spaces

OBSERVATION, ACTION = 17, 6
TORCHRL, SEGMENTS = "TorchRL", "RowSegments"
Numbers = dict[str, float]


def rows_like_halfcheetah(count: int) -> TensorDict:
    """``[count]`` rows of what a SAC run stores."""

    def ends() -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros(count, 1, dtype=torch.bool)
            for name in ("done", "terminated", "truncated")
        }

    version = torch.zeros(count, dtype=torch.int64)
    return TensorDict(
        {
            "observation": torch.randn(count, OBSERVATION),
            "reward_sum": torch.randn(count, 1),
            "action": torch.rand(count, ACTION),
            "loc": torch.randn(count, ACTION),
            "scale": torch.rand(count, ACTION),
            "policy_version": version,
            "collector": {"traj_ids": version.clone()},
            **ends(),
            "next": {
                "observation": torch.randn(count, OBSERVATION),
                "reward": torch.randn(count, 1),
                "reward_sum": torch.randn(count, 1),
                "policy_version": version.clone(),
                **ends(),
            },
        },
        [count],
    )


def full_buffer(capacity: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=256)
    for _ in range(0, capacity, 50_000):
        buffer.extend(rows_like_halfcheetah(min(capacity, 50_000)))
    return buffer


def files_of(checkpoint: Path) -> dict[tuple[str, int, int], int]:
    stats = [(file.name, file.stat()) for file in checkpoint.rglob("*") if file.is_file()]
    return {(name, stat.st_ino, stat.st_mtime_ns): stat.st_size for name, stat in stats}


def timed_ms(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1e3


def measure(capacity: int, new: int, times: int, folder: Path) -> Numbers:
    """Medians of saves, each after ``new`` rows, and of one load for each checkpointer."""
    buffer = full_buffer(capacity)
    ways = {TORCHRL: TensorStorageCheckpointer(), SEGMENTS: RowSegments(buffer)}
    told: dict[str, list[float]] = {}
    seen: dict[str, dict[tuple[str, int, int], int]] = {way: {} for way in ways}
    for turn in range(times + 1):
        buffer.extend(rows_like_halfcheetah(new))
        for way, checkpointer in ways.items():
            buffer.storage.checkpointer = checkpointer
            checkpoint = folder / way
            took = timed_ms(lambda at=checkpoint: Checkpoint(replay_buffer=buffer).save(at))  # type: ignore[misc]
            files = files_of(checkpoint)
            if turn:  # the first one writes the whole buffer in both ways
                told.setdefault(f"{way} ms", []).append(took)
                written = sum(size for file, size in files.items() if file not in seen[way])
                told.setdefault(f"{way} MB", []).append(written / 1e6)
            seen[way] = files
    for way in ways:
        fresh = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=256)
        if way == SEGMENTS:
            fresh.storage.checkpointer = RowSegments(fresh)
        load = Checkpoint(replay_buffer=fresh).load
        told[f"{way} load ms"] = [timed_ms(lambda at=folder / way, load=load: load(at))]  # type: ignore[misc]
        assert all(
            torch.equal(leaf, buffer.storage.get(slice(0, capacity))[name])
            for name, leaf in fresh.storage.get(slice(0, capacity)).items(True, True)
        )
    medians = {name: statistics.median(values) for name, values in told.items()}
    return {
        "rows": capacity,
        "new": new,
        **{name: round(value, 2) for name, value in medians.items()},
    }


# ----------------------------------------------------------------------------------------------- growth

VECTORS, PICTURES, WHOLE = "vectors", "pictures", "whole pictures"
STACK, SIDE = 4, 84
WORKERS, STEPS = 2, 64  #: of a batch
FILLED_AT_ONCE = 2_000  #: steps of each worker in a batch that fills the buffer
DRAWN = 256
NEW = 5_000  #: frames between two checkpoints
STORES, DRAWS = 50, 200  #: how often these are timed
EPISODE_STEPS = 200
FEW_STEPS = 1_000


def memory_of(kind: str, rows: int) -> StepMemory:
    """The memory that the recipe makes, with its checkpointer."""
    env: EnvConfig = EnvConfig("CartPole-v1")
    space: Box = Box(-np.inf, np.inf, (4,), np.float32)
    if kind != VECTORS:
        env = AtariConfig("ALE/Pong-v5")
        space = Box(0, 255, (STACK, SIDE, SIDE), np.uint8)
    recipe = DQNConfig(buffer_frames=rows, batch_size=DRAWN)
    spaces = Spaces(observations_of(space, kind), 2, OneHot(2, dtype=torch.int64))
    memory = step_memory(Run(Config(recipe=recipe, env=env), spaces))
    if kind == WHOLE:
        memory.frames = None
    memory.buffer.storage.checkpointer = RowSegments(memory.buffer, memory.frames)
    return memory


class Worker:
    """Fills a slot as a worker does, with random contents."""

    def __init__(self, kind: str, steps: int) -> None:
        self._steps = steps
        self._pictures = kind != VECTORS
        shape: tuple[int, ...] = (4,)
        if self._pictures:
            shape = (STACK, SIDE, SIDE)
            self._frames = torch.randint(256, (64, SIDE, SIDE), dtype=torch.uint8)
        dtype = torch.uint8 if self._pictures else torch.float32
        space = Box(-np.inf, np.inf, (4,), np.float32)
        actions = Spaces(observations_of(space, kind), 2, OneHot(2)).player_actions()
        self.player = UniformPlayer(actions, shape, dtype)
        self._views: dict[str, Tensor] = {}
        for name, (size, kind_of_number) in RolloutShape(steps, 1).arrays(self.player).items():
            self._views[name] = torch.zeros(size, dtype=kind_of_number)
        self._count = 0
        self._show_first(0)

    def rollout(self, writer: int) -> TakenRollout:
        views = self._views
        observed = views[keys.OBSERVATION]
        ends = torch.rand(self._steps) < 1 / EPISODE_STEPS
        observed[0] = observed[-1]
        views[keys.IS_INIT][0] = views[keys.IS_INIT][-1]
        views[keys.IS_INIT][1:, 0] = ends
        views[keys.TERMINATED][:, 0] = ends
        views[keys.REWARD].normal_()
        if not self._pictures:
            observed[1:].normal_()
        else:
            for step, is_end in enumerate(ends.tolist()):
                if is_end:
                    self._show_first(step + 1)
                else:
                    observed[step + 1, :, :-1] = observed[step, :, 1:]
                    observed[step + 1, 0, -1] = self._frame()
        return TakenRollout(writer, writer, 0, views, torch.empty(0))

    def _show_first(self, at: int) -> None:
        if self._pictures:
            self._views[keys.OBSERVATION][at] = self._frame()

    def _frame(self) -> Tensor:
        """A frame that was not there before."""
        frame = self._frames[self._count % len(self._frames)]
        self._count += 1
        frame[0, :8] = torch.from_numpy(np.array([self._count]).view(np.uint8))
        return frame


def batches(kind: str, steps: int) -> Generator[TensorDict]:
    workers = [Worker(kind, steps) for _ in range(WORKERS)]
    form = Transitions(workers[0].player.actions, ())
    while True:
        rollouts = [worker.rollout(number) for number, worker in enumerate(workers)]
        yield form.batch(rollouts, CPU)


def resident_bytes(*, peak: bool = False) -> int:
    """Of this process, now or at most since :func:`forget_peak`."""
    name = "VmHWM" if peak else "VmRSS"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {name}")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def costs(act: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the wall clock and of the processor."""
    cpu = time.process_time()
    wall_ms = timed_ms(act)
    return wall_ms, (time.process_time() - cpu) * 1e3


def medians(name: str, each: list[tuple[float, float]]) -> Numbers:
    wall, cpu = zip(*each, strict=True)
    return {f"{name} ms": statistics.median(wall), f"{name} cpu ms": statistics.median(cpu)}


def grown(kind: str, rows: int, folder: Path) -> Numbers:
    """Fill a buffer, and measure what batches, draws and checkpoints cost then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    at_first = resident_bytes()
    memory = memory_of(kind, rows)
    most = min(FILLED_AT_ONCE, max(1, rows // 10 // WORKERS))
    filling = batches(kind, most)
    while memory.buffer.write_count < rows - rows // FEW_STEPS:
        memory.store(next(filling))
    filling.close()
    numbers: Numbers = {"rows": rows, "resident MB": (resident_bytes() - at_first) / 1e6}

    arriving = batches(kind, STEPS)
    arrived = [next(arriving).clone() for _ in range(STORES)]
    stores = [costs(lambda batch=batch: memory.store(batch)) for batch in arrived]  # type: ignore[misc]
    numbers |= medians("store", stores)
    del arrived
    numbers |= medians("draw", [costs(lambda: memory.draw(None)) for _ in range(DRAWS)])

    checkpoint = WholeCheckpoint(replay_buffer=memory.buffer)
    at = folder / CHECKPOINT
    first = costs(lambda: checkpoint.save(at))
    numbers |= medians("first save", [first])
    seen = files_of(at)
    numbers["checkpoint MB"] = sum(seen.values()) / 1e6
    saves = []
    written = []
    for _ in range(5):
        for _ in range(0, NEW, WORKERS * STEPS):
            memory.store(next(arriving))
        saves.append(costs(lambda: checkpoint.save(at)))
        files = files_of(at)
        written.append(sum(size for file, size in files.items() if file not in seen) / 1e6)
        seen = files
    numbers |= medians("save", saves)
    numbers["written MB"] = statistics.median(written)
    numbers["files"] = len(seen)
    return numbers


def resumed(kind: str, rows: int, folder: Path) -> Numbers:
    """Check a checkpoint and load it, as a run does that goes on from it."""
    torch.set_num_threads(1)
    memory = memory_of(kind, rows)
    forget_peak()
    at_first = resident_bytes()
    at = folder / CHECKPOINT
    check = costs(lambda: require_whole(at, trusted=False))
    load = costs(lambda: Checkpoint(replay_buffer=memory.buffer).load(at))
    peak = resident_bytes(peak=True) - at_first
    facts = {"peak MB": peak / 1e6, "rows again": len(memory.buffer)}
    return {**medians("check", [check]), **medians("load", [load]), **facts}


def alone(act: Callable[..., Numbers], *arguments: Any) -> Numbers:
    """What a function returns, in a process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(act, *arguments).result()


def growth(kind: str, rows: int, folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=folder) as name:
        numbers = alone(grown, kind, rows, Path(name))
        numbers |= alone(resumed, kind, rows, Path(name))
    return {"kind": kind, **{name: round(value, 3) for name, value in numbers.items()}}


def growth_table(results: list[dict[str, Any]]) -> str:
    """The growth as a table in Markdown: milliseconds, those of the processor in brackets."""
    lines = [
        "| | rows | bytes a row | memory | batch of 128 | draw of 256 | checkpoint | it writes | a resume checks "
        "| and loads | its memory |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        digits = {"store": 2, "draw": 2, "save": 0, "check": 0, "load": 0}
        store, draw, save, check, load = (
            f"{r[f'{name} ms']:,.{count}f} ({r[f'{name} cpu ms']:,.{count}f})"
            for name, count in digits.items()
        )
        row_bytes = r["checkpoint MB"] / r["rows"] * 1e6
        lines.append(
            f"| {r['kind']} | {r['rows']:,} | {row_bytes:,.0f} | {r['resident MB']:,.0f} MB | {store} | {draw} "
            f"| {save} | {r['written MB']:,.1f} MB | {check} | {load} | {r['peak MB']:,.0f} MB |"
        )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------- beside TorchRL


def table(results: list[Numbers]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| rows | new rows | written before | written now | | save before | save now | | load before | now |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        old, now = r[f"{TORCHRL} MB"], r[f"{SEGMENTS} MB"]
        slow, fast = r[f"{TORCHRL} ms"], r[f"{SEGMENTS} ms"]
        lines.append(
            f"| {r['rows']:,} | {r['new']:,} | {old:.1f} MB | {now:.1f} MB | {old / now:.0f} times less "
            f"| {slow:.0f} ms | {fast:.0f} ms | {slow / fast:.1f} times faster "
            f"| {r[f'{TORCHRL} load ms']:.0f} ms | {r[f'{SEGMENTS} load ms']:.0f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {VECTORS: [10**5, 10**6, 10**7], PICTURES: [10**4, 10**5, 10**6], WHOLE: [10**4, 10**5]}
    for kind, rows in sizes.items():
        name = kind.split()[0]
        parser.add_argument(f"--{name}", dest=kind, type=int, nargs="*", default=rows)
    parser.add_argument("--rows", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--new", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", type=Path, help="a file for the table of growth")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    grew: list[dict[str, Any]] = []
    for kind in sizes:
        for rows in vars(arguments)[kind]:
            grew.append(growth(kind, rows, arguments.folder))
            print(grew[-1], flush=True)
    results = []
    for capacity in arguments.rows:
        for new in arguments.new:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                results.append(measure(capacity, new, arguments.times, Path(folder)))
            print(results[-1], flush=True)
    print(growth_table(grew), table(results), sep="\n\n")
    if arguments.table is not None:
        arguments.table.write_text(growth_table(grew) + "\n")
    if arguments.json is not None:
        found = {"growth": grew, "beside TorchRL": results}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""What a checkpoint of a full replay buffer costs: bytes and milliseconds, by two checkpointers.

    python benchmarks/replay_checkpoints.py [--rows 100000 1000000] [--new 1000 10000 50000] [--times 5]
                                            [--folder .] [--json replay_checkpoints.json]

Rows are those that ``recipe=sac`` stores of HalfCheetah-v5, with random contents. The buffer is full. Each
time, some rows are added, and the buffer is saved by ``torchrl.checkpoint.Checkpoint``: with TorchRL's own
checkpointer, which writes the whole storage, and with RowSegments, which writes the new rows and waits until
they are on disk. The two take turns, so that a busy machine is busy for both. Medians; compare the columns,
not the milliseconds. Bytes are those of files that the checkpoint before did not have.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer, TensorStorageCheckpointer

from rlsync.runs.recipes.replay.row_segments import RowSegments

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
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--new", type=int, nargs="+", default=[1_000, 10_000, 50_000])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for capacity in arguments.rows:
        for new in arguments.new:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                results.append(measure(capacity, new, arguments.times, Path(folder)))
            print(results[-1], flush=True)
    print(table(results))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

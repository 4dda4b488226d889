"""Torn and misnamed frames of worker processes, with TorchRL's own schemes and with a board.

    python benchmarks/schemes.py [--frames 20000] [--schemes board shared_mem multi_process] [--out FILE.csv]

An ordinary loop: two workers of a MultiAsyncCollector collect batches of 128 frames, and the learner
publishes after each batch. Every weight of the policy (64 tensors of 128 x 128) holds the number of the
publish. Each frame reports the smallest and the largest weight that chose its action, and its stamp.
Different weights are a **torn** frame. A stamp that is not the weight's number is a **misnamed** one; a
stamp that is always so much too high or too low counts as right.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from servers import Canary, StillEnv
from torchrl.collectors import MultiAsyncCollector
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from rlsync import BoardScheme

SCHEMES: dict[str, Callable[[], WeightSyncScheme]] = {
    "board": BoardScheme,
    "shared_mem": SharedMemWeightSyncScheme,
    "multi_process": MultiProcessWeightSyncScheme,
}
COLUMNS = ("scheme", "publishes", "frames", "torn", "misnamed")
BATCH = 128


def observe(name: str, enough: int) -> dict[str, object]:
    """Collect so many frames, and count."""
    learner, publishes, frames, torn = Canary(), 0, 0, 0
    # of frames that are not torn: stamp minus number of the weights
    apart: Counter[int] = Counter()
    collector = MultiAsyncCollector(
        [StillEnv] * 2,
        Canary(),  # not the learner's: TorchRL's workers would act with the memory that it writes
        frames_per_batch=BATCH,
        total_frames=-1,
        track_policy_version=True,
        weight_sync_schemes={"policy": SCHEMES[name]()},
    )
    for batch in collector:
        low, high, stamp = (batch[key].flatten() for key in ("low", "high", "policy_version"))
        whole = low == high
        frames, torn = frames + len(low), torn + int((~whole).sum())
        apart.update((stamp - low)[whole].long().tolist())
        if frames >= enough:
            break
        publishes += 1
        collector.update_policy_weights_(learner.fill(publishes))
    collector.shutdown()
    misnamed = sum(apart.values()) - max(apart.values())
    return dict(zip(COLUMNS, (name, publishes, frames, torn, misnamed), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [observe(name, asked.frames) for name in asked.schemes]
    for row in rows:
        print(row)
    if asked.out:
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

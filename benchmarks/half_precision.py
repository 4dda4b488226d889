"""Do workers in half precision learn as well? Count the frames until the default recipe is solved.

    python benchmarks/half_precision.py [--seeds 0 1 2 3 4] [--dtypes float32 bfloat16]
                                        [--out half_precision.json]

This trains the default recipe, PPO on CartPole-v1 with two worker processes on a board, to a mean return of
475 over 20 episodes, once for each seed and dtype. Only the ``dtype`` in the sync map differs. The learner
always trains in float32. The table also has the bytes of a publish.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from rlsync import SyncWeights
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.settings import Config, RouteConfig, SyncConfig
from rlsync.torchrl_plugin.compat.trainers import registered_modules


def run(dtype: str, seed: int) -> dict[str, object]:
    """Run one training."""
    declared = None if dtype == "float32" else dtype
    route = RouteConfig("policy", "loss_module.actor_network", declared)
    trainer = ppo.RECIPE.build(Config(seed=seed, sync=SyncConfig(map=[route])))
    trainer.train()
    parts = registered_modules(trainer)
    (returns,) = (part for part in parts if isinstance(part, EpisodeReturns))
    (sync,) = (part for part in parts if isinstance(part, SyncWeights))
    return {
        "dtype": dtype,
        "seed": seed,
        "solved": returns.reached,
        "frames": trainer.collected_frames,
        "copied_bytes": sync.receipts[-1].copied_bytes,
    }


def table(rows: list[dict], seeds: list[int]) -> list[str]:
    lines = [
        f"| workers act in | bytes a publish | {' | '.join(f'seed {seed}' for seed in seeds)} | median |",
        "|---|---|" + "---|" * (len(seeds) + 1),
    ]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        mine = [row for row in rows if row["dtype"] == dtype]
        frames = [f"{row['frames']:,}" if row["solved"] else f"> {row['frames']:,}" for row in mine]
        median = statistics.median(row["frames"] for row in mine)
        lines.append(
            f"| {dtype} | {mine[0]['copied_bytes']:,} | {' | '.join(frames)} | {median:,.0f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", default="half_precision.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in options.seeds:
        for dtype in options.dtypes:
            rows.append(run(dtype, seed))
            print(rows[-1], flush=True)
    Path(options.out).write_text(json.dumps(rows, indent=2) + "\n")
    print(*table(rows, options.seeds), sep="\n")


if __name__ == "__main__":
    main()

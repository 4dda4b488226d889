"""rlsync's recipes ``sac``, ``crossq`` and ``td3`` on one environment. They report their frames and updates.

    python benchmarks/peers/rlsync_off_policy_peer.py --algorithm sac --env Pendulum-v1 --seconds 60

This is the training of ``rlsync train recipe=sac``, with one worker and batches of 64 frames, built in
Python so that it can end after a given time.
"""

from __future__ import annotations

import argparse

from paced import run
from rlsync_peer import NEVER

from rlsync.recipes.registry import recipe_named
from rlsync.recipes.replay.settings import PaceConfig
from rlsync.recipes.settings import CollectorConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=["sac", "crossq", "td3"], default="sac")
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--prefill", type=int, default=1_000)
    parser.add_argument("--collector", choices=["sync", "async"], default="async")
    parser.add_argument("--update-dtype", default="float32")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    named = recipe_named(options.algorithm)
    pace, way = PaceConfig(prefill=options.prefill), options.compile
    keys = {"lr": 1e-3, "pace": pace, "update_dtype": options.update_dtype, "compile": way}
    recipe = named.settings(total_frames=NEVER, **keys)
    collector = CollectorConfig(options.collector, 1, 64)
    acting = "policy.module[0]" if options.algorithm == "td3" else "policy"  # of td3, before its noise
    run(named.build, options.env, collector, recipe, options.seconds, acting)


if __name__ == "__main__":
    main()

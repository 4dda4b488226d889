"""rlsync's recipes ``sac``, ``crossq`` and ``td3`` on one environment. They report their frames and updates.

    python benchmarks/peers/rlsync_off_policy_peer.py --algorithm sac --env Pendulum-v1 --seconds 60

This is the training of ``rlsync train recipe=sac``, with one worker and batches of 64 frames, built in
Python so that it can end after a given time.
"""

from __future__ import annotations

import argparse

from paced import run
from rlsync_peer import NEVER

from rlsync.recipes import sac, td3
from rlsync.recipes.replay.settings import PaceConfig
from rlsync.recipes.sac import CrossQConfig, SACConfig
from rlsync.recipes.settings import CollectorConfig
from rlsync.recipes.td3 import TD3Config

RECIPES = {
    "sac": (sac.RECIPE.build, SACConfig),
    "crossq": (sac.CROSSQ.build, CrossQConfig),
    "td3": (td3.RECIPE.build, TD3Config),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=list(RECIPES), default="sac")
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--prefill", type=int, default=1_000)
    parser.add_argument("--collector", choices=["sync", "async"], default="async")
    parser.add_argument("--update-dtype", default="float32")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    build, settings = RECIPES[options.algorithm]
    pace, way = PaceConfig(prefill=options.prefill), options.compile
    recipe = settings(total_frames=NEVER, lr=1e-3, pace=pace, update_dtype=options.update_dtype, compile=way)
    collector = CollectorConfig(options.collector, 1, 64)
    acting = "policy.module[0]" if options.algorithm == "td3" else "policy"  # of td3, before its noise
    run(build, options.env, collector, recipe, options.seconds, acting)


if __name__ == "__main__":
    main()

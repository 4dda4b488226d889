"""rlsync's recipe ``dreamer_v3`` on one environment. It reports its frames and updates.

    python benchmarks/peers/rlsync_dreamer_peer.py --env CartPole-v1 --workers 1 --seconds 60

This is the training of ``rlsync train recipe=dreamer_v3``, with one worker or none, built in Python so that
it can end after a given time.
"""

from __future__ import annotations

import argparse

from dreamer_sizes import add_sizes
from paced import run
from rlsync_peer import NEVER

from rlsync.runs.recipes.dreamer import v3
from rlsync.runs.recipes.dreamer.config import DreamerV3Config
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.settings import CollectorConfig

#: The recipe's key for each size; the pace has keys of its own.
KEYS = {
    "belief": "belief",
    "categoricals": "categoricals",
    "classes": "classes",
    "width": "cells",
    "layers": "depth",
    "batch_size": "batch_size",
    "sequence_length": "sequence_length",
    "horizon": "horizon",
    "buffer_frames": "buffer_frames",
}


def recipe_of(options: argparse.Namespace) -> DreamerV3Config:
    """The recipe's settings, with these sizes and no end."""
    sizes = {key: vars(options)[name] for name, key in KEYS.items()}
    pace = PaceConfig(ratio=options.replay_ratio, prefill=options.prefill)
    return DreamerV3Config(total_frames=NEVER, pace=pace, **sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    add_sizes(parser)
    parser.add_argument(
        "--workers", type=int, default=1, help="processes; 0: the learner's own acts"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    run(
        v3.RECIPE.build,
        options.env,
        CollectorConfig(options.workers, 16),
        recipe_of(options),
        options.seconds,
    )


if __name__ == "__main__":
    main()

"""rlsync's recipes ``sac`` and ``td3`` on one environment. They report their frames and updates.

    python benchmarks/peers/rlsync_off_policy_peer.py --algorithm sac --env Pendulum-v1 --seconds 60

This is the training of ``rlsync train recipe=sac``, with one worker and the shipped settings, built in Python
so that it can end after a given time.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from rlsync_peer import NEVER, Report

from rlsync.recipes.config import CollectorConfig, Config, EnvConfig, LoggerConfig
from rlsync.recipes.hooks import KeepPace
from rlsync.recipes.off_policy import sac, td3
from rlsync.recipes.off_policy.config import PaceConfig, SACConfig, TD3Config
from rlsync.torchrl_plugin import compat

RECIPES = {"sac": (sac.build, SACConfig), "td3": (td3.build, TD3Config)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=list(RECIPES), default="sac")
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--prefill", type=int, default=1_000)
    parser.add_argument("--collector", choices=["sync", "async"], default="async")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    build, settings = RECIPES[options.algorithm]
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = build(
            Config(
                run_dir=run_dir,
                checkpoint_every_frames=NEVER,
                env=EnvConfig(options.env),
                collector=CollectorConfig(options.collector, 1, 64),
                logger=LoggerConfig(kind="none"),
                recipe=settings(total_frames=NEVER, pace=PaceConfig(prefill=options.prefill)),
            )
        )
        (pace,) = (m for m in compat.registered_modules(trainer) if isinstance(m, KeepPace))
        trainer.register_op("post_steps", Report(trainer, options.seconds, lambda: {"updates": pace.updates}))
        try:
            trainer.train()
        finally:
            trainer.collector.shutdown()


if __name__ == "__main__":
    main()

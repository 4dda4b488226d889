"""rlsync's recipe ``impala`` on Pong. It reports its steps.

    python benchmarks/peers/rlsync_peer.py --precision fp32 --seconds 60 [--workers 2] [--envs 8]
                                           [--rollout 32] [--torso nature] [--lstm 0] [--torso-threads 1]
                                           [--cluster] [--lag K]

This is the training of ``rlsync train recipe=impala env=pong``, built in Python so that it can end after a
given time. Steps are those that the learner has trained on. The lag covers all steps of the run and comes
from the recipe's own histogram. With ``--cluster`` it starts a Ray of this machine, whose one node has the
workers.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from torchrl.trainers import Trainer

from rlsync.runs.life.training import prepare_process
from rlsync.runs.recipes import run_files
from rlsync.runs.recipes.hooks.measuring import StatisticsHook
from rlsync.runs.recipes.impala import recipe
from rlsync.runs.recipes.impala.settings import ImpalaConfig, ModelConfig
from rlsync.runs.recipes.settings import (
    THIS_MACHINE,
    AtariConfig,
    ClusterConfig,
    CollectorConfig,
    Config,
    LoggerConfig,
)
from rlsync.torchrl_plugin.compat.trainers import registered_modules

REPORT_EVERY_S = 0.5
NEVER = 10**9


class Report:
    """Prints a line of JSON for the measuring process from time to time, and ends the run in time.

    Args:
        trainer: that runs.
        seconds: after which it ends.
        more: what a report says besides the steps.
    """

    def __init__(
        self, trainer: Trainer, seconds: float, more: Callable[[], dict[str, float]] = dict
    ) -> None:
        self._trainer = trainer
        self._seconds = seconds
        self._more = more
        self._ends_s = self._next_s = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        self._ends_s = self._ends_s or now + self._seconds
        if now >= self._next_s:
            self._next_s = now + REPORT_EVERY_S
            print(
                "@",
                json.dumps({"steps": self._trainer.collected_frames} | self._more()),
                flush=True,
            )
        if now >= self._ends_s:
            self._trainer.request_stop("the time is over")


def config_of(options: argparse.Namespace, run_dir: str) -> Config:
    """The recipe's config, with the settings of the other contenders."""
    batch = options.envs * options.rollout
    settings = ImpalaConfig(
        total_frames=NEVER,
        target_return=None,
        unroll_length=options.rollout,
        batch_size=options.envs,
        optimizer="rmsprop",
        lr=6e-4,
        anneal_lr=False,
        clip_norm=40.0,
        update_dtype={"fp32": "float32", "bf16": "bfloat16"}[options.precision],
        model=ModelConfig(
            torso=options.torso,
            lstm=options.lstm,
            torso_threads=options.torso_threads,
        ),
    )
    return Config(
        run_dir=run_dir,
        checkpoint_every_frames=NEVER,
        env=AtariConfig("ALE/Pong-v5", options.envs, repeat_action_probability=0.0),
        collector=CollectorConfig(options.workers, batch, lag=options.lag),
        cluster=ClusterConfig(kind="ray" if options.cluster else THIS_MACHINE),
        logger=LoggerConfig(kind="none"),
        recipe=settings,
    )


def lag(histogram: Path) -> dict[str, float]:
    """The mean and the maximum lag, from the recipe's own histogram."""
    with histogram.open(newline="") as file:
        rows = [(int(row["staleness_versions"]), int(row["steps"])) for row in csv.DictReader(file)]
    steps = sum(count for _, count in rows)
    return {"lag_mean": sum(age * count for age, count in rows) / steps, "lag_max": max(rows)[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--torso", choices=["nature", "impala"], default="nature")
    parser.add_argument("--lstm", type=int, default=0)
    parser.add_argument("--torso-threads", type=int, default=1)
    parser.add_argument("--lag", type=int, help="collector.lag; by default the run is free")
    parser.add_argument(
        "--cluster", action="store_true", help="workers on a Ray node of this machine"
    )
    options = parser.parse_args()
    prepare_process()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as run_dir:  # Ray may still write
        os.environ.setdefault("RAY_TMPDIR", run_dir)
        trainer = recipe.RECIPE.build(config_of(options, run_dir))
        trainer.register_op("post_steps", Report(trainer, options.seconds))
        try:
            trainer.train()
        finally:
            trainer.collector.shutdown()
        (load,) = (m.load for m in registered_modules(trainer) if isinstance(m, StatisticsHook))
        print(load, flush=True)
        print("@", json.dumps(lag(Path(run_dir) / run_files.STALENESS)), flush=True)


if __name__ == "__main__":
    main()

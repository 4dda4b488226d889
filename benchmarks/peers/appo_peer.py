"""Sample Factory's APPO on Pong. It reports its steps, and runs in its own virtual environment.

    PEER_PYTHON benchmarks/peers/appo_peer.py --seconds 60 [--workers 2] [--envs 8] [--rollout 32]
                                              [--batch 256] [--torso nature] [--lstm 0]
                                              [--until RETURN --out FILE.csv] [--shipped]
                                              [Sample Factory's own arguments]

With ``--until`` it ends when the mean return of the newest 20 episodes reaches that; ``--out`` has this mean
every 40,000 steps. With ``--shipped`` it learns with the settings of ``sf_examples.atari``, also the lengths
of rollouts and batches, without asynchronous sampling, and the network is theirs.

The environment is that of ``sf_examples.atari``. ale-py 0.12 registers nothing for gymnasium 0.29, so this
script registers the id that those examples use. Steps are those that the learner has trained on, without
frame skip. Sample Factory's log calls them "Total num frames" when summaries_use_frameskip is off. The
collected steps, which its log calls "Samples", are reported too.

Otherwise it makes one epoch over each batch, as the other contenders do, with asynchronous, double-buffered
sampling. It uses GAE instead of V-trace, because with_vtrace ends version 2.1.1 with an AttributeError in its
summaries.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.atari.atari_params import atari_override_defaults
from sf_examples.atari.atari_utils import make_atari_env

ENV = "atari_pong"
REPORT_EVERY_S = 0.5
EPISODES, ROW_EVERY_STEPS = 20, 40_000


def make_env(
    name: str, cfg: object, env_config: object, render_mode: str | None = None
) -> gymnasium.Env:
    """Make the stock Atari environment of the examples. Called in every process that needs one."""
    if "PongNoFrameskip-v4" not in gymnasium.registry:
        gymnasium.register(
            "PongNoFrameskip-v4",
            entry_point="ale_py.env:AtariEnv",
            kwargs={
                "game": "pong",
                "obs_type": "rgb",
                "frameskip": 1,
                "repeat_action_probability": 0.0,
            },
        )
    return make_atari_env(name, cfg, env_config, render_mode)


class Report(AlgoObserver):
    """Prints a line of JSON for the measuring process, from time to time after a training step."""

    def __init__(self, seconds: float, until: float, out: Path | None) -> None:
        self._seconds = seconds
        self._until = until
        self._out = out
        self._began_s = time.monotonic()
        self._ends_s = self._next_s = self._next_row = 0.0
        if out:
            out.write_text("frames,return,seconds\n")

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        now = time.monotonic()
        self._ends_s = self._ends_s or now + self._seconds
        # 2.1.1 does not count these seconds: --train_for_seconds alone never ends
        if now >= self._ends_s:
            runner.total_train_seconds = runner.cfg.train_for_seconds + 1
        if now < self._next_s or 0 not in runner.env_steps:
            return
        self._next_s = now + REPORT_EVERY_S
        self._follow(runner)
        lag = runner.policy_lag[0]
        line: dict[str, float] = {
            "steps": int(runner.env_steps[0]),
            "sampled_steps": int(runner.samples_collected[0]),
            "versions": training_iteration_since_resume,
        }
        if lag:
            line |= {
                "lag_mean": float(lag["version_diff_avg"]),
                "lag_max": float(lag["version_diff_max"]),
            }
        print("@", json.dumps(line), flush=True)

    def _follow(self, runner: Runner) -> None:
        newest = list(runner.policy_avg_stats.get("reward", [[]])[0])[-EPISODES:]
        if len(newest) < EPISODES:
            return
        mean, steps = sum(map(float, newest)) / EPISODES, int(runner.env_steps[0])
        reached = mean >= self._until
        if self._out and (reached or steps >= self._next_row):
            self._next_row = steps + ROW_EVERY_STEPS
            with self._out.open("a") as opened:
                opened.write(f"{steps},{mean:.2f},{time.monotonic() - self._began_s:.0f}\n")
        if reached:
            self._ends_s = time.monotonic()


def arguments(options: argparse.Namespace, train_dir: str) -> list[str]:
    """The arguments of Sample Factory."""
    told: dict[str, object] = {
        "env": ENV,
        "experiment": "pong",
        "train_dir": train_dir,
        "device": "cpu",
        "seed": options.seed,
        "num_workers": options.workers,
        "num_envs_per_worker": options.envs,
        "policy_workers_per_policy": 1,
        "summaries_use_frameskip": False,
        "train_for_seconds": int(options.seconds),
        "save_every_sec": 100_000,
        "with_wandb": False,
    }
    if not options.shipped:
        told |= {
            "worker_num_splits": 2,
            "async_rl": True,
            "serial_mode": False,
            "batched_sampling": False,
            "rollout": options.rollout,
            "batch_size": options.batch,
            "num_batches_per_epoch": 1,
            "num_epochs": 1,
            "with_vtrace": False,
            "recurrence": options.rollout if options.lstm else 1,
            "use_rnn": bool(options.lstm),
            "rnn_type": "lstm",
            "rnn_size": options.lstm or 1,
            "encoder_conv_architecture": {"nature": "convnet_atari", "impala": "resnet_impala"}[
                options.torso
            ],
            "encoder_conv_mlp_layers": {"nature": 512, "impala": 256}[options.torso],
            "nonlinearity": "relu",
            "obs_scale": 255.0,
            "normalize_input": False,
            "normalize_returns": False,
            "env_frameskip": 4,
            "env_framestack": 4,
            "learning_rate": 6e-4,
            "exploration_loss_coeff": 0.01,
        }
    return [f"--{name}={value}" for name, value in told.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--torso", choices=["nature", "impala"], default="nature")
    parser.add_argument("--lstm", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--until", type=float, default=math.inf)
    parser.add_argument("--out", type=Path)
    options, further = parser.parse_known_args()
    register_env(ENV, make_env)
    with tempfile.TemporaryDirectory() as train_dir:
        told = arguments(options, train_dir) + further
        parser, _ = parse_sf_args(told)
        if options.shipped:
            atari_override_defaults(ENV, parser)
        _, runner = make_runner(parse_full_cfg(parser, told))
        runner.register_observer(Report(options.seconds, options.until, options.out))
        return int(runner.init() or runner.run())


if __name__ == "__main__":
    raise SystemExit(main())

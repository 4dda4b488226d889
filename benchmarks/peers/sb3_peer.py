"""Stable-Baselines3 with the settings of rlsync's recipes, in a virtual environment.

    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm sac --env Pendulum-v1 --seconds 60
    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm sac --env Pendulum-v1 --frames 10000 --seed 0
                                             --evaluate-every 1000 [--episodes 8] --out FILE.csv

    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm ppo --env CartPole-v1 --num-envs 8 --frames 20480

With ``--package sbx`` the learner (sac, td3) is SBX's: the same in jax, which is asked for one thread,
and takes more than one core all the same.
It reports its frames and updates. With ``--evaluate-every`` it plays greedily between two updates and writes
the returns as CSV; that time is not in the seconds of the file, nor in those that it reports. It ends when
these returns reach ``--target-return``; without evaluations, when those of the last 20 episodes do.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise

REPORT_EVERY_S = 0.5
EVALUATION_SEED = 100_000
NEVER = 10**9
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # of jax


def model_of(options: argparse.Namespace) -> BaseAlgorithm:
    """The learner; without options it has the values of configs/recipe, and for dqn of configs/tuned."""
    if options.algorithm == "ppo":
        return ppo_of(options)
    env = gymnasium.make(options.env)
    if options.algorithm == "dqn":
        return DQN(
            "MlpPolicy",
            env,
            learning_rate=linear(2.3e-3),
            buffer_size=50_000,
            learning_starts=options.prefill,
            batch_size=64,
            gamma=0.99,
            train_freq=2,
            gradient_steps=1,
            target_update_interval=256,  # frames: 128 updates
            exploration_fraction=10_000 / options.total_frames,
            exploration_final_eps=0.04,
            max_grad_norm=10,
            policy_kwargs={"net_arch": [256, 256]},
            device=options.device,
            seed=options.seed,
        )
    same = {
        "learning_rate": options.lr,
        "buffer_size": options.buffer_frames,
        "learning_starts": options.prefill,
        "batch_size": 256,
        "tau": 0.005,
        "gamma": 0.99,
        "train_freq": options.frames_per_update,
        "gradient_steps": 1,
        "policy_kwargs": {"net_arch": [256, 256]},
        "device": options.device,
        "seed": options.seed,
    }
    package = importlib.import_module(options.package)
    if options.algorithm == "sac":
        return package.SAC("MlpPolicy", env, ent_coef="auto_1.0", **same)
    actions = env.action_space.shape
    noise = NormalActionNoise(np.zeros(actions), np.full(actions, 0.1))  # in halves of the range
    return package.TD3("MlpPolicy", env, action_noise=noise, policy_delay=2, **same)


def ppo_of(options: argparse.Namespace) -> PPO:
    """PPO with 2,048 frames a batch from all environments together."""
    return PPO(
        "MlpPolicy",
        make_vec_env(options.env, options.num_envs, seed=options.seed),
        learning_rate=linear(2e-3),
        n_steps=2048 // options.num_envs,
        batch_size=128,
        n_epochs=4,
        ent_coef=0.0,
        policy_kwargs={"net_arch": [64, 64]},
        device=options.device,
        seed=options.seed,
    )


def linear(rate: float) -> Callable[[float], float]:
    """A learning rate that falls to a twentieth."""
    return lambda remaining: rate * max(remaining, 0.05)


class Report(BaseCallback):
    """Prints a line of JSON for the measuring process from time to time, evaluates, and ends the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self._options = options
        self._env = gymnasium.make(options.env)
        self._env.reset(seed=EVALUATION_SEED + options.seed)
        self._began_s = self._next_s = self._evaluating_s = 0.0
        self.rows: list[dict[str, float]] = []
        self.reached = False

    def _on_training_start(self) -> None:
        self._began_s = time.monotonic()

    def _on_step(self) -> bool:
        every = self._options.evaluate_every
        if every and self.num_timesteps % every == 0:
            self._evaluate()
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + REPORT_EVERY_S
            self.report()
        target = self._options.target_return
        self.reached = target is not None and self._mean_return() >= target
        within = self._options.seconds is None or now < self._began_s + self._options.seconds
        return within and not self.reached

    def report(self) -> None:
        said = {
            "steps": self.num_timesteps,
            "updates": self.model._n_updates,
            "reached": int(self.reached),
            "seconds": time.monotonic() - self._began_s,
            "evaluating_s": self._evaluating_s,
        }
        print("@", json.dumps(said), flush=True)

    def _mean_return(self) -> float:
        if self._options.evaluate_every:
            return self.rows[-1]["return_mean"] if self.rows else -math.inf
        newest = [episode["r"] for episode in self.model.ep_info_buffer][-20:]
        return float(np.mean(newest)) if len(newest) == 20 else -math.inf

    def _evaluate(self) -> None:
        began_s = time.monotonic()
        returns, _ = evaluate_policy(
            self.model,
            self._env,
            self._options.episodes,
            deterministic=True,
            return_episode_rewards=True,
            warn=False,
        )
        self.rows.append(
            {
                "frames": self.num_timesteps,
                "updates": self.model._n_updates,
                "episodes": len(returns),
                "return_mean": round(float(np.mean(returns)), 2),
                "return_std": round(float(np.std(returns)), 2),
                "seconds": round(began_s - self._began_s - self._evaluating_s, 1),
            }
        )
        self._evaluating_s += time.monotonic() - began_s
        if self._options.out:
            self._write(self._options.out)

    def _write(self, path: Path) -> None:
        """All rows so far: a run that is ended has those of its evaluations."""
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=["sac", "td3", "dqn", "ppo"], default="sac")
    parser.add_argument(
        "--package", choices=["stable_baselines3", "sbx"], default="stable_baselines3"
    )
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--prefill", type=int, default=1_000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--buffer-frames", type=int, default=100_000)
    parser.add_argument("--frames-per-update", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--frames", type=int, default=NEVER)
    parser.add_argument("--evaluate-every", type=int, default=0, help="frames")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--num-envs", type=int, default=1, help="of ppo")
    parser.add_argument("--total-frames", type=int, default=150_000, help="over which rates fall")
    parser.add_argument("--target-return", type=float)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("XLA_FLAGS", ONE_THREAD)
    report = Report(options)
    model_of(options).learn(options.frames, callback=report)
    report.report()


if __name__ == "__main__":
    main()

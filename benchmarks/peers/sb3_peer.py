"""Stable-Baselines3 with the settings of rlsync's recipes, in a virtual environment.

    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm sac --env Pendulum-v1 --seconds 60
    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm sac --env Pendulum-v1 --frames 10000 --seed 0
                                             --evaluate-every 1000 [--episodes 8] --out FILE.csv

    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm ppo --env CartPole-v1 --num-envs 8 --frames 20480

    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm ppo --env HalfCheetah-v5 --frames 1000000 --seed 0
                                             --episodes-every 20000 --out FILE.csv

    PEER_PYTHON benchmarks/peers/sb3_peer.py --algorithm ppo --env ALE/Pong-v5 --frames 10000000 --seed 0
                                             --target-return 18 --threads 2 --episodes-every 8000
                                             --out FILE.csv

With ``--package sbx`` the learner (sac, td3) is SBX's: the same in jax, which is asked for one thread,
and takes more than one core all the same.
It reports its frames and updates. With ``--evaluate-every`` it plays greedily between two updates and writes
the returns as CSV; that time is not in the seconds of the file, nor in those that it reports. It ends when
these returns reach ``--target-return``; without evaluations, when those of the last 20 episodes do. With
``--episodes-every`` the file has the mean return of the last 20 episodes of training instead, without a pause.
``ppo`` has rl-zoo3's settings on HalfCheetah-v5 and Hopper-v5, and both it and ``dqn`` on games of Atari,
which they play as ``env=pong`` of rlsync does (``--threads`` are those of torch).
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
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize

REPORT_EVERY_S = 0.5
EVALUATION_SEED = 100_000
NEVER = 10**9
NEWEST_EPISODES = 20
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # of jax


# Of https://github.com/DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml, as in configs/tuned/ppo_*.yaml of rlsync.
ZOO: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {
        "batch_size": 64,
        "gamma": 0.98,
        "learning_rate": 2.0633e-05,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
    },
    "Hopper-v5": {
        "batch_size": 32,
        "gamma": 0.999,
        "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
    },
}


def model_of(options: argparse.Namespace) -> BaseAlgorithm:
    """The learner; without options it has the values of configs/recipe, and for dqn of configs/tuned."""
    if options.algorithm == "ppo":
        return ppo_of(options)
    if options.algorithm == "dqn" and is_game(options.env):
        return game_dqn_of(options)
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
    """PPO with 2,048 frames a batch from all environments together, or with rl-zoo3's settings."""
    if is_game(options.env):
        return game_ppo_of(options)
    if options.env in ZOO:
        return zoo_ppo_of(options)
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


def zoo_ppo_of(options: argparse.Namespace) -> PPO:
    """PPO as rl-zoo3 trains it on a task of MuJoCo: one environment, observations and rewards normalised."""
    settings = ZOO[options.env]
    envs = make_vec_env(options.env, 1, seed=options.seed)
    return PPO(
        "MlpPolicy",
        VecNormalize(envs, gamma=settings["gamma"]),
        n_steps=512,
        policy_kwargs={
            "log_std_init": -2,
            "ortho_init": False,
            "activation_fn": torch.nn.ReLU,
            "net_arch": {"pi": [256, 256], "vf": [256, 256]},
        },
        device=options.device,
        seed=options.seed,
        **settings,
    )


def is_game(env: str) -> bool:
    return env.startswith("ALE/")


def games(options: argparse.Namespace, count: int) -> VecEnv:
    """Environments with AtariWrapper's preprocessing, four pictures each, without sticky actions."""
    gymnasium.register_envs(importlib.import_module("ale_py"))
    plain = {"frameskip": 1, "repeat_action_probability": 0.0}
    return VecFrameStack(
        make_atari_env(options.env, count, seed=options.seed, env_kwargs=plain), n_stack=4
    )


def game_ppo_of(options: argparse.Namespace) -> PPO:
    """PPO as rl-zoo3 trains it on a game of Atari."""
    return PPO(
        "CnnPolicy",
        games(options, 8),
        learning_rate=lambda remaining: 2.5e-4 * remaining,
        clip_range=lambda remaining: 0.1 * remaining,
        n_steps=128,
        batch_size=256,
        n_epochs=4,
        ent_coef=0.01,
        vf_coef=0.5,
        device=options.device,
        seed=options.seed,
    )


def game_dqn_of(options: argparse.Namespace) -> DQN:
    """DQN as rl-zoo3 trains it on a game of Atari."""
    return DQN(
        "CnnPolicy",
        games(options, 1),
        learning_rate=1e-4,
        buffer_size=100_000,
        learning_starts=100_000,
        batch_size=32,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=1_000,
        exploration_fraction=0.1,
        exploration_final_eps=0.01,
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
        if options.evaluate_every:
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
        every = self._options.episodes_every
        if every and self.num_timesteps % every == 0:
            self._keep(self._newest_episodes(), time.monotonic())
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
        newest = self._newest_episodes()
        return float(np.mean(newest)) if len(newest) == NEWEST_EPISODES else -math.inf

    def _newest_episodes(self) -> list[float]:
        return [episode["r"] for episode in self.model.ep_info_buffer][-NEWEST_EPISODES:]

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
        self._keep(returns, began_s)
        self._evaluating_s += time.monotonic() - began_s

    def _keep(self, returns: list[float], at_s: float) -> None:
        if not returns:
            return
        self.rows.append(
            {
                "frames": self.num_timesteps,
                "updates": self.model._n_updates,
                "episodes": len(returns),
                "return_mean": round(float(np.mean(returns)), 2),
                "return_std": round(float(np.std(returns)), 2),
                "seconds": round(at_s - self._began_s - self._evaluating_s, 1),
            }
        )
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
    parser.add_argument("--episodes-every", type=int, default=0, help="frames")
    parser.add_argument("--num-envs", type=int, default=1, help="of ppo")
    parser.add_argument("--total-frames", type=int, default=150_000, help="over which rates fall")
    parser.add_argument("--target-return", type=float)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ.setdefault("XLA_FLAGS", ONE_THREAD)
    report = Report(options)
    model_of(options).learn(options.frames, callback=report)
    report.report()


if __name__ == "__main__":
    main()

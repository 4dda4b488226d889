"""What acting takes: a policy's call, in TorchRL's classes and in plain tensors; frames a second.

    python benchmarks/acting.py [--peer-venv FOLDER] [--rounds 10]

Contenders take turns in each round, in this process and with one thread; a cell is the least processor time
of the rounds. Frames a second are those of TorchRL's collector on CartPole-v1 with the policy of ``ppo``, and
of Stable-Baselines3's ``collect_rollouts``, which runs in a virtual environment of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers.venvs import STABLE_BASELINES
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.recipes.settings import EnvConfig
from rlsync.recipes.spaces import make_env

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.recipes.test_plain_policies import POLICIES, stock

ROWS = (1, 8)
STEPS = 128

SB3 = """
import time, torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
torch.set_num_threads(1)
for envs in {rows}:
    venv = make_vec_env("CartPole-v1", envs)
    model = PPO("MlpPolicy", venv, n_steps={steps}, policy_kwargs=dict(net_arch=[64, 64]))
    _, callback = model._setup_learn(10**9)
    least = float("inf")
    for _ in range({rounds}):
        began = time.thread_time()
        model.collect_rollouts(model.env, callback, model.rollout_buffer, {steps})
        least = min(least, time.thread_time() - began)
    print(round(envs * {steps} / least))
"""


def least_s(ways: dict[str, Callable[[], object]], rounds: int, calls: int) -> Iterator[tuple[str, float]]:
    """The least processor time of a call, of contenders that take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            began = time.thread_time()
            for _ in range(calls):
                call()
            times[name].append((time.thread_time() - began) / calls)
    for name, taken in times.items():
        yield name, min(taken)


def _call(policy: Any, seen: TensorDict) -> None:
    policy(seen.copy())


def batches(policy: Any, envs: int) -> Callable[[], object]:
    """What collects STEPS steps of all environments at each call."""
    make = partial(make_env, EnvConfig(num_envs=envs))
    collector = Collector(
        make, policy, frames_per_batch=STEPS * envs, total_frames=-1, track_policy_version=True
    )
    return partial(next, iter(collector))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-venv", type=Path, default=STABLE_BASELINES.folder)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| policy | rows | TorchRL's classes, us | plain tensors, us |\n| --- | ---: | ---: | ---: |")
    for name, (spaces, made) in POLICIES.items():
        plain = made()
        for rows in ROWS:
            shape = [rows] if rows > 1 else []
            seen = TensorDict({"observation": torch.zeros(*shape, spaces.features)}, shape)
            ways = {"stock": stock(plain), "plain": plain}
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                calls = {way: partial(_call, policy, seen) for way, policy in ways.items()}
                took = dict(least_s(calls, options.rounds, 50))
            print(f"| {name} | {rows} | {took['stock'] * 1e6:.0f} | {took['plain'] * 1e6:.0f} |", flush=True)
    code = SB3.format(rows=ROWS, steps=STEPS, rounds=options.rounds)
    python = str(STABLE_BASELINES.python(options.peer_venv))
    sb3 = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    print("\n| environments | TorchRL's classes, frames/s | plain tensors | SB3 |")
    print("| ---: | ---: | ---: | ---: |")
    for envs, peer in zip(ROWS, sb3, strict=True):
        plain = POLICIES["ppo"][1]()
        took = dict(
            least_s(
                {w: batches(p, envs) for w, p in (("stock", stock(plain)), ("plain", plain))},
                options.rounds,
                1,
            )
        )
        print(
            f"| {envs} | {STEPS * envs / took['stock']:.0f} | {STEPS * envs / took['plain']:.0f} | {peer} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

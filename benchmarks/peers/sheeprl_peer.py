"""sheeprl's DreamerV3 on one environment, in a virtual environment of its own.

    PEER_PYTHON benchmarks/peers/sheeprl_peer.py --env CartPole-v1 --seconds 60
    PEER_PYTHON benchmarks/peers/sheeprl_peer.py --env CartPole-v1 --frames 20000 --seed 0
                                                 --evaluate-every 1000 [--episodes 8] --out FILE.csv

It reports its frames and updates. With ``--evaluate-every`` it plays greedily between two updates and writes
the returns as CSV; that time is not in the seconds of the file.

sheeprl's own loop and its own update run unchanged. Two names that the loop looks up are replaced: the one
that makes the networks, to learn which player acts, and the one that is asked after each frame how many
updates follow.

The first ``--prefill`` frames (sheeprl's ``learning_starts``) have random actions. Updates begin with the
last of them. No updates are owed for the frames before: each frame is worth ``--replay-ratio`` updates from
then on. ``per_rank_pretrain_steps`` is 0: with another value, that many frames' updates follow at once.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import hydra
import numpy as np
import sheeprl.configs
import torch
from dreamer_sizes import add_sizes
from omegaconf import OmegaConf
from sheeprl.algos.dreamer_v3 import dreamer_v3
from sheeprl.algos.dreamer_v3.utils import prepare_obs
from sheeprl.cli import check_configs, run_algorithm
from sheeprl.utils.utils import Ratio, dotdict

REPORT_EVERY_S = 0.5
EVALUATION_SEED = 100_000
NEVER = 10**9
OBSERVATION = "state"


class TimeIsOver(Exception):
    """Ends sheeprl's loop."""


def env_of(env_id: str) -> dict[str, Any]:
    """How to make the environment, for hydra. sheeprl's actor acts in [-1, 1] and does not rescale."""
    made = {"_target_": "gymnasium.make", "id": env_id}
    if not isinstance(gymnasium.make(env_id).action_space, gymnasium.spaces.Box):
        return made
    return {
        "_target_": "gymnasium.wrappers.RescaleAction",
        "env": made,
        "min_action": -1.0,
        "max_action": 1.0,
    }


def config_of(options: argparse.Namespace) -> Any:
    """sheeprl's config: its smallest model, with these sizes. Nothing is logged, saved or filmed."""
    optimizers = {
        "world_model": options.model_lr,
        "actor": options.actor_lr,
        "critic": options.critic_lr,
    }
    changes = {
        "algo.total_steps": options.frames,
        "algo.learning_starts": options.prefill,
        "algo.replay_ratio": options.replay_ratio,
        "algo.per_rank_batch_size": options.batch_size,
        "algo.per_rank_sequence_length": options.sequence_length,
        "algo.horizon": options.horizon,
        "algo.dense_units": options.width,
        "algo.mlp_layers": options.layers,
        "algo.world_model.recurrent_model.recurrent_state_size": options.belief,
        "algo.world_model.stochastic_size": options.categoricals,
        "algo.world_model.discrete_size": options.classes,
        "algo.world_model.transition_model.hidden_size": options.width,
        "algo.world_model.representation_model.hidden_size": options.width,
        "algo.cnn_keys": "{encoder: [], decoder: []}",
        "algo.mlp_keys": f"{{encoder: [{OBSERVATION}], decoder: [{OBSERVATION}]}}",
        "algo.run_test": False,
        "buffer.size": options.buffer_frames,
        "buffer.memmap": False,
        "buffer.checkpoint": False,
        "checkpoint.every": NEVER,
        "checkpoint.save_last": False,
        "env.id": options.env,
        "env.num_envs": 1,
        "env.sync_env": True,
        "env.capture_video": False,
        "metric.log_level": 0,
        "run_name": "run",
        "seed": options.seed,
        "num_threads": 1,
    } | {f"algo.{part}.optimizer.lr": lr for part, lr in optimizers.items()}
    chosen = ["exp=dreamer_v3", "algo=dreamer_v3_XS", "env=gym"]
    with hydra.initialize_config_dir(
        str(Path(sheeprl.configs.__path__[0]).resolve()), version_base="1.3"
    ):
        config = hydra.compose(
            "config", [*chosen, *(f"{key}={value}" for key, value in changes.items())]
        )
    config = dotdict(OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    config.env.wrapper = dotdict(env_of(options.env))
    return config


class Watched:
    """Stands between sheeprl's loop and its ``Ratio``: reports, evaluates, and ends the run.

    Args:
        options: of this script.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._env = hydra.utils.instantiate(env_of(options.env))
        self._env.reset(seed=EVALUATION_SEED + options.seed)
        self._player: Any = None
        self._fabric: Any = None
        self._ratio: Ratio | None = None
        self._updates = 0
        self._began_s = time.monotonic()
        self._next_s = self._evaluating_s = 0.0
        self.rows: list[dict[str, float]] = []

    def put_in(self) -> None:
        """Replace the two names in sheeprl's module."""
        make_networks = dreamer_v3.build_agent

        def build_agent(fabric: Any, *arguments: Any, **named: Any) -> Sequence[Any]:
            made = make_networks(fabric, *arguments, **named)
            self._fabric, self._player = fabric, made[-1]
            return made

        def ratio(*arguments: Any, **named: Any) -> Watched:
            self._ratio = Ratio(*arguments, **named)
            return self

        dreamer_v3.build_agent, dreamer_v3.Ratio = build_agent, ratio

    def __call__(self, frames_that_count: int) -> int:
        """How many updates follow now. It is asked after each frame, from the last one of the prefill on."""
        frames = int(frames_that_count) + max(0, self._options.prefill - 1)
        every = self._options.evaluate_every
        if every and frames % every == 0:
            self._evaluate(frames)
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + REPORT_EVERY_S
            print("@", json.dumps({"steps": frames, "updates": self._updates}), flush=True)
        if self._options.seconds is not None and now >= self._began_s + self._options.seconds:
            raise TimeIsOver
        assert self._ratio is not None
        follow = self._ratio(frames_that_count)
        self._updates += follow
        return follow

    def _evaluate(self, frames: int) -> None:
        began_s = time.monotonic()
        player = self._player
        # of the training's episode
        kept = player.actions, player.recurrent_state, player.stochastic_state
        with torch.inference_mode(), torch.random.fork_rng():
            returns = [self._play() for _ in range(self._options.episodes)]
        player.actions, player.recurrent_state, player.stochastic_state = kept
        self.rows.append(
            {
                "frames": frames,
                "updates": self._updates,
                "episodes": len(returns),
                "return_mean": round(float(np.mean(returns)), 2),
                "return_std": round(float(np.std(returns)), 2),
                "seconds": round(began_s - self._began_s - self._evaluating_s, 1),
            }
        )
        print(self.rows[-1], flush=True)
        self._evaluating_s += time.monotonic() - began_s

    def _play(self) -> float:
        """One episode, played as in sheeprl's test(); its latent states are drawn even so."""
        player = self._player
        player.init_states()
        observation, _ = self._env.reset()
        total, over = 0.0, False
        while not over:
            seen = prepare_obs(self._fabric, {OBSERVATION: observation})
            (action,) = player.get_actions(seen, greedy=True)
            chosen = action if player.actor.is_continuous else action.argmax(-1)
            shape = self._env.action_space.shape
            observation, reward, terminated, truncated, _ = self._env.step(
                chosen.numpy().reshape(shape)
            )
            total += float(reward)
            over = terminated or truncated
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1")
    add_sizes(parser)
    parser.add_argument("--model-lr", type=float, default=1e-4)
    parser.add_argument("--actor-lr", type=float, default=8e-5)
    parser.add_argument("--critic-lr", type=float, default=8e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--frames", type=int, default=NEVER)
    parser.add_argument("--evaluate-every", type=int, default=0, help="frames")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    out = options.out and options.out.absolute()
    watched = Watched(options)
    watched.put_in()
    config = config_of(options)
    check_configs(config)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # sheeprl writes its config into logs/ below the current folder
        try:
            run_algorithm(config)
        except TimeIsOver:
            pass
        finally:
            os.chdir("/")
    if out and watched.rows:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(watched.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(watched.rows)


if __name__ == "__main__":
    main()

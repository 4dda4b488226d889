"""RLlib's IMPALA (new API stack) on Pong. It reports its steps, and runs in its own virtual environment.

    PEER_PYTHON benchmarks/peers/rllib_peer.py --seconds 60 [--workers 2] [--envs 8] [--rollout 32]
                                               [--batch 256] [--torso nature] [--lstm 0] [--aggregators 0]

Steps are those that the learner has trained on, without frame skip. The settings of RLlib's documentation for
throughput are its defaults for IMPALA: a learner of its own, env runners that pull the newest weights when
they begin to sample, and weights sent after every update. The environment is its stock wrapper for Atari on
the new API stack, with frames stacked in the environment. Its env runners get the priority of the learner, as
rlsync's workers do. ``--lstm`` must be 0 and ``--torso`` nature.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import ale_py
import gymnasium
import ray
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.wrappers.atari_wrappers import wrap_atari_for_new_api_stack
from ray.tune.registry import register_env

ENV = "pong"
SHALLOW = [[32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"]]


def make_env(_: dict[str, Any]) -> gymnasium.Env:
    """One environment. Called in every process that needs one."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(
        "ALE/Pong-v5", frameskip=1, full_action_space=False, repeat_action_probability=0.0
    )
    return wrap_atari_for_new_api_stack(env, dim=84, frameskip=4, framestack=4)


def config_of(options: argparse.Namespace) -> IMPALAConfig:
    """RLlib's config, with the settings of the other contenders."""
    return (
        IMPALAConfig()
        .environment(ENV, clip_rewards=True)
        .env_runners(
            num_env_runners=options.workers,
            num_envs_per_env_runner=options.envs,
            rollout_fragment_length=options.rollout,
        )
        .learners(num_learners=1, num_aggregator_actors_per_learner=options.aggregators)
        .training(
            train_batch_size_per_learner=options.batch,
            lr=6e-4,
            grad_clip=40.0,
            grad_clip_by="global_norm",
            vf_loss_coeff=0.5,
            entropy_coeff=0.01,
        )
        .rl_module(
            model_config=DefaultModelConfig(
                vf_share_layers=True,
                conv_filters=SHALLOW,
                conv_activation="relu",
                head_fcnet_hiddens=[512],
                head_fcnet_activation="relu",
            )
        )
        .reporting(min_time_s_per_iteration=1, metrics_num_episodes_for_smoothing=5)
        .debugging(seed=0)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--torso", choices=["nature"], default="nature")
    parser.add_argument("--lstm", type=int, choices=[0], default=0)
    parser.add_argument("--aggregators", type=int, default=0)
    options = parser.parse_args()
    # and the learner, and what keeps the weights
    actors = options.workers + options.aggregators + 2
    ray.init(
        address="local",
        num_cpus=actors,
        include_dashboard=False,
        logging_level="ERROR",
        _system_config={"worker_niceness": 0},
    )
    register_env(ENV, make_env)
    algorithm = config_of(options).build_algo()
    ends_s = time.monotonic() + options.seconds
    while time.monotonic() < ends_s:
        result = algorithm.train()
        trained = (
            result.get("learners", {})
            .get("__all_modules__", {})
            .get("num_env_steps_trained_lifetime")
        )
        if trained is not None:
            print("@", json.dumps({"steps": int(trained)}), flush=True)
    algorithm.stop()
    del algorithm  # it calls Ray when it is deleted
    ray.shutdown()


if __name__ == "__main__":
    main()

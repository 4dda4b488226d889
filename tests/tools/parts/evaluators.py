"""TorchRL's Evaluator with a canary: its result has the least and the greatest weight that acted."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.collectors import Evaluator
from torchrl.envs import EnvBase

from tests.tools.parts.canary import CanaryPolicy, make_small_canary
from tests.tools.parts.envs import CountingEnv


def make_env() -> EnvBase:
    return CountingEnv(horizon=7)  # no divisor of what a rollout has, so that episodes span rollouts


def make_canary(env: EnvBase | None = None) -> CanaryPolicy:
    return make_small_canary()


def acting(batch: TensorDictBase) -> dict[str, float]:
    """The least and the greatest weight that acted in any step of an evaluation."""
    mask = batch.get(("collector", "mask"))
    return {"low": float(batch["canary_min"][mask].min()), "high": float(batch["canary_max"][mask].max())}


def evaluator(env: Any, **options: Any) -> Evaluator:
    return Evaluator(
        env, num_trajectories=3, frames_per_batch=10, metrics_fn=acting, dump_video=False, **options
    )

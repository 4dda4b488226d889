"""The pace of real runs: sheeprl's case with worker processes, whichever side is slow, and after a resume."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from torchrl.trainers import Trainer

from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.settings import Config
from tests.runs.recipes.test_off_policy import built, pace_of, small
from tests.runs.recipes.test_recipes import trained

Trace = list[tuple[int, int]]
#: Of each of the four environments, seconds.
STEP_S = 0.0005
UPDATE_S = 0.002


class SlowCartPole(CartPoleEnv):
    """CartPole whose steps take time."""

    def step(self, action: Any) -> Any:
        time.sleep(STEP_S)
        return super().step(action)


gymnasium.register("SlowCartPole-v0", SlowCartPole)  # type: ignore[arg-type]


def sheeprls(lag: int | None, env: str = "CartPole-v1", frames: int = 4096) -> Config:
    """Two workers with two environments each, ratio 0.5, learning starts after 1,024 frames."""
    config = small("dqn", lag=lag, num_envs=2, total_frames=frames, pace=PaceConfig(0.5, None, 1024))
    config.env.id = env
    return config


def trace_of(trainer: Trainer) -> Trace:
    """Frames and updates before the run and after each batch of it, while it runs."""
    pace = pace_of(trainer)
    trace = [(trainer.collected_frames, pace.updates)]
    trainer.register_op("post_steps", lambda: trace.append((trainer.collected_frames, pace.updates)))
    return trace


def is_held(trace: Trace, ratio: float, prefill: int) -> bool:
    """Whether the ratio is that, within one update, over any window after the prefill."""
    learning = [(frames, updates) for frames, updates in trace if frames >= prefill]
    return all(
        abs((after - before) - ratio * (end - begin)) <= 1
        for at, (begin, before) in enumerate(learning)
        for end, after in learning[at + 1 :]
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("slow", "lag", "frames", "updates"), [("samplers", 0, 4096, 1536), ("learner", None, 2048, 512)]
)
@pytest.mark.usefixtures("fork_workers")
def test_the_ratio_of_a_run_is_held_over_any_window_whichever_side_is_slow(
    slow: str, lag: int | None, frames: int, updates: int
) -> None:
    trainer = built(sheeprls(lag, "SlowCartPole-v0" if slow == "samplers" else "CartPole-v1", frames))
    if slow == "learner":
        trainer.register_op("post_optim", lambda: time.sleep(UPDATE_S))
    trace = trace_of(trainer)
    trained(trainer)
    assert is_held(trace, 0.5, 1024)
    assert trace[-1] == (frames, updates), "sheeprl makes 1,538 updates in 4,096 frames"
    pace = pace_of(trainer)
    assert pace.pace.measured(*trace[-1]) == 0.5, "sheeprl logs 0.375"


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_the_ratio_is_held_over_windows_that_a_resume_lies_in(tmp_path: Path) -> None:
    odd = PaceConfig(ratio=0.29, prefill=100)  # no batch allows a whole number of updates
    first = built(small("dqn", lag=None, run_dir=tmp_path, pace=odd))
    trace = trace_of(first)
    trained(first)
    again = built(small("dqn", lag=None, pace=odd, total_frames=512))
    again.load_from_file(tmp_path / CHECKPOINT)
    rest = trace_of(again)
    trained(again)
    assert rest[0] == trace[-1] == (256, 45)
    assert is_held(trace + rest[1:], 0.29, 100)
    assert rest[-1] == (512, 119)


class CountingCartPole(CartPoleEnv):
    """CartPole that leaves a byte in a file at each step, whichever process it runs in."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def step(self, action: Any) -> Any:
        with self.path.open("ab") as file:
            file.write(b".")
        return super().step(action)


gymnasium.register("CountingCartPole-v0", CountingCartPole)  # type: ignore[arg-type]


@pytest.mark.parametrize("lag", [0, pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.usefixtures("fork_workers")
def test_workers_of_a_slow_learner_are_as_many_rollouts_ahead_as_their_lag(lag: int, tmp_path: Path) -> None:
    steps = tmp_path / "steps"
    config = small("dqn", lag=lag, batch=32, total_frames=256, pace=PaceConfig(0.5, None, 64))
    config.env = EnvConfig("CountingCartPole-v0", kwargs={"path": str(steps), "disable_env_checker": True})
    trainer = built(config)
    begun = steps.stat().st_size if steps.exists() else 0
    ahead: list[int] = []

    def look() -> None:
        time.sleep(0.05)  # long enough for workers to go on for as long as they are let
        ahead.append(steps.stat().st_size - begun - trainer.collected_frames)

    trainer.register_op("post_optim", look)
    trained(trainer)
    assert max(ahead) == lag * config.collector.frames_per_batch

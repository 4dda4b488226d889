"""A run with a lag ends with the same weights whoever dies: a worker, or the learner, at any moment."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.record.schedule import Life, lives_in, runs_compared
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.evaluation.evaluator import Evaluator
from rlsync.runs.evaluation.process import read_evaluations
from rlsync.runs.life.aside import set_aside
from rlsync.runs.life.resume import load
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.run_files import CHECKPOINT, EVALUATIONS, SCHEDULE
from rlsync.runs.recipes.settings import Config
from rlsync.seams import schedule
from tests.laws.test_rerun import forked
from tests.runs.actors.test_unroll_collector import cartpole_net
from tests.runs.recipes.test_one_worker import BATCH, config_of, life_of, same
from tests.tools.parts import undecided  # noqa: F401 - it registers an environment

__all__ = ["forked"]  # a fixture

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

QUICKLY = Restarts(10**6, first_pause_s=0.0, longest_pause_s=0.0)
NAMES = ["ppo", "ppo-lstm", "dqn", "sac", "td3", "crossq"]


def in_lives(name: str, folder: Path, *, lag: int = 1, workers: int = 2) -> Config:
    """Three lives of two batches."""
    config = config_of(name, folder, lag=lag, workers=workers)
    config.checkpoint_every_frames = 2 * BATCH
    return config


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_case
def test_workers_that_are_killed_change_nothing(
    name: str, lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker dies in each life, once while it may be acting and once when the life begins."""
    monkeypatch.setattr(
        "rlsync.runs.recipes.place.CollectSettings", partial(CollectSettings, restarts=QUICKLY)
    )
    undisturbed = life_of(in_lives(name, tmp_path / "one", lag=lag))
    assert same(undisturbed, killed_often(in_lives(name, tmp_path / "other", lag=lag)))


def killed_often(config: Config) -> Life:
    """A run of two workers, of which one is killed after each batch."""
    deaths = 0

    def watch(trainer: Trainer) -> None:
        trainer_of.append(trainer)
        trainer.register_op("pre_steps_log", kill)

    def kill(batch: TensorDictBase) -> None:
        nonlocal deaths
        # One after the other: if all are dead at once the run ends.
        collector = trainer_of[0].collector
        if collector.restarted == deaths:
            os.kill(collector.procs[deaths % 2].pid, signal.SIGKILL)
            deaths += 1

    trainer_of: list[Trainer] = []
    life = life_of(config, watch)
    assert deaths > 1
    assert trainer_of[0].collector.restarted >= deaths - 1
    return life


def gone_on(config: Config) -> Life:
    """A run that goes on from the checkpoint in its folder."""
    folder = Path(str(config.run_dir))
    set_aside(folder, folder / CHECKPOINT)
    trainer = recipe_of(config).build(config)
    load(trainer, folder / CHECKPOINT, [])
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    return lives_in(Path(str(config.run_dir)) / SCHEDULE)[-1]


class Killed(BaseException):
    """Ends a training at once: nothing of it is saved."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_case
def test_a_learner_that_dies_and_goes_on_from_its_checkpoint_changes_nothing(
    name: str, workers: int, tmp_path: Path
) -> None:
    lag = 0 if workers == 0 else 1
    life_of(in_lives(name, tmp_path / "one", lag=lag, workers=workers))
    config = in_lives(name, tmp_path / "other", lag=lag, workers=workers)
    killed_in_its_second_life(config)
    gone_on(config)
    require_same(tmp_path / "one", tmp_path / "other")


def killed_in_its_second_life(config: Config) -> None:
    def kill_in_the_second_life(trainer: Trainer) -> None:
        trainer.register_op("post_steps", die)
        trainer_of.append(trainer)

    def die() -> None:
        if trainer_of[0].collected_frames == 3 * BATCH:
            raise Killed

    trainer_of: list[Trainer] = []
    with pytest.raises(Killed):
        life_of(config, kill_in_the_second_life)


def require_same(undisturbed: Path, resumed: Path) -> None:
    one, other = (lives_in(run / SCHEDULE) for run in (undisturbed, resumed))
    assert len(one) == 1
    assert len(other) == 2
    found = runs_compared(one, other)
    assert found.is_equal, str(found)
    assert found.updates[0] == found.updates[2] > 0


def scores_in(folder: Path) -> list[tuple[float, ...]]:
    """Where the learner stood with each version that was evaluated, and how that did."""
    scores = []
    for one in read_evaluations(folder / EVALUATIONS):
        scores.append((one.frames, one.optim_steps, one.return_mean, one.length_mean))
    return scores


def evaluated(name: str, folder: Path, *, workers: int, target: float | None = None) -> Config:
    """Lives of two batches, and an evaluation after each batch that has brought updates."""
    lag = 0 if workers == 0 else 1
    config = in_lives(name, folder, lag=lag, workers=workers)
    evaluation = config.recipe.evaluations()
    evaluation.every_frames, evaluation.episodes = 1, 2
    config.recipe.target_return = target
    return config


@pytest.fixture
def evaluators(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pid of each evaluating process; one that is killed is started again at once."""
    pids: list[int] = []

    class Quick(Evaluator):
        def _start(self) -> None:
            super()._start()
            pids.append(self._process.pid or 0)

    monkeypatch.setattr("rlsync.runs.recipes.evaluating.Evaluator", partial(Quick, restarts=QUICKLY))
    return pids


def kill_newest(pids: list[int]) -> None:
    with suppress(ProcessLookupError):  # it was killed before, and another one is yet to be started
        os.kill(pids[-1], signal.SIGKILL)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["ppo", "dqn"])
@pytest.mark.one_case
def test_evaluations_are_the_same_when_evaluator_and_learner_die(
    name: str, workers: int, tmp_path: Path, evaluators: list[int]
) -> None:
    def kill(trainer: Trainer) -> None:
        trainer.register_op("pre_steps_log", lambda batch: kill_newest(evaluators))

    life_of(evaluated(name, tmp_path / "one", workers=workers))
    undisturbed = scores_in(tmp_path / "one")
    assert len(undisturbed) == len({steps for _, steps, _, _ in undisturbed}) > 3
    assert undisturbed[0][:2] == (0, 0)
    assert undisturbed[-1][0] == 6 * BATCH

    began = len(evaluators)
    life_of(evaluated(name, tmp_path / "evaluator", workers=workers), kill)
    assert len(evaluators) > began + 3
    assert scores_in(tmp_path / "evaluator") == undisturbed

    for batch in (3, 4):  # within a life, and at the end of one, before its checkpoint
        config = evaluated(name, tmp_path / f"learner {batch}", workers=workers)

        def die(trainer: Trainer, batch: int = batch) -> None:
            def look() -> None:
                if trainer.collected_frames == batch * BATCH:
                    raise Killed

            trainer.register_op("post_steps", look)

        with pytest.raises(Killed):
            life_of(config, die)
        gone_on(config)
        assert scores_in(tmp_path / f"learner {batch}") == undisturbed


def test_a_target_ends_a_run_at_the_same_batch_however_late_its_evaluation_is(
    tmp_path: Path, evaluators: list[int]
) -> None:
    life_of(evaluated("ppo", tmp_path / "one", workers=2))
    returns = [score[2] for score in scores_in(tmp_path / "one")]
    best = max(range(1, 5), key=returns.__getitem__)
    target = returns[best]

    def wait(trainer: Trainer) -> None:
        trainer.register_op("batch_process", lambda batch: time.sleep(0.5))

    def kill(trainer: Trainer) -> None:
        trainer.register_op("post_steps", lambda: kill_newest(evaluators))

    ends = []
    for run, disturb in (("at once", bool), ("learner waits", wait), ("killed", kill)):
        life_of(evaluated("ppo", tmp_path / run, workers=2, target=target), disturb)
        ends.append(scores_in(tmp_path / run))
    assert ends[0] == ends[1] == ends[2]
    assert len(ends[0]) < len(returns)
    assert max(score[2] for score in ends[0]) >= target


def test_the_lives_of_a_run_have_seeds_of_their_own_and_new_environments(tmp_path: Path) -> None:
    settings = CollectSettings(
        steps=4, envs_per_worker=2, rollouts_per_batch=2, seed=3, life_rollouts=3, start_method="fork"
    )
    life = schedule.FixedLag(1, 2, 2, 3)
    collector = RepeatedUnrolls(
        cartpole_net(), GymnasiumEnvs("CartPole-v1"), settings, life=life, lag=1, num_workers=2
    )
    first: dict[int, Any] = {}
    try:
        for _, batch in zip(range(9), collector, strict=False):
            for at, rollout in enumerate(collector.last_rollouts):
                assert rollout.life == rollout.number // 3
                columns = slice(2 * at, 2 * at + 2)
                begins = batch["is_init"][0, columns]
                assert bool(begins.all()) or rollout.number % 3, "a life begins with episodes"
                if rollout.number % 3 == 0:
                    observation = batch["observation"][0, columns].numpy()
                    for before in first.values():
                        assert not np.isclose(before, observation).any()
                    first[rollout.worker, rollout.life] = observation.copy()
    finally:
        collector.shutdown()
    assert len(first) == 6


def test_an_environment_that_its_seed_does_not_decide_is_told_when_its_worker_was_replaced(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = CollectSettings(
        steps=8, envs_per_worker=1, rollouts_per_batch=2, seed=3, start_method="fork", restarts=QUICKLY
    )
    collector = RepeatedUnrolls(
        cartpole_net(),
        GymnasiumEnvs("Noisy-v0"),
        settings,
        life=schedule.FixedLag(0, 2, 2),
        lag=0,
        num_workers=2,
    )
    try:
        for number, _ in zip(range(6), collector, strict=False):
            if number == 3:
                os.kill(collector.procs[0].pid or 0, signal.SIGKILL)
    finally:
        collector.shutdown()
    assert "the same actions in rollout 0 had another observation" in capfd.readouterr().err

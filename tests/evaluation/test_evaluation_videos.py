"""Videos of evaluated versions: real runs of every recipe, and what is refused before one starts."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import gymnasium
import imageio.v3 as iio
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torchrl.trainers import Trainer

from rlsync.cli.job import examined
from rlsync.evaluation import films as filming
from rlsync.evaluation.films import EvaluationFilms, Filming, video_of_version
from rlsync.evaluation.play import play
from rlsync.recipes.impala import Categorical, ImpalaNet
from rlsync.recipes.impala.config import ImpalaConfig
from rlsync.recipes.run_files import BEST_VIDEO, EVALUATIONS, VIDEOS
from rlsync.recipes.settings import CollectorConfig, Config, EnvConfig, EvaluationConfig, PPOConfig
from rlsync.workers.envs.specs import GymnasiumEnvs, make_venv
from rlsync.workers.player import Player
from tests.recipes.test_off_policy import built, small
from tests.tools.parts import child_pids
from tests.tools.running import in_three_lines

CARTPOLE, SEED = GymnasiumEnvs("CartPole-v1"), 3
#: A gif counts in hundredths of a second: a thirtieth becomes 30 ms.
CARTPOLE_MS, PENDULUM_MS = 20, 30
FILMED = EvaluationConfig(every_frames=1, episodes=1, video_every=1)
FOR_EVER = 10**9


def shown_ms(gif: Path) -> float:
    """How long it takes to show it; a gif holds equal frames once, and shows them for longer."""
    return sum(iio.immeta(gif, index=frame)["duration"] for frame in range(len(iio.imread(gif, index=None))))


def greedy() -> Player:
    torch.manual_seed(0)
    return ImpalaNet((4,), Categorical(2)).player(deterministic=True)


# -------------------------------------------------------------------------------------- films


def test_every_second_evaluation_and_each_best_version_are_filmed(tmp_path: Path) -> None:
    player, folder, best = greedy(), tmp_path / VIDEOS, tmp_path / BEST_VIDEO
    films = EvaluationFilms(Filming(folder, 2, best), player, CARTPOLE, SEED)
    films.evaluated(7, best=True)
    assert best.read_bytes() == video_of_version(folder, 7).read_bytes()
    first = best.stat().st_mtime_ns
    films.evaluated(8, best=False)
    assert [file.name for file in folder.iterdir()] == ["version_000007.gif"]
    films.evaluated(9, best=False)
    assert best.stat().st_mtime_ns == first
    films.evaluated(10, best=True)
    assert best.stat().st_mtime_ns > first
    assert sorted(file.name for file in folder.iterdir()) == ["version_000007.gif", "version_000009.gif"]
    frames = iio.imread(best, index=None)
    assert frames.shape[1:] == (200, 300, 3)


def test_the_film_is_the_episode_that_the_evaluation_began_with(tmp_path: Path) -> None:
    player = greedy()
    EvaluationFilms(Filming(tmp_path, 1), player, CARTPOLE, SEED).evaluated(1, best=False)
    envs = make_venv(CARTPOLE, 1)
    (episode,) = [e for ended in play(player, envs, 1, SEED) for e in ended]
    envs.close()
    assert shown_ms(video_of_version(tmp_path, 1)) == CARTPOLE_MS * (episode.length + 1)


def test_a_video_that_cannot_be_written_is_told_once_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / VIDEOS).write_text("a file where the folder should be")
    films = EvaluationFilms(Filming(tmp_path / VIDEOS, 1), greedy(), CARTPOLE, SEED)
    with caplog.at_level(logging.WARNING):
        films.evaluated(1, best=False)
        films.evaluated(2, best=False)
    assert len(caplog.records) == 1
    assert "no video of version 1" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == [VIDEOS]


# --------------------------------------------------------------------------------------- runs


def config_of(recipe: str, run_dir: Path) -> Config:
    match recipe:
        case "ppo":
            return Config(
                run_dir=str(run_dir),
                collector=CollectorConfig("sync", frames_per_batch=64),
                recipe=PPOConfig(total_frames=FOR_EVER, target_return=None, evaluation=FILMED),
            )
        case "impala":
            return Config(
                run_dir=str(run_dir),
                env=EnvConfig("CartPole-v1", 2),
                collector=CollectorConfig("async", frames_per_batch=20),
                recipe=ImpalaConfig(
                    total_frames=FOR_EVER,
                    target_return=None,
                    unroll_length=5,
                    batch_size=4,
                    evaluation=FILMED,
                ),
            )
    return small(recipe, run_dir=run_dir, total_frames=FOR_EVER, evaluation=FILMED)


def end_with(trainer: Trainer, file: Path) -> None:
    """End the training when a file is there."""
    trainer.register_op("post_steps", lambda: trainer.request_stop("filmed") if file.exists() else None)


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("recipe", ["dqn", "sac", "td3", "ppo", "impala"])
def test_a_run_films_what_it_evaluates(recipe: str, tmp_path: Path) -> None:
    trainer = built(config_of(recipe, tmp_path))
    end_with(trainer, tmp_path / BEST_VIDEO)
    trainer.train()
    assert child_pids() == set()
    with (tmp_path / EVALUATIONS).open(newline="") as rows:
        first = next(csv.DictReader(rows))
    length = int(float(first["length_mean"]))
    frame_ms = PENDULUM_MS if recipe in ("sac", "td3") else CARTPOLE_MS
    file = video_of_version(tmp_path / VIDEOS, int(first["version"]))
    assert shown_ms(file) == frame_ms * (length + 1)
    if frame_ms == CARTPOLE_MS:
        assert float(first["return_mean"]) == length, "CartPole gives one for each step that the film shows"
    assert iio.imread(tmp_path / BEST_VIDEO, index=0).shape[2] == 3


# ------------------------------------------------------------------------------------ refusals


class Unseen(CartPoleEnv):
    """It has no screen."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        super().__init__()


gymnasium.register("Unseen-v0", entry_point=Unseen, max_episode_steps=20)


def refused(config: Config) -> str:
    job, errors = examined(config)
    assert job is None
    (error,) = errors
    assert in_three_lines(error)
    assert "recipe.evaluation.video_every" in error.where
    return str(error)


def test_a_run_that_can_film_is_not_refused(tmp_path: Path) -> None:
    job, errors = examined(config_of("dqn", tmp_path))
    assert job is not None, errors


def test_an_environment_without_a_screen_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = config_of("dqn", tmp_path)
    config.env.id = "Unseen-v0"
    text = refused(config)
    assert "Unseen-v0 cannot be filmed" in text
    assert "recipe.evaluation.video_every=null" in text


def test_a_missing_package_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = filming.find_spec
    monkeypatch.setattr(filming, "find_spec", lambda name: None if name == "imageio" else find(name))
    assert "pip install 'rlsync[video]'" in refused(config_of("dqn", tmp_path))


def test_videos_without_evaluations_are_refused(tmp_path: Path) -> None:
    config = config_of("dqn", tmp_path)
    config.recipe = small("dqn", evaluation=EvaluationConfig(video_every=5)).recipe
    assert "there is no evaluation to film" in refused(config)

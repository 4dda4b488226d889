"""Films of one episode and of evaluated versions: what they show, in real runs too, and what is refused."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import gymnasium
import imageio.v3 as iio
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.core.machine import has_package
from rlsync.runs.actors.envs.specs import AtariEnvs, GymnasiumEnvs, TorchRLEnvs, make_venv
from rlsync.runs.actors.player import Player
from rlsync.runs.evaluation.play import FilmedAtari, film, filmed, play
from rlsync.runs.evaluation.process import EvaluationFilms, Filming, video_of_version
from rlsync.runs.life.job import examined
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.run_files import BEST_VIDEO, EVALUATIONS, VIDEOS
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    PPOConfig,
)
from tests.runs.recipes.test_off_policy import built, small
from tests.tools.parts import child_pids, make_cartpole
from tests.tools.parts.gifs import shown_ms
from tests.tools.running import in_three_lines

CARTPOLE, SEED = GymnasiumEnvs("CartPole-v1"), 3
#: A gif counts in hundredths of a second: a thirtieth becomes 30 ms.
CARTPOLE_MS, PENDULUM_MS = 20, 30
FILMED = EvaluationConfig(every_frames=1, episodes=1, video_every=1)
FOR_EVER = 10**9


def greedy() -> Player:
    torch.manual_seed(0)
    return ImpalaNet((4,), Categorical(2)).player(deterministic=True)


# -------------------------------------------------------------------------------------- films


def test_every_second_evaluation_and_each_best_version_are_filmed(tmp_path: Path) -> None:
    player, folder, best = greedy(), tmp_path / VIDEOS, tmp_path / BEST_VIDEO
    films = EvaluationFilms(Filming(folder, 2, best), player, CARTPOLE, SEED)
    films.evaluated(7, 0, best=True)
    assert best.read_bytes() == video_of_version(folder, 7).read_bytes()
    first = best.stat().st_mtime_ns
    films.evaluated(8, 1, best=False)
    assert [file.name for file in folder.iterdir()] == ["version_000007.gif"]
    films.evaluated(9, 2, best=False)
    assert best.stat().st_mtime_ns == first
    films.evaluated(10, 3, best=True)
    assert best.stat().st_mtime_ns > first
    assert sorted(file.name for file in folder.iterdir()) == ["version_000007.gif", "version_000009.gif"]
    frames = iio.imread(best, index=None)
    assert frames.shape[1:] == (200, 300, 3)


def test_the_film_is_the_episode_that_the_evaluation_began_with(tmp_path: Path) -> None:
    player = greedy()
    EvaluationFilms(Filming(tmp_path, 1), player, CARTPOLE, SEED).evaluated(1, 0, best=False)
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
        films.evaluated(1, 0, best=False)
        films.evaluated(2, 1, best=False)
    assert len(caplog.records) == 1
    assert "no video of version 1" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == [VIDEOS]


def test_the_last_frame_is_the_end_of_the_episode_and_not_the_next_beginning() -> None:
    envs = filmed(GymnasiumEnvs("CartPole-v1"), seed=0)
    envs.reset(0)
    frames, over = [envs.frame], False
    while not over:
        envs.send(torch.zeros(1, dtype=torch.int64))
        over = bool(envs.recv().terminated)
        frames.append(envs.frame)
    envs.close()

    alone = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    alone.reset(seed=0)
    shown = [alone.render()]
    for _ in frames[1:]:
        terminated = alone.step(0)[2]
        shown.append(alone.render())
    alone.close()
    assert terminated
    assert np.array_equal(np.stack(frames), np.stack(shown))


@pytest.mark.seconds
@pytest.mark.parametrize(
    "spec",
    [
        AtariEnvs("pong"),
        AtariEnvs("pong", repeat_action_probability=0.25, options={"frameskip": 2, "noop_max": 9}),
        AtariEnvs("breakout", life_loss_ends_episode=True),
    ],
    ids=["usual", "sticky", "lives"],
)
@pytest.mark.one_case
def test_an_atari_film_shows_in_colour_what_the_network_sees_in_grey(spec: AtariEnvs) -> None:
    envs = FilmedAtari(spec)
    assert envs.fps == (30 if spec.options else 15)
    generator = torch.Generator().manual_seed(1)
    observation = envs.reset(11)
    for _ in range(150):
        frame = envs.frame
        assert frame.shape == (210, 160, 3)
        grey = torch.from_numpy(frame @ np.array([0.299, 0.587, 0.114]))[None, None]
        small = torch.nn.functional.interpolate(grey, (84, 84), mode="area").flatten()
        seen = observation[0, -1].flatten().to(small.dtype)
        assert torch.corrcoef(torch.stack([small, seen]))[0, 1] > 0.99
        envs.send(torch.randint(4, (1,), generator=generator))
        observation = envs.recv().observation
    assert (frame.max(-1) != frame.min(-1)).any(), "in colour"
    envs.close()


@pytest.mark.seconds
def test_a_film_that_goes_apart_from_the_game_is_refused() -> None:
    envs = FilmedAtari(AtariEnvs("pong"))
    envs.reset(0)
    envs._shown.reset(1)
    with pytest.raises(RlsyncError, match="and its film differ"):
        step_on(envs, 2000)
    envs.close()


def step_on(envs: FilmedAtari, steps: int) -> None:
    for step in range(steps):
        envs.send(torch.tensor([step // 7 % 6]))
        envs.recv()


def test_a_long_episode_is_filmed_in_part_and_played_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsync.runs.evaluation.play.MAX_FRAMES", 5)
    player = ImpalaNet((4,), Categorical(2)).player()
    envs = filmed(GymnasiumEnvs("CartPole-v1"), seed=0)
    made = film(player, envs, tmp_path / "cut.gif", seed=0)
    envs.close()
    assert made.frames == 5
    assert shown_ms(made.file) == 5 * 20
    assert made.episode.length > 5
    assert str(made).endswith("; the first 4 steps of it")


def test_an_environment_without_a_screen_says_so() -> None:
    with pytest.raises(ConfigError, match="a TorchRLEnvs has no screen"):
        filmed(TorchRLEnvs(make_cartpole), seed=0)


# --------------------------------------------------------------------------------------- runs


def config_of(recipe: str, run_dir: Path) -> Config:
    match recipe:
        case "ppo":
            return Config(
                run_dir=str(run_dir),
                collector=CollectorConfig(frames_per_batch=64),
                recipe=PPOConfig(total_frames=FOR_EVER, target_return=None, evaluation=FILMED),
            )
        case "impala":
            return Config(
                run_dir=str(run_dir),
                env=EnvConfig("CartPole-v1", 2),
                collector=CollectorConfig(frames_per_batch=20, lag=None),
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
@pytest.mark.thorough
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
    # A GIF counts in 10 ms and shows pictures that are alike as one: three of 33 ms are 100.
    assert frame_ms * (length + 1) <= shown_ms(file) <= 1.05 * frame_ms * (length + 1)
    if frame_ms == CARTPOLE_MS:
        assert float(first["return_mean"]) == length, "CartPole gives one for each step that the film shows"
    assert iio.imread(tmp_path / BEST_VIDEO, index=0).shape[2] == 3


# ------------------------------------------------------------------------------------ refusals


class Unseen(CartPoleEnv):
    """It has no screen."""

    metadata = {"render_modes": []}

    def __init__(self) -> None:
        super().__init__()


class ModeOnly(CartPoleEnv):
    """It takes a mode to render in, and has none."""

    metadata = {"render_modes": []}


gymnasium.register("Unseen-v0", entry_point=Unseen, max_episode_steps=20)
gymnasium.register("ModeOnly-v0", entry_point=ModeOnly, max_episode_steps=20)


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


@pytest.mark.parametrize("name", ["Unseen-v0", "ModeOnly-v0"])
def test_an_environment_without_a_screen_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    config = config_of("dqn", tmp_path)
    config.env.id = name
    text = refused(config)
    assert f"{name} cannot be filmed" in text
    assert "recipe.evaluation.video_every=null" in text


def test_a_missing_package_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlsync.core.machine.has_package", lambda name: name != "imageio" and has_package(name)
    )
    assert "pip install 'rlsync[video]'" in refused(config_of("dqn", tmp_path))


def test_videos_without_evaluations_are_refused(tmp_path: Path) -> None:
    config = config_of("dqn", tmp_path)
    config.recipe = small("dqn", evaluation=EvaluationConfig(video_every=5)).recipe
    assert "there is no evaluation to film" in refused(config)

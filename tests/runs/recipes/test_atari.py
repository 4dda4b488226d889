"""Atari by a protocol that is said and recorded: what is played, what the learner sees, what is reported."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from omegaconf import OmegaConf

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line, own_hydra
from rlsync.runs.config.composing import composition
from rlsync.runs.evaluation.play import Episode, play
from rlsync.runs.life.kept import config_of
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.impala import AtariEnvs, CollectSettings, UnrollCollector, check_batch, make_venv
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.replay.settings import ActorCriticConfig, PaceConfig
from rlsync.runs.recipes.run_files import RESOLVED
from rlsync.runs.recipes.sac import SACConfig
from rlsync.runs.recipes.settings import AtariConfig, Config, EvaluationConfig, OnPolicyNormalizeConfig
from rlsync.runs.recipes.td3 import TD3Config
from tests.tools.parts.configs import configs_of
from tests.tools.programs import run_program

LIVES = AtariEnvs("breakout", repeat_action_probability=0.25, life_loss_ends_episode=True)
GAMES = AtariEnvs("breakout", repeat_action_probability=0.25)
REPO = Path(__file__).resolve().parents[3]


def checked(*words: str) -> Config:
    """The checked config of a command line."""
    (config,) = configs_of(*words)
    return config


def composed(*words: str) -> Config:
    """The config of a command line; its environment is not looked at."""
    line = command_line.read(list(words))
    with own_hydra.initialised():
        made, errors = composition(line, line.jobs[0])
    assert errors == []
    assert made is not None
    return made.config


def uniform() -> UniformPlayer:
    envs = make_venv(GAMES, 1)
    envs.close()
    return UniformPlayer(envs.actions, envs.observation_shape, envs.observation_dtype)


# ------------------------------------------------------------------------------- what is played


def test_the_defaults_of_an_atari_game_are_what_gymnasium_registers_as_v5() -> None:
    registered = dict(gymnasium.spec("ALE/SpaceInvaders-v5").kwargs)
    options = AtariConfig("ALE/SpaceInvaders-v5").spec().ale_options()
    assert AtariConfig("ALE/SpaceInvaders-v5").spec().game == registered.pop("game")
    assert {name: options[name] for name in registered} == registered


@pytest.mark.thorough
@pytest.mark.seconds
def test_sticky_actions_are_played_with_the_probability_of_the_config() -> None:
    def played(probability: float) -> np.ndarray[Any, Any]:
        config = AtariConfig("ALE/Breakout-v5", repeat_action_probability=probability)
        envs = make_venv(config.spec(), 1)
        by_hand = AtariVectorEnv("breakout", 1, repeat_action_probability=probability, reward_clipping=False)
        seen, (theirs, _) = envs.reset(3), by_hand.reset(seed=3)
        draw = np.random.default_rng(0)
        for _ in range(60):
            action = draw.integers(0, 4, 1)
            envs.send(torch.from_numpy(action))
            seen, theirs = envs.recv().observation, by_hand.step(action)[0]
            assert np.array_equal(seen.numpy(), theirs)
        envs.close()
        return np.array(theirs)

    assert not np.array_equal(played(0.0), played(0.25))


def test_a_protocol_that_the_config_changes_reaches_the_game() -> None:
    config = AtariConfig("ALE/Breakout-v5", frameskip=2, img_height=42, img_width=40, stack_num=3)
    config.max_episode_frames, config.full_action_space = 100, True
    envs = make_venv(config.spec(), 1)
    assert (envs.observation_shape, envs.actions.shape) == ((3, 42, 40), ())
    assert envs.actions == DiscreteActions(18)
    envs.reset(0)
    ends = []
    for _ in range(50):
        envs.send(torch.zeros(1, dtype=torch.int64))
        ends.append(bool(envs.recv().truncated[0]))
    assert any(ends), "100 frames are at most 50 steps"
    envs.close()


# ------------------------------------------------------------- lives for the learner, games for people


@pytest.mark.seconds
def test_a_lost_life_ends_the_learners_episode_and_the_game_goes_on() -> None:
    envs = make_venv(LIVES, 2)
    same = AtariVectorEnv(
        "breakout",
        2,
        repeat_action_probability=0.25,
        reward_clipping=False,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    envs.reset(5), same.reset(seed=5)
    draw, lives, lost, games = np.random.default_rng(1), np.array([5, 5]), 0, 0
    for _ in range(450):
        action = draw.integers(0, 4, 2)
        envs.send(torch.from_numpy(action))
        answer = envs.recv()
        seen, reward, terminated, truncated, info = same.step(action)
        over = terminated | truncated
        fewer = (info["lives"] < lives) & ~over
        assert np.array_equal(answer.observation.numpy(), seen)
        assert np.array_equal(answer.reward.numpy(), reward)
        assert np.array_equal(answer.over.numpy(), over)
        assert np.array_equal(answer.terminated.numpy(), terminated | fewer)
        lives, lost, games = info["lives"].copy(), lost + fewer.sum(), games + over.sum()
        if games == 2:
            break
    assert games >= 2
    assert lost >= 4 * games, "each game has five lives"
    envs.close()


@pytest.mark.thorough
@pytest.mark.seconds
def test_an_evaluated_return_sums_over_the_lives_of_a_game() -> None:
    def episodes(spec: AtariEnvs) -> list[Episode]:
        envs = make_venv(spec, 2)
        try:
            return [one for ended in play(uniform(), envs, 2, seed=2) for one in ended]
        finally:
            envs.close()

    games = episodes(GAMES)
    assert episodes(LIVES) == games
    assert sum(game.total for game in games) > 0


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.seconds
def test_a_return_that_training_reports_sums_over_the_lives_of_a_game() -> None:
    player = uniform()
    settings = CollectSettings(steps=50, envs_per_worker=2, start_method="fork", seed=4)
    collector = UnrollCollector(player, LIVES, settings, num_workers=1)
    returns, kept, ends = EpisodeReturns(), torch.zeros(2), 0
    told: list[float] = []
    summed: list[float] = []
    try:
        for batch in itertools.islice(collector, 14):
            check_batch(batch, player)
            told += returns.ended(batch)
            lengths = batch["collector", "episode_length"]
            for step in range(50):
                kept += batch["reward"][step]
                ends += int(batch["terminated"][step].sum())
                over = lengths[step] > 0
                summed += kept[over].tolist()
                kept[over] = 0.0
    finally:
        collector.shutdown(timeout=5)
    assert told == summed
    assert len(told) >= 2
    assert ends >= 5 * len(told), "each game has five lives"


@pytest.mark.parametrize("option", ["episodic_life", "life_loss_info", "reward_clipping"])
def test_an_option_of_ale_py_that_would_report_something_else_than_games_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"with the option '{option}' of ale-py, returns would not"):
        AtariEnvs("breakout", options={option: True})
    config = Config(env=AtariConfig("ALE/Breakout-v5", kwargs={option: True}), recipe=ImpalaConfig())
    with pytest.raises(ConfigError, match=option):
        config.env.spec()


# ---------------------------------------------------------------------------------- which settings


@pytest.mark.seconds
@pytest.mark.parametrize(
    "words", [["env=pong", "env.id=ALE/Breakout-v5"], ["env=atari", "env.id=ALE/Breakout-v5"]]
)
@pytest.mark.parametrize("recipe", ["impala", "laser"])
@pytest.mark.one_case
def test_a_game_gets_the_settings_for_pixels_and_no_other_games_target(recipe: str, words: list[str]) -> None:
    config = composed(f"recipe={recipe}", *words)
    of_pong = composed(f"recipe={recipe}", "env=pong")
    assert isinstance(config.env, AtariConfig)
    assert (of_pong.recipe.target_return, config.recipe.target_return) == (19.0, None)
    assert isinstance(config.recipe, ImpalaConfig)
    assert config.recipe.normalize == OnPolicyNormalizeConfig(observations=True, clip=5.0)
    assert config.recipe.reward_clipping == "clip"
    of_pong.recipe.target_return = None
    assert config.recipe == of_pong.recipe


@pytest.mark.thorough
@pytest.mark.seconds
def test_pong_is_played_as_the_results_were_measured_and_any_game_as_v5() -> None:
    pong, atari = (
        composed("recipe=impala", "env=pong"),
        composed("recipe=impala", "env=atari", "env.id=ALE/Pong-v5"),
    )
    assert isinstance(pong.env, AtariConfig)
    assert isinstance(atari.env, AtariConfig)
    assert pong.env.repeat_action_probability == 0.0
    assert atari.env.repeat_action_probability == 0.25
    assert pong.env.spec() == AtariEnvs("pong")
    assert atari.recipe == pong.recipe, "the id tells that it is Pong"


@pytest.mark.thorough
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("recipe", "env"),
    [
        ("ppo", "env=cartpole"),
        ("dqn", "env=gymnasium"),
        ("impala", "env=gymnasium"),
        ("laser", "env=cartpole"),
    ],
)
def test_the_target_of_cartpole_is_that_of_no_other_environment(recipe: str, env: str) -> None:
    of_cartpole = 475.0 if recipe in ("ppo", "dqn") else 450.0
    assert composed(f"recipe={recipe}", env, "env.id=CartPole-v1").recipe.target_return == of_cartpole
    assert composed(f"recipe={recipe}", env, "env.id=Acrobot-v1").recipe.target_return is None


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "general"), [("sac", SACConfig()), ("td3", TD3Config())])
def test_what_suits_pendulum_is_not_what_continuous_actions_get_in_general(
    recipe: str, general: ActorCriticConfig
) -> None:
    of_pendulum = replace(
        general, lr=1e-3, initial_weights="orthogonal", buffer_frames=100_000, pace=PaceConfig(prefill=1_000)
    )
    of_mujoco = replace(general, total_frames=1_000_000, evaluation=EvaluationConfig(5_000, 10))
    for words, settings, frames in (
        ((), of_pendulum, 64),
        (("~tuned",), general, 8),
        (("env=gymnasium", "env.id=HalfCheetah-v5"), of_mujoco, 8),
        (("env=hopper",), of_mujoco, 8),
        (("env=gymnasium", "env.id=Walker2d-v5"), general, 8),
    ):
        config = composed(f"recipe={recipe}", *words)
        assert (config.recipe, config.collector.frames_per_batch) == (settings, frames)


@pytest.mark.seconds
def test_the_command_line_has_the_last_word_about_tuned_settings() -> None:
    game = ("recipe=impala", "env=atari", "env.id=ALE/Breakout-v5")
    words = ("recipe.lr=0.125", "recipe.target_return=30", "env.repeat_action_probability=0.5")
    config = composed(*game, *words)
    assert (config.recipe.lr, config.recipe.target_return) == (0.125, 30.0)
    assert composed(*game, "tuned=impala_pong").recipe.target_return == 19.0
    assert composed(*game, "~tuned").recipe == ImpalaConfig()
    assert composed("recipe=impala", "tuned=impala_pixels").recipe.total_frames == 10_000_000


@pytest.mark.thorough
@pytest.mark.seconds
def test_the_tuned_settings_of_a_folder_of_ones_own_are_found_by_name_and_by_id(tmp_path: Path) -> None:
    for folder in ("env", "tuned"):
        (tmp_path / folder).mkdir()
    (tmp_path / "env" / "mine.yaml").write_text("defaults:\n  - atari\n  - _self_\nid: ALE/Breakout-v5\n")
    target = "# @package _global_\n# Mine.\nrecipe:\n  target_return: 44.0\n"
    (tmp_path / "tuned" / "impala_mine.yaml").write_text(target)
    own = ("--config-dir", str(tmp_path), "recipe=impala")
    assert composed(*own, "env=mine").recipe.target_return == 44.0
    assert composed(*own, "env=atari", "env.id=ALE/Breakout-v5").recipe.target_return == 44.0
    assert composed(*own, "env=mine", "env.id=ALE/Pong-v5").recipe.target_return == 19.0


@pytest.mark.one_case
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "what", "cure"),
    [
        (
            ["env=gymnasium", "env.id=ALE/Breakout-v5"],
            "is an Atari game",
            "give env=atari env.id=ALE/Breakout-v5",
        ),
        (
            ["env=gymnasium", "env.id=PongNoFrameskip-v4"],
            "is an Atari game",
            "give env=atari env.id=ALE/Pong-v5",
        ),
        (
            ["env=atari", "env.id=PongNoFrameskip-v4"],
            "is not the id of an Atari game's v5",
            "give env.id=ALE/Pong-v5 env.repeat_action_probability=0.0",
        ),
        (["env=atari", "env.id=ALE/Pong"], "is not the id of an Atari game's v5", "for example"),
        (["env=atari"], "no game is named", "for example env.id=ALE/Breakout-v5"),
        (["env=pong", "+env.kwargs.noop_max=2"], "noop_max has a key of its own", "write env.noop_max=2"),
    ],
)
def test_a_game_whose_protocol_is_not_said_is_refused_with_the_words_to_write(
    words: list[str], what: str, cure: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        checked("recipe=impala", *words)
    assert what in refused.value.what
    assert refused.value.cure.startswith(cure)


# -------------------------------------------------------------------------------------------- runs


@pytest.mark.slow
@pytest.mark.thorough
def test_the_first_lines_and_the_config_of_a_run_tell_settings_protocol_and_end(tmp_path: Path) -> None:
    words = ("recipe=impala", "env=atari", "env.id=ALE/Breakout-v5", "env.life_loss_ends_episode=true")
    small = ("env.num_envs=2", "recipe.batch_size=2", "collector.frames_per_batch=40", "run_dir=run")
    ended = run_program("rlsync", "train", *words, *small, "recipe.total_frames=80", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    run, settings, plays, workers, ends = ended.stdout.splitlines()[:5]
    assert run == f"run {tmp_path}/run"
    assert settings.startswith("settings recipe/impala with tuned/impala_pixels (Atari games from pixels")
    assert plays.startswith("plays ALE/Breakout-v5: sticky actions 0.25, 4 frames a step, up to 30 no-ops")
    assert "a lost life ends the learner's episode; returns are of whole games, not clipped" in plays
    assert workers == "workers 2; no fixed lag: workers act with the newest version"
    assert ends == "ends after 80 frames; no target return is set"
    env = OmegaConf.load(tmp_path / "run" / RESOLVED).env
    assert (env.id, env.repeat_action_probability, env.frameskip) == ("ALE/Breakout-v5", 0.25, 4)
    assert (env.life_loss_ends_episode, env.noop_max, env.max_episode_frames) == (True, 30, 108_000)
    assert config_of(tmp_path / "run").env == AtariConfig("ALE/Breakout-v5", 2, life_loss_ends_episode=True)


@pytest.mark.thorough
@pytest.mark.seconds
def test_a_check_tells_general_settings_from_tuned_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "env.id=Acrobot-v1"]) == 0
    said, _ = capsys.readouterr().out.split("\n\n")
    assert said.splitlines()[1:-1] == [
        "settings recipe/ppo alone: general settings, not tuned for Acrobot-v1",
        "plays Acrobot-v1",
        "workers 2; lag 1: workers act while the learner learns",
        "ends after 150,000 frames; no target return is set",
    ]
    assert main(["check", "--json", "recipe=impala", "env=pong", "env.id=ALE/Breakout-v5"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["configs"]
    assert told["settings"].startswith("recipe/impala with tuned/impala_pixels (Atari games from pixels")
    assert told["plays"].startswith("ALE/Breakout-v5: no sticky actions")


def test_a_config_in_python_is_checked_like_one_of_the_command_line() -> None:
    with pytest.raises(ConfigError, match="is not the id of an Atari game's v5"):
        check(Config(env=AtariConfig("Breakout-v4")))
    with pytest.raises(ConfigError, match="repeat_action_probability"):
        check(Config(env=AtariConfig("ALE/Breakout-v5", repeat_action_probability=1.5)))
    assert Config(recipe=ImpalaConfig()).recipe.target_return is None


# ------------------------------------------------------------------------------------- the figures


def solved_pong() -> dict[tuple[str, str], tuple[int, int]]:
    """Frames and seconds until a return of 18, of each run and seed that got there."""
    solved: dict[tuple[str, str], tuple[int, int]] = {}
    with (REPO / "docs" / "results" / "pong.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if float(row["return"]) >= 18:
                solved.setdefault((row["run"], row["seed"]), (int(row["frames"]), int(row["seconds"])))
    return solved


def test_what_is_written_of_ppo_and_dqn_on_pong_is_what_their_curves_say() -> None:
    page = (REPO / "docs/results/ppo.md").read_text()
    section = page.partition("## Pong from pixels")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line
    ]
    written = [
        (run, seed, frames, minutes) for run, seed, frames, minutes, *_ in rows[2:] if frames != "never"
    ]
    of_page = [
        (run, seed, f"{frames:,}", f"{seconds / 60:.1f}")
        for (run, seed), (frames, seconds) in solved_pong().items()
        if run.startswith(("ppo", "dqn", "Sample Factory"))
    ]
    assert sorted(written) == sorted(of_page)


def test_what_is_written_of_pong_is_what_its_curve_says() -> None:
    docs = REPO / "docs"
    solved = solved_pong()
    steps, seconds = zip(*(solved["impala, as shipped", seed] for seed in "012"), strict=True)
    page = " ".join((docs / "results/actor_learner.md").read_text().split())
    told = ", ".join(f"{each:,}" for each in steps[:-1]) + f" and {steps[-1]:,}"
    minutes = f"{min(seconds) / 60:.1f} to {max(seconds) / 60:.1f} minutes"
    assert f"18 after {told} agent steps, {minutes}" in page
    steps, seconds = zip(*(solved["laser, as shipped", seed] for seed in "01"), strict=True)
    told = " and ".join(f"{each:,}" for each in steps)
    assert (
        f"took {told} steps, two seeds, and {seconds[0] / 60:.0f} and {seconds[1] / 60:.0f} minutes" in page
    )
    of_sf = [solved["Sample Factory 2.1.1", seed] for seed in "01"]
    told = " and ".join(f"{each:,}" for each, _ in of_sf)
    quiet = f"{of_sf[1][1] / 60:.1f} minutes on quiet cores ({of_sf[1][0] / of_sf[1][1]:.0f} steps a second)"
    assert f"took {told} steps, the latter in {quiet}, the former in {of_sf[0][1] / 60:.0f} with" in page
    assert minutes in " ".join((docs / "release_notes/0.1.0.md").read_text().split())

"""dreamer_v3 from pictures, and the environments that are observed as their pictures."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import OneHot

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.specs import RenderedEnvs
from rlsync.runs.cli.main import main
from rlsync.runs.recipes.dreamer import v3
from rlsync.runs.recipes.dreamer.config import DreamerV3Config
from rlsync.runs.recipes.env_settings import RenderedConfig
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.run_files import EVALUATIONS
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.spaces import ANY, Spaces
from tests.runs.recipes.test_dreamer_recipes import OF, SMALL, WAYS, compare_states
from tests.runs.recipes.test_recipes import trained
from tests.tools.parts.configs import configs_of
from tests.tools.parts.space_envs import SEVERAL_PARTS

pytest.importorskip("pygame")
pytest.importorskip("PIL.Image")

CARTPOLE = ["recipe=dreamer_v3", "env=rendered_cartpole", "~tuned"]
#: Pictures of 16 x 16, so that a run takes seconds.
TINY = [*SMALL, *OF["dreamer_v3"], "recipe.channels=2", "env.img_height=16", "env.img_width=16"]


def config_of(*words: str) -> Config:
    return configs_of(*words)[0]


def built(config: Config) -> Any:
    return recipe_of(config).build(config, None)


# ------------------------------------------------------------------ environments


def test_the_picture_is_what_the_environment_rendered_made_smaller() -> None:
    plain = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    seen = RenderedEnvs("CartPole-v1", img_height=40, img_width=60).make()
    plain.reset(seed=3)
    picture, _ = seen.reset(seed=3)
    for _ in range(5):
        # At a tenth of the size the picture still has the same mean, block by block.
        blocks = plain.render().reshape(20, 20, 20, 30, 3).mean((1, 3))
        small = picture.transpose(1, 2, 0).reshape(20, 2, 20, 3, 3).mean((1, 3))
        assert picture.shape == (3, 40, 60)
        assert picture.dtype == np.uint8
        assert np.abs(blocks - small).max() < 25
        assert np.abs(blocks - small).mean() < 1
        plain.step(1)
        picture, *_ = seen.step(1)
    assert (seen.reset(seed=3)[0] != picture).any()


def test_a_crop_shows_that_part_alone() -> None:
    whole = RenderedEnvs("CartPole-v1", img_height=400, img_width=600).make()
    part = RenderedEnvs("CartPole-v1", img_height=160, img_width=300, crop=(160, 320, 150, 450)).make()
    expected = whole.reset(seed=0)[0][:, 160:320, 150:450]
    np.testing.assert_array_equal(part.reset(seed=0)[0], expected)


def test_several_steps_for_an_action_add_their_rewards_up_until_the_episode_ends() -> None:
    env = RenderedEnvs("CartPole-v1", frameskip=3).make()
    plain = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    plain.reset(seed=0)
    steps, ended = 0, False
    while not ended:
        ended = any(plain.step(1)[2:4])
        steps += 1
    assert steps % 3, "the last action has to be cut short"
    rewards: list[float] = []
    ended = False
    while not ended:
        _, reward, terminated, truncated, _ = env.step(1)
        rewards.append(float(reward))
        ended = terminated or truncated
    assert rewards == [3.0] * (steps // 3) + [float(steps % 3)]


# ------------------------------------------------------------------ player and learner


def test_the_learner_makes_the_state_that_the_player_had_from_pixels_too() -> None:
    """With one class nothing is drawn at random, so the two must agree in every row."""
    torch.manual_seed(0)
    recipe = DreamerV3Config(cells=16, belief=16, categoricals=2, classes=1, bins=31, channels=2)
    config = RenderedConfig("CartPole-v1", img_height=16, img_width=16, crop=[160, 320, 0, 600])
    compare_states(v3.make_loss(recipe, ANY.probe(config)), recipe, v3.DreamerV3Player, config)


def test_a_perfect_picture_has_no_loss_and_a_black_one_that_of_all_its_pixels() -> None:
    """What the loss compares: pixels from 0 to 1, summed over a picture."""
    torch.manual_seed(0)
    recipe = DreamerV3Config(cells=8, belief=8, categoricals=2, classes=2, bins=31, channels=2)
    config = RenderedConfig("CartPole-v1", img_height=16, img_width=16)
    model = v3.make_loss(recipe, ANY.probe(config)).model_loss
    white = torch.full((1, 2, 3, 16, 16), 255, dtype=torch.uint8)
    decoder = model.world_model.module[2].module
    rows = loss_rows(white)
    for value, expected in ((1.0, 0.0), (0.0, 3 * 16 * 16)):
        with torch.no_grad():
            last = decoder.layers[-1]
            last.weight.zero_()
            last.bias.fill_(value - 0.5)  # TorchRL's decoder adds a half
            losses, _ = model(rows.clone())
        assert float(losses["loss_model_reco"]) == pytest.approx(expected, abs=1e-3)


def test_each_part_is_compared_for_itself_and_of_a_picture_all_that_there_is() -> None:
    """Pixels from 0 to 1, numbers by their symlog; this picture is no multiple of 16 high."""
    torch.manual_seed(0)
    recipe = DreamerV3Config(cells=8, belief=8, categoricals=2, classes=2, bins=31, channels=2)
    model = v3.make_loss(recipe, Spaces(SEVERAL_PARTS, 2, OneHot(2))).model_loss
    numbers, camera = model.world_model.module[2].module.decoders
    parts = {
        "camera": torch.full((1, 2, 3, 18, 16), 255, dtype=torch.uint8),
        "speed": torch.full((1, 2, 2), math.e - 1),  # whose symlog is 1
        "gear": torch.zeros(1, 2, 3),
    }
    rows = loss_rows(SEVERAL_PARTS.join(parts))
    with torch.no_grad():
        for last in (numbers.model[-1], camera.layers[-1]):
            last.weight.zero_()
            last.bias.zero_()
        losses, _ = model(rows)
    of_camera = 0.5**2 * 3 * 18 * 16  # TorchRL's decoder adds a half
    assert float(losses["loss_model_reco"]) == pytest.approx(of_camera + 2, abs=1e-3)


def loss_rows(pictures: torch.Tensor) -> TensorDict:
    shape = pictures.shape[:2]
    flags = {key: torch.zeros(*shape, 1, dtype=torch.bool) for key in ("done", "terminated")}
    following = {"observation": pictures, "reward": torch.zeros(*shape, 1), **flags}
    given = {"action": torch.zeros(*shape, 2), "is_init": torch.zeros(*shape, 1, dtype=torch.bool)}
    given |= {"state": torch.zeros(*shape, 4), "belief": torch.zeros(*shape, 8), "next": following}
    return TensorDict(given, shape)


# ------------------------------------------------------------------ runs


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_run_from_pictures_updates_every_part(way: str, tmp_path: Path) -> None:
    words = *CARTPOLE, *TINY, *WAYS[way], "recipe.total_frames=96", f"run_dir={tmp_path}"
    trainer = built(config_of(*words))
    before = {key: value.clone() for key, value in trainer.loss_module.named_parameters()}
    trained(trainer)
    after = dict(trainer.loss_module.named_parameters())
    assert [key for key, value in before.items() if torch.equal(value, after[key])] == []
    assert trainer.replay_buffer[:]["next", "observation"].dtype is torch.uint8


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_a_run_is_trained_resumed_and_evaluated_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    words = [*CARTPOLE, *TINY, "recipe.evaluation.every_frames=64", "recipe.evaluation.episodes=2"]
    assert main(["train", *words, f"run_dir={first}"]) == 0
    assert (first / EVALUATIONS).read_text().count("\n") >= 2
    assert main(["train", f"resume={first}", f"run_dir={again}", "recipe.total_frames=256"]) == 0
    capsys.readouterr()
    assert main(["eval", str(again), "--episodes", "2", "--json", "--video", str(tmp_path / "a.gif")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["env"] == "CartPole-v1"
    assert found["frames"] == 256
    assert (tmp_path / "a.gif").stat().st_size > 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.usefixtures("fork_workers")
def test_impala_takes_pictures_without_more_ado() -> None:
    words = [
        "recipe=impala",
        "env=rendered_cartpole",
        "recipe.total_frames=16",
        "collector.num_workers=1",
        "env.num_envs=1",
    ]
    few = ["recipe.batch_size=2", "recipe.unroll_length=4", "collector.frames_per_batch=8"]
    trainer = built(config_of(*words, *few))
    trained(trainer)


# ------------------------------------------------------------------ refusals


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["env=rendered"], "no environment is named"),
        (["env=rendered_cartpole", "env.crop=[1,2]"], r"env.crop cannot be \[1, 2\]"),
        (["env=rendered_cartpole", "env.crop=[0,500,0,600]"], "no part of a picture of 400 rows"),
        (["env=rendered_cartpole", "+env.kwargs.render_mode=human"], "always rendered as rgb_array"),
        (["env=rendered", "env.id=CartPole-v77"], "cannot make the environment"),
    ],
)
@pytest.mark.seconds
def test_what_cannot_be_drawn_or_seen_is_refused(words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        built(config_of("recipe=dreamer_v3", *words))


class Dark(gymnasium.Env[Any, Any]):
    """It cannot be drawn."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)


def test_an_environment_without_a_picture_is_told_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        gymnasium.registry, "Dark-v0", gymnasium.envs.registration.EnvSpec("Dark-v0", entry_point=Dark)
    )
    with pytest.raises(ConfigError, match=r"'Dark-v0' has no picture: (?s:.*)env=gymnasium"):
        ANY.probe(RenderedConfig("Dark-v0"))


def test_a_missing_pygame_is_told_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ConfigError, match=r"cannot be drawn: (?s:.*)rlsync\[video\]"):
        ANY.probe(RenderedConfig("CartPole-v1"))


def test_a_recipe_of_flat_observations_refuses_pictures() -> None:
    with pytest.raises(ConfigError, match=r"it gives pixels(?s:.*)an observation without pictures"):
        built(config_of("recipe=dreamer_v1", "env=rendered", "env.id=Pendulum-v1"))


@pytest.mark.thorough
@pytest.mark.seconds
def test_settings_that_are_tuned_for_pictures_are_found_by_the_kind() -> None:
    for words in (["env=rendered_cartpole"], ["env=rendered", "env.id=Acrobot-v1"]):
        assert config_of("recipe=dreamer_v3", *words).recipe.pace.ratio == 0.5
    assert config_of("recipe=dreamer_v3", "env=gymnasium", "env.id=CartPole-v1").recipe.pace.ratio == 0.25


@pytest.mark.thorough
def test_settings_that_are_tuned_for_an_id_are_not_those_of_its_picture() -> None:
    words = ["recipe=impala", "env=rendered", "env.id=CartPole-v1"]
    assert config_of(*words).recipe.target_return is None
    assert config_of("recipe=impala", "env=gymnasium", "env.id=CartPole-v1").recipe.target_return == 450

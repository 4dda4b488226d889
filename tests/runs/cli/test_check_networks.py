"""``rlsync check`` says what networks see and choose, and which answers of an environment none should see."""

from __future__ import annotations

import json
import multiprocessing.process
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from rlsync.core import machine
from rlsync.core.errors import RlsyncWarning
from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line
from rlsync.runs.life.job import jobs_of
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.overview import Overview, ReplayMemory, warn_of_disk
from rlsync.runs.recipes.settings import Config
from tests.tools.parts.space_envs import hinted

NUMBERS = ("observation", [4], "float32", "mlp")
CHOICE = ("gear", [4], "float32", "mlp")
SPEED = ("speed", [4], "float32", "mlp")
CAMERA = ("camera", [3, 12, 12], "uint8", "convolutions (impala)")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: object) -> None:
        raise AssertionError("a check starts no process")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch, nothing_starts: None) -> None:
    """Environments of a module are looked at as those of gymnasium are: no worker plays a batch there."""
    monkeypatch.setattr("rlsync.runs.cli.check._is_own", lambda job, own: False)


def document(capsys: pytest.CaptureFixture[str], *line: str, status: int = 0) -> dict[str, Any]:
    """What ``rlsync check --json`` prints."""
    assert main(["check", "--json", *line]) == status
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def networks(capsys: pytest.CaptureFixture[str], *line: str) -> dict[str, Any]:
    (overview,) = document(capsys, *line)["networks"]
    return dict(overview)


# ------------------------------------------------------------------------ what networks see and choose


@pytest.mark.seconds
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("recipe", ["ppo", "dqn", "laser"])
@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("numbers", [CHOICE, SPEED]),
        ("picture and mask", [CHOICE, ("action_mask", [4], "float32", "leaves out what it forbids"), CAMERA]),
        ("mask in info", [CHOICE, SPEED, ("action_mask", [4], "float32", "leaves out what it forbids")]),
    ],
)
@pytest.mark.one_case
def test_each_part_of_an_observation_is_told_with_what_sees_it(
    case: str, parts: list[tuple[Any, ...]], recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overview = networks(capsys, f"recipe={recipe}", *hinted(case))
    keys = ("name", "shape", "dtype", "seen_by")
    assert [tuple(part[key] for key in keys) for part in overview["observation"]] == parts
    assert overview["action"] == "one of 4"
    made_of = {part["name"]: part["made_of"] for part in overview["observation"]}
    assert made_of["gear"] == "one-hot of a choice of 4"
    assert made_of.get("speed", "") in ("", "a box of [2, 2], flattened to 4 numbers")
    assert (overview["replay"] is None) == (recipe == "ppo")


@pytest.mark.seconds
@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ("recipe=dqn", "env=gymnasium", "env.id=FrozenLake-v1", "recipe.hidden=[8]"),
            [
                "observation    [16] float32: one-hot of a choice of 16; mlp",
                "action         one of 4; the largest value",
                f"parameters     {17 * 8 + 9 * 4} of what acts, {17 * 8 + 9 * 4} are trained",
                "replay         50,000 frames, 128 bytes of observations each: 6.4 MB",
            ],
        ),
        (
            ("recipe=ppo", "env=halfcheetah", "recipe.hidden=[8]"),
            [
                "observation    [17] float32: numbers; mlp, normalised",
                "action         6 numbers from -1 to 1; IndependentNormal",
                f"parameters     {18 * 8 + 9 * 6 + 6} of what acts, {18 * 8 * 2 + 9 * 7 + 6} are trained",
            ],
        ),
        (
            ("recipe=sac", "env=pendulum", "recipe.hidden=[8]"),
            [
                "observation    [3] float32: numbers; mlp",
                "action         1 number from -2 to 2; TanhNormal",
                f"parameters     {4 * 8 + 9 * 2} of what acts, {4 * 8 + 9 * 2 + 2 * (5 * 8 + 9) + 1} are trained",
                "replay         100,000 frames, 24 bytes of observations each: 2.4 MB",
            ],
        ),
    ],
    ids=["FrozenLake", "HalfCheetah", "Pendulum"],
)
@pytest.mark.one_case
def test_a_line_for_each_part_then_the_action_the_sizes_and_the_replay(
    words: tuple[str, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if "env=halfcheetah" in words:
        pytest.importorskip("mujoco")
    assert main(["check", *words]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert head.startswith(f"networks of {words[0].removeprefix('recipe=')} on ")
    assert [row.strip() for row in rows] == lines


@pytest.mark.seconds
@pytest.mark.usefixtures("nothing_starts")
def test_a_game_is_a_picture_and_its_replay_is_refused_no_memory_but_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ale_py")
    monkeypatch.setattr(machine, "memory_bytes", lambda: 10**8)
    words = ("recipe=dqn", "env=pong", "recipe.buffer_frames=20000", "recipe.pace.prefill=1000")
    with pytest.warns(
        RlsyncWarning, match="a replay of 20,000 frames takes 154.8 MB(?s:.*)buffer_frames=6459"
    ):
        overview = networks(capsys, *words)
    (picture,) = overview["observation"]
    assert (picture["shape"], picture["dtype"]) == ([4, 84, 84], "uint8")
    assert picture["seen_by"] == "convolutions (nature)"
    assert 20_000 * 84 * 84 < overview["replay"]["total_bytes"] < 1.1 * 20_000 * 84 * 84, "each frame once"


@pytest.mark.parametrize("kept", [True, False])
def test_a_checkpoint_that_the_disk_has_no_room_for_is_warned_of(
    kept: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    config = Config(recipe=DQNConfig(buffer_checkpointed=kept))
    folder = tmp_path / "not" / "made"
    for total_bytes in (10**3, 10**18):
        warn_of_disk(config, ReplayMemory(10, total_bytes // 10, total_bytes, "recipe.buffer_frames"), folder)
    texts = [str(warning.message) for warning in recwarn]
    assert len(texts) == kept
    if kept:
        assert "a replay of 1000000000.0 GB when that is full, and the disk has room for" in texts[0]
        assert str(folder) in texts[0]


def test_what_is_counted_is_what_the_trainer_of_the_run_holds() -> None:
    words = ["recipe=ppo", "collector.num_workers=0", "logger=none", "recipe.hidden=[8]"]
    (job,) = jobs_of(command_line.read(words))
    trainer = job.recipe.build(job.config, job.spaces)
    loss = trainer.loss_module
    overview = Overview.of(job.config, job.spaces, trainer.collector.player, loss)
    trainer.shutdown()
    assert overview.trained_parameters == sum(p.numel() for p in loss.parameters() if p.requires_grad)
    assert overview.acting_parameters == sum(p.numel() for p in loss.actor_network_params.parameters())


# ----------------------------------------------------------------------- what an environment answers

ANSWERS = f"{__name__}:Answers-v0"


class Answers(gymnasium.Env[Any, Any]):
    """Observes a speed from -1 to 1, and a picture, or the speed alone.

    Args:
        value: what the speed's second number is, from the third step on.
        picture: whether there is a picture.
        mask: whether the info has a mask of actions.
    """

    def __init__(self, value: float = 0.0, picture: bool = True, mask: bool = False) -> None:
        speed = Box(-1, 1, (2,), np.float32)
        camera = Box(0, 255, (12, 12, 3), np.uint8)
        self.observation_space = Dict(speed=speed, camera=camera) if picture else speed
        self.action_space = Discrete(2)
        self._picture = picture
        self._info = {"action_mask": np.ones(2, np.int8)} if mask else {}
        self._value = value

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        observation, info = self._observe()
        return observation, 1.0, self._steps == 12, False, info

    def _observe(self) -> tuple[Any, dict[str, Any]]:
        speed = np.zeros(2, np.float32)
        if self._steps > 2:
            speed[1] = self._value
        observation = {"speed": speed, "camera": np.zeros((12, 12, 3), np.uint8)}
        return (observation if self._picture else speed), self._info


gymnasium.register("Answers-v0", Answers)


def answers(**kwargs: object) -> tuple[str, ...]:
    words = [f"+env.kwargs.{name}={value}" for name, value in kwargs.items()]
    return ("env=gymnasium", f"env.id={ANSWERS}", "env.num_envs=2", *words)


@pytest.mark.seconds
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("picture", "field"), [(True, "an observation whose part 'speed' is"), (False, "an observation that is")]
)
def test_a_number_that_is_none_is_an_error_which_names_the_part(
    picture: bool, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, *answers(value="nan", picture=picture), status=2)
    (error,) = found["errors"]
    assert error["what"] == f"{ANSWERS!r} answers step() with {field} infinite or not a number"
    assert found["networks"] == []


@pytest.mark.seconds
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(("picture", "name"), [(True, "speed"), (False, "observation")])
def test_a_number_outside_its_bounds_is_warned_of_once(
    picture: bool, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(RlsyncWarning) as warned:
        document(capsys, *answers(value=1.5, picture=picture))
    (warning,) = [each for each in warned if issubclass(each.category, RlsyncWarning)]
    outside = f"with {name!r} outside its space: number 1 is 1.5, and its bounds are -1 to 1"
    assert outside in str(warning.message)


@pytest.mark.seconds
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("key", ["observation", "info", "none"])
@pytest.mark.one_case
def test_a_mask_in_the_info_is_warned_of_where_the_key_does_not_apply_it(
    key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*answers(mask=True, value=1.0), f"env.action_mask={key}")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RlsyncWarning)
        document(capsys, *words)
    told = [str(each.message) for each in warned if issubclass(each.category, RlsyncWarning)]
    assert len(told) == (key != "info")
    for text in told:
        assert "has a mask of actions, action_mask, which is not applied" in text
        assert "give env.action_mask=info" in text


@pytest.mark.seconds
@pytest.mark.processes
@pytest.mark.parametrize(("lag", "warns"), [("1", True), ("null", False)])
def test_with_a_lag_an_environment_that_its_seed_does_not_decide_is_told(
    lag: str, warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["env.id=tests.tools.parts.undecided:Noisy-v0", f"collector.lag={lag}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["check", "recipe=ppo", *words]) == 0
    told = [
        str(each.message)
        for each in caught
        if "the seed does not decide this environment" in str(each.message)
    ]
    assert bool(told) == warns
    if warns:
        assert "had another observation in step 1" in told[0]
        assert "env.id" in told[0]

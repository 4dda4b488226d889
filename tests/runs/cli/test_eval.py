"""``rlsync eval``: what a policy returns, compared with episodes stepped by hand; and its film."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import imageio.v3 as iio
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchrl.checkpoint import Checkpoint

from rlsync import load_policy
from rlsync.core.errors import ConfigError
from rlsync.runs.cli.main import main
from rlsync.runs.evaluation.checkpoint import load
from rlsync.runs.evaluation.play import Episode
from rlsync.runs.life.job import examined
from rlsync.runs.life.kept import config_of
from rlsync.runs.life.training import train_job
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.evaluating import acting_of
from rlsync.runs.recipes.impala import Categorical
from rlsync.runs.recipes.impala.settings import ImpalaConfig, UnrollReplayConfig
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.run_files import CHECKPOINT, DIGESTS, RECEIPTS
from rlsync.runs.recipes.settings import AtariConfig, CollectorConfig, Config, PPOConfig, RouteConfig
from rlsync.runs.recipes.settings import SyncConfig as Sync
from rlsync.runs.recipes.settings import WhenConfig as When
from tests.runs.recipes.test_checkpoints import facts
from tests.tools.parts.gifs import shown_ms

RECIPES = ("ppo", "dqn", "impala")


def small(recipe: str, run_dir: Path) -> Config:
    """Two batches, or so."""
    config = Config(run_dir=str(run_dir), collector=CollectorConfig(num_workers=1, frames_per_batch=64))
    if recipe == "dqn":
        config.recipe = DQNConfig(
            total_frames=128, batch_size=16, pace=PaceConfig(ratio=6 / 64, prefill=0), hidden=[16]
        )
        routes = [
            RouteConfig("policy.module[0]", "loss_module.value_network"),
            RouteConfig("policy.module[1]", "greedy_module"),
        ]
        config.sync = Sync(map=routes, when=When(every=4, unit="optim_steps"))
    elif recipe == "impala":
        config.env.num_envs = 2
        config.collector.frames_per_batch = 40
        config.collector.lag = None
        config.recipe = ImpalaConfig(
            total_frames=160,
            target_return=None,
            unroll_length=10,
            batch_size=4,
            replay=UnrollReplayConfig(ratio=1.0),
        )
    else:
        config.recipe = PPOConfig(total_frames=128, batch_size=32, num_epochs=2, hidden=[16])
    return config


def train(config: Config) -> int:
    job, errors = examined(config)
    assert job is not None, errors
    return train_job(job)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run of each recipe."""
    folder = tmp_path_factory.mktemp("runs")
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        for recipe in RECIPES:
            assert train(small(recipe, folder / recipe)) == 0
    finally:
        multiprocessing.set_start_method(before, force=True)
    return {recipe: folder / recipe for recipe in RECIPES}


class Kept:
    """A component of a checkpoint, as it was written."""

    def __init__(self, checkpoint: Path, name: str) -> None:
        self.found: dict[str, Any] = {}
        Checkpoint(**{name: self}).load(checkpoint)

    def state_dict(self) -> dict[str, Any]:
        return self.found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict


def outputs_of(run: Path, between: Callable[[Tensor], Tensor] = torch.tanh) -> Callable[[Tensor], Tensor]:
    """The policy's network by hand, from nothing but the tensors of the checkpoint."""
    weights = Kept(run / CHECKPOINT, "policy").found
    layers = [
        (weights[name], weights[name.removesuffix("weight") + "bias"])
        for name in weights
        if name.endswith("weight") and not name.startswith("value.")
    ]

    def outputs(observation: Tensor) -> Tensor:
        *hidden, last = layers
        for weight, bias in hidden:
            observation = between(observation @ weight.T + bias)
        return observation @ last[0].T + last[1]

    return outputs


def by_hand(seed: int, choose: Callable[[Tensor], int]) -> Episode:
    """One episode of CartPole, stepped by nothing of ours."""
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=seed)
    total, length, over = 0.0, 0, False
    while not over:
        action = choose(torch.from_numpy(observation))
        observation, reward, terminated, truncated, _ = env.step(action)
        total, length, over = total + float(reward), length + 1, terminated or truncated
    env.close()
    return Episode(total, length)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """What ``rlsync eval --json`` finds."""
    capsys.readouterr()
    assert main(["eval", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------ what is played


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_returns_are_those_of_the_same_weights_and_seeds_stepped_by_hand(
    recipe: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = outputs_of(runs[recipe], torch.relu if recipe == "dqn" else torch.tanh)
    played = [by_hand(seed, lambda seen: int(outputs(seen).argmax())) for seed in (7, 8, 9, 10)]
    returns = [episode.total for episode in played]
    found = said(capsys, runs[recipe], "--deterministic", "--episodes=4", "--seed=7", "--no-video")
    assert found["episodes"] == 4
    assert (found["return_min"], found["return_max"]) == (min(returns), max(returns))
    assert found["return_mean"] == pytest.approx(statistics.fmean(returns))
    assert found["return_std"] == pytest.approx(statistics.pstdev(returns))
    assert found["length_mean"] == pytest.approx(statistics.fmean(e.length for e in played))
    assert found["video"] == {"file": None, "why": "not asked for"}


@pytest.mark.thorough
def test_actions_are_drawn_as_workers_draw_them(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    outputs, generator = outputs_of(runs["impala"]), torch.Generator().manual_seed(3)
    drawn = by_hand(3, lambda seen: int(Categorical(2).act(outputs(seen)[None], generator)[0]))
    found = said(capsys, runs["impala"], "--episodes=1", "--seed=3", "--no-video")
    assert (found["return_mean"], found["length_mean"]) == (drawn.total, drawn.length)

    first = said(capsys, runs["ppo"], "--episodes=8", "--no-video")
    assert first == said(capsys, runs["ppo"], "--episodes=8", "--no-video")
    likeliest = said(capsys, runs["ppo"], "--episodes=8", "--no-video", "--deterministic")
    assert first["return_mean"] != likeliest["return_mean"]


def test_a_policy_that_acted_in_half_precision_is_evaluated_in_it(runs: dict[str, Path]) -> None:
    config = config_of(runs["ppo"])
    policies = []
    for dtype in (None, "bfloat16"):
        config.sync.map[0].dtype = dtype
        acting = acting_of(config)
        load(runs["ppo"] / CHECKPOINT, acting)
        policies.append(acting.player.modules["policy"])
    full, half = policies
    for wide, narrow in zip(full.parameters(), half.parameters(), strict=True):
        assert narrow.dtype is torch.bfloat16
        assert torch.equal(wide.bfloat16(), narrow)


# ------------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_line_says_which_version_returned_what(
    recipe: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    newest = json.loads((runs[recipe] / RECEIPTS).read_text().splitlines()[-1])
    capsys.readouterr()
    assert main(["eval", str(runs[recipe]), "--episodes", "2", "--no-video"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    ahead = {"dqn": "( \\+ \\d optimizer steps)?"}.get(recipe, "")
    pattern = (
        rf"version {newest['version']}{ahead}  frames 1\d\d  episodes 2  return [\d.]+ ± [\d.]+ \([\d.]+ to "
    )
    assert re.match(pattern, line), line


def test_optimizer_steps_beyond_the_newest_version_are_told(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    newest = json.loads((runs["dqn"] / RECEIPTS).read_text().splitlines()[-1])
    counters = Kept(runs["dqn"] / CHECKPOINT, "trainer_module.sync_weights").found
    found = said(capsys, runs["dqn"], "--episodes=1", "--no-video")
    assert (found["version"], found["frames"]) == (newest["version"], 128)
    assert found["unpublished_steps"] == counters["optim_steps"] - newest["optim_steps"]


# ------------------------------------------------------------------------------------ the film


@pytest.mark.parametrize("recipe", ["ppo", "impala"])
def test_a_gif_beside_the_run_shows_the_episode_that_it_tells_of(
    recipe: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = said(capsys, runs[recipe], "--episodes=1", "--seed=4")
    file = runs[recipe] / f"eval-{found['frames']}.gif"
    length = found["video"]["length"]
    assert found["video"] == {"file": str(file), "return": found["return_mean"], "length": length}
    frames = iio.imread(file, index=None)
    assert frames.shape[1:] == (200, 300, 3)
    assert all((a != b).any() for a, b in pairwise(frames))
    assert shown_ms(file) == 20 * (length + 1), "CartPole has fifty steps a second"
    file.unlink()


@pytest.mark.parametrize(
    ("package", "why"),
    [
        ("pygame", "CartPole-v1 cannot be filmed: pygame is not installed"),
        ("imageio", "imageio is not installed, which writes .gif; pip install 'rlsync[video]'"),
    ],
)
def test_what_cannot_be_rendered_is_evaluated_and_one_line_says_why(
    package: str,
    why: str,
    runs: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    capsys.readouterr()
    assert main(["eval", str(runs["ppo"]), "--episodes", "1"]) == 0
    out, err = capsys.readouterr()
    score, line = out.splitlines()
    assert score.startswith("version ")
    assert line.startswith(f"no video: {why}")
    assert "pip install 'rlsync[video]'" in line
    assert err == ""
    assert not list(runs["ppo"].glob("*.gif"))

    assert main(["eval", str(runs["ppo"]), "--video", str(runs["ppo"] / "a.gif")]) == 2
    out, err = capsys.readouterr()
    assert out == "", "nothing is played for a video that is asked for and cannot be had"
    assert len(err.splitlines()) == 3


# ------------------------------------------------------------------------------------ refusals


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["eval", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    what, where, cure = err.splitlines()
    assert where.startswith("  where  ")
    assert cure.startswith("  cure   ")
    return what + "\n" + cure


def test_an_mp4_without_its_writer_is_refused_before_anything_is_played(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    text = refused(capsys, runs["ppo"], "--video", runs["ppo"] / "a.mp4")
    assert "imageio_ffmpeg is not installed" in text
    assert "pip install 'imageio-ffmpeg', or name a .gif" in text


def test_a_video_that_cannot_be_written_is_refused(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be written as '.avi'" in refused(capsys, runs["ppo"], "--video", "a.avi")
    assert f"there is no folder {Path.cwd()}/nowhere" in refused(
        capsys, runs["ppo"], "--video", "nowhere/a.gif"
    )


def test_what_is_no_run_is_refused(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "is not the folder of a run" in refused(capsys, tmp_path)
    assert "is not the folder of a run" in refused(capsys, tmp_path / "nowhere")
    shutil.copy(runs["ppo"] / "config.yaml", tmp_path)
    assert "holds no checkpoint" in refused(capsys, tmp_path)
    assert "does not exist" in refused(capsys, runs["ppo"], "--checkpoint", tmp_path / "nowhere")


def test_a_checkpoint_that_is_not_the_runs_is_refused(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = refused(capsys, runs["ppo"], "--checkpoint", runs["dqn"])
    assert "that checkpoint is of recipe.name 'dqn', the run is of 'ppo'" in text
    assert f"rlsync eval {runs['dqn']}" in text
    moved = shutil.copytree(runs["dqn"] / CHECKPOINT, tmp_path / "moved")
    text = refused(capsys, runs["ppo"], "--checkpoint", moved)  # whose tensors would fit
    assert "one of them has: exploration, target_updater, trainer_module.epsilon_decay" in text
    own = shutil.copytree(runs["ppo"], tmp_path / "own", ignore=shutil.ignore_patterns(CHECKPOINT))
    moved = shutil.copytree(runs["impala"] / CHECKPOINT, tmp_path / "impala")
    assert "does not fit the run's configuration" in refused(capsys, own, "--checkpoint", moved)


def test_a_checkpoint_is_only_read_and_one_that_is_damaged_is_refused(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = shutil.copytree(runs["dqn"], tmp_path / "run")
    before = facts(run / CHECKPOINT)
    said(capsys, run, "--episodes=1", "--no-video")
    assert facts(run / CHECKPOINT) == before
    (file,) = run.glob(f"{CHECKPOINT}/components/*-policy/state/tensor_00000000.memmap")
    os.truncate(file, 8)
    before = facts(run / CHECKPOINT)
    assert "the checkpoint is damaged: it has 8 of " in refused(capsys, run)
    assert main(["eval", str(run)]) == 2
    assert f"  where  {file}\n" in capsys.readouterr().err
    assert facts(run / CHECKPOINT) == before


def test_a_checkpoint_of_an_older_rlsync_is_played_with_trust_and_called_unchecked(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = shutil.copytree(runs["dqn"], tmp_path / "run")
    (run / CHECKPOINT / DIGESTS).unlink()
    assert "it has no digests.json" in refused(capsys, run)
    assert main(["eval", str(run), "--trust", "--episodes=1", "--no-video"]) == 0
    assert capsys.readouterr().err == f"unchecked: {run / CHECKPOINT} has no digests.json\n"


def test_a_checkpoint_that_was_kept_elsewhere_is_evaluated(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = shutil.copytree(runs["dqn"] / CHECKPOINT, tmp_path / "kept")
    both = [
        said(capsys, runs["dqn"], *more, "--episodes=3", "--no-video")
        for more in ([], ["--checkpoint", kept])
    ]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("recipe.name", "sarsa", "no recipe 'sarsa'"),
        ("recipe.speed", 1, "'speed'"),
        ("recipe.hidden", [8], "does not fit the run's configuration"),
        ("env.id", "CartPol-v1", "cannot make the environment 'CartPol-v1'"),
    ],
)
def test_a_configuration_that_does_not_lead_to_the_policy_is_refused(
    key: str,
    value: object,
    what: str,
    runs: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    run = shutil.copytree(runs["ppo"], tmp_path / "run")
    written = OmegaConf.load(run / "config.yaml")
    OmegaConf.update(written, key, value, force_add=True)
    OmegaConf.save(written, run / "config.yaml")
    assert what in refused(capsys, run)


@pytest.mark.parametrize("wrong", ["--episodes=0", "--episodes=few", "--seed=-1", "--video=a.gif --no-video"])
def test_a_wrong_command_line_exits_with_two(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval", "run", *wrong.split()])
    assert "usage: rlsync eval" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ Pong


@pytest.mark.slow
@pytest.mark.thorough
def test_pong_from_pixels_is_evaluated_and_filmed_in_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config(
        run_dir=str(tmp_path),
        env=AtariConfig("ALE/Pong-v5", 2, max_episode_frames=400),
        collector=CollectorConfig(frames_per_batch=80, lag=None),
        recipe=ImpalaConfig(total_frames=160, target_return=None, unroll_length=20, batch_size=4),
    )
    assert train(config) == 0
    found = said(capsys, tmp_path, "--episodes=1", "--seed=2")
    assert found["length_mean"] == found["video"]["length"] <= 100
    assert found["return_mean"] == found["video"]["return"]
    frames = iio.imread(tmp_path / "eval-160.gif", index=None)
    assert frames.shape[1:] == (210, 160, 3)
    frame_ms = shown_ms(tmp_path / "eval-160.gif") / (found["video"]["length"] + 1)
    assert 60 <= frame_ms <= 70, "fifteen steps a second, in hundredths of a second"
    assert (frames[0] != frames[-1]).any()


# ---------------------------------------------------------------------------------- the policy, for programs


@pytest.mark.parametrize("recipe", RECIPES)
def test_load_policy_gives_what_eval_plays(runs: dict[str, Path], recipe: str) -> None:
    policy = load_policy(runs[recipe])
    outputs = outputs_of(runs[recipe], torch.tanh if recipe == "ppo" else torch.relu)
    rows = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    if recipe != "impala":  # whose layers are named otherwise
        assert torch.equal(policy(rows), outputs(rows).argmax(-1))
    trained = load(runs[recipe] / CHECKPOINT, acting_of(config_of(runs[recipe])))
    assert policy.trained == trained
    assert len(policy.metadata()["run_id"]) == 12
    assert OmegaConf.create(policy.metadata()["config"]).env.id == "CartPole-v1"


def test_a_version_that_the_run_does_not_keep_is_refused_with_those_that_it_keeps(
    runs: dict[str, Path],
) -> None:
    run, trained = runs["ppo"], load_policy(runs["ppo"]).trained
    if not trained.unpublished_steps:
        assert load_policy(run, trained.version).trained == trained
    with pytest.raises(ConfigError) as refused:
        load_policy(run, 99)
    assert refused.value.what == "the run keeps no weights of version 99"
    assert refused.value.cure == f"it keeps last: {trained}"
    with pytest.raises(ConfigError, match=r"there is no best version\n  where  .*best\.pt"):
        load_policy(run, "best")
    with pytest.raises(ConfigError, match="'worst' names no weights of a run"):
        load_policy(run, "worst")  # type: ignore[arg-type]


@pytest.mark.thorough
@pytest.mark.seconds
def test_export_writes_a_file_and_tells_which_weights_are_in_it(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, policy = tmp_path / "policy.pt2", load_policy(runs["dqn"])
    assert main(["export", str(runs["dqn"]), str(file)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{file}: {policy.trained}  digest {policy.digest()}"
    assert second == "compared on 1,000 observations: outputs differ by 0 at most"
    rows = torch.randn(9, 4)
    assert torch.equal(torch.export.load(file).module()(rows), policy(rows))
    assert main(["export", str(runs["dqn"]), str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == policy.metadata()

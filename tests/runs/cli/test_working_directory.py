"""A relative path means the working directory in which it was given, whatever changes that one later."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsync import load_policy
from rlsync.runs.cli.main import main
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.run_files import CHECKPOINT, LIVES
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig, PPOConfig
from tests.tools.parts.moving import ID

pytestmark = [pytest.mark.usefixtures("fork_workers"), pytest.mark.processes, pytest.mark.slow]

PPO = ("env.num_envs=1", "recipe.num_epochs=1", "collector.frames_per_batch=64", "logger=none")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the environment goes."""
    return tmp_path_factory.mktemp("elsewhere")


def train(elsewhere: Path, *words: str) -> None:
    env = ("env=gymnasium", f"env.id='{ID}'", f"+env.kwargs.folder={elsewhere}", "recipe.target_return=null")
    assert main(["train", *words, *PPO, *env]) == 0


def test_every_verb_finds_and_writes_what_its_relative_path_names(
    here: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(elsewhere, "recipe.total_frames=64", "run_dir=runs/it", "hydra.job.chdir=true")
    assert Path.cwd() == here
    more = ("resume=runs/it", "run_dir=runs/it", "recipe.total_frames=128", "hydra.job.chdir=true")
    assert main(["train", *more]) == 0
    run = here / "runs" / "it"
    assert sorted(here.rglob(CHECKPOINT)) == [run / CHECKPOINT, run / LIVES / "1" / CHECKPOINT]
    capsys.readouterr()
    main(["status", "runs/it"])
    assert "total_frames collected  frames 128" in capsys.readouterr().out
    written = ["policy.safetensors", "best.gif", "again"]
    for verb in (
        ["export", "runs/it", written[0]],
        ["eval", "runs/it", "--episodes", "1", "--video", written[1]],
        ["rerun", "runs/it", "--from", "1", "--into", written[2]],
    ):
        monkeypatch.chdir(here)
        assert main(verb) == 0
    assert {path.name for path in here.iterdir()} == {"runs", *written}
    monkeypatch.chdir(here)
    assert load_policy("runs/it").version > 1
    assert list(elsewhere.iterdir()) == []


@pytest.mark.thorough
def test_the_jobs_of_a_sweep_lie_in_one_folder(here: Path, elsewhere: Path) -> None:
    train(elsewhere, "-m", "seed=0,1", "recipe.total_frames=64", "collector.num_workers=0")
    assert len(list(here.glob(f"runs/*/*/[01]/{CHECKPOINT}"))) == 2
    assert list(elsewhere.iterdir()) == []


@pytest.mark.thorough
def test_a_run_that_is_built_in_python_writes_to_the_folder_that_its_config_named(
    here: Path, elsewhere: Path
) -> None:
    config = Config(
        env=EnvConfig(ID, 1, {"folder": str(elsewhere)}),
        collector=CollectorConfig(num_workers=0, frames_per_batch=64),
        recipe=PPOConfig(total_frames=64, hidden=[8], target_return=None),
        run_dir="it",
    )
    ppo.RECIPE.build(config).train()
    assert (here / "it" / CHECKPOINT).is_dir()
    assert list(elsewhere.iterdir()) == []

"""Runs that 0.1.0 wrote: they evaluate, resume and are drawn, also where keys have gone since."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlsync.core.errors import ConfigError
from rlsync.runs.cli.main import main
from rlsync.runs.config.composing import written
from rlsync.runs.life.kept import config_of
from rlsync.runs.recipes import run_files
from rlsync.runs.recipes.bounds import bound_errors
from rlsync.runs.recipes.dreamer.config import DreamerV1Config
from rlsync.runs.recipes.impala.settings import ImpalaConfig, ModelConfig
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.td3 import TD3Config
from tests.runs.recipes.test_registry import rlsync

RUNS = Path(__file__).parents[2] / "data" / "earlier_runs"
RECIPES = ("ppo", "dqn", "sac", "impala")


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run's folder, as rlsync 0.1.0 wrote it."""
    with tarfile.open(RUNS / f"{request.param}.tar.gz") as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / request.param


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    ["impala", *(pytest.param(recipe, marks=pytest.mark.thorough) for recipe in RECIPES[:3])],
    indirect=True,
)
def test_an_earlier_run_evaluates_resumes_and_is_drawn(run: Path) -> None:
    name, config = run.name, OmegaConf.load(run / run_files.RESOLVED)
    goal = int(config.recipe.total_frames) + int(config.collector.frames_per_batch)
    told, resumed, *_ = rlsync(
        run.parent,
        ("eval", name, "--episodes=1", "--no-video", "--json", "--trust"),
        ("train", "--trust", f"resume={name}", "run_dir=again", f"recipe.total_frames={goal}"),
        ("plot", name, "again", "--out", "both.png"),
        ("report", name, "again", "-o", "both.html"),
        ("compare", name, name),
    )
    scored = json.loads(told)
    assert (scored["recipe"], scored["frames"]) == (name, config.recipe.total_frames)
    assert f"stopped: total_frames collected  frames {goal}" in resumed


@pytest.mark.parametrize(
    ("run", "lag"),
    [("ppo", "lag 0: workers wait for each update"), ("impala", "no fixed lag")],
    indirect=["run"],
)
def test_the_status_of_an_earlier_run_says_its_lag(
    run: Path, lag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(run)]) == 1  # it has ended
    printed = capsys.readouterr().out
    assert "total_frames collected" in printed
    assert f"\n{lag}" in printed


@pytest.mark.one_case
@pytest.mark.parametrize("run", RECIPES, indirect=True)
def test_the_config_of_an_earlier_run_is_read_with_the_defaults_of_newer_keys(run: Path) -> None:
    file = run / run_files.RESOLVED
    config = config_of(run)
    assert config.recipe.name == run.name
    found = OmegaConf.load(file)
    del found.stop_within_s, found.recipe.clip_norm
    OmegaConf.save(found, file)
    again = config_of(run)
    assert (again.stop_within_s, again.recipe.lr) == (config.stop_within_s, config.recipe.lr)


@pytest.mark.parametrize("run", ["dqn"], indirect=True)
def test_a_key_that_has_gone_is_left_out_where_it_was_null_and_refused_where_it_was_not(run: Path) -> None:
    file = run / run_files.RESOLVED
    before, found = written(file), OmegaConf.load(file)
    found.recipe.gone = None
    found.sync.when.gone = None
    OmegaConf.save(found, file)
    assert written(file) == before
    found.recipe.gone = 3
    OmegaConf.save(found, file)
    with pytest.raises(ConfigError, match="'gone' not in 'DQNConfig'"):
        written(file)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "lag", "workers"),
    [("sync", 0, 2), ("async", None, 2), ("in_process", 0, 0)],
)
@pytest.mark.parametrize("run", ["dqn"], indirect=True)
def test_the_kind_of_an_earlier_collector_is_a_lag_now(
    run: Path, kind: str, lag: int | None, workers: int
) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    found.collector.kind, found.collector.transport = kind, "board"
    OmegaConf.save(found, file)
    collector = written(file).collector
    assert (collector.lag, collector.num_workers) == (lag, workers)


@pytest.mark.parametrize("run", ["impala"], indirect=True)
def test_a_lag_that_an_earlier_run_had_is_kept_and_another_kind_or_transport_is_refused(run: Path) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    found.collector.lag = 3
    OmegaConf.save(found, file)
    assert written(file).collector.lag == 3
    found.collector.transport = "store"
    OmegaConf.save(found, file)
    with pytest.raises(ConfigError, match="get their weights from a board, and no more by store") as refused:
        written(file)
    assert refused.value.where == f"{file}, collector.transport"
    found.collector.transport = None
    found.collector.kind = "threads"
    OmegaConf.save(found, file)
    with pytest.raises(ConfigError, match="'kind' not in 'CollectorConfig'"):
        written(file)


@pytest.mark.parametrize("run", ["sac"], indirect=True)
def test_an_earlier_run_of_td3_is_refused_with_a_sentence_that_says_to_start_anew(run: Path) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    found.recipe = OmegaConf.structured(TD3Config())
    assert [route.destination for route in found.sync.map] == ["policy"]
    OmegaConf.save(found, file)
    assert written(file).recipe.name == "td3"
    found.sync.map[0].destination = "policy.module[0]"
    OmegaConf.save(found, file)
    with pytest.raises(ConfigError, match="no more as 'policy") as refused:
        written(file)
    assert refused.value.cure.startswith("start anew")


@pytest.mark.parametrize("run", ["sac"], indirect=True)
def test_a_dreamer_v1_of_0_1_is_not_resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    found.recipe = OmegaConf.structured(DreamerV1Config())
    OmegaConf.save(found, file)
    assert main(["check", f"resume={run}"]) == 2
    refused = capsys.readouterr().out
    assert "a run of dreamer_v1 by rlsync 0.1 cannot go on" in refused
    assert "cure   start anew, without resume; rlsync eval plays" in refused


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_networks_that_differ_from_those_of_0_1_are_a_reason_to_start_anew(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    found.recipe.hidden = [4]
    OmegaConf.save(found, file)
    words = ["--trust", f"resume={run}", f"run_dir={run.parent / 'again'}", "recipe.total_frames=256"]
    assert main(["train", *words]) == 2
    refused = capsys.readouterr().err
    assert "the checkpoint does not fit this configuration" in refused
    assert "; else start anew: rlsync 0.1 wrote this run, some of whose networks were others" in refused


@pytest.mark.parametrize("run", ["ppo"], indirect=True)
def test_a_run_of_0_1_is_not_made_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["rerun", str(run)], ["frame", str(run), "3"]):
        assert main(words) == 2
        assert "cannot be made again: rlsync 0.1 recorded it" in capsys.readouterr().err


@pytest.mark.parametrize("run", ["impala"], indirect=True)
def test_pixels_that_were_normalised_still_are_and_cut_where_they_were(run: Path) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    for before, now in ((False, (False, 10.0)), (True, (True, 5.0))):
        found.recipe.model.normalize = before
        OmegaConf.save(found, file)
        recipe = written(file).recipe
        assert isinstance(recipe, ImpalaConfig)
        assert (recipe.normalize.observations, recipe.normalize.clip) == now
        assert not recipe.normalize.rewards


@pytest.mark.parametrize("run", ["impala"], indirect=True)
def test_a_torso_has_the_name_of_now_in_runs_of_0_1_alone(run: Path) -> None:
    file = run / run_files.RESOLVED
    found = OmegaConf.load(file)
    for before, now in (("shallow", "nature"), ("deep", "impala")):
        found.recipe.model.torso = before
        OmegaConf.save(found, file)
        assert written(file).recipe.model.torso == now
        config = Config(recipe=ImpalaConfig(model=ModelConfig(torso=before)))
        (refused,) = bound_errors(config)
        assert refused.cure.startswith(f"did you mean '{now}'? give one of auto, mlp, ")


@pytest.mark.parametrize("run", ["impala"], indirect=True)
def test_bfloat16_of_an_earlier_model_is_the_dtype_of_updates_now(run: Path) -> None:
    file = run / run_files.RESOLVED
    assert written(file).recipe.update_dtype == "float32"
    found = OmegaConf.load(file)
    found.recipe.model.bfloat16 = True
    OmegaConf.save(found, file)
    assert written(file).recipe.update_dtype == "bfloat16"
    file.write_text(file.read_text().partition("recipe:")[0])
    with pytest.raises(ConfigError, match="configuration: it names no recipe, so it was cut"):
        written(file)
    found.recipe.model = "resnet"  # no section: as in a recipe of somebody's own
    OmegaConf.save(found, file)
    with pytest.raises(ConfigError, match="cannot read the run's configuration"):
        written(file)

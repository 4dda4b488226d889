"""``rlsync rerun`` and ``rlsync compare``: what they refuse, what they print, and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlsync.cli.main import main
from rlsync.core.schedule import ScheduleWriter
from rlsync.recipes.impala.settings import ImpalaConfig
from rlsync.recipes.rerun import lives_to_repeat, schedule_facts
from rlsync.recipes.run_files import RESOLVED, SCHEDULE
from rlsync.recipes.settings import ClusterConfig, CollectorConfig, Config, EnvConfig
from rlsync.recipes.sync_settings import SyncConfig, WhenConfig


def recorded(
    folder: Path,
    config: Config,
    facts: dict[str, Any] | None = None,
    *,
    digests: dict[int, dict[str, int]] | None = None,
) -> Path:
    """The folder of a run that made two rollouts."""
    folder.mkdir()
    OmegaConf.save(OmegaConf.structured(config), folder / RESOLVED)
    writer = ScheduleWriter(folder / SCHEDULE, facts or schedule_facts(config))
    writer.publish(1, 0)
    for number in range(2):
        writer.rollout(number, 0, 0, 1)
        writer.publish(number + 2, number + 1)
    for version, found in (digests or {3: {"policy.a": 1}}).items():
        writer.digests(version, found)
    writer.close()
    return folder


def impala(**recipe: object) -> Config:
    options = {"total_frames": 80, "unroll_length": 5, "batch_size": 2, **recipe}
    return Config(
        env=EnvConfig(id="CartPole-v1", num_envs=2),
        collector=CollectorConfig("async", frames_per_batch=10),
        recipe=ImpalaConfig(**options),
    )


def resumed() -> Config:
    config = impala()
    config.resume = "runs/before"
    return config


def by_seconds() -> Config:
    config = impala()
    config.sync = SyncConfig(when=WhenConfig(1.0, "seconds"))
    return config


def on_a_cluster() -> Config:
    config = impala()
    config.cluster = ClusterConfig("ray")
    return config


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (resumed, "the checkpoint in runs/before is not the one that it began from"),
        (by_seconds, "it published every so many seconds"),
        (on_a_cluster, "its workers were on a cluster"),
        (lambda: impala(when_full="drop_newest"), "its workers dropped rollouts"),
    ],
    ids=["resumed", "seconds", "cluster", "drop_newest"],
)
def test_a_run_that_cannot_be_made_again_is_refused_before_anything_runs(
    tmp_path, capsys, config, why
) -> None:
    run = recorded(tmp_path / "run", config())
    files = {path.name for path in run.iterdir()}
    assert main(["rerun", str(run), "--trust"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert told[0].startswith(f"this run cannot be made again: {why}")
    assert {path.name for path in run.iterdir()} == files, "nothing was written"


def test_a_schedule_of_another_config_is_refused(tmp_path: Path, capsys) -> None:
    run = recorded(tmp_path / "run", impala())
    OmegaConf.save(OmegaConf.structured(impala(lr=0.5)), run / RESOLVED)
    assert main(["rerun", str(run), "--trust"]) == 2
    assert "another config than the one beside it: recipe.lr differs" in capsys.readouterr().err


def test_a_schedule_that_is_older_than_a_key_is_taken_with_the_keys_default(tmp_path: Path) -> None:
    given = impala()
    older = schedule_facts(given)
    del older["config"]["recipe"]["lr"], older["config"]["cluster"]
    run = recorded(tmp_path / "run", given, older)
    assert list(lives_to_repeat(run, lambda _: given)) == [1]


def test_a_run_without_a_schedule_a_version_it_never_had_and_a_folder_in_use_are_refused(
    tmp_path, capsys
) -> None:
    run = recorded(tmp_path / "run", impala())
    assert main(["rerun", str(run), "--trust", "--until", "9"]) == 2
    assert "its newest version is 3" in capsys.readouterr().err
    assert main(["rerun", str(run), "--trust", "--from", "2"]) == 2
    assert "no life 2 that can be made again" in capsys.readouterr().err
    assert main(["rerun", str(run), "--trust", "--into", str(tmp_path)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    (run / SCHEDULE).unlink()
    assert main(["rerun", str(run), "--trust"]) == 2
    assert "no schedule" in capsys.readouterr().err


def test_two_runs_are_compared_and_the_first_difference_named(tmp_path: Path, capsys) -> None:
    one = recorded(tmp_path / "a", impala(), digests={2: {"policy.a": 1, "policy.b": 2}, 3: {"policy.a": 1}})
    other = recorded(
        tmp_path / "b", impala(), digests={2: {"policy.a": 1, "policy.b": 2}, 3: {"policy.a": 4}}
    )
    assert main(["compare", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "equal up to version 3: 2 digests of 2\n"
    assert main(["compare", str(one), str(other)]) == 1
    assert capsys.readouterr().out.startswith(
        "unequal at version 3: 1 leaves: policy.a\nequal up to version 2;"
    )
    assert main(["compare", str(one), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["leaves"] == ["policy.a"]

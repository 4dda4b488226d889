"""``rlsync rerun`` and ``rlsync compare``: what they refuse, what they print, and their exit statuses."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlsync.core.errors import ConfigError
from rlsync.record.schedule import ScheduleWriter, lives_in
from rlsync.runs.cli.main import main
from rlsync.runs.life.state import ended
from rlsync.runs.recipes.dqn import RECIPE as DQN
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.rerun import frame_of, lives_to_repeat, schedule_facts
from rlsync.runs.recipes.run_files import RESOLVED, SCHEDULE
from rlsync.runs.recipes.settings import ClusterConfig, CollectorConfig, Config, EnvConfig
from rlsync.runs.recipes.sync_settings import RouteConfig, SyncConfig, WhenConfig
from tests.runs.cli.test_main import Run, finished
from tests.tools.parts.space_envs import SHIFTED
from tests.tools.programs import ENDS_WITHIN_S

MAP_OF_DQN = [
    RouteConfig("policy.module[0]", "loss_module.value_network"),
    RouteConfig("policy.module[1]", "greedy_module"),
]


def recorded(
    folder: Path,
    config: Config,
    facts: dict[str, Any] | None = None,
    *,
    digests: dict[int, dict[str, int]] | None = None,
    end: bool = False,
) -> Path:
    """The folder of a run that made two rollouts, and was killed if it has no end."""
    folder.mkdir()
    OmegaConf.save(OmegaConf.structured(config), folder / RESOLVED)
    writer = ScheduleWriter(folder / SCHEDULE, facts or schedule_facts(config))
    writer.publish(1, 0)
    for number in range(2):
        writer.rollout(number, 0, 0, 1)
        writer.publish(number + 2, number + 1)
    for version, found in (digests or {3: {"policy.a": 1}}).items():
        writer.digests(version, found)
    if end:
        writer.note("end", {"version": 3})
    writer.close()
    return folder


def impala(**recipe: object) -> Config:
    options = {"total_frames": 80, "unroll_length": 5, "batch_size": 2, **recipe}
    return Config(
        env=EnvConfig(id="CartPole-v1", num_envs=2),
        collector=CollectorConfig(frames_per_batch=10, lag=None),
        recipe=ImpalaConfig(**options),
    )


def resumed() -> Config:
    config = impala()
    config.resume = "/runs/before"
    return config


def by_seconds() -> Config:
    config = impala()
    config.sync = SyncConfig(when=WhenConfig(1.0, "seconds"))
    return config


def on_a_cluster() -> Config:
    config = impala()
    config.cluster = ClusterConfig("ray")
    return config


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (resumed, "the checkpoint in /runs/before is not the one that it began from"),
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


def test_a_run_of_lives_is_made_again_from_any_of_them_also_after_a_stop_in_a_later_one(
    tmp_path: Path,
) -> None:
    words = ("recipe=impala", "recipe.total_frames=1000000", "recipe.target_return=null", "logger=none")
    run = Run(tmp_path, "train", *words, "run_dir=it", "life_frames=800", "sync.digest_every=2")
    try:
        while run.process.poll() is None and f"{tmp_path}/it/checkpoint  frames 1,600" not in run.output:
            assert ended(tmp_path / "it") is None, "rlsync status --watch would leave"
            time.sleep(0.001)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.exit_status(ENDS_WITHIN_S) == 128 + signal.SIGTERM
    finally:
        run.kill()
    end = ended(tmp_path / "it")
    assert end is not None
    assert (end.how, end.status) == ("terminated", 143)
    more = f"recipe.total_frames={end.frames + 100}"
    assert (
        "stopped: total_frames collected"
        in finished(tmp_path, "train", "resume=it", "run_dir=it", more).output
    )
    lives = lives_in(tmp_path / "it" / SCHEDULE)
    assert [life.facts["resumed"] for life in lives] == [False, *[True] * (len(lives) - 1)]
    assert len(lives) == 4, "three before the stop, and one after it"
    again = finished(tmp_path, "rerun", "it", "--from", "2", "--json")
    found = json.loads(again.output.splitlines()[-1])
    assert found["unequal"] == 0
    assert found["equal"] == sum(len(life.digests) for life in lives[1:] if life.rollouts)


def test_a_run_without_a_schedule_a_version_it_never_had_and_a_folder_in_use_are_refused(
    tmp_path, capsys
) -> None:
    run = recorded(tmp_path / "run", impala())
    assert main(["rerun", str(run), "--trust", "--until", "9"]) == 2
    assert "the newest version is 3" in capsys.readouterr().err
    assert main(["rerun", str(run), "--trust", "--from", "2"]) == 2
    assert "no life 2 that can be made again" in capsys.readouterr().err
    assert main(["rerun", str(run), "--trust", "--into", str(tmp_path)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert main(["rerun", str(run), "--trust", "--into", "/proc/again"]) == 2
    assert "cannot write into /proc: No such file or directory\n  where  --into\n" in capsys.readouterr().err
    (run / SCHEDULE).unlink()
    assert main(["rerun", str(run), "--trust"]) == 2
    assert "no schedule" in capsys.readouterr().err


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("21", "no such frame was recorded: NUMBER cannot be 21"),
        ("0", "NUMBER cannot be 0"),
        ("--worker 2 --rollout 0 --step 0", "--worker cannot be 2"),
        ("--worker 1 --rollout 1 --step 0", "--rollout cannot be 1"),
        ("--worker 1 --rollout 0 --step 5", "--step cannot be 5"),
        ("--worker 1 --rollout 0 --step 0 --env 2", "--env cannot be 2"),
        ("--worker 1 --rollout 0", "no frame is named, or two are"),
        ("3 --worker 1 --rollout 0 --step 0", "no frame is named, or two are"),
        ("3 --from 2", "no life 2 that can be made again"),
    ],
)
def test_a_frame_that_the_schedule_does_not_have_is_refused(tmp_path: Path, capsys, words, told) -> None:
    run = recorded(tmp_path / "run", impala())
    assert main(["frame", str(run), "--trust", *words.split()]) == 2
    first, *rest = capsys.readouterr().err.splitlines()
    assert told in first
    assert len(rest) == 2


def test_a_batch_that_a_killed_run_has_not_completed_has_no_frames(tmp_path: Path) -> None:
    given = impala()  # whose record has two rollouts of ten frames
    (life, _), *_ = lives_to_repeat(recorded(tmp_path / "run", given), lambda _: given).values()
    assert frame_of(life, given, 20, (None, None, None, 0)).rollout.worker == 1
    given.recipe.batch_size, given.collector.frames_per_batch = 6, 30
    with pytest.raises(ConfigError, match="NUMBER cannot be 1"):
        frame_of(life, given, 1, (None, None, None, 0))


def test_the_frame_of_a_run_without_a_schedule_is_refused(tmp_path: Path, capsys) -> None:
    run = recorded(tmp_path / "run", impala())
    (run / SCHEDULE).unlink()
    assert main(["frame", str(run), "--trust", "3"]) == 2
    assert "no schedule" in capsys.readouterr().err


@pytest.mark.seconds
def test_a_frame_is_told_and_compared_with_the_row_that_the_run_keeps(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Config(
        run_dir=str(tmp_path / "run"),
        env=EnvConfig(SHIFTED),
        collector=CollectorConfig(num_workers=0, frames_per_batch=16),
        sync=SyncConfig(digest_every=1, map=MAP_OF_DQN),
        recipe=DQNConfig(
            total_frames=96, hidden=[8], batch_size=16, pace=PaceConfig(0.5, prefill=32), target_return=None,
            compile="off",
        ),
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    OmegaConf.save(OmegaConf.structured(given), tmp_path / "run" / RESOLVED)
    DQN.build(given).train()
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert main(["frame", given.run_dir, "70", "--trust", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["frame"], told["rollout"], told["step"], told["prefill"]) == (70, 4, 5, False)
    assert told["equal"] == dict.fromkeys(
        ["stored action", "stored observation", "stored policy_version", "recorded version"], True
    )
    assert len(told["observation"]) == 2
    assert told["sent"] == 5 + told["action"].index(1), "what its environment calls that choice"
    assert all(len(each) == 16 for each in told["digests"].values())
    assert {path.name for path in (tmp_path / "run").iterdir()} == files, "nothing was written"

    monkeypatch.setattr("rlsync.runs.life.again.kept_frame", lambda *_: {"action": torch.zeros(2)})
    assert main(["frame", given.run_dir, "7", "--trust"]) == 1
    said = capsys.readouterr().out
    assert "'stored action': False" in said
    assert re.search("^prefill +True$", said, re.MULTILINE)


def test_two_runs_are_compared_and_the_first_difference_named(tmp_path: Path, capsys) -> None:
    one = recorded(tmp_path / "a", impala(), digests={2: {"policy.a": 1, "policy.b": 2}, 3: {"policy.a": 1}})
    other = recorded(
        tmp_path / "b", impala(), digests={2: {"policy.a": 1, "policy.b": 2}, 3: {"policy.a": 4}}
    )
    assert main(["compare", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "equal up to update 2 of 2: 2 digests of 2\n"
    assert main(["compare", str(one), str(other)]) == 1
    assert capsys.readouterr().out.startswith(
        "unequal at update 2 (version 3): 1 leaves: policy.a\nequal up to update 1 of 2;"
    )
    assert main(["compare", str(one), str(other), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["leaves"] == ["policy.a"]


def test_a_run_and_its_killed_and_resumed_twin_are_compared_to_the_end(tmp_path: Path, capsys) -> None:
    def lives(name: str, *each: tuple[tuple[int, int, int], ...]) -> str:
        """The folder of a run whose lives published (version, optimizer steps, digest)."""
        (tmp_path / name).mkdir()
        for published in each:
            writer = ScheduleWriter(tmp_path / name / SCHEDULE, {})
            writer.rollout(0, 0, 0, 1)
            for version, steps, digest in published:
                writer.publish(version, steps)
                writer.digests(version, {"policy.a": digest})
            writer.note("end", {"version": version})
            writer.close()
        return str(tmp_path / name)

    whole = lives("whole", ((1, 0, 10), (2, 1, 11), (3, 2, 12), (4, 3, 13)))
    # Killed after a step that its checkpoint did not have, and that it made once more.
    twin = lives("twin", ((1, 0, 10), (2, 1, 11), (3, 2, 99)), ((1001, 1, 11), (1002, 2, 12), (1003, 3, 13)))
    assert main(["compare", whole, twin]) == 0
    assert capsys.readouterr().out == "equal up to update 3 of 3: 4 digests of 4\n"

    other = lives("other", ((1, 0, 10), (2, 1, 11)), ((1001, 1, 11), (1002, 2, 7), (1003, 3, 8)))
    assert main(["compare", whole, other]) == 1
    assert capsys.readouterr().out.startswith(
        "unequal at update 2 (version 3, 1002 in the second run): 1 leaves: policy.a\n"
        "equal up to update 1 of 3; "
    )

    shorter = lives("shorter", ((1, 0, 10), (2, 1, 11)), ((1001, 1, 11), (1002, 4, 14)))
    assert main(["compare", whole, shorter]) == 1, "nothing is known of the rest"
    assert capsys.readouterr().out.splitlines() == [
        "equal up to update 1 of 4, where both runs have digests: 2 digests of 2",
        "not compared: 2 digests of the first run and 1 of the second. The other run has none after as many "
        "optimizer steps",
    ]
    assert main(["compare", whole, shorter, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["alone"] == [2, 1]


def test_a_schedule_without_an_end_is_told(tmp_path: Path, capsys) -> None:
    cut = recorded(tmp_path / "cut", impala())
    whole = recorded(tmp_path / "whole", impala(), end=True)
    assert main(["compare", str(cut), str(whole)]) == 0
    why = "the run goes on or was killed, or the file was cut off"
    assert capsys.readouterr().err == f"{cut / SCHEDULE} stops at version 3, without an end: {why}\n"


@pytest.mark.parametrize(
    ("verb", "cure"),
    [
        ("status", "start it again: it was stopped"),
        ("eval", "start it again"),
        ("timeline", "name the folder"),
    ],
)
def test_a_run_that_was_killed_before_it_wrote_anything_is_told(tmp_path: Path, capsys, verb, cure) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / RESOLVED).touch()
    assert main([verb, str(tmp_path)]) == 2
    assert f"cure   {cure}" in capsys.readouterr().err

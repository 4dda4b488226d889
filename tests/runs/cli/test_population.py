"""Agents that share a replay: what is refused, who ends with whom, and what the other verbs make of them."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import pytest

import rlsync
from rlsync.runs.cli.main import main
from rlsync.runs.evaluation.process import Evaluated
from rlsync.runs.life.state import ended, handle_in, status_of
from rlsync.runs.recipes.checkpoints import checkpoint_at, require_whole
from rlsync.runs.recipes.run_files import (
    METRICS,
    PLOT,
    SCALARS,
    RunStatistics,
    agents_in,
    best_agent,
    statistics_in,
)
from rlsync.runs.recipes.settings import Config
from tests.tools.processes import is_alive, wait_until
from tests.tools.programs import Program

TWO = ("recipe=laser", "recipe.agents=2")
SHORT = (
    "env.num_envs=2",
    "collector.num_workers=1",
    "collector.frames_per_batch=64",
    "recipe.unroll_length=8",
    "recipe.batch_size=8",
    "recipe.model.hidden=[8]",
    "recipe.target_return=null",
    "recipe.total_frames=1920",
    "recipe.replay.min_steps=320",
    "checkpoint_every_frames=320",
    "run_dir=it",
)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["recipe=laser", "recipe.agents=1_000_000"], {"recipe.agents": "cannot be 1000000"}),
        (
            ["recipe=laser", "recipe.agents=0", "recipe.vary={lr: [0.1]}"],
            {"recipe.agents": "cannot be 0", "recipe.vary": "one agent does not differ"},
        ),
        (
            [
                *("recipe=impala", "recipe.agents=2", "recipe.vary=[1, 2]", "collector.num_workers=0"),
                *("recipe.replay.checkpointed=true", "collector.lag=1", "cluster=ray"),
                "life_frames=1000",
            ],
            {
                "recipe.vary": "[1, 2] is no list of values by key",
                "recipe.replay.ratio": "2 agents share one replay",
                "recipe.replay.checkpointed": "2 agents share one replay",
                "collector.lag": "2 agents share one replay",
                "cluster.kind": "2 agents share one replay",
                "life_frames": "2 agents share one replay",
                "collector.num_workers": "2 agents share one replay",
            },
        ),
        (
            [*TWO, 'recipe.vary={lr: "range(1,4)"}'],
            {"recipe.vary": "3 values of lr for 2 agents"},
        ),
        ([*TWO, "recipe.replay.max_bytes=1000"], {"recipe.replay.max_bytes": "may take 1,000"}),
        (
            [*TWO, "recipe.vary={lrr: [0.1, 0.2], lr: [0.1, -1]}"],
            {"override recipe.lrr=0.1": "unknown key 'recipe.lrr'", "recipe.lr": "cannot be -1"},
        ),
        ([*TWO, "recipe.vary={model.lstm: [0, 8]}"], {"recipe.vary": "the rollouts of these agents differ"}),
    ],
)
def test_what_a_population_cannot_have_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], words: list[str], wrong: dict[str, str]
) -> None:
    assert main(["check", "--json", *words]) == 2
    told = json.loads(capsys.readouterr().out)["errors"]
    for where, what in wrong.items():
        assert any(where in error["where"] and what in error["what"] for error in told), (where, told)


def test_a_recipe_in_python_trains_one_agent() -> None:
    from rlsync.core.errors import ConfigError
    from rlsync.runs.recipes.impala.recipe import RECIPE
    from rlsync.runs.recipes.impala.settings import ImpalaConfig, UnrollReplayConfig
    from rlsync.runs.recipes.settings import CollectorConfig

    recipe = ImpalaConfig(agents=2, replay=UnrollReplayConfig(ratio=1.0))
    with pytest.raises(ConfigError, match=r"and recipe\.agents is 2"):
        RECIPE.build(Config(recipe=recipe, collector=CollectorConfig(frames_per_batch=160, lag=None)))


def test_the_best_agent_has_the_best_evaluation_else_the_best_return(tmp_path: Path) -> None:
    assert best_agent(tmp_path) == tmp_path, "no population"
    means = {2: 70.0, 10: 80.0, 3: 90.0}
    for number, mean in means.items():
        (tmp_path / "agents" / str(number)).mkdir(parents=True)
        (tmp_path / "agents" / str(number) / "config.yaml").touch()
        facts: dict[str, Any] = dict.fromkeys((f.name for f in fields(RunStatistics)), 0)
        RunStatistics(**facts | {"return_mean": mean}).write(tmp_path / "agents" / str(number))
    assert list(agents_in(tmp_path)) == [2, 3, 10]
    assert best_agent(tmp_path).name == "3"
    header = ",".join(f.name for f in fields(Evaluated))
    scores = {2: (40.0, 2.0), 10: (60.0, 80.0), 3: (math.nan, math.nan)}  # in four episodes
    for number, (mean, std) in scores.items():
        score = Evaluated(4, mean, std, mean, mean, 9.0, version=7, seconds=1.0)
        (tmp_path / "agents" / str(number) / "evaluations.csv").write_text(
            f"{header}\n{','.join(map(str, astuple(score)))}\n"
        )
    assert best_agent(tmp_path).name == "2", "agent 10 was lucky, and agent 3 has no mean"


def started(folder: Path, *words: str) -> Program:
    return Program("rlsync", "train", *TWO, *SHORT, *words, cwd=folder, merged=True)


def pid_of(agent: Path) -> int | None:
    handle = handle_in(agent)
    return None if handle is None or statistics_in(agent) is None else handle.address.pid


def last(agent: Path, metric: str) -> float:
    with (agent / METRICS / SCALARS / f"{metric}.csv").open() as file:
        return float(list(csv.reader(file))[-1][1])


@pytest.mark.processes
@pytest.mark.slow
def test_a_killed_agent_stops_no_other_and_is_resumed_and_a_signal_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "it"
    program = started(tmp_path, "recipe.vary={lr: [0.001, 0.003]}")
    agents = [run / "agents" / str(number) for number in range(2)]
    wait_until(lambda: all(pid_of(agent) for agent in agents), 120)
    assert status_of(run).healthy
    victim = pid_of(agents[1])
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    assert program.wait(120) == 1
    told = program.stdout.read()
    assert f"\nagent 1 killed by SIGKILL\n  where  {tmp_path / 'it'}\n  cure   " in told
    assert f"\nbest agent {best_agent(run)}\n" in told
    first, second = (ended(agent) for agent in agents)
    assert first is not None
    assert (first.status, first.frames, second) == (0, 1920, None)
    assert last(agents[0], "replay/from_agent_1") > 0
    assert [c in (agents[n] / "config.yaml").read_text() for n, c in enumerate(["lr: 0.001", "lr: 0.003"])]
    # What the other verbs make of it.
    found = status_of(run)
    assert not found.healthy
    assert [agent.state for agent in found.agents] == ["ended", "killed"]
    assert f"best agent {best_agent(run)}" in found.told
    capsys.readouterr()
    assert main(["plot", str(run)]) == 0
    assert (run / PLOT).is_file()
    assert main(["eval", str(best_agent(run)), "--episodes", "1", "--no-video"]) == 0
    of_agent = capsys.readouterr().out.splitlines()[-1]
    assert main(["eval", str(run), "--episodes", "1", "--no-video"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == of_agent
    assert rlsync.load_policy(run).digest() == rlsync.load_policy(best_agent(run)).digest()
    assert main(["rerun", str(run)]) == 2
    assert "its replay was that of a population" in capsys.readouterr().err
    assert main(["rerun", str(agents[0])]) == 2
    # Only the killed one is left; a signal ends it.
    program = Program("rlsync", "train", "resume=it", "run_dir=it", cwd=tmp_path, merged=True)
    wait_until(lambda: pid_of(agents[1]) not in (None, victim), 120)
    again = pid_of(agents[1])
    assert again is not None
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait(60) == 128 + signal.SIGTERM
    wait_until(lambda: not is_alive(again), 10)
    end, whole = ended(agents[1]), ended(run)
    assert end is not None
    assert whole is not None
    assert (end.how, end.status, whole.how) == ("terminated", 143, "terminated")
    checkpoint = checkpoint_at(agents[1])
    assert checkpoint is not None
    assert require_whole(checkpoint, trusted=False)
    assert ended(agents[0]) == first

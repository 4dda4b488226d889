"""``rlsync.runs.train``: the command as one call, with exceptions and a result."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlsync import ConfigError, RlsyncError
from rlsync.runs import RunResult, train
from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line
from rlsync.runs.evaluation.play import Episode, Score
from rlsync.runs.evaluation.process import Evaluated
from rlsync.runs.life.launch import _override
from rlsync.runs.life.result import NoObjective
from rlsync.runs.life.state import TARGET_REACHED, ended
from rlsync.runs.plain import json_of
from tests.tools.programs import run_program
from tests.tools.running import in_three_lines

#: A run of a second, in this process alone.
HERE = (
    "collector.num_workers=0",
    "collector.frames_per_batch=256",
    "recipe.num_epochs=1",
    "recipe.compile=off",
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.seconds
@pytest.mark.processes
def test_a_run_returns_how_it_ended_its_returns_and_its_policy(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    before = [*logging.getLogger().handlers]
    every = {"recipe.total_frames": 2048, "recipe.evaluation.every_frames": 512}
    result = train("recipe=ppo", *HERE, "recipe.evaluation.episodes=2", seed=1, run_dir="it's here", **every)
    assert (result.how, result.status, result.frames) == ("total_frames collected", 0, 2048)
    assert result.folder == tmp_path / "it's here"
    assert result == RunResult.of("it's here"), "it is read from the folder"
    assert result.last_return is not None
    assert 9 < result.last_return < 200
    assert result.best_return in [each.return_mean for each in result.evaluations]
    assert result.load_policy().version == result.version
    assert result.load_policy("best").version in [each.version for each in result.evaluations]
    assert torch.get_num_threads() == 2
    assert logging.getLogger().handlers == before


@pytest.mark.seconds
def test_the_command_prints_the_result_as_json_and_nothing_else_on_its_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--json", *HERE, "recipe.total_frames=512", "run_dir=it"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads(json_of(RunResult.of("it").to_dict()))
    assert printed.err.startswith("run ")
    assert main(["train", "--json", "-m", "seed=1,2", *HERE]) == 2
    assert capsys.readouterr().out == ""


def test_what_is_wrong_is_raised_in_three_lines_before_there_is_a_folder(tmp_path: Path) -> None:
    wrong: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (("recipe=pppo",), {}, "no recipe 'pppo'"),
        ((), {"seed": -1}, "seed cannot be -1"),
        ((), {"seed": object()}, "a key cannot have a value of the type object"),
        (("-m", "seed=1,2"), {}, "a sweep has many results"),
        (("hydra.mode=MULTIRUN", "seed=1"), {}, "a sweep has many results"),
        (("--cfg", "job"), {}, "this trains one run"),
        (("--help",), {}, "this trains one run"),
    ]
    for words, keys, problem in wrong:
        with pytest.raises(ConfigError) as raised:
            train(*words, **keys)
        assert str(raised.value).startswith(problem)
        assert in_three_lines(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2.5e-4,
        math.inf,
        "text",
        "null",
        "12",
        "it's, {a} [b] = c",
        "a\\b\\",
        "\\'",
        "",
        [1, "two, three", None],
        {"a": 1, "b": ["c d"]},
    ],
)
def test_a_value_arrives_as_it_is(value: Any) -> None:
    word = _override(("+env.kwargs.x", value))
    line = command_line.read([word, "env=gymnasium", "env.id=CartPole-v1"])
    assert not line.errors
    with command_line.own_hydra.initialised():
        assert command_line.parsed(word).value() == value


@pytest.mark.seconds
def test_it_trains_in_a_thread_one_run_at_a_time(tmp_path: Path) -> None:
    results: list[RunResult] = []
    refused: list[str] = []

    def look(so_far: RunResult) -> None:
        assert threading.current_thread().name == "mine"
        if not refused:
            with pytest.raises(ConfigError, match="this process trains a run already") as raised:
                train(*HERE)
            refused.append(str(raised.value))

    def work() -> None:
        results.append(train(*HERE, "recipe.total_frames=512", after_batch=look))

    thread = threading.Thread(target=work, name="mine")
    thread.start()
    thread.join(200)
    (result,) = results
    assert (result.status, result.frames, len(refused)) == (0, 512, 1)


class Pruned(Exception):
    """Raised by whoever watches."""


@pytest.mark.seconds
def test_what_the_watcher_raises_ends_the_run_with_a_checkpoint(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[RunResult] = []

    def look(so_far: RunResult) -> None:
        seen.append(so_far)
        raise Pruned

    with pytest.raises(Pruned):
        train(*HERE, "recipe.total_frames=100000", run_dir="it", after_batch=look)
    assert [(each.how, each.status, each.frames) for each in seen] == [("not ended", None, 256)]
    end = ended(Path("it").absolute())
    assert end is not None
    assert (end.how, end.error, end.frames) == ("failed", "Pruned: ", 256)
    assert "goes on from 256 frames" in capfd.readouterr().err
    assert train(resume="it", run_dir="it", **{"recipe.total_frames": 768}).frames == 768


def sends(number: signal.Signals, times: int) -> Callable[[RunResult], None]:
    def send(so_far: RunResult) -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)

    return send


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("number", "raises"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_ends_the_run_in_good_order_and_is_then_raised(
    number: signal.Signals, raises: type[BaseException]
) -> None:
    with pytest.raises(raises):
        train(*HERE, "recipe.total_frames=10000000", run_dir="it", after_batch=sends(number, 1))
    result = RunResult.of("it")
    assert (result.how, result.status) == (
        "interrupted" if number == signal.SIGINT else "terminated",
        128 + number,
    )
    assert result.load_policy().version == result.version


@pytest.mark.seconds
def test_a_signal_that_the_program_handles_itself_is_its_own_affair() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
    try:
        result = train(*HERE, "recipe.total_frames=10000000", after_batch=sends(signal.SIGUSR2, 1))
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert (result.how, heard) == ("terminated", [signal.SIGUSR2])


TWICE = """
import multiprocessing, os, signal, threading, time
from multiprocessing.connection import wait
from rlsync.runs import train


def interrupt_twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)


def hangs(so_far):
    threading.Thread(target=interrupt_twice).start()
    workers = [each.sentinel for each in multiprocessing.active_children() if each is not other]
    try:
        time.sleep(600)
    finally:
        print(len(wait(workers, 0)), "of", len(workers), "workers had ended before the interrupt was raised")


other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
other.start()
try:
    train("collector.frames_per_batch=256", "recipe.total_frames=100000", run_dir="it", after_batch=hangs)
except KeyboardInterrupt:
    print("lives on, beside", [child.name for child in multiprocessing.active_children()])
other.kill()
other.join()
"""


@pytest.mark.seconds
def test_a_second_ctrl_c_ends_the_processes_of_the_run_and_not_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TWICE)
    done = run_program("program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"lives on, beside \['ForkProcess-\S*1'\]", done.stdout)
    ends = re.search(r"(\d) of (\d) workers had ended", done.stdout)
    assert ends is not None
    assert ends[1] == ends[2] != "0"
    assert "Ctrl-C again ends it at once, without a checkpoint" in done.stderr
    end = ended(tmp_path / "it")
    assert end is not None
    assert (end.how, end.status, end.checkpoint) == ("interrupted", 130, None)


def evaluated(*totals: float) -> Evaluated:
    score = Score.of([Episode(total, 1) for total in totals])
    return Evaluated(
        **{name: getattr(score, name) for name in Score.__dataclass_fields__}, version=1, seconds=1
    )


def test_an_objective_is_finite_and_the_larger_the_better() -> None:
    bare = RunResult(Path("run"), "total_frames collected", 0, frames=1000, seconds=8.0)
    returns = replace(bare, last_return=20.0)
    best = replace(returns, best_return=90.0, evaluations=(evaluated(90.0, 90.0),))
    reached = replace(best, how=TARGET_REACHED)
    assert [each.objective() for each in (returns, best)] == [20.0, 90.0]
    assert [best.objective("best"), best.objective("return")] == [90.0, 20.0]
    assert [reached.objective("-frames_to_target"), reached.objective("-seconds_to_target")] == [
        -1000.0,
        -8.0,
    ]
    lacking = [
        (bare, "auto", "neither an evaluation nor an episode with a finite return"),
        (returns, "best", "no evaluation with a finite return"),
        (bare, "return", "no episode with a finite return"),
        (replace(bare, last_return=math.nan), "return", "no episode with a finite return"),
        (best, "-frames_to_target", "not reached its target return"),
        (best, "-seconds_to_target", "not reached its target return"),
    ]
    for result, kind, problem in lacking:
        with pytest.raises(NoObjective, match=problem) as raised:
            result.objective(kind)
        assert isinstance(raised.value, RlsyncError)
        assert in_three_lines(raised.value)

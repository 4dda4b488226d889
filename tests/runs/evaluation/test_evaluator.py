"""The evaluating process dies, hangs or plays for ever: the run ends by an error, or says so."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrl.collectors import Collector
from torchrl.trainers import Trainer

from rlsync.core.errors import AdoptionTimeout, WorkerLost
from rlsync.core.ledger import Ledger, Stamp
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.cli.main import main
from rlsync.runs.evaluation import evaluator as evaluators
from rlsync.runs.evaluation.evaluator import Evaluator, evaluations_ended
from rlsync.runs.evaluation.play import Patience
from rlsync.runs.evaluation.process import EvaluationJob
from rlsync.runs.recipes.run_files import CHECKPOINT, ENDED
from rlsync.sync.processes import process_state
from rlsync.tensors.layout import Layout
from rlsync.torchrl_plugin.compat.trainers import ShutdownStage
from rlsync.transport.board.writer import BoardWriter
from tests.tools.parts.envs import make_counting_env
from tests.tools.parts.faulty_evaluations import ID
from tests.tools.parts.policies import make_policy
from tests.tools.parts.sizes import FRAMES_PER_BATCH
from tests.tools.parts.trainers import make_ppo_trainer
from tests.tools.processes import wait_until
from tests.tools.programs import ENDS_WITHIN_S

SOON_S = 0.5
SILENT_S = 3.0  # longer than a loaded machine keeps a process waiting


@pytest.fixture
def board() -> Iterator[BoardWriter]:
    writer = BoardWriter()
    writer.lay_out(Layout.build({}))
    writer.publish([], stamp=Stamp(1, 1))
    yield writer
    writer.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    policy = make_policy()
    collector = Collector(make_counting_env, policy, frames_per_batch=FRAMES_PER_BATCH, total_frames=-1)
    made = make_ppo_trainer(collector, policy)
    yield made
    collector.shutdown()


def job(board: BoardWriter, folder: Path, fault: str = "", **changes: Any) -> EvaluationJob:
    """An evaluation of version 1, by a player that needs no weights."""
    player, env = UniformPlayer(DiscreteActions(2), (4,)), GymnasiumEnvs(ID, {"fault": fault})
    return EvaluationJob(board.handle, player, env, 2, folder / "evaluations.csv", 0, **changes)


def started(job: EvaluationJob, trainer: Trainer, target: float | None = None, **options: Any) -> Evaluator:
    evaluator = Evaluator(job, Ledger(), "fork", **options)
    evaluator.target = target
    evaluator.register(trainer)
    return evaluator


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["made", "reset", "first"])
def test_an_evaluator_that_fails_before_its_first_step_is_told_before_anything_runs(
    fault: str, board: BoardWriter, tmp_path: Path
) -> None:
    with pytest.raises(WorkerLost) as told:
        Evaluator(job(board, tmp_path, fault), Ledger(), "fork")
    assert told.value.what.endswith(f") exited with status 1: ValueError: the simulator fails: {fault}")
    assert told.value.where == f"starting the evaluator in {ID}"
    assert "recipe.evaluation.every_frames=0" in told.value.cure
    assert multiprocessing.active_children() == []


@pytest.mark.processes
def test_an_evaluator_that_hangs_in_its_first_step_is_killed_and_named(
    board: BoardWriter, tmp_path: Path
) -> None:
    with pytest.raises(AdoptionTimeout, match=r"has not made its first step after 0\.5 s"):
        Evaluator(job(board, tmp_path, "hangs"), Ledger(), "fork", start_timeout_s=SOON_S)
    assert multiprocessing.active_children() == []


#: What becomes of the process after its first step, and what is told of it.
ENDS = {
    "late": "exited with status 1: ValueError: the simulator fails: late",
    "lingers": "exited with status 1: ValueError: the simulator fails: lingers",
    "leaves": "exited with status 0",
    "endless": "exited with status 1: an episode has not ended after 200 steps",
    "killed": "killed by SIGKILL",
    "stopped": "(pid {pid}, stopped) has not made a step for 0.5 s, with version 1",
}


@pytest.mark.processes
@pytest.mark.each_value
@pytest.mark.parametrize("judges", [False, True])
@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=pytest.mark.thorough if end == "lingers" else ()) for end in ENDS]
)
def test_the_end_of_the_evaluator_ends_a_run_that_it_judges_and_is_noted_by_others(
    end: str,
    judges: bool,
    board: BoardWriter,
    trainer: Trainer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault = end if end in ("late", "lingers", "leaves", "endless") else ""
    work = job(board, tmp_path, fault, patience=Patience(steps=200))
    # Only these two give no sign of life for longer than that, one of them because it dies.
    silent_timeout_s = {"stopped": SOON_S, "lingers": SILENT_S}.get(end, ENDS_WITHIN_S)
    target = 1e9 if judges else None
    once = Restarts(0)
    evaluator = started(work, trainer, target, silent_timeout_s=silent_timeout_s, restarts=once)
    evaluator.ask()
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    if not fault:
        os.kill(process.pid, signal.SIGKILL if end == "killed" else signal.SIGSTOP)
    told = ENDS[end].format(pid=process.pid)

    def noted() -> bool:
        evaluator()
        return evaluations_ended(trainer) is not None

    if judges:
        with pytest.raises((WorkerLost, AdoptionTimeout)) as error:
            wait_until(noted, ENDS_WITHIN_S)
        assert error.value.what.endswith(told)
        assert error.value.where.startswith(f"evaluating in {ID}; ")
        assert error.value.where.endswith("; it judges recipe.target_return=1e+09")
        assert evaluations_ended(trainer) is None, "the error says it"
    else:
        assert wait_until(noted, ENDS_WITHIN_S)
        (line,) = [record.getMessage() for record in caplog.records if "evaluation" in record.getMessage()]
        failure = evaluations_ended(trainer)
        assert failure is not None
        assert failure.endswith(told)
        assert failure.startswith("no evaluation at all: the evaluator" if fault else "no evaluation a")
        assert line.startswith(f"{failure}\n  where  evaluating in {ID}")
    ShutdownStage.of(trainer)()
    assert multiprocessing.active_children() == []


@pytest.mark.processes
def test_a_wait_at_the_end_of_a_run_says_what_it_waits_for(
    board: BoardWriter,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(evaluators, "_TELL_AFTER_S", 0.0)
    started(job(board, tmp_path), trainer, silent_timeout_s=SOON_S)
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert wait_until(lambda: process_state(process.pid or 0) == "stopped", ENDS_WITHIN_S)
    trainer.collected_frames = trainer.total_frames
    ShutdownStage.of(trainer)()
    said = f"waiting until the last version is evaluated: the evaluator (pid {process.pid}, stopped) plays"
    assert said in caplog.text
    assert "Ctrl-C leaves it out" in caplog.text
    assert evaluations_ended(trainer) is not None
    assert multiprocessing.active_children() == []


@pytest.mark.processes
def test_a_learner_that_waits_for_evaluations_says_so_once(
    board: BoardWriter,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(evaluators, "_TELL_AFTER_S", 0.0)
    evaluator = started(job(board, tmp_path), trainer, in_order=True, every_frames=10)
    try:
        for version in (2, 3):
            evaluator.ask()
            trainer.collected_frames += 10
            evaluator()
            board.publish([], stamp=Stamp(1, version))
    finally:
        evaluator.close()
    assert [result.version for result in evaluator.evaluations()] == [1, 2]
    assert caplog.text.count("for the evaluation of version 1: one takes longer than the frames") == 1
    assert "for the evaluation of version 2" not in caplog.text


@pytest.mark.processes
def test_the_last_evaluation_is_judged_too(board: BoardWriter, trainer: Trainer, tmp_path: Path) -> None:
    evaluator = started(job(board, tmp_path), trainer, target=1.0)
    reasons: list[str] = []
    evaluator.stop = reasons.append
    trainer.collected_frames = trainer.total_frames
    ShutdownStage.of(trainer)()
    assert [result.version for result in evaluator.evaluations()] == [1]
    (why,) = reasons
    assert why.endswith(" of version 1 reached 1")


@pytest.mark.processes
def test_an_infinite_return_reaches_no_target_and_is_not_the_best(
    board: BoardWriter, trainer: Trainer, tmp_path: Path
) -> None:
    best = tmp_path / "best.pt"
    evaluator = started(job(board, tmp_path, "infinite", best=best), trainer, target=1.0)
    reasons: list[str] = []
    evaluator.stop = reasons.append
    trainer.collected_frames = trainer.total_frames
    ShutdownStage.of(trainer)()
    (result,) = evaluator.evaluations()
    assert math.isnan(result.return_mean)
    assert (reasons, best.exists()) == ([], False)


def train(folder: Path, *words: str) -> int:
    """``rlsync train`` with an evaluator that fails in its fifth step; returns the exit status."""
    small = ("collector.num_workers=1", "collector.frames_per_batch=64", "recipe.total_frames=512")
    evaluations = ("recipe.evaluation.every_frames=64", "+env.kwargs.fault=late")
    own = ("env=gymnasium", f"env.id={ID}", "logger=none", f"run_dir={folder}")
    try:
        return main(["train", *small, *evaluations, *own, *words])
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_run_says_at_its_end_in_its_folder_and_to_status_that_nothing_was_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("stopped: ")]
    said = "no evaluation at all: the evaluator (pid "
    assert "stopped: total_frames collected  frames 512" in line
    assert said in line
    told = json.loads((tmp_path / ENDED).read_text())["evaluations_ended"]
    assert told.startswith(said)
    main(["status", str(tmp_path)])
    assert capsys.readouterr().out.count(told) == 1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_run_whose_target_nobody_judges_any_more_fails_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "recipe.target_return=1000") == 1
    assert "ValueError: the simulator fails: late\n  where  " in capsys.readouterr().err
    ended = json.loads((tmp_path / ENDED).read_text())
    assert (ended["how"], ended["status"]) == ("failed", 1)
    assert "it judges recipe.target_return=1000" in ended["error"]
    assert Path(ended["checkpoint"]) == tmp_path / CHECKPOINT


@pytest.mark.seconds
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_check_lists_an_evaluator_that_cannot_start(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("recipe.evaluation.every_frames=64", "+env.kwargs.fault=first", "collector.num_workers=1")
    assert main(["check", "--json", "env=gymnasium", f"env.id={ID}", *words]) == 2
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert error["what"].endswith("ValueError: the simulator fails: first")
    assert error["where"] == f"starting the evaluator in {ID}"

"""A run that goes on by itself after it was killed, from its checkpoint or from nothing: nothing is different."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rlsync.record.schedule import ScheduleWriter, lives_in, runs_compared
from rlsync.runs.cli.main import main
from rlsync.runs.evaluation.process import video_of_version
from rlsync.runs.life.accounts import Account, account_of
from rlsync.runs.life.aside import set_aside
from rlsync.runs.life.state import Repeated, repeated_in
from rlsync.runs.recipes.checkpoints import AboutRun, taken
from rlsync.runs.recipes.run_files import (
    ABOUT_RUN,
    ASIDE,
    CHECKPOINT,
    LIFE_END,
    RECEIPTS,
    SCHEDULE,
    VIDEOS,
)
from tests.runs.cli.test_main import Run, folder
from tests.tools.processes import is_alive, wait_until

__all__ = ["folder"]  # a fixture

pytestmark = [pytest.mark.processes, pytest.mark.slow]

SMALL = (
    "recipe=ppo",
    "recipe.num_epochs=1",
    "recipe.compile=off",
    "recipe.target_return=null",
    "collector.frames_per_batch=256",
    "checkpoint_every_frames=1024",
    "sync.digest_every=1",
)


ENDLESS = "recipe.total_frames=100000000"
WITHOUT = "checkpoint_every_frames=null"


def receipts(run: Path) -> list[dict]:
    if not (run / RECEIPTS).is_file():
        return []
    lines = (run / RECEIPTS).read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def learner_of(parent: int) -> int | None:
    """The process that trains, of a parent that starts it again."""
    for child in psutil.Process(parent).children():
        with suppress(psutil.Error):  # it has just died
            if "restarts=0" in child.cmdline():
                return child.pid
    return None


def killed_at(run: Run, frames: int) -> None:
    """Kill the learner as soon as a version after so many frames was published, and wait for the next one."""
    there = run.folder / "r"
    assert wait_until(lambda: any(each["frames"] >= frames for each in receipts(there)), 60), run.output
    pid = learner_of(run.process.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: learner_of(run.process.pid) not in (None, pid), 60), run.output


@pytest.mark.thorough
def test_a_run_that_is_killed_goes_on_by_itself_and_nothing_is_different_or_doubled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "recipe.total_frames=9000", "recipe.evaluation.every_frames=1000"]
    whole = Run(folder, "train", *words, "run_dir=whole")
    try:
        assert whole.exit_status(120) == 0, whole.output
    finally:
        whole.kill()
    run = Run(folder, "train", *words, "run_dir=r", "restarts=4", afresh=True)
    try:
        killed_at(run, 256)  # before its first checkpoint
        killed_at(run, 2000)
        killed_at(run, 5000)
        assert run.exit_status(120) == 0, run.output
    finally:
        run.kill()
    assert run.output.count("killed by SIGKILL: it goes on in") == 3
    found = runs_compared(lives_in(folder / "whole" / SCHEDULE), lives_in(folder / "r" / SCHEDULE))
    assert found.is_equal, str(found)

    batches = [each["batches"] for each in receipts(folder / "r") if each["reason"] == "trigger"]
    assert batches == [each["batches"] for each in receipts(folder / "whole") if each["reason"] == "trigger"]
    for curve in ("return", "loss_objective", "grad_norm_0"):
        file = Path("metrics", "scalars", f"{curve}.csv")
        assert (folder / "r" / file).read_bytes() == (folder / "whole" / file).read_bytes()
    versions = [each["version"] for each in receipts(folder / "r")]
    aside = [each["version"] for part in (folder / "r" / ASIDE).glob("*") for each in receipts(part)]
    assert len({*versions, *aside}) == len(versions) + len(aside), "no version number comes twice"
    assert main(["compare", str(folder / "whole"), str(folder / "r")]) == 0
    assert "evaluations equal: 10 of 10" in capsys.readouterr().out
    main(["status", str(folder / "r")])
    told = capsys.readouterr().out
    assert "or began again, 3 times: " in told
    assert re.search(
        r"= 9,216 learned from \+ [\d,]+ made again(?: \+ .*)?; 0 dropped$", told, re.MULTILINE
    ), told


def test_a_signal_ends_the_run_and_its_parent_and_an_error_does_not_start_it_again(folder: Path) -> None:
    run = Run(
        folder,
        "train",
        *SMALL,
        "recipe.total_frames=100000000",
        "run_dir=signalled",
        "restarts=4",
        afresh=True,
    )
    try:
        run.wait_for("^frames", 60)
        learner = learner_of(run.process.pid)
        assert learner is not None
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.exit_status(60) == 128 + signal.SIGTERM, run.output
        assert wait_until(lambda: not is_alive(learner), 20)
    finally:
        run.kill()
    assert "stopped: terminated" in run.output
    assert "it goes on in" not in run.output

    (folder / "broken.py").write_text("def make(render_mode=None):\n    raise OSError('no licence')\n")
    words = ["env.make=broken:make", "run_dir=s", "restarts=4"]
    failed = Run(folder, "train", *SMALL, *words, afresh=True)
    try:
        assert failed.exit_status(60) == 2, failed.output
    finally:
        failed.kill()
    assert failed.output.count("no licence") >= 1
    assert "it goes on in" not in failed.output


def test_a_run_that_was_stopped_within_a_life_goes_on_from_where_the_life_began(folder: Path) -> None:
    # Lives of 16 batches: it is stopped near the beginning of the second, far from its end.
    small = [word for word in SMALL if not word.startswith("checkpoint_every_frames=")]
    words = (*small, "checkpoint_every_frames=4096", "recipe.total_frames=9000")
    whole = Run(folder, "train", *words, "run_dir=undisturbed")
    run = Run(folder, "train", *words, "run_dir=preempted", "resume=auto")
    try:
        assert wait_until(lambda: len(receipts(folder / "preempted")) > 19, 60), run.output
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.exit_status(60) == 128 + signal.SIGTERM, run.output
        assert whole.exit_status(120) == 0, whole.output
    finally:
        run.kill()
        whole.kill()
    checkpoint = folder / "preempted" / CHECKPOINT
    assert AboutRun.of(checkpoint).within_a_life
    assert not AboutRun.of(folder / "preempted" / LIFE_END).within_a_life
    assert "where the run was stopped" in str(taken(folder / "preempted", trusted=False))
    again = Run(folder, "train", *words, "run_dir=preempted", "resume=auto")
    try:
        assert again.exit_status(120) == 0, again.output
    finally:
        again.kill()
    assert not (folder / "preempted" / LIFE_END).exists()
    one, other = (lives_in(folder / name / SCHEDULE) for name in ("undisturbed", "preempted"))
    assert len(other) == 2
    assert runs_compared(one, other).is_equal


@pytest.mark.thorough
def test_a_run_dies_with_its_parent_in_good_order(folder: Path) -> None:
    run = Run(
        folder, "train", *SMALL, "recipe.total_frames=100000000", "run_dir=orphan", "restarts=4", afresh=True
    )
    try:
        run.wait_for("^frames", 60)
        learner = learner_of(run.process.pid)
        assert learner is not None
        os.kill(run.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(learner), 60)
    finally:
        run.kill()
    assert json.loads((folder / "orphan" / "ended.json").read_text())["how"] == "terminated"


def test_frames_are_accounted_for_and_none_is_taken_twice_or_lost_unseen(tmp_path: Path) -> None:
    writer = ScheduleWriter(tmp_path / SCHEDULE, {"rollout_frames": 10})
    for number in (0, 1, 1, 4):
        writer.rollout(0, 0, number, version=1)
    writer.rollout(1, 0, 0, version=1, dropped=True)
    writer.close()
    account = account_of(tmp_path, frames=20, again=10)
    assert account == Account(taken=40, learned=20, again=10, waiting=10, dropped=10, twice=10, missing=20)
    assert str(account) == (
        "frames taken 40 = 20 learned from + 10 made again + 10 of a batch that is not complete; 10 dropped; "
        "10 TAKEN TWICE, 20 MISSING"
    )
    assert account_of(tmp_path, frames=50, again=0) is None, "the schedule is older than the number"
    assert account_of(tmp_path / "nothing", 0, 0) is None


def test_lines_are_set_aside_only_where_a_checkpoint_says_how_long_their_files_were(tmp_path: Path) -> None:
    lines = ['{"version": 7, "frames": 10}\n', '{"version": 1004, "frames": 20}\n', '{"version": 1005, "fra']
    (tmp_path / VIDEOS).mkdir()
    for version in (7, 1004):
        video_of_version(tmp_path / VIDEOS, version).touch()
    (tmp_path / RECEIPTS).write_text("".join(lines))
    checkpoint = tmp_path / CHECKPOINT
    checkpoint.mkdir()
    set_aside(tmp_path, checkpoint)  # an earlier rlsync wrote it
    assert (tmp_path / RECEIPTS).read_text() == "".join(lines)
    assert repeated_in(tmp_path) == []
    about = {"within_a_life": False, "bytes": {RECEIPTS: len(lines[0])}}
    (checkpoint / ABOUT_RUN).write_text(json.dumps(about))
    set_aside(tmp_path, checkpoint)
    assert (tmp_path / RECEIPTS).read_text() == lines[0]
    assert (tmp_path / ASIDE / "1" / RECEIPTS).read_text() == lines[1] + lines[2]
    assert [film.name for film in (tmp_path / VIDEOS).iterdir()] == ["version_000007.gif"]
    assert [film.name for film in (tmp_path / ASIDE / "1" / VIDEOS).iterdir()] == ["version_001004.gif"]
    assert repeated_in(tmp_path) == [Repeated(10, 20)]


def test_a_run_that_is_done_has_nothing_left_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "recipe.total_frames=256", f"run_dir={folder / 'done'}", "resume=auto"]
    run = Run(folder, "train", *words)
    try:
        assert run.exit_status(60) == 0, run.output
    finally:
        run.kill()
    assert main(["train", *words]) == 0
    assert "nothing is left to do: the run has collected 256 frames already" in capsys.readouterr().out
    assert main(["train", *words[:-1], f"resume={folder / 'done'}"]) == 2


@pytest.mark.parametrize(
    ("words", "problem", "cure"),
    [
        (["resume=auto"], "resume=auto has no folder", "run_dir=FOLDER"),
        (["restarts=2"], "a run that is started again needs a folder of its own", "run_dir=FOLDER"),
        (["-m", "seed=0,1", "restarts=2"], "the jobs of a sweep are not started again", "restarts=0"),
        (["-m", "seed=0,1", "resume=auto", "run_dir=orphan"], "resume=auto has no folder", "one by one"),
        (["restarts=-1", "run_dir=orphan"], "restarts", "0"),
    ],
)
def test_what_cannot_be_started_again_is_refused(
    words: list[str], problem: str, cure: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert cure in told


def test_the_folder_of_another_run_is_not_taken_for_its_own_beginning(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(folder, "train", *SMALL, ENDLESS, f"run_dir={folder / 'other'}", WITHOUT)
    try:
        run.wait_for("^frames", 60)
        os.kill(run.process.pid, signal.SIGKILL)
        run.exit_status(20)
    finally:
        run.kill()
    assert not (folder / "other" / "checkpoint").exists()
    again = [
        *SMALL,
        ENDLESS,
        f"run_dir={folder / 'other'}",
        WITHOUT,
        "resume=auto",
    ]
    assert main(["train", *again, "seed=4"]) == 2
    assert "holds another run" in capsys.readouterr().err
    assert (folder / "other" / RECEIPTS).is_file()
    assert main(["check", *again]) == 0
    assert not (folder / "other" / ASIDE).exists(), "a check moves nothing"

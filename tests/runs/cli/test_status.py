"""``rlsync status`` on a run that trains, whose worker is stopped, then killed, and that has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import asdict, fields, replace
from pathlib import Path

import jsonschema
import pytest

from rlsync.runs.cli.main import main
from rlsync.runs.cli.watch import View
from rlsync.runs.life.state import KILLED, NO_BOARD, RUNNING, Ended, RunStatus, status_of
from rlsync.runs.recipes.run_files import (
    BOARD,
    CHECKPOINT,
    RESOLVED,
    STATISTICS,
    RunStatistics,
    statistics_schema,
)
from rlsync.transport.board import BoardReader
from rlsync.transport.board.format import EVALUATOR
from rlsync.transport.contract import ReaderStatus
from tests.runs.cli.test_endings import TRAIN, goes_on
from tests.runs.cli.test_main import Run, folder
from tests.tools.board_workers import Acts, plain_layout
from tests.tools.counted_board import CountedBoard
from tests.tools.processes import descendant_pids, stopped, wait_until

__all__ = ["folder"]  # a fixture


def workers_of(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    main(["status", "--json", str(run_folder)])
    return json.loads(capsys.readouterr().out)["workers"]


@pytest.mark.processes
def test_status_tells_which_workers_live_and_what_they_act_with(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = watching = Run(folder, *TRAIN, "run_dir=it")
    try:
        run.wait_for(r"frames .* version", 60)
        run_folder = folder / "it"
        assert main(["status", str(run_folder)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"newest version \d+", said[0])
        assert [line.split(" (")[0] for line in said[1:3]] == ["worker 0", "worker 1"]
        assert said[3].startswith("frames ")
        assert "lag 1: workers act while the learner learns" in said

        workers = workers_of(run_folder, capsys)
        assert {w["pid"] for w in workers} <= descendant_pids(run.process.pid)
        assert all(w["alive"] and w["adopted_version"] > 1 for w in workers)

        watching = Run(folder, "status", "--watch", str(run_folder))
        watching.wait_for(r"^ +1 +\d+ +running", 60)
        for name, value in {"TTY_COMPATIBLE": "1", "TERM": "xterm", "COLUMNS": "40"}.items():
            monkeypatch.setenv(name, value)
        left = Run(folder, "status", "--watch", str(run_folder))
        try:
            left.wait_for(r"^ +1 +\d+ +running +\d+ .*…$", 60)  # on a narrow terminal a row is cut off
            left.interrupt()
            assert left.exit_status(60) == 130
        finally:
            left.kill()
        assert "Traceback" not in left.output

        with stopped(workers[0]["pid"]):
            assert workers_of(run_folder, capsys)[0]["state"] == "stopped"

        os.kill(workers[1]["pid"], signal.SIGKILL)
        run.wait_for("worker 1 was started again", 60)
        assert wait_until(lambda: workers_of(run_folder, capsys)[1]["pid"] != workers[1]["pid"], 60)
        again = workers_of(run_folder, capsys)
        assert again[0]["pid"] == workers[0]["pid"]
        for worker in again:
            os.kill(worker["pid"], signal.SIGKILL)
        assert run.exit_status(60) == 1
        assert watching.exit_status(60) == 1, "the run has failed"
        assert re.search(r"^ended .*: failed", watching.output, re.MULTILINE)
        ends = "; ".join(f"worker {w['reader']} (pid {w['pid']}) killed by SIGKILL" for w in again)
        assert f"no worker is left: {ends}" in run.output
        assert "Traceback" not in run.output
        assert f"checkpoint {run_folder}/checkpoint: resume={run_folder} goes on from" in run.output
        assert wait_until(lambda: not descendant_pids(run.process.pid), 60)
    finally:
        run.kill()
        watching.kill()
    assert main(["status", "--json", str(run_folder)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["statistics"]["version"] > 1
    assert (told["state"], told["ended"]["how"], told["ended"]["status"]) == ("ended", "failed", 1)
    assert not (run_folder / BOARD).exists()
    assert main(["status", str(run_folder)]) == 1
    assert re.match(r"ended \S+ \S+: failed  frames [\d,]+  version \d+\n", capsys.readouterr().out)
    goes_on(folder, "it")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"collector": {"lag": 0, "num_workers": 2}}, "lag 0: workers wait for each update"),
        ({"collector": {"lag": None, "num_workers": 2}}, "no fixed lag: workers act with the newest version"),
        (
            {"collector": {"lag": 1, "num_workers": 0}},
            "lag 0: the learner's own process acts between its upd",
        ),
        (
            {"collector": {"kind": "sync", "lag": None, "num_workers": 2}},
            "lag 0: workers wait for each update",
        ),
        ({"collector": {"num_workers": 2}}, ""),
        ({"collector": "sync"}, ""),
        ({}, ""),
    ],
)
def test_the_lag_is_that_of_the_runs_config_and_no_line_where_it_has_none(
    words: dict[str, object], says: str, tmp_path: Path
) -> None:
    (tmp_path / RESOLVED).write_text(json.dumps({"cluster": {"kind": "none"}} | words))
    found = status_of(tmp_path)
    assert found.lag.startswith(says)
    assert bool(found.lag) == bool(says)
    assert found.told.splitlines()[1:] == ([found.lag] if says else [])


def test_a_process_that_evaluates_is_no_worker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = CountedBoard()
    board.lay_out(plain_layout())
    readers = [BoardReader(board.handle, Acts("copy"), number) for number in (0, EVALUATOR)]
    (tmp_path / BOARD).write_text(json.dumps(asdict(board.handle)))
    assert [worker["reader"] for worker in workers_of(tmp_path, capsys)] == [0]
    main(["status", str(tmp_path)])
    _, worker, evaluator = capsys.readouterr().out.splitlines()
    assert worker.startswith("worker 0 (pid ")
    assert evaluator.startswith("evaluator (pid ")
    assert len(readers) == 2
    board.close()


def test_a_folder_without_a_board_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "name the folder that rlsync train printed" in capsys.readouterr().err


def test_the_schema_explains_each_number_of_the_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert all(len(number["description"]) > 10 for number in schema["properties"].values())
    with pytest.raises(SystemExit) as ended:
        main(["status"])
    assert ended.value.code == 2


def test_statistics_that_cannot_be_read_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / RESOLVED).touch()
    (tmp_path / STATISTICS).write_text('{"frames": 1')
    assert main(["status", str(tmp_path)]) == 2
    assert "cannot read the statistics" in capsys.readouterr().err


def statistics_after(seconds: float, frames: int, by_worker: dict[str, int]) -> RunStatistics:
    known = {
        "frames": frames,
        "updates": frames // 2,
        "updates_per_frame": 0.5,
        "seconds": seconds,
        "frames_per_s": frames / seconds,
        "updates_per_s": 0.0,
        "version": 3,
        "published_bytes": 0,
        "lag_versions": 1,
        "learner_wait_s": 0.0,
        "total_frames": 1000,
        "run_id": "",
        "frames_by_worker": by_worker,
    }
    return RunStatistics(**dict.fromkeys(spec.name for spec in fields(RunStatistics)) | known)


def test_status_says_when_the_outputs_of_the_workers_last_held() -> None:
    held = replace(statistics_after(2, 100, {}), outputs_held_version=7)
    assert str(held).endswith("; outputs of the workers held at version 7")
    held = replace(held, outputs_held_time_s=time.time() - 250)
    assert re.search(r"; outputs of the workers held at version 7, 4 min 1\d s ago$", str(held))


def test_what_is_not_known_during_the_prefill_is_not_a_number_in_the_progress() -> None:
    early = replace(statistics_after(2, 100, {}), updates=0, frames_per_s=0.0)
    assert early.progress() == "frames 100 / 1,000  return none  version 3  lag 1  0 frames/s"


def test_a_mean_return_that_is_not_a_number_is_shown_and_is_null_in_the_file(tmp_path: Path) -> None:
    odd = replace(statistics_after(2, 100, {}), return_mean=float("inf"))
    assert "return inf" in odd.progress()
    odd.write(tmp_path)
    held = json.loads((tmp_path / "statistics.json").read_text())
    assert held["return_mean"] is None
    jsonschema.validate(held, statistics_schema())


def test_a_view_has_the_rate_of_each_worker_since_the_oldest_statistics(tmp_path: Path) -> None:
    workers = tuple(ReaderStatus(n, 40 + n, True, "running", 3 - n, n, 0.5) for n in (0, 1))
    view = View(tmp_path)
    for told in (statistics_after(1, 100, {"0": 100}), statistics_after(3, 400, {"0": 200, "1": 200})):
        told.write(tmp_path)
        learner, _, *rows = view.of(RunStatus(RUNNING, "", 3, workers, statistics=told)).splitlines()
    assert learner.startswith("learner  frames 400 / 1,000  return none  version 3  lag 1  150 frames/s")
    assert "updates/frame 0.5" in learner
    assert [row.split()[:6] for row in rows] == [
        ["0", "40", "running", "3", "0", "50"],
        ["1", "41", "running", "2", "1", "100"],
    ]


def test_a_run_that_has_lost_how_it_ended_counts_as_killed(tmp_path: Path) -> None:
    (tmp_path / RESOLVED).touch()
    begun = status_of(tmp_path)
    assert (begun.state, begun.healthy) == (NO_BOARD, False)
    assert "the run is starting" in begun.told
    statistics_after(2, 100, {}).write(tmp_path)
    assert status_of(tmp_path).state == KILLED


def test_a_run_that_was_moved_names_the_checkpoint_where_it_is_now(tmp_path: Path) -> None:
    left = str(tmp_path / "before" / CHECKPOINT)
    (tmp_path / "now").mkdir()
    Ended("interrupted", "2026-11-20 18:00:00", 130, 512, 3, checkpoint=left).write(tmp_path / "now")
    assert status_of(tmp_path / "now").told.endswith(f"\ncheckpoint {tmp_path / 'now' / CHECKPOINT}")


@pytest.mark.parametrize(("status", "said"), [(0, 0), (130, 1)])
def test_a_watch_of_a_run_that_has_ended_tells_how(
    status: int, said: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Ended("total_frames collected", "2026-11-20 18:00:00", status, 512, 3).write(tmp_path)
    assert main(["status", "--watch", str(tmp_path)]) == said
    assert "total_frames collected  frames 512  version 3" in capsys.readouterr().out

"""``rlsync timeline``: a lane for each worker, as a picture and as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlsync.record.schedule import Rollout, ScheduleWriter, lives_in
from rlsync.runs.cli.main import main
from rlsync.runs.cli.panels import lanes
from rlsync.runs.recipes.run_files import SCHEDULE, TIMELINE


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = ScheduleWriter(tmp_path / SCHEDULE, {})
    writer.publish(1, 0)
    for number in range(3):
        writer.rollout(number % 2, number // 2, number, 1, dropped=number == 1)
        writer.publish(number + 2, number + 1)
    writer.note("checkpoint", {"version": 4})
    writer.close()
    return tmp_path


def test_a_trace_has_a_thread_for_each_worker_and_all_that_happened(run: Path) -> None:
    assert main(["timeline", str(run), "--trace", str(run / "t.json")]) == 0
    events = json.loads((run / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert names == {"learner": 1, "worker 0": 2, "worker 1": 3}, "viewers draw no thread 0"
    bars = [event for event in events if event["ph"] == "X"]
    assert [(bar["tid"], bar["name"], bar["args"]["life"]) for bar in bars] == [
        (2, "version 1", 0),
        (3, "version 1, dropped", 0),
        (2, "version 1", 1),
    ]
    instants = [event["name"] for event in events if event["ph"] == "i"]
    assert instants == ["publish 1", "publish 2", "publish 3", "publish 4", "checkpoint"]


def test_a_rerun_is_drawn_below_its_original_and_traced_as_a_process_of_its_own(run: Path) -> None:
    again = run / "rerun-1"
    again.mkdir()
    (again / SCHEDULE).write_bytes((run / SCHEDULE).read_bytes())
    assert main(["timeline", str(run), str(again), "--trace", str(run / "t.json")]) == 0
    events = json.loads((run / "t.json").read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {1: str(run), 2: str(again)}
    assert [{**event, "pid": 1} for event in events if event["pid"] == 2][1:] == [
        event for event in events if event["pid"] == 1
    ][1:]
    figure = lanes({str(folder): lives_in(folder / SCHEDULE)[-1] for folder in (run, again)})
    assert [len(axes.patches) for axes in figure.axes] == [3, 3]


def test_a_bar_lasts_from_one_rollout_of_its_worker_to_the_next(run: Path) -> None:
    (life,) = lives_in(run / SCHEDULE)
    life.events = [Rollout(w, 0, n, 1, ms) for w, n, ms in ((0, 0, 5), (1, 0, 20), (0, 1, 90))]
    assert [(rollout.worker, begin) for rollout, begin in life.spans()] == [(0, 5), (1, 5), (0, 5)]
    assert [event.ms for event in life.between(10, 50).events] == [20]


def test_a_picture_is_drawn_and_a_time_in_which_nothing_happened_is_refused(run: Path, capsys) -> None:
    assert main(["timeline", str(run)]) == 0
    assert (run / TIMELINE).stat().st_size > 1000
    assert main(["timeline", str(run), "--from", "500"]) == 2
    assert "nothing was recorded in that time" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_a_file_in_a_folder_that_is_not_there_is_told(
    option: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(run), option, str(run / "no" / "file.png")]) == 2
    assert capsys.readouterr().err == (
        f"there is no folder {run / 'no'}\n"
        f"  where  {run / 'no' / 'file.png'}\n"
        "  cure   name a file in another folder\n"
    )

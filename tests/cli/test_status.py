"""``rlsync status`` on a run that trains, whose worker is stopped, then killed, and that has ended."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path

import jsonschema
import pytest

from rlsync.cli.main import main
from rlsync.recipes.run_files import BOARD, RESOLVED, STATISTICS
from rlsync.transport.board import BoardReader
from rlsync.transport.board.format import EVALUATOR
from tests.cli.test_main import ENDLESS, Run, folder
from tests.tools.board_workers import Acts, plain_layout
from tests.tools.counted_board import CountedBoard
from tests.tools.parts.processes import descendant_pids, stopped, wait_until

__all__ = ["folder"]  # a fixture


def workers_of(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict]:
    main(["status", "--json", str(run_folder)])
    return json.loads(capsys.readouterr().out)["workers"]


@pytest.mark.processes
def test_status_tells_which_workers_live_and_what_they_act_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(folder, "train", "logger=none", *ENDLESS)
    try:
        run.wait_for(r"frames .* version", 60)
        run_folder = folder / run.run_folder()
        assert main(["status", str(run_folder)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"newest version \d+", said[0])
        assert [line.split(" (")[0] for line in said[1:3]] == ["worker 0", "worker 1"]
        assert said[3].startswith("frames ")

        workers = workers_of(run_folder, capsys)
        assert {w["pid"] for w in workers} <= descendant_pids(run.process.pid)
        assert all(w["alive"] and w["adopted_version"] > 1 for w in workers)

        with stopped(workers[0]["pid"]):
            assert workers_of(run_folder, capsys)[0]["state"] == "stopped"

        os.kill(workers[1]["pid"], signal.SIGKILL)
        assert run.exit_status(60) == 1
        said = next(line for line in run.output.splitlines() if "killed by SIGKILL" in line)
        assert f"worker 1 (pid {workers[1]['pid']}, killed by SIGKILL, acted with version" in said
        assert "Traceback" not in run.output
        assert wait_until(lambda: not descendant_pids(run.process.pid), 60)
    finally:
        run.kill()
    assert main(["status", "--json", str(run_folder)]) == 1
    assert json.loads(capsys.readouterr().out)["statistics"]["version"] > 1
    assert main(["status", str(run_folder)]) == 1
    assert re.match(r"ended \S+ \S+: failed  frames [\d,]+  version \d+\n", capsys.readouterr().out)


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

"""``rlsync bench``: it measures what it says, with real worker processes, and leaves none."""

from __future__ import annotations

import json
import re

import pytest

from rlsync.runs.cli.main import main


@pytest.mark.usefixtures("fork_workers")
def test_bench_measures_each_model_with_the_workers_that_are_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--models", "3x100", "mlp", "--workers", "1", "--trials", "3", "--json"]) == 0
    small, mlp = json.loads(capsys.readouterr().out)["rows"]
    assert (small["model"], small["tensors"], small["payload_bytes"]) == ("3x100", 3, 4 * 3 * 100)
    assert (mlp["model"], mlp["payload_bytes"]) == ("mlp", 4 * 12 * 1700)
    for row in (small, mlp):
        assert (row["workers"], row["trials"]) == (1, 3)
        numbers = ("publish_ms", "memcpy_ms", "publish_per_memcpy", "adopt_alias_us", "adopt_copy_us")
        assert all(row[number] > 0 for number in numbers)


@pytest.mark.usefixtures("fork_workers")
def test_bench_prints_a_table_that_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "--models", "1000x1000", "--workers", "2", "--trials", "1"]) == 0
    said = capsys.readouterr().out
    assert "one publish to 2 worker processes" in said
    assert re.search(r"^ *1000x1000 +1,000 +4\.00( +[\d,.]+){5} *$", said, re.M), "one line, nothing cut"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["--models", "mlpp"], "did you mean 'mlp'?"),
        (["--models", "0x10"], "TENSORSxFLOATS like 12x5000"),
        (["--workers", "0"], "workers is at least 1"),
        (["--trials", "0"], "trials is at least 1"),
    ],
)
def test_wrong_arguments_are_refused_before_a_worker_starts(
    arguments: list[str], cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert cure in capsys.readouterr().err

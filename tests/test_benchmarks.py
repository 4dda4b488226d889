"""The scripts in benchmarks/, run for a few seconds: they count, they fail when they should, they write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ENDS_WITHIN_S = 100

#: A reader that takes a slot without a lease and without asking which version lies there.
WITHOUT_LEASES = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from rlsync.transport.board import BoardReader
BoardReader._lease_slot = lambda self, version, slot: True  # workers import this file and do it too
from soak import main
if __name__ == "__main__":
    raise SystemExit(main())
"""


def _run(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=ENDS_WITHIN_S)


def test_a_short_soak_counts_kills_stops_and_layouts_and_finds_nothing_bad(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    ended = _run(BENCHMARKS / "soak.py", "--workers", 3, "--seconds", 2, "--seed", 9, "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())
    assert not any(found["bad"].values()), found
    assert set(found["bad"]) > {"torn", "wrong", "fell", "lost", "coalesced", "leaked_descriptors"}
    counts = found["counts"]
    assert counts["respawns"] == counts["kills"] > 0
    assert counts["stops"] > 0
    assert counts["layouts"] >= 2  # the first, and the last one that all must reach
    assert counts["publishes"] > 100
    assert 3 <= counts["adoptions"] <= counts["looks"]


def test_a_soak_of_readers_without_leases_finds_what_they_tear_and_fails(tmp_path: Path) -> None:
    script, out = tmp_path / "without_leases.py", tmp_path / "soak.json"
    script.write_text(WITHOUT_LEASES)
    ended = _run(script, "--workers", 2, "--seconds", 1.5, "--out", out)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    bad = json.loads(out.read_text())["bad"]
    assert bad["wrong"] > 0
    assert bad["torn"] > 0


def test_the_footprint_of_a_board_is_one_descriptor_a_worker_however_many_tensors(tmp_path: Path) -> None:
    out, table = tmp_path / "footprint.json", tmp_path / "footprint.md"
    schemes, size = ["board alias", "board copy"], ["--tensors", 10, 200, "--workers", 2, "--big-floats", 0]
    ended = _run(BENCHMARKS / "footprint.py", "--schemes", *schemes, *size, "--out", out, "--table", table)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["tensors"], row["scheme"]) for row in rows] == [(n, s) for n in (10, 200) for s in schemes]
    assert {row["worker_board_descriptors"] for row in rows} == {1}
    assert len({row["worker_descriptors"] for row in rows}) == 1
    assert all(row["grown_bytes"] > 0 for row in rows)
    assert "| 200 | 2 |" in table.read_text()


def test_workers_that_adopt_by_alias_keep_no_copy_of_their_own(tmp_path: Path) -> None:
    out, table = tmp_path / "footprint.json", tmp_path / "footprint.md"
    size = ["--tensors", 20, "--floats", 1_000_000, "--workers", 3, "--big-floats", 0]
    script, written = BENCHMARKS / "footprint.py", ["--out", out, "--table", table]
    ended = _run(script, "--schemes", "board alias", "board copy", *size, *written)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    by_alias, by_copy = (row["copies"] for row in json.loads(out.read_text())["rows"])
    assert by_alias < 3.5  # three slots
    assert by_copy > 5.5  # and a copy for each of three workers


def test_a_step_is_timed_without_a_publish_with_one_and_with_one_in_the_background(tmp_path: Path) -> None:
    out = tmp_path / "background.json"
    ended = _run(BENCHMARKS / "background.py", "--models", "small", "--steps", 2, "--busy", "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (row,) = json.loads(out.read_text())
    assert row["payload_bytes"] == 4 * 3 * (128 * 128 + 128)
    assert all(row[way]["step_s"] > row[way]["held_s"] > 0 for way in ("at once", "in background"))
    assert "| small, busy |" in ended.stdout


def test_the_steps_of_a_learner_are_timed_for_each_precision_and_beside_torchrl(tmp_path: Path) -> None:
    ended = _run(BENCHMARKS / "impala_loss.py", "--repeats", 1)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "TorchRL" in ended.stdout

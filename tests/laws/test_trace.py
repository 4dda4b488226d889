"""RLSYNC_TRACE: what it says of a version agrees from its publish to the batch that the learner takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlsync.core import trace
from tests.tools.programs import ENDS_WITHIN_S

REPO = Path(__file__).resolve().parents[2]

STOCK = """
from torchrl.collectors import MultiSyncCollector
from rlsync import BoardScheme, SyncWeights
from tests.tools.parts import make_a2c_trainer, make_policy, make_workers

if __name__ == "__main__":
    collector = make_workers(MultiSyncCollector, make_policy(), schemes={"policy": BoardScheme()})
    source = "loss_module.actor_network"
    trainer = make_a2c_trainer(collector, total_frames=200, weight_update_map={"policy": source})
    SyncWeights({"policy": source}).register(trainer)
    trainer.train()
"""

OWN = (
    "recipe=ppo",
    "recipe.total_frames=2048",
    "collector.frames_per_batch=512",
    "run_dir=run",
    "logger=none",
)

PROGRAMS = {
    "rlsync's workers": ("-m", "rlsync", "train", *OWN),
    "the learner's own process": ("-m", "rlsync", "train", *OWN, "collector.num_workers=0"),
    "a collector of TorchRL": ("-c", STOCK),
}

Line = Mapping[str, Any]


def traced(folder: Path, *arguments: str) -> list[Line]:
    file = folder / "trace.jsonl"
    variables = {**os.environ, "RLSYNC_TRACE": str(file), "PYTHONPATH": str(REPO)}
    program = folder / "program.py"
    if arguments[0] == "-c":  # workers import the main module, which must be a file
        program.write_text(arguments[1])
        arguments = (str(program),)
    command = [sys.executable, *arguments]
    subprocess.run(command, cwd=folder, env=variables, check=True, timeout=ENDS_WITHIN_S, capture_output=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [
        PROGRAMS["rlsync's workers"],
        pytest.param(PROGRAMS["the learner's own process"], marks=pytest.mark.thorough),
        PROGRAMS["a collector of TorchRL"],
    ],
    ids=PROGRAMS,
)
def test_a_version_can_be_followed_from_its_publish_to_the_batch(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    lines = traced(tmp_path, *arguments)
    counts = Counter(line["event"] for line in lines)
    assert min(counts[event] for event in ("publish", "adopt", "begin", "stamp", "take")) >= 2, counts
    published: dict[int, float] = {}
    has: dict[str, int] = {}
    acts: dict[str, int] = {}
    stamped: set[int] = set()
    for line in sorted(lines, key=lambda line: line["time_s"]):
        who, version = line["who"], line["version"]
        match line["event"]:
            case "publish":
                assert who == "learner"
                assert line["took_s"] >= 0
                published.setdefault(version, line["time_s"])
            case "adopt":
                has[who] = version
            case "begin":
                assert has[who] == version
                acts[who] = version
            case "stamp":
                assert acts[who] == version
                stamped.add(version)
            case "take":
                assert version in stamped
    assert stamped <= published.keys()


def test_nothing_is_written_unless_somebody_asks() -> None:
    assert "RLSYNC_TRACE" not in os.environ
    assert not trace.ON

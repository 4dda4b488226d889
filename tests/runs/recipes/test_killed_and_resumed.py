"""A training that is killed at a random moment and resumed publishes when it would have, by other numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from rlsync.runs.evaluation.process import best_in, read_evaluations
from rlsync.runs.recipes.run_files import BEST, EVALUATIONS
from tests.runs.cli.test_main import Run, folder
from tests.tools.processes import descendant_pids, is_alive, wait_until
from tests.tools.programs import ENDS_WITHIN_S

__all__ = ["folder"]  # a fixture

PPO = ("recipe.num_epochs=1", "collector.frames_per_batch=256", "sync.when.every=3")
DQN = ("recipe=dqn", "sync.when.every=7", "sync.when.unit=batches")
COMMON = ("logger=none", "recipe.target_return=null", "checkpoint_every_frames=600")


def receipts(run_folder: Path) -> list[dict]:
    return [json.loads(line) for line in (run_folder / "receipts.jsonl").read_text().splitlines()]


def kill_after_its_first_checkpoint(run: Run, folder: Path) -> Path:
    run.wait_for(r"frames ", 60)
    run_folder = folder / run.run_folder()
    saved = run_folder / "checkpoint" / "manifest.json"
    assert wait_until(lambda: saved.exists() and len(receipts(run_folder)) > 1, 40)
    time.sleep(random.Random(os.getpid()).uniform(0, 1.5))
    family = descendant_pids(run.process.pid)
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(10)
    assert wait_until(lambda: not any(is_alive(pid) for pid in family), 20), "workers end by themselves"
    return run_folder


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "every"), [(PPO, 3), (DQN, 7)], ids=["ppo", "dqn"])
@pytest.mark.thorough
def test_publishes_come_at_the_batches_of_the_uninterrupted_run(
    folder: Path, arguments: tuple[str, ...], every: int
) -> None:
    killed = Run(folder, "train", *COMMON, *arguments, "recipe.total_frames=1000000")
    try:
        before = kill_after_its_first_checkpoint(killed, folder)
    finally:
        killed.kill()
    done = receipts(before)
    frames_per_batch = done[-1]["frames"] // done[-1]["batches"]
    saved = shutil.copytree(before / "checkpoint", folder / f"saved-{every}")
    goal = done[-1]["frames"] + 4 * every * frames_per_batch
    resumed = Run(folder, "train", *COMMON, *arguments, f"recipe.total_frames={goal}", f"resume={saved}")
    try:
        assert resumed.exit_status(ENDS_WITHIN_S) == 0, resumed.output
        after = receipts(folder / resumed.run_folder())
    finally:
        resumed.kill()
    first = next(r for r in after if r["reason"] == "resume")
    at_the_checkpoint = [r for r in done if r["batches"] <= first["batches"]]
    assert 0 < first["batches"] <= done[-1]["batches"] + every
    assert first["version"] > max(r["version"] for r in at_the_checkpoint)
    triggered = [r["batches"] for r in after if r["reason"] == "trigger"]
    expected = (first["batches"] // every + 1) * every
    assert triggered[:3] == [expected, expected + every, expected + 2 * every]
    sooner = [r["batches"] for r in done if r["reason"] == "trigger"]
    assert sooner == [every * (i + 1) for i in range(len(sooner))]
    versions = [r["version"] for r in after]
    assert versions == sorted(set(versions))
    assert len({receipt["run_id"] for receipt in done + after}) == 2, "each folder has its own"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_that_is_killed_and_resumed_names_no_two_versions_alike(folder: Path) -> None:
    arguments = ("recipe.num_epochs=1", "collector.frames_per_batch=256", "recipe.total_frames=1000000")
    evaluates = ("recipe.evaluation.every_frames=256", "recipe.evaluation.episodes=1")
    begun = Run(folder, "train", *COMMON, *arguments, *evaluates)
    try:
        run = kill_after_its_first_checkpoint(begun, folder)
    finally:
        begun.kill()
    enough = len(receipts(run)) + 4
    resumed = Run(folder, "train", *COMMON, *arguments, *evaluates, f"resume={run}", f"run_dir={run}")
    try:
        assert wait_until(lambda: len(receipts(run)) >= enough, 60), resumed.output
        assert wait_until((run / BEST).exists, 60), resumed.output
    finally:
        resumed.kill()
    published = receipts(run)
    versions = [receipt["version"] for receipt in published]
    assert versions == sorted(set(versions))
    evaluations, best = read_evaluations(run / EVALUATIONS), best_in(run / BEST)
    evaluated = [result.version for result in evaluations]
    assert evaluated == sorted(set(evaluated))
    (run_id,) = {receipt["run_id"] for receipt in published}
    assert {result.run_id for result in evaluations} == {run_id}
    assert run_id == best.run_id != ""

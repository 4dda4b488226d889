"""Checkpoints written before versions had one owner: a run goes on from them as the next generation."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from rlsync import SyncWeights
from rlsync.cli import resume
from rlsync.cli.eval import config_of
from rlsync.recipes.registry import recipe_of
from rlsync.recipes.run_files import CHECKPOINT, RECEIPTS
from rlsync.torchrl_plugin import compat

OLD_RUNS = Path(__file__).parent / "data" / "old_runs"

pytestmark = pytest.mark.usefixtures("fork_workers")


@pytest.mark.parametrize("name", ["ppo", "dqn", "impala"])
def test_an_old_run_goes_on_counting_in_the_next_generation(tmp_path: Path, name: str) -> None:
    with tarfile.open(OLD_RUNS / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / name
    last = json.loads((run / RECEIPTS).read_text().splitlines()[-1])
    config = config_of(run)
    config.run_dir = None
    if name == "impala":
        config.collector.kind = "async"  # its configs said sync, and it made no difference
    config.recipe.total_frames = last["frames"] + 2 * config.collector.frames_per_batch
    trainer = recipe_of(config).build(config, None)
    try:
        resume.load(trainer, run / CHECKPOINT)
        (sync,) = (m for m in compat.registered_modules(trainer) if isinstance(m, SyncWeights))
        steps = sync.counters().optim_steps
        assert (sync.ledger.generation, trainer.collected_frames) == (2, last["frames"])
        assert steps >= last["optim_steps"]
        assert sync.ledger.optim_steps_since(last["version"], steps) == steps - last["optim_steps"]
        trainer.train()
        assert "resume" in [receipt.reason for receipt in sync.receipts]
        assert min(receipt.version for receipt in sync.receipts) > last["version"]
        assert trainer.collected_frames == config.recipe.total_frames
    finally:
        trainer.shutdown()

"""Dreamers on one Ray node: their states, versions and rows are what they are on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlsync.runs.recipes.hooks.steering import KeepPace
from rlsync.runs.recipes.registry import recipe_of
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes.test_dreamer_recipes import small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("one_node"),
]


@pytest.mark.parametrize(
    ("name", "on_adoption", "lag"),
    [
        ("dreamer_v3", "recompute", "0"),
        pytest.param("dreamer_v1", "keep", "null", marks=pytest.mark.thorough),
    ],
)
def test_a_dreamer_learns_from_the_rows_of_a_node(
    name: str, on_adoption: str, lag: str, tmp_path: Path
) -> None:
    words = [f"recipe.on_adoption={on_adoption}", f"collector.lag={lag}", "cluster.kind=ray"]
    trainer = recipe_of(config := small(name, *words, run_dir=tmp_path)).build(config)
    batches: list[TensorDict] = []
    trainer.register_op("batch_process", lambda batch: batches.append(batch.clone()) or batch)
    before = {key: value.clone() for key, value in trainer.loss_module.named_parameters()}
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    (pace,) = (module for module in registered_modules(trainer) if isinstance(module, KeepPace))
    assert pace.updates == 16
    after = dict(trainer.loss_module.named_parameters())
    assert [key for key, value in before.items() if torch.equal(value, after[key])] == []
    stamps = torch.cat([batch["policy_version"].flatten() for batch in batches])
    made_by = torch.cat([batch["state_version"].flatten() for batch in batches])
    begins = torch.cat([batch["is_init"].flatten() for batch in batches])
    # Without a lag workers may make most rows before the learner publishes again.
    assert len(stamps.unique()) >= (2 if lag == "null" else 3)
    assert (made_by[begins] == -1).all()
    assert (made_by[~begins] >= 1).all()
    assert torch.equal(made_by[~begins], stamps[~begins]) == (on_adoption == "recompute")
    rows = trainer.replay_buffer[:]
    for stream in rows["stream"].unique():
        numbers = rows["row"][rows["stream"] == stream].sort().values
        assert torch.equal(numbers, torch.arange(len(numbers)))

"""rlsync's hooks and scheme in TorchRL's config groups: registered by a call, used by a stock trainer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import OmegaConf
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import PPOTrainer

from rlsync import BoardScheme, SyncWeights, WatchWorkers
from rlsync.runs.config import torchrl_configs
from rlsync.runs.config.command_line import choices
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.compat.schemes import schemes_of
from tests.tools.parts.configs import configs_of
from tests.tools.programs import fresh_python

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "torchrl_config"

IN_A_FRESH_PROCESS = """
import json
from hydra.core.config_store import ConfigStore
from rlsync.runs.config import torchrl_configs
groups = ConfigStore.instance().repo
before = sorted(set(groups) & {"hook", "weight_sync_scheme", "trainer"})
torchrl_configs.register()
print(json.dumps([before, sorted(groups["hook"]), sorted(groups["weight_sync_scheme"])]))
"""


@contextmanager
def built(*line: str) -> Iterator[Trainer]:
    """The trainer of the example's YAML, with these overrides."""
    torchrl_configs.register()
    with initialize_config_dir(str(EXAMPLE), version_base="1.3"):
        config = compose("ppo", list(line))
    trainer = hydra.utils.instantiate(config.trainer)
    try:
        yield trainer
    finally:
        trainer.shutdown()


def the_hook(trainer: Trainer) -> SyncWeights:
    (hook,) = (m for m in trainers.registered_modules(trainer) if isinstance(m, SyncWeights))
    return hook


@pytest.mark.processes
@pytest.mark.thorough
def test_nothing_is_registered_before_the_call_and_torchrls_own_stay_beside_ours() -> None:
    done = fresh_python("-c", IN_A_FRESH_PROCESS)
    before, hooks, schemes = json.loads(done.stdout)
    assert before == []
    assert {"sync_weights.yaml", "watch_workers.yaml", "early_stopping.yaml"} <= set(hooks)
    assert {"board.yaml", "shared_mem.yaml"} <= set(schemes)


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_a_stock_ppo_config_trains_with_the_board_and_each_batch_says_which_version_acted() -> None:
    with built() as trainer:
        assert type(trainer) is PPOTrainer
        hook = the_hook(trainer)
        assert trainers.stock_update_weights(trainer) == [], "weights would be pushed twice"
        assert {row.verdict.value for row in hook.plan.rows} == {"copied"}
        acted: list[tuple[list[int], list[int]]] = []

        def watch(batch):
            stamps = batch["policy_version"], batch["next", "policy_version"]
            acted.append(tuple(s.unique().tolist() for s in stamps))

        trainer.register_op("pre_steps_log", watch)
        trainer.train()
        # Version 1 is what the workers start with, 2 the learner's first; then one a batch.
        assert acted == [([v], [v]) for v in (2, 3, 4, 5, 6)]
        assert [receipt.version for receipt in hook.receipts] == [2, 3, 4, 5, 6, 7]
        last = trainer.loss_module.actor_network.state_dict()
        assert any(tensor.abs().sum() > 0 for tensor in last.values())


@pytest.mark.usefixtures("fork_workers")
def test_the_map_the_trigger_and_the_scheme_are_overridden_like_any_key() -> None:
    line = ("collector=multi_async", "sync.when.every=3", "sync.when.unit=optim_steps", "scheme.adopt=copy")
    with built(*line, "sync.finite=true", "sync.history=7", "collector.num_workers=1") as trainer:
        hook = the_hook(trainer)
        assert (str(hook.when), hook.finite, hook.receipts.maxlen) == ("every 3 optim_steps", True, 7)
        assert schemes_of(trainer.collector)["policy"].adopt == "copy"
        assert hook.sync_map == {"policy": "loss_module.actor_network"}


@pytest.mark.usefixtures("fork_workers")
def test_a_source_that_leads_nowhere_is_refused_when_the_trainer_is_built() -> None:
    with pytest.raises(InstantiationException, match="actor_netwrk") as refused:
        with built("sync.map.0.source=loss_module.actor_netwrk", "collector.num_workers=1"):
            pass
    assert "did you mean 'actor_network'?" in str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("config", "of"),
    [
        (torchrl_configs.SyncWeightsConfig, SyncWeights),
        (torchrl_configs.WatchWorkersConfig, WatchWorkers),
        (torchrl_configs.BoardSchemeConfig, BoardScheme),
    ],
)
def test_the_configs_have_every_argument_of_what_they_make_with_its_default(config: type, of: type) -> None:
    renamed = {"sync_map": "map"}
    no_settings = {"trainer", "collector", "per_worker_weights"}  # objects, and what is there to be refused
    arguments = {
        renamed.get(name, name): parameter.default
        for name, parameter in inspect.signature(of).parameters.items()
        if not name.startswith("_") and name not in no_settings
    }
    made = config()
    keys = {spec.name for spec in fields(config) if not spec.name.startswith("_")}
    assert keys == set(arguments)
    composed_by_us = {"map", "when"}
    assert {k: getattr(made, k) for k in keys - composed_by_us} == {
        k: default for k, default in arguments.items() if k not in composed_by_us
    }


@pytest.mark.seconds
def test_torchrls_groups_do_not_turn_up_among_those_of_rlsync_train() -> None:
    torchrl_configs.register()
    assert choices()["logger"] == ["csv", "none", "tensorboard", "wandb"]
    assert "trainer" not in choices()
    (config,) = configs_of("collector=workers", "logger=csv")
    assert OmegaConf.structured(config).collector.lag == 1


@pytest.mark.slow
@pytest.mark.thorough
def test_the_example_script_trains_with_spawned_workers(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    done = fresh_python(
        str(EXAMPLE / "train.py"), "sync.when.every=2", "trainer.total_frames=1600", cwd=tmp_path
    )
    expected = "[(2, 2), (2, 2), (3, 3), (3, 3)]"
    assert done.stdout.splitlines()[-1] == f"versions that acted, batch by batch: {expected}"

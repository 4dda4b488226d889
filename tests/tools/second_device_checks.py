"""What test_second_device.py runs in a process that has a second device, one check by its name."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import DQNLoss
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.core.ledger import Ledger
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.player import Acted, Record
from rlsync.runs.evaluation.evaluator import Evaluator
from rlsync.runs.evaluation.play import Score, play
from rlsync.runs.evaluation.process import EvaluationJob
from rlsync.runs.life.job import Job
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.settings import Config, DeviceConfig
from rlsync.runs.recipes.spaces import DISCRETE
from rlsync.runs.recipes.sync_settings import WhenConfig
from rlsync.torchrl_plugin.compat.trainers import optimizers
from tests.runs.actors.test_players import CARTPOLE, PairPlayer, collecting, make_impala
from tests.runs.recipes.test_impala_recipe import small
from tests.runs.recipes.test_off_policy import tiny
from tests.runs.recipes.test_recipes import small_dqn, small_ppo
from tests.runs.recipes.test_row_segments import give, loaded, save, stored
from tests.runs.recipes.test_row_segments import make as make_buffer
from tests.tools.processes import wait_until
from tests.tools.second_device_program import lend

WAIT_S = 100.0


class Located(PairPlayer):
    """Records whether everything was on the second device, and counts the steps of its worker's life."""

    records = (
        *PairPlayer.records,
        Record("on_second", (), torch.float32),
        Record("count", (), torch.float32),
    )

    def begin(self, num_envs: int, *given: Any) -> dict[str, Tensor]:
        return {**super().begin(num_envs, *given), "count": torch.zeros(num_envs)}

    def act(self, observation: Tensor, is_init: Tensor, reward: Tensor, state: Any, generator: Any) -> Acted:
        acted = super().act(observation, is_init, reward, state, generator)
        count = state["count"] + 1
        parts = [observation, is_init, reward, *state.values(), *self.encoder.parameters()]
        on_second = torch.full_like(count, float(all(part.device.type == "second" for part in parts)))
        records = {**acted.records, "on_second": on_second, "count": count}
        return Acted(acted.action.to(count.device), records, {**acted.state, "count": count})


def devices_of(batch: TensorDictBase) -> dict[str, set[str]]:
    """The devices of what a loss reads, and of what lies beside."""
    found: dict[str, set[str]] = {"": set(), "collector": set()}
    for key, tensor in batch.items(True, True):
        found["collector" if isinstance(key, tuple) else ""].add(tensor.device.type)
    return found


def workers_act_where_they_are_told() -> None:
    player = Located()
    player.publish_as(1)
    acted_on = {0: 1.0, 1: 0.0}
    options = {"policy_device": ["second", "cpu"], "storing_device": "second", "rollouts_per_batch": 2}
    with collecting(player, CARTPOLE, num_workers=2, **options) as collector:
        versions, workers = set(), set()
        for version, batch in enumerate(itertools.islice(collector, 12), start=2):
            assert devices_of(batch) == {"": {"second"}, "collector": {"cpu"}}, devices_of(batch)
            assert torch.equal(batch["least"], batch["policy_version"].float())
            assert torch.equal(batch["collector", "greatest"], batch["least"].cpu())
            expected = [acted_on[worker] for worker in collector.last_workers for _ in range(4)]
            assert batch["on_second"].cpu().unique(dim=0).tolist() == [expected]
            versions |= set(batch["policy_version"].flatten().tolist())
            workers |= set(collector.last_workers)
            player.publish_as(version)
            collector.update_policy_weights_()
    assert len(versions) > 3, versions
    assert workers == {0, 1}, workers


def a_slot_is_given_back_when_it_is_copied() -> None:
    with collecting(Located(), CARTPOLE, num_workers=1, slots=1, storing_device="second") as collector:
        held = list(itertools.islice(collector, 6))
    begun = [int(batch["count"][0, 0]) for batch in held]
    assert begun == [1 + 6 * number for number in range(6)], begun


def evaluations_play_there() -> None:
    device, file = lend(), Path("scores.csv")
    network = make_impala()
    with collecting(network, CARTPOLE, num_workers=1) as collector:
        handle, player = collector.board.handle, collector.worker_player
        job = EvaluationJob(handle, player, CARTPOLE, 4, file, 7, device=device)
        evaluator = Evaluator(job, Ledger(), start_method="fork")
        evaluator.ask()
        try:
            assert wait_until(evaluator.evaluations, WAIT_S)
        finally:
            evaluator.close()
    envs = make_venv(CARTPOLE, 4)
    acting = network.player()
    played = [episode for ended in play(acting, envs, 4, 7, device) for episode in ended]
    envs.close()
    assert {p.device.type for p in network.parameters()} == {"second"}, "play moves the player"
    assert evaluator.evaluations()[0].return_mean == Score.of(played).return_mean


def config_of(recipe: str) -> Config:
    made = {
        "ppo": small_ppo,
        "dqn": lambda: small_dqn(WhenConfig(every=2, unit="optim_steps")),
        "impala": lambda: small(total_frames=80),
        "sac": lambda: tiny("sac", workers=2),
    }[recipe]()
    made.recipe.total_frames = 3 * made.collector.frames_per_batch
    made.collector.device = ["second", "cpu"]
    made.learner, made.evaluation = DeviceConfig("second"), DeviceConfig("second")
    made.run_dir = "."
    return made


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    return [value] if isinstance(value, Tensor) else []


def the_learner_learns_there(recipe: str) -> None:
    config = config_of(recipe)
    trainer = recipe_of(config).build(config, None)
    consumed: set[str] = set()

    def look(batch: TensorDictBase) -> None:
        consumed.update(tensor.device.type for tensor in batch.exclude("collector").values(True, True))

    trainer.register_op("process_optim_batch", look)
    before = [parameter.detach().cpu().clone() for parameter in trainer.loss_module.parameters()]
    trainer.train()
    after = [parameter.detach().cpu() for parameter in trainer.loss_module.parameters()]
    (optimizer,) = optimizers(trainer)
    state = [t for t in tensors_in(dict(optimizer.state)) if t.ndim]
    kept: list[Tensor] = []
    if trainer.replay_buffer is not None:
        kept = list(trainer.replay_buffer[:].values(True, True))
    module: nn.Module = trainer.loss_module
    told = {
        "consumed": sorted(consumed),
        "trained": sorted({t.device.type for t in [*module.parameters(), *module.buffers()]}),
        "optimizer": sorted({t.device.type for t in state}),
        "replay buffer": sorted({t.device.type for t in kept}),
        "changed": any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "policy": [float(t.double().sum()) for t in policy_of(trainer).state_dict().values()],
    }
    Path("told.json").write_text(json.dumps(told))


def a_recipe_that_stays_on_the_cpu_is_refused() -> None:
    config = config_of("ppo")
    on_cpu = replace(config, learner=DeviceConfig())
    stays = replace(ppo.RECIPE, trainer=lambda run: ppo.build(Run(on_cpu, DISCRETE.probe(on_cpu.env))))
    with pytest.raises(ConfigError) as refused:
        Job(config, stays, DISCRETE.probe(config.env), None).build()
    assert refused.value.what == "the recipe 'ppo' trains on cpu, not on second:0"
    assert refused.value.where == "learner.device"
    assert multiprocessing.active_children() == []


def a_replay_buffer_there_is_saved_and_loaded() -> None:
    buffer = make_buffer(7, device="second")
    for count in (5, 4, 3):
        give(buffer, count)
        checkpoint = save(buffer, Path())
    for device in ("second", "cpu"):
        again = loaded(checkpoint, 7, device=device)
        rows = stored(again)
        assert {leaf.device.type for leaf in rows.values(True, True)} == {device}
        assert rows["number"].cpu().tolist() == [7, 8, 9, 10, 11, 5, 6]
        give(again, 1)
        assert stored(again)["number"].cpu().tolist() == [7, 8, 9, 10, 11, 12, 6]


def policy_of(trainer: Trainer) -> nn.Module:
    loss: Any = trainer.loss_module
    return loss.value_network if isinstance(loss, DQNLoss) else loss.actor_network


if __name__ in ("__main__", "__mp_main__"):  # the latter in a fork server, whose workers have the device, too
    lend()

if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

"""Faults 11 and 13: counters survive a resume, intervals hold, and any stock trainer takes the hook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer

from rlsync import Every, SyncWeights, UpdateWeights
from tests.tools.parts import (
    make_a2c_trainer,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_counting_env,
    make_dqn_trainer,
    make_policy,
    make_ppo_trainer,
    make_q_policy,
    make_sac_trainer,
)
from tests.tools.running import ACTOR, Witness, on_a_board, running, values

pytestmark = pytest.mark.usefixtures("fork_workers")

VALUE = {"policy": "loss_module.value_network"}


class Kind:
    """One stock algorithm: its trainer, policy, environment, map, and an output that frames carry."""

    def __init__(
        self,
        trainer: Callable[..., Trainer],
        policy: Callable[[], nn.Module],
        sync_map: dict[str, str],
        output: str,
        *,
        env: Callable = make_counting_env,
        on_policy: bool = False,
    ) -> None:
        self._trainer = trainer
        self.policy = policy
        self.sync_map = sync_map
        self.output = output
        self.env = env
        self._demands = {"weight_update_map": sync_map} if on_policy else {}

    def trainer(self, collector: BaseCollector, actor: nn.Module, frames: int) -> Trainer:
        trainer = self._trainer(collector, actor, total_frames=frames, **self._demands)
        if trainer.loss_module.value_estimator is None:  # else a saved DQNLoss cannot be loaded
            trainer.loss_module.make_value_estimator()
        return trainer


PPO = Kind(make_ppo_trainer, make_policy, ACTOR, "logits", on_policy=True)
A2C = Kind(make_a2c_trainer, make_policy, ACTOR, "logits", on_policy=True)
DQN = Kind(make_dqn_trainer, make_q_policy, VALUE, "action_value")
SAC = Kind(make_sac_trainer, make_continuous_policy, ACTOR, "loc", env=make_continuous_env)

all_kinds = pytest.mark.parametrize("kind", [PPO, A2C, DQN, SAC], ids=["ppo", "a2c", "dqn", "sac"])


def _by_register(trainer: Trainer, sync_map: dict[str, str], when: Every) -> SyncWeights:
    hook = SyncWeights(sync_map, when)
    hook.register(trainer)
    return hook


def _by_register_op(trainer: Trainer, sync_map: dict[str, str], when: Every) -> SyncWeights:
    hook = SyncWeights(sync_map, when, trainer=trainer)
    trainer.register_op("post_optim" if when.unit == "optim_steps" else "post_steps", hook)
    return hook


both_registers = pytest.mark.parametrize("register", [_by_register, _by_register_op])

# ------------------------------------------------- fault 11: any trainer, any collector, any interval


@all_kinds
@pytest.mark.parametrize("collect", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.one_case
def test_a_stock_trainer_with_worker_processes_publishes_once_a_batch_and_frames_tell(
    kind: Kind, collect: type
) -> None:
    policy = kind.policy()
    with on_a_board(policy, collect, env=kind.env) as collector:
        trainer = kind.trainer(collector, policy, frames=50)
        hook = SyncWeights(kind.sync_map)
        hook.register(trainer)
        witness = Witness(trainer, hook, kind.policy, kind.output)

        trainer.train()

        assert [receipt.reason for receipt in hook.receipts] == ["start"] + ["trigger"] * 5
        assert hook.version == collector.policy_version == 7  # the first was the constructor's
    assert len(witness.batches) == 5
    assert witness.agrees()
    if collect is MultiSyncCollector:
        assert witness.stamps() == [{2}, {3}, {4}, {5}, {6}]


@all_kinds
@both_registers
@pytest.mark.one_case
def test_a_stock_trainer_takes_an_interval_of_optimizer_steps(
    kind: Kind, register: Callable[..., SyncWeights]
) -> None:
    policy = kind.policy()
    with on_a_board(policy, env=kind.env) as collector:
        trainer = kind.trainer(collector, policy, frames=50)
        hook = register(trainer, kind.sync_map, Every(3, "optim_steps"))
        witness = Witness(trainer, hook, kind.policy, kind.output)
        trainer.train()
    assert [receipt.optim_steps for receipt in hook.receipts] == [0, 3, 6, 9]
    assert [receipt.version for receipt in hook.receipts] == [2, 3, 4, 5]
    assert witness.stamps() == [{2}, {2}, {3}, {4}, {4}]
    assert witness.agrees()


# ------------------------------------------------------------------ fault 11: counters in checkpoints


def _legacy(trainer: Trainer, path: Path) -> None:
    trainer.save_trainer_file = path


def _unified(trainer: Trainer, path: Path) -> None:
    trainer.checkpoint = Checkpoint()
    trainer.save_trainer_file = path


def _in_process(kind: Kind, policy: nn.Module) -> object:
    return running(make_collector(kind.policy(), env=kind.env))


def _with_workers(kind: Kind, policy: nn.Module) -> object:
    return on_a_board(policy, env=kind.env)


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:The default Trainer checkpoint format:FutureWarning")
@pytest.mark.filterwarnings("ignore:The default Trainer checkpoint format:DeprecationWarning")
@both_registers
@pytest.mark.parametrize("save", [_legacy, _unified])
@pytest.mark.parametrize("collect", [_in_process, _with_workers])
@pytest.mark.parametrize("kind", [PPO, DQN], ids=["ppo", "dqn"])
def test_a_resumed_training_goes_on_in_phase_and_its_first_frame_acts_with_the_saved_weights(
    kind: Kind,
    collect: Callable,
    save: Callable[[Trainer, Path], None],
    register: Callable[..., SyncWeights],
    tmp_path: Path,
) -> None:
    file, when = tmp_path / "trainer", Every(4, "optim_steps")
    policy = kind.policy()
    with collect(kind, policy) as collector:
        trainer = kind.trainer(collector, policy, frames=30)
        save(trainer, file)
        first = register(trainer, kind.sync_map, when)
        trainer.train()
    assert [receipt.optim_steps for receipt in first.receipts] == [0, 4]

    resumed = kind.policy()
    with collect(kind, resumed) as collector:
        trainer = kind.trainer(collector, resumed, frames=70)
        hook = register(trainer, kind.sync_map, when)
        trainer.load_from_file(file)
        witness = Witness(trainer, hook, kind.policy, kind.output)
        trainer.train()

    done = [(receipt.reason, receipt.optim_steps) for receipt in hook.receipts]
    assert done[-3:] == [("resume", 6), ("trigger", 8), ("trigger", 12)]
    assert hook.receipts[-3].batches == 3
    assert hook.receipts[-3].version > first.version
    assert witness.agrees()
    saved = witness.published[hook.receipts[-3].version]
    for mine, theirs in zip(saved.parameters(), policy.parameters(), strict=True):
        assert mine.equal(theirs)
    assert values(witness.batches[0], "policy_version") == {hook.receipts[-3].version}


@both_registers
def test_the_counter_of_batches_survives_a_resume_too(register: Callable[..., SyncWeights]) -> None:
    when = Every(2, "batches")
    trainer = DQN.trainer(make_collector(make_q_policy()), make_q_policy(), frames=30)
    register(trainer, VALUE, when)
    state = {}
    trainer.register_op("shutdown", lambda: state.update(trainer.state_dict()))
    trainer.train()

    trainer = DQN.trainer(make_collector(make_q_policy()), make_q_policy(), frames=60)
    hook = register(trainer, VALUE, when)
    trainer.load_state_dict(state)
    trainer.train()

    done = [(receipt.reason, receipt.batches) for receipt in hook.receipts]
    assert done == [("resume", 3), ("trigger", 4), ("trigger", 6)]


# ------------------------------------------------------------------------- fault 13: no drift

COUNTS = (1, 2, 5, 6, 8, 9)


class _Sender:
    def update_weights(self) -> None:
        pass


def _sync_weights(trainer: Trainer) -> SyncWeights:
    return SyncWeights(VALUE, Every(3, "optim_steps"), trainer=trainer)


def _update_weights(trainer: Trainer) -> UpdateWeights:
    return UpdateWeights(None, 3, sender=_Sender(), trainer=trainer, interval_unit="optim_steps")


@pytest.mark.parametrize("make", [_sync_weights, _update_weights])
@pytest.mark.each_value
def test_an_interval_of_three_fires_at_multiples_of_three_or_the_first_step_past_them(
    make: Callable[[Trainer], SyncWeights],
) -> None:
    trainer = DQN.trainer(make_collector(make_q_policy()), make_q_policy(), frames=30)
    trainer.optimization_stepper = SimpleNamespace(optimizer_step_count=0)
    hook = make(trainer)
    for op, _ in trainer._setup_ops:
        op()

    for trainer.optimization_stepper.optimizer_step_count in COUNTS:
        hook()

    triggered = [r.optim_steps for r in hook.receipts if r.reason == "trigger"]
    assert triggered == [5, 6, 9]

"""VerifySync(behaviour=...): what acts computes what the learner's module computes with that version."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss
from torchrl.trainers import Trainer

from rlsync import BoardScheme, ConfigError, Every, PublishError, Source, SyncWeights, VerifySync
from tests.laws.zoo.parts import ACTOR, actor_of, make_trainer
from tests.tools.parts import (
    ACTIONS,
    make_collector,
    make_counting_env,
    make_mlp,
    make_ppo_loss,
    make_workers,
)
from tests.tools.running import in_three_lines, running

EACH = Every(1, "batches")


class Packed(nn.Module):
    """Transposes its weight at the first call, and never again."""

    def __init__(self, *, packs: bool) -> None:
        super().__init__()
        self.net, self.packs = nn.Linear(4, ACTIONS), packs
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.packs:
            return self.net(x)
        if self.packed is None:
            self.packed = self.net.weight.detach().t().contiguous()
        return x @ self.packed + self.net.bias


class Scaled(nn.Module):
    """Has a number that is no leaf."""

    def __init__(self, by: float = 1.0) -> None:
        super().__init__()
        self.net, self.by = make_mlp(ACTIONS), by

    def forward(self, x: Tensor) -> Tensor:
        return self.by * self.net(x)


class Normed(nn.Module):
    """Statistics that forward() changes in each worker, and dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, ACTIONS), nn.Dropout(0.0))
        self.register_buffer("mean", torch.zeros(4))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        self.mean.lerp_(x.reshape(-1, 4).mean(0), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.update(x)
        return self.net(x - self.mean)


def verified(
    collector: BaseCollector,
    net: nn.Module,
    *,
    sync_map: dict[str, str | Source] | None = None,
    batches: int = 4,
    lr: float = 1e-2,
) -> tuple[Trainer, VerifySync]:
    trainer = make_trainer(collector, make_ppo_loss(actor_of(net)), batches=batches)
    sync = SyncWeights(sync_map or ACTOR)
    sync.register(trainer)
    for group in trainer.optimizer.param_groups:
        group["lr"] = lr
    hook = VerifySync(sync, when=EACH, behaviour=EACH)
    hook.register(trainer)
    return trainer, hook


def workers(
    net: nn.Module, kind: type[BaseCollector] = MultiSyncCollector, **scheme: object
) -> BaseCollector:
    return make_workers(kind, actor_of(net), schemes={"policy": BoardScheme(**scheme)}, workers=2)


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("make", [lambda: make_mlp(ACTIONS), Normed])
def test_a_right_policy_holds_in_every_worker(
    make: Callable[[], nn.Module], kind: type[BaseCollector]
) -> None:
    with running(workers(make(), kind)) as collector:
        trainer, hook = verified(collector, make(), batches=6)
        trainer.train()
    assert hook.deviations == []
    assert hook.uncompared == ()
    assert hook.behaviour_held is not None
    if kind is MultiSyncCollector:
        assert hook._report()["verify_sync/outputs_held"] == 2


@pytest.mark.processes
@pytest.mark.seconds
def test_a_worker_that_acts_with_a_packed_weight_is_named() -> None:
    declared = {"policy": Source("loss_module.actor_network", idle=("*",))}
    with running(workers(Packed(packs=True))) as collector:
        trainer, _ = verified(collector, Packed(packs=False), sync_map=declared, batches=8)
        with pytest.raises(PublishError, match="apart from what the learner's module computes") as raised:
            trainer.train()
    assert in_three_lines(raised.value)
    assert "worker" in raised.value.where


@pytest.mark.processes
@pytest.mark.seconds
def test_a_number_that_differs_between_learner_and_worker_is_named() -> None:
    with running(workers(Scaled(2.0))) as collector:
        trainer, _ = verified(collector, Scaled(1.0))
        with pytest.raises(PublishError, match="gives 'logits' that is"):
            trainer.train()


def test_a_collector_in_this_process_is_compared() -> None:
    with running(make_collector(actor_of(make_mlp(ACTIONS)))) as collector:
        trainer, hook = verified(collector, make_mlp(ACTIONS))
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())
    assert hook.behaviour_held is not None
    with running(make_collector(actor_of(Scaled(2.0)))) as collector:
        trainer, _ = verified(collector, Scaled(1.0))
        with pytest.raises(PublishError, match="apart from"):
            trainer.train()


def test_weights_that_stand_still_are_no_proof() -> None:
    with running(make_collector(actor_of(make_mlp(ACTIONS)))) as collector:
        trainer, hook = verified(collector, make_mlp(ACTIONS), lr=0.0)
        trainer.train()
    assert hook.deviations == []
    assert hook.behaviour_held is None
    assert hook._report()["verify_sync/outputs_without_power"] == 1


def test_a_part_of_the_policy_is_compared_by_itself_and_exploration_is_off() -> None:
    q = QValueActor(
        TensorDictModule(make_mlp(ACTIONS), ["observation"], ["action_value"]),
        in_keys=["observation"],
        spec=make_counting_env().action_spec,
    )
    greedy = EGreedyModule(make_counting_env().action_spec, eps_init=1.0, eps_end=1.0)
    loss = DQNLoss(q, action_space="one_hot", delay_value=True)
    with running(make_collector(TensorDictSequential(copy.deepcopy(q), greedy))) as collector:
        trainer = make_trainer(collector, loss)
        sync = SyncWeights({"policy.module[0]": "loss_module.value_network"})
        sync.register(trainer)
        hook = VerifySync(sync, when=EACH, behaviour=EACH)
        hook.register(trainer)
        trainer.train()
    assert (hook.deviations, hook.uncompared) == ([], ())


def test_a_comparison_changes_no_frame() -> None:
    frames = []
    for behaviour in (None, EACH):
        torch.manual_seed(0)
        with running(make_collector(actor_of(Normed()))) as collector:
            trainer = make_trainer(collector, make_ppo_loss(actor_of(Normed())))
            sync = SyncWeights(ACTOR)
            sync.register(trainer)
            VerifySync(sync, when=EACH, behaviour=behaviour).register(trainer)
            seen: list[object] = []
            trainer.register_op("batch_process", lambda batch, seen=seen: seen.append(batch.clone()))
            trainer.train()
            frames.append((torch.stack(seen), list(collector.policy.buffers())))
    assert (frames[0][0] == frames[1][0]).all()
    assert all(torch.equal(a, b) for a, b in zip(frames[0][1], frames[1][1], strict=True))


def test_a_behaviour_that_is_no_trigger_is_refused() -> None:
    with pytest.raises(ConfigError, match="'behaviour' is a trigger, got int"):
        VerifySync(SyncWeights(ACTOR), behaviour=10)

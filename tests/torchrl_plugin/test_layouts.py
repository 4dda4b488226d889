"""Faults 8 and 9: weights of any make arrive whole, or are refused before anything changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync import LayoutMismatch, SyncMapError, SyncWeights
from tests.tools.parts import (
    ACTIONS,
    CanaryPolicy,
    make_collector,
    make_dqn_trainer,
    make_policy,
    make_small_canary,
)
from tests.tools.running import acted, in_three_lines, on_a_board, running, values

pytestmark = pytest.mark.processes

# ------------------------------------------------------------------- fault 8: layouts that differ


def _weights(version: float = 5.0) -> TensorDict:
    return TensorDict.from_module(make_small_canary().fill(version)).data.clone()


def _key(number: int) -> tuple[str, str, str]:
    return ("canary", "weights", str(number))


WRONG: dict[str, Callable[[], object]] = {
    "a leaf is missing": lambda: _weights().exclude(_key(2)),
    "all leaves are missing": lambda: TensorDict(),
    "a leaf is extra": lambda: _weights().set(_key(4), torch.zeros(10)),
    "a shape broadcasts": lambda: _weights().set(_key(3), torch.zeros(1)),
    "a scalar broadcasts": lambda: _weights().set(_key(3), torch.zeros(())),
    "the last shape is another": lambda: _weights().set(_key(3), torch.zeros(11)),
    "a dtype is another": lambda: _weights().set(_key(3), torch.zeros(10, dtype=torch.float64)),
    "the module is larger": lambda: CanaryPolicy(5, 10).fill(5),
    "the module is another": lambda: make_policy(),
    "it holds no weights": lambda: 5,
}


@pytest.mark.parametrize("what", WRONG)
def test_a_push_is_refused_before_anything_changes_when(what: str) -> None:
    policy = make_small_canary().fill(1)
    with on_a_board(policy, workers=1) as collector:
        with pytest.raises(SyncMapError) as refusal:
            collector.update_policy_weights_(WRONG[what]())
        batch = next(iter(collector))
    assert in_three_lines(refusal.value)
    assert acted(batch) == values(batch, "policy_version") == {1}
    assert collector.policy_version == 1


def _collector(policy: nn.Module, process: bool) -> AbstractContextManager[BaseCollector]:
    return on_a_board(policy, workers=1) if process else running(make_collector(policy))


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("source", "said"),
    [
        (CanaryPolicy(5, 10), "no destination leaf"),
        (CanaryPolicy(3, 10), "no source leaf"),
        (CanaryPolicy(4, 1), "does not fit"),
        (nn.Tanh(), "no source leaf"),
    ],
)
@pytest.mark.each_value
def test_a_source_that_does_not_fit_is_refused_at_registration(
    source: nn.Module, said: str, process: bool
) -> None:
    policy = make_small_canary().fill(1)
    with _collector(policy, process) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.source, version = source, collector.policy_version
        with pytest.raises(LayoutMismatch, match=said) as refusal:
            SyncWeights({"policy": "source"}).register(trainer)
        batch = next(iter(collector))
    assert in_three_lines(refusal.value)
    assert acted(batch) == {1}
    assert values(batch, "policy_version") == {version}


def test_a_source_that_no_longer_fits_at_a_publish_is_refused_and_the_old_weights_act() -> None:
    policy = make_small_canary()
    with on_a_board(policy, workers=1) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.source = make_small_canary().fill(2)
        hook = SyncWeights({"policy": "source"})
        hook.register(trainer)
        hook.publish()
        trainer.source.canary.weights[3].data = torch.full((11,), 3.0)
        trainer.source.canary.weights[0].data.fill_(3)
        with pytest.raises(LayoutMismatch, match="11"):
            hook.publish()
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}


def make_tied_canary() -> nn.Module:
    """A canary whose second weight is its first."""
    policy = make_small_canary()
    policy.canary.weights[1] = policy.canary.weights[0]
    return policy


@pytest.mark.parametrize("process", [False, True])
def test_a_tie_that_the_source_loses_is_refused_at_the_next_publish(
    process: bool, fork_workers: None
) -> None:
    board = on_a_board(policy_factory=make_tied_canary, workers=1)
    with board if process else running(make_collector(make_tied_canary())) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.source = make_tied_canary().fill(2)
        hook = SyncWeights({"policy": "source"})
        hook.register(trainer)
        version = hook.publish().version
        state = {name: weight + 1 for name, weight in trainer.source.state_dict().items()}
        trainer.source.load_state_dict(state, assign=True)  # a tensor of its own for each name
        with pytest.raises(LayoutMismatch, match=r"the destination ties it to canary\.weights\.0") as refusal:
            hook.publish()
        batch = next(iter(collector))
    assert in_three_lines(refusal.value)
    assert hook.version == version
    assert acted(batch) == {2}


# ------------------------------------------------------------- fault 9: sources that are not plain


class Scaler(nn.Module):
    """Multiplies by a number that travels only as extra state, nested twice."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = torch.tensor(scale)
        self.calls = 0

    def get_extra_state(self) -> dict[str, object]:
        return {"scale": {"now": self.scale}, "calls": self.calls}

    def set_extra_state(self, state: dict[str, dict[str, torch.Tensor]]) -> None:
        self.scale, self.calls = state["scale"]["now"], state["calls"]

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        action = torch.zeros(*observation.shape[:-1], ACTIONS, dtype=torch.int64)
        action[..., 0] = 1
        return action, (torch.ones_like(observation[..., 0]) * self.scale).detach()


def make_scaled_policy(scale: float = 0.0) -> TensorDictModule:
    module = nn.Sequential(nn.Sequential(Scaler(scale)))
    return TensorDictModule(module, in_keys=["observation"], out_keys=["action", "scale"])


@pytest.mark.parametrize("process", [False, True])
def test_extra_state_of_a_nested_module_travels(process: bool) -> None:
    learner = make_scaled_policy()
    with _collector(make_scaled_policy(), process) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.source = learner
        hook = SyncWeights({"policy": "source"})
        hook.register(trainer)
        batches = iter(collector)
        for scale in (3.0, 4.0):
            learner.module[0][0].scale.fill_(scale)
            learner.module[0][0].calls += 1
            hook.publish()
            assert values(next(batches), "scale") == {scale}


def make_normed_policy() -> nn.Module:
    policy = make_policy()
    nn.utils.parametrizations.weight_norm(policy.module[0].module[0])
    return policy


def _logits_agree(batch: TensorDict, policy: nn.Module) -> bool:
    with torch.no_grad():
        again = policy(batch.select("observation"))["logits"]
    return torch.allclose(again, batch["logits"], atol=1e-6)


def test_a_policy_with_weight_norm_made_by_a_factory_acts_with_what_is_published() -> None:
    learner = make_normed_policy()
    with on_a_board(policy_factory=make_normed_policy) as collector:
        collector.update_policy_weights_(policy=learner)
        batch = next(iter(collector))
    assert _logits_agree(batch, learner)
    assert values(batch, "policy_version") == {1}


def _compiled(policy: nn.Module) -> nn.Module:
    return torch.compile(policy)


def _inner_compiled(policy: nn.Module) -> nn.Module:
    policy.module[0].module[0] = torch.compile(policy.module[0].module[0])
    return policy


def _wrapped_in_ddp(policy: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(policy)


@pytest.fixture
def process_group() -> Iterator[Callable[[], None]]:
    """Call it to have a process group of one."""
    dist = torch.distributed
    yield lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.collect()  # wrappers go before their group
    if dist.is_initialized():
        dist.destroy_process_group()


# What they return must live on: a Trainer that is collected shuts its collector down.
def _by_hook(collector: BaseCollector, learner: nn.Module) -> object:
    trainer = make_dqn_trainer(collector)
    trainer.source = learner
    hook = SyncWeights({"policy": "source"})
    hook.register(trainer)
    hook.publish()
    return hook


def _by_stock_hook(collector: BaseCollector, learner: nn.Module) -> object:
    trainer = make_dqn_trainer(collector)
    trainer.source = learner
    hook = StockUpdateWeights(collector, 1, weight_update_map={"policy": "source"}, trainer=trainer)
    hook()
    return hook


def _by_module(collector: BaseCollector, learner: nn.Module) -> None:
    collector.update_policy_weights_(learner)


def _by_state_dict(collector: BaseCollector, learner: nn.Module) -> None:
    collector.update_policy_weights_(weights=learner.state_dict())


WRAPS = (_compiled, _inner_compiled, _wrapped_in_ddp)
SENDS = (_by_hook, _by_stock_hook, _by_module, _by_state_dict)


@pytest.mark.parametrize(
    ("wrap", "send"),
    [(wrap, send) for wrap in WRAPS for send in SENDS],
)
@pytest.mark.one_case
def test_a_wrapped_learner_reaches_workers_that_act_with_a_plain_policy(
    wrap: Callable[[nn.Module], nn.Module],
    send: Callable[[BaseCollector, nn.Module], object],
    process_group: Callable[[], None],
) -> None:
    plain = make_policy()
    with on_a_board(make_policy(), workers=1) as collector:
        if wrap is _wrapped_in_ddp:
            process_group()
        kept = send(collector, wrap(plain))
        batch = next(iter(collector))
        del kept
    assert _logits_agree(batch, plain)
    assert values(batch, "policy_version") == {2}


def test_a_compiled_worker_sees_what_is_published() -> None:
    # Compiled code does not see a re-pointed .data: such a worker copies, whatever the scheme says.
    learner = make_small_canary()
    with on_a_board(policy_factory=make_compiled_canary, workers=1) as collector:
        batches = iter(collector)
        for version in (1, 2, 3, 4):
            collector.update_policy_weights_(policy=learner.fill(version))
            batch = next(batches)
            assert acted(batch) == values(batch, "policy_version") == {version}


def make_compiled_canary() -> nn.Module:
    policy = make_small_canary()
    policy.canary = torch.compile(policy.canary, backend="eager")
    policy.canary.low_high = policy.canary._orig_mod.low_high
    return policy

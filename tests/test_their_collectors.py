"""rlsync.UpdateWeights on collectors of other makes: their own method carries checked weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.weight_update import SharedMemWeightSyncScheme

from rlsync import DestinationNotFound, LayoutMismatch, UpdateWeights, resolve
from tests.faults.running import acted, running
from tests.parts import (
    CanaryPolicy,
    make_collector,
    make_dqn_trainer,
    make_small_canary,
    make_workers,
)


class TheirCollector:
    """A third party's collector: it can say what its policy is, and take weights."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.taken: list[object] = []

    def get_model(self, name: str) -> nn.Module:
        return {"policy": self.policy}[name]

    def update_policy_weights_(self, weights: object = None) -> None:
        self.taken.append(weights)
        if isinstance(weights, TensorDictBase):
            TensorDict.from_module(self.policy).data.update_(weights.data)


class TheirBlindCollector:
    """A third party's collector that only takes weights."""

    def __init__(self) -> None:
        self.taken: list[TensorDictBase] = []

    def update_policy_weights_(self, weights: TensorDictBase) -> None:
        self.taken.append(weights)


def _with_canary(collector: object) -> tuple[Trainer, CanaryPolicy]:
    trainer = make_dqn_trainer(collector)
    trainer.canary = make_small_canary()
    return trainer, trainer.canary


@pytest.fixture
def sources() -> tuple[Trainer, CanaryPolicy]:
    return _with_canary(make_collector(make_small_canary()))


def _published(weights: object, version: float) -> bool:
    assert isinstance(weights, TensorDictBase)
    parameters = [t for key, t in weights.items(True, True) if "calls" not in key]
    return len(parameters) == 4 and all(bool((t == version).all()) for t in parameters)


def test_an_unknown_collector_gets_checked_weights_through_its_own_method(
    sources: tuple[Trainer, CanaryPolicy],
) -> None:
    trainer, policy = sources
    theirs = TheirCollector(make_small_canary())
    hook = UpdateWeights(theirs, 1, weight_update_map={"policy": "canary"}, trainer=trainer)
    for version in (1, 2):
        policy.fill(version)
        hook()
        assert _published(theirs.taken[-1], version)
        assert theirs.policy.canary.low_high() == (version, version)
    assert len(theirs.taken) == 2
    assert [receipt.version for receipt in hook.receipts] == [1, 2]


def test_an_unknown_collector_gets_nothing_that_does_not_fit_its_policy(
    sources: tuple[Trainer, CanaryPolicy],
) -> None:
    trainer, _ = sources
    theirs = TheirCollector(CanaryPolicy(4, 11))
    with pytest.raises(LayoutMismatch, match="11"):
        UpdateWeights(theirs, 1, weight_update_map={"policy": "canary"}, trainer=trainer)
    hook = UpdateWeights(theirs, 1, policy_weights_getter=make_small_canary)
    with pytest.raises(LayoutMismatch, match="11"):
        hook()
    assert theirs.taken == []


def test_a_collector_that_shows_nothing_gets_the_weights_unchecked_and_the_plan_says_so(
    sources: tuple[Trainer, CanaryPolicy],
) -> None:
    trainer, policy = sources
    theirs = TheirBlindCollector()
    policy.fill(3)
    UpdateWeights(theirs, 1, weight_update_map={"policy": "canary"}, trainer=trainer)()
    assert _published(theirs.taken[0], 3)
    UpdateWeights(theirs, 1, policy_weights_getter=lambda: policy.fill(4))()
    assert _published(theirs.taken[1], 4)
    rows = resolve({"policy": "canary"}, SimpleNamespace(collector=theirs, canary=policy)).rows
    assert {row.note for row in rows} == {"this collector does not show its weights: unchecked"}


def test_an_unknown_collector_without_getter_and_map_decides_for_itself() -> None:
    theirs = TheirCollector(make_small_canary())
    hook = UpdateWeights(theirs, 1)
    hook()
    assert theirs.taken == [None]
    assert hook.version == 1


def test_an_unknown_collector_has_no_other_destination_than_the_policy(
    sources: tuple[Trainer, CanaryPolicy],
) -> None:
    trainer, _ = sources
    theirs = TheirCollector(make_small_canary())
    wrong = {"env.transform[0]": "canary"}
    with pytest.raises(DestinationNotFound, match="offers: policy"):
        UpdateWeights(theirs, 1, weight_update_map=wrong, trainer=trainer)


@pytest.mark.usefixtures("fork_workers")
def test_a_process_collector_with_torchrls_own_scheme_gets_checked_weights() -> None:
    schemes = {"policy": SharedMemWeightSyncScheme()}
    with running(
        make_workers(MultiSyncCollector, make_small_canary(), schemes=schemes, workers=1)
    ) as collector:
        trainer, policy = _with_canary(collector)
        hook = UpdateWeights(collector, 1, weight_update_map={"policy": "canary"}, trainer=trainer)
        policy.fill(2)
        with torch.no_grad():
            hook()
        batches = iter(collector)
        next(batches)
        assert acted(next(batches)) == {2}
        trainer.canary = CanaryPolicy(4, 11)
        with pytest.raises(LayoutMismatch, match="11"):
            hook()

"""rlsync.UpdateWeights on collectors of other makes: their own method carries checked weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.weight_update import SharedMemWeightSyncScheme, WeightSyncScheme

from rlsync import (
    BoardScheme,
    DestinationNotFound,
    LayoutMismatch,
    NoBoard,
    RlsyncWarning,
    SyncWeights,
    UpdateWeights,
    resolve,
)
from tests.tools.parts import (
    CanaryPolicy,
    make_collector,
    make_counting_env,
    make_dqn_trainer,
    make_small_canary,
    make_workers,
)
from tests.tools.running import acted, running

#: What a process collector without a board has to be given.
BOARD_LINE = r"pass weight_sync_schemes=\{'policy': rlsync\.BoardScheme\(\)\} to the collector"


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


class TheirHolder:
    """A third party's collector that holds its policy, as TorchRL's distributed collectors do."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy
        self.taken: list[object] = []

    def update_policy_weights_(self, weights: object = None) -> None:
        self.taken.append(weights)


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


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (lambda: CanaryPolicy(24, 10), "has no source leaf canary.canary.weights.10"),
        (lambda: CanaryPolicy(9, 10), "canary.weights.9"),
        (lambda: CanaryPolicy(10, 1), r"shape \[10\] does not fit \[1\]"),
        (lambda: CanaryPolicy(10, 11), r"shape \[10\] does not fit \[11\]"),
    ],
    ids=["layers that the source lacks", "a layer too many", "a width of 1", "another width"],
)
def test_a_source_is_compared_leaf_by_leaf_with_the_policy_that_a_collector_holds(
    sources: tuple[Trainer, CanaryPolicy], held: Callable[[], nn.Module], told: str
) -> None:
    trainer, _ = sources
    trainer.canary, theirs = CanaryPolicy(10, 10), TheirHolder(held())
    ours = SimpleNamespace(collector=theirs, canary=trainer.canary)
    with pytest.raises(LayoutMismatch, match=told):
        resolve({"policy": "canary"}, ours).check()
    with pytest.raises(LayoutMismatch, match=told):
        UpdateWeights(theirs, 1, weight_update_map={"policy": "canary"}, trainer=trainer)
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
        with pytest.warns(NoBoard, match=BOARD_LINE):
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


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize(
    "schemes",
    [{}, {"policy": SharedMemWeightSyncScheme}, {"policy": BoardScheme}],
    ids=["none", "theirs", "ours"],
)
@pytest.mark.parametrize("stamped", [True, False])
def test_a_forgotten_board_is_told_once_at_register_and_in_the_plan(
    schemes: dict[str, type[WeightSyncScheme]], stamped: bool
) -> None:
    made = {name: scheme() for name, scheme in schemes.items()}
    collector = MultiSyncCollector(
        [make_counting_env],
        make_small_canary(),
        frames_per_batch=20,
        total_frames=-1,
        track_policy_version=stamped,
        weight_sync_schemes=made or None,
    )
    with running(collector):
        trainer, _ = _with_canary(collector)
        hook = SyncWeights({"policy": "canary"})
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RlsyncWarning)
            hook.register(trainer)
        about_us = [warning for warning in told if issubclass(warning.category, RlsyncWarning)]
        if schemes == {"policy": BoardScheme}:
            assert about_us == []
            assert hook.plan.notes == ("replaces TorchRL's UpdateWeights(MultiSyncCollector) at post_steps",)
            return
        (warning,) = about_us
        assert warning.category is NoBoard
        assert warning.filename == __file__, "at the line that registers"
        for said in (str(warning.message), hook.plan.summary()):
            assert "weight_sync_schemes={'policy': rlsync.BoardScheme()}" in said
            assert ("frames carry no policy_version" in said) is not stamped
            assert ("stamps may be wrong" in said) is stamped

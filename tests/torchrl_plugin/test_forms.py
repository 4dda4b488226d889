"""Fault 18: every documented form of update_policy_weights_ drives a board."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tensordict import TensorDict
from torchrl.collectors import BaseCollector

from rlsync import SyncWeights
from tests.tools.parts import CanaryPolicy, make_dqn_trainer, make_small_canary
from tests.tools.running import acted, on_a_board, values

pytestmark = pytest.mark.usefixtures("fork_workers")

FORMS: dict[str, Callable[[BaseCollector, CanaryPolicy], None]] = {
    "a module": lambda c, p: c.update_policy_weights_(p),
    "policy=": lambda c, p: c.update_policy_weights_(policy=p),
    "a tensordict": lambda c, p: c.update_policy_weights_(TensorDict.from_module(p)),
    "weights=tensordict": lambda c, p: c.update_policy_weights_(weights=TensorDict.from_module(p)),
    "weights=state_dict": lambda c, p: c.update_policy_weights_(weights=p.state_dict()),
    "a nested dict": lambda c, p: c.update_policy_weights_(TensorDict.from_module(p).to_dict()),
    "weights_dict=": lambda c, p: c.update_policy_weights_(weights_dict={"policy": p}),
    "model_id=": lambda c, p: c.update_policy_weights_(p, model_id="policy"),
    "policy_or_weights=": lambda c, p: c.update_policy_weights_(policy_or_weights=p),
}


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
def test_a_push_arrives_when_it_is_given_as(form: str) -> None:
    with on_a_board(make_small_canary()) as collector:
        FORMS[form](collector, make_small_canary().fill(2))
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}


def test_a_push_without_weights_sends_what_the_collectors_own_policy_holds_now() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        policy.fill(2)
        collector.update_policy_weights_()
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}


def test_a_push_without_weights_publishes_the_map_once_there_is_one() -> None:
    with on_a_board(make_small_canary(), workers=1) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.source = make_small_canary().fill(2)
        hook = SyncWeights({"policy": "source"})
        hook.register(trainer)
        collector.update_policy_weights_()
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}
    assert [receipt.version for receipt in hook.receipts] == [2]

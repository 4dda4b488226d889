"""rlsync.UpdateWeights: TorchRL's own arguments, and what they mean there, without the faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tensordict import TensorDict
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync import ConfigError, LayoutMismatch, UpdateWeights
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from tests.tools.parts import (
    CanaryPolicy,
    Sender,
    make_collector,
    make_dqn_trainer,
    make_policy,
    make_ppo_trainer,
    make_q_policy,
    make_small_canary,
)
from tests.tools.running import ACTOR, acted, in_three_lines, on_a_board, running, values

pytestmark = pytest.mark.usefixtures("fork_workers")


def _with_canary(collector: object) -> tuple[Trainer, CanaryPolicy]:
    trainer = make_dqn_trainer(collector)
    trainer.canary = make_small_canary()
    return trainer, trainer.canary


# --------------------------------------------------------------------------------------- validation

WRONG: dict[str, Callable[[], UpdateWeights]] = {
    "nothing to send to": lambda: UpdateWeights(None, 1),
    "an interval is a positive": lambda: UpdateWeights(make_collector(make_policy()), 0),
    "no interval unit 'steps'": lambda: UpdateWeights(sender=Sender(), interval_unit="steps"),
    "sources of a map are paths": lambda: UpdateWeights(
        make_collector(make_policy()), 1, weight_update_map=ACTOR
    ),
    "optimizer steps are counted by a trainer": lambda: UpdateWeights(
        sender=Sender(), interval_unit="optim_steps"
    ),
    "a sender knows its own weights": lambda: UpdateWeights(
        sender=Sender(), policy_weights_getter=make_policy
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_arguments_that_torchrl_refuses_are_refused_as_a_value_error_that_says(said: str) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        WRONG[said]()
    assert isinstance(refusal.value, ConfigError)
    assert in_three_lines(refusal.value)


# ------------------------------------------------------------------------- getter, map and sender

GETTERS: dict[str, Callable[[CanaryPolicy], object]] = {
    "a module": lambda policy: policy,
    "a tensordict": TensorDict.from_module,
    "a state dict": lambda policy: policy.state_dict(),
}


@pytest.mark.one_case
@pytest.mark.parametrize("returns", GETTERS)
def test_what_the_getter_returns_reaches_the_workers(returns: str) -> None:
    policy = make_small_canary()
    with on_a_board(make_small_canary()) as collector:
        hook = UpdateWeights(collector, 1, policy_weights_getter=lambda: GETTERS[returns](policy))
        batches = iter(collector)
        for version in (2, 3):
            policy.fill(version)
            hook()
            batch = next(batches)
            assert acted(batch) == values(batch, "policy_version") == {version}
    assert [receipt.version for receipt in hook.receipts] == [2, 3]
    assert {receipt.copied_leaves for receipt in hook.receipts} == {5}


def test_what_the_getter_returns_reaches_an_in_process_collector() -> None:
    acting, policy = make_small_canary(), make_small_canary().fill(3)
    collector = make_collector(acting)
    UpdateWeights(collector, 1, policy_weights_getter=lambda: policy)()
    batch = next(iter(collector))
    assert acted(batch) == {3}
    assert values(batch, "policy_version") == values(batch, "next", "policy_version") == {1}
    collector.shutdown()


@pytest.mark.parametrize("process", [False, True])
def test_what_the_getter_returns_is_checked_before_anything_changes(process: bool) -> None:
    acting = make_small_canary().fill(1)
    with on_a_board(acting) if process else running(make_collector(acting)) as collector:
        hook = UpdateWeights(collector, 1, policy_weights_getter=lambda: CanaryPolicy(4, 1))
        version = collector.policy_version
        with pytest.raises(LayoutMismatch) as refusal:
            hook()
        batch = next(iter(collector))
    assert in_three_lines(refusal.value)
    assert acted(batch) == {1}
    assert values(batch, "policy_version") == {version}


def test_a_map_takes_precedence_over_a_getter() -> None:
    with on_a_board(make_small_canary()) as collector:
        trainer, policy = _with_canary(collector)
        hook = UpdateWeights(
            collector,
            1,
            policy_weights_getter=lambda: make_small_canary().fill(9),
            weight_update_map={"policy": "canary"},
            trainer=trainer,
        )
        policy.fill(2)
        hook()
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}


def test_without_getter_and_map_the_collectors_own_policy_is_published() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        hook = UpdateWeights(collector, 1)
        policy.fill(2)
        hook()
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}
    assert hook.version == 2


def test_a_send_that_finds_no_room_counts_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_a_board(make_small_canary()) as collector:
        hook = UpdateWeights(collector, 1)
        version = hook.version
        with monkeypatch.context() as full:
            full.setattr(endpoint_of(collector).publisher.transport._slots, "take", lambda: None)
            receipt = hook.publish()
        assert (receipt.coalesced, receipt.copied_bytes) == (True, 0)
        assert receipt.version == hook.version == version
        assert hook.publish().version == version + 1


def test_a_sender_does_the_sending_in_the_middle_of_an_optimization_loop() -> None:
    sender = Sender()
    trainer = make_dqn_trainer(make_collector(make_q_policy()), total_frames=30)
    hook = UpdateWeights(None, 2, sender=sender, trainer=trainer, interval_unit="optim_steps")
    hook.register(trainer)
    trainer.train()
    assert [receipt.optim_steps for receipt in hook.receipts] == [2, 4, 6]
    assert sender.sent == hook.version == 3


# ------------------------------------------------------------------------------ units and stages

# (batches, optimizer steps) at each publish of a training of 4 batches, 2 optimizer steps each
UNITS = {"batches": [(2, 4), (4, 8)], "optim_steps": [(0, 2), (1, 4), (2, 6), (3, 8)]}


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["register", "register_op"])
@pytest.mark.parametrize("unit", UNITS)
def test_an_interval_of_two_counts(unit: str, way: str) -> None:
    policy = make_policy()
    with on_a_board(policy) as collector:
        trainer = make_ppo_trainer(collector, policy, total_frames=40, weight_update_map=ACTOR)
        hook = UpdateWeights(collector, 2, weight_update_map=ACTOR, trainer=trainer, interval_unit=unit)
        if way == "register":
            hook.register(trainer)
        else:
            trainer.register_op("post_optim" if unit == "optim_steps" else "post_steps", hook)
        trainer.train()
    assert [(r.batches, r.optim_steps) for r in hook.receipts] == UNITS[unit]
    assert [receipt.version for receipt in hook.receipts] == list(range(2, 2 + len(UNITS[unit])))


def test_a_hook_that_meets_its_trainer_at_register_counts_its_batches_there() -> None:
    acting = make_small_canary()
    collector = make_collector(acting)
    hook = UpdateWeights(collector, 2, policy_weights_getter=make_small_canary)
    for _ in range(5):
        hook()
    assert [receipt.batches for receipt in hook.receipts] == [2, 4]


def calls(hook: UpdateWeights | StockUpdateWeights, count: int) -> list[int]:
    """The calls, by their number in this process, at which a hook sent."""
    sent = []
    for call in range(1, count + 1):
        before = hook.sender.sent
        hook()
        if hook.sender.sent > before:
            sent.append(call)
    return sent


HOOKS = {"rlsync": UpdateWeights, "TorchRL": StockUpdateWeights}


@pytest.mark.parametrize("second", HOOKS)
@pytest.mark.parametrize("first", HOOKS)
@pytest.mark.each_value
def test_the_counter_is_torchrl_s_and_either_hook_goes_on_where_the_other_was_saved(
    first: str, second: str
) -> None:
    saved = HOOKS[first](update_weights_interval=3, sender=Sender())
    assert saved.counter == 0
    assert calls(saved, 4) == [3]
    assert saved.counter == 4
    resumed = HOOKS[second](update_weights_interval=3, sender=Sender())
    resumed.load_state_dict(saved.state_dict())
    assert resumed.counter == 4
    # Ours sends what it has loaded at the first call; then both send at calls 6 and 9 of the whole run.
    again = [1] if second == "rlsync" else []
    assert calls(resumed, 5) == [*again, 2, 5]
    assert resumed.counter == 9


def test_the_counter_stays_at_zero_where_optimizer_steps_are_counted_as_in_torchrl() -> None:
    trainer = make_dqn_trainer(make_collector(make_q_policy()), total_frames=30)
    settings = {"update_weights_interval": 2, "trainer": trainer, "interval_unit": "optim_steps"}
    hook = UpdateWeights(sender=Sender(), **settings)
    hook.register(trainer)
    trainer.train()
    assert hook.counter == 0
    stock = StockUpdateWeights(sender=Sender(), **settings)
    stock.load_state_dict(hook.state_dict())
    assert stock.state_dict() == {"counter": 0, "last_update_count": 6}
    resumed = UpdateWeights(sender=Sender(), **settings | {"trainer": make_dqn_trainer(trainer.collector)})
    resumed.load_state_dict(stock.state_dict())
    assert resumed.state_dict()["last_update_count"] == 6


@pytest.mark.one_case
@pytest.mark.parametrize("way", ["register", "register_op"])
def test_the_counters_are_part_of_the_trainers_checkpoint(way: str) -> None:
    def build(frames: int) -> tuple[Trainer, UpdateWeights]:
        trainer = make_ppo_trainer(make_collector(make_policy()), total_frames=frames)
        hook = UpdateWeights(trainer.collector, 2, weight_update_map=ACTOR, trainer=trainer)
        if way == "register":
            hook.register(trainer)
        else:
            trainer.register_op("post_steps", hook)
        return trainer, hook

    trainer, _ = build(30)
    state: dict[str, object] = {}
    trainer.register_op("shutdown", lambda: state.update(trainer.state_dict()))
    trainer.train()
    trainer, hook = build(60)
    trainer.load_state_dict(state)
    trainer.train()
    done = [(receipt.reason, receipt.batches) for receipt in hook.receipts]
    assert done == [("resume", 3), ("trigger", 4), ("trigger", 6)]
    assert hook.counter == 6

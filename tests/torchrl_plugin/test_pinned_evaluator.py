"""TorchRL's Evaluator, pinned: each evaluation acts with one published version, and its result says which."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl import trainers
from torchrl.collectors import Evaluator, MultiSyncCollector
from torchrl.trainers import Trainer

from rlsync import BoardScheme, ConfigError, DestinationNotFound, LayoutMismatch, SyncWeights
from tests.tools.parts import (
    CanaryPolicy,
    make_collector,
    make_dqn_trainer,
    make_policy,
    make_small_canary,
    make_workers,
)
from tests.tools.parts.evaluators import acting, make_canary, make_env
from tests.tools.parts.evaluators import evaluator as new_evaluator
from tests.tools.running import in_three_lines, on_a_board, running

pytestmark = pytest.mark.usefixtures("fork_workers")

#: Long enough for any evaluation here.
WITHIN_S = 100.0


def make_evaluator(policy: CanaryPolicy | None = None, **options: Any) -> Evaluator:
    made = {"policy": policy} if policy is not None else {"policy_factory": make_canary}
    return new_evaluator(make_env() if policy is not None else make_env, **made, **options)


#: Each way in which an Evaluator makes and feeds what acts.
EVALUATORS: dict[str, Callable[[CanaryPolicy], Evaluator]] = {
    "a thread, the learner's own policy": lambda learner: make_evaluator(learner),
    "a thread, a policy of its own": lambda learner: make_evaluator(make_small_canary()),
    "a thread, a factory": lambda learner: make_evaluator(),
    "a thread, a factory that returns the learner's own policy": lambda learner: Evaluator(
        make_env,
        policy_factory=lambda env: learner,
        num_trajectories=3,
        frames_per_batch=10,
        metrics_fn=acting,
    ),
    "a process": lambda learner: make_evaluator(backend="process"),
    "a process on a board": lambda learner: make_evaluator(
        backend="process", weight_sync_schemes={"policy": BoardScheme()}
    ),
}


@contextmanager
def ended(evaluator: Evaluator) -> Iterator[Evaluator]:
    try:
        yield evaluator
    finally:
        evaluator.shutdown()


def with_canary(collector: object, learner: CanaryPolicy) -> tuple[Trainer, SyncWeights]:
    trainer = make_dqn_trainer(collector)
    trainer.canary = learner
    sync = SyncWeights({"policy": "canary"}, max_unchanged_publishes=None)
    sync.register(trainer)
    return trainer, sync


@contextmanager
def learning(kind: str) -> Iterator[tuple[CanaryPolicy, SyncWeights]]:
    """A learner whose weights hold the version that is published next."""
    learner = make_small_canary()
    if kind == "a board":
        with on_a_board(learner) as collector:
            yield learner, with_canary(collector, learner)[1]
    else:
        with running(make_collector(copy.deepcopy(learner))) as collector:
            yield learner, with_canary(collector, learner)[1]


def told(result: dict[str, Any] | None) -> tuple[float, float, float]:
    assert result is not None
    return result["eval/low"], result["eval/high"], result["eval/policy_version"]


@pytest.mark.seconds
@pytest.mark.parametrize("transport", ["a board", "in process"])
@pytest.mark.parametrize("way", EVALUATORS)
@pytest.mark.one_case
def test_an_evaluation_acts_with_one_version_while_the_learner_writes_and_publishes(
    way: str, transport: str
) -> None:
    with learning(transport) as (learner, sync), ended(EVALUATORS[way](learner)) as evaluator:
        sync.pin(evaluator)
        learner.fill(sync.version + 1)
        sync()  # the first publish, which a trainer makes before its first frame
        # Its process starts now, while nothing else runs here: a fork beside a busy thread may hang.
        assert told(evaluator.evaluate()) == (sync.version, sync.version, sync.version)
        for _ in range(3):
            learner.fill(sync.version + 1)
            sync.publish()
            version = sync.version
            assert evaluator.trigger_eval(step=version)
            result = None
            while result is None:  # the learner goes on, and publishes without a pause
                learner.fill(sync.version + 1)
                sync.publish()
                result = evaluator.poll()
            assert told(result) == (version, version, version)
            assert sync.version > version
            assert learner.canary.low_high() == (sync.version, sync.version)  # nobody wrote into the learner
        learner.fill(-1.0)  # the learner is ahead of what it has published
        assert told(evaluator.evaluate()) == (sync.version, sync.version, sync.version)


def test_the_callback_and_a_custom_prefix_have_the_version_too() -> None:
    results: list[TensorDictBase] = []
    with learning("in process") as (learner, sync):
        evaluator = make_evaluator(make_small_canary(), log_prefix="test", on_result=results.append)
        with ended(evaluator):
            sync.pin(evaluator)
            learner.fill(1)
            result = evaluator.evaluate()
    assert result["test/policy_version"] == 1
    assert int(results[0]["test/policy_version"]) == 1


def test_an_evaluation_before_the_first_frame_publishes_the_first_version() -> None:
    with learning("in process") as (learner, sync), ended(make_evaluator(make_small_canary())) as evaluator:
        sync.pin(evaluator)
        learner.fill(1)
        assert told(evaluator.evaluate()) == (1, 1, 1)
        assert [receipt.reason for receipt in sync.receipts] == ["start"]


def test_versions_that_nobody_kept_are_not_guessed() -> None:
    with learning("in process") as (learner, sync), ended(make_evaluator(make_small_canary())) as evaluator:
        sync()
        learner.fill(2)
        sync.pin(evaluator)  # version 1 is past, and its weights are nowhere else
        assert told(evaluator.evaluate()) == (2, 2, 2)
        assert [(r.version, r.reason) for r in sync.receipts] == [(1, "start"), (2, "call")]


def test_requests_that_queue_up_keep_their_versions() -> None:
    with learning("in process") as (learner, sync):
        with ended(make_evaluator(make_small_canary(), busy_policy="queue")) as evaluator:
            sync.pin(evaluator)
            learner.fill(1)
            assert evaluator.trigger_eval()
            assert told(evaluator.wait(WITHIN_S)) == (1, 1, 1)
            for version in (2, 3):
                learner.fill(version)
                sync.publish()
                assert evaluator.trigger_eval()
            learner.fill(9)
            last = evaluator.wait(WITHIN_S)
            while told(last)[2] < 3:  # TorchRL may lose a result that is not fetched before the next one
                assert told(last) == (2, 2, 2)
                last = evaluator.wait(WITHIN_S)
            assert told(last) == (3, 3, 3)


@pytest.mark.skipif(not hasattr(Evaluator, "evaluate_episodes"), reason="TorchRL has it from 0.15 on")
def test_episodes_one_by_one_act_with_one_version_and_say_which() -> None:
    with learning("a board") as (learner, sync):
        evaluator = make_evaluator(learner, max_steps=7)
        with ended(evaluator):
            sync.pin(evaluator)
            for publish in (sync, sync.publish):
                learner.fill(sync.version + 1)
                publish()
                learner.fill(-1.0)
                episodes = evaluator.evaluate_episodes(seed=0)
                assert episodes["policy_version"].tolist() == [sync.version] * 3
                # what it acts with still holds the version
                assert evaluator._backend._policy.canary.low_high() == (sync.version, sync.version)
                assert told(evaluator.evaluate()) == (sync.version, sync.version, sync.version)


@pytest.mark.skipif(not hasattr(Evaluator, "evaluate_episodes"), reason="TorchRL has it from 0.15 on")
def test_evaluations_of_rollouts_without_a_collector_act_with_one_version() -> None:
    with learning("in process") as (learner, sync):
        evaluator = make_evaluator(learner, max_steps=7, episode_sampling="per_env")
        with ended(evaluator):
            sync.pin(evaluator)
            learner.fill(1)
            assert told(evaluator.evaluate()) == (1, 1, 1)


@pytest.mark.skipif(not hasattr(trainers, "EvaluatorHook"), reason="TorchRL has it from 0.15 on")
@pytest.mark.parametrize("make", [make_collector, partial(make_workers, MultiSyncCollector)])
def test_a_hook_of_torchrls_that_evaluates_acts_with_what_was_published(make: Callable[..., Any]) -> None:
    learner = make_small_canary()
    schemes = {} if make is make_collector else {"schemes": {"policy": BoardScheme()}}
    with running(make(copy.deepcopy(learner), **schemes)) as collector:
        trainer, sync = with_canary(collector, learner)
        with ended(make_evaluator(make_small_canary())) as evaluator:
            sync.pin(evaluator)
            hook = trainers.EvaluatorHook(evaluator, every_frames=1, policy="canary", run_at_start=True)
            hook.register(trainer)
            trainer.register_op("post_optim", lambda: learner.fill(sync.version + 1))
            learner.fill(sync.version + 1)
            with pytest.raises(ConfigError, match="given by hand"):
                evaluator.evaluate(learner)
            trainer.train()
    seen = [trainer._log_dict[f"evaluation/{name}"] for name in ("low", "high", "policy_version")]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) >= 2


# ------------------------------------------------------------------------------------------- refused


def test_weights_given_by_hand_are_refused() -> None:
    with learning("in process") as (learner, sync), ended(make_evaluator(make_small_canary())) as evaluator:
        sync.pin(evaluator)
        for call in (evaluator.evaluate, evaluator.trigger_eval):
            with pytest.raises(ConfigError, match="given by hand have no version") as refusal:
                call(learner)
            assert in_three_lines(refusal.value)


def test_an_evaluator_that_has_evaluated_already_is_refused() -> None:
    with learning("in process") as (_, sync), ended(make_evaluator(make_small_canary())) as evaluator:
        evaluator.evaluate()
        with pytest.raises(ConfigError, match="has evaluated already") as refusal:
            sync.pin(evaluator)
        assert in_three_lines(refusal.value)
        assert "eval/policy_version" not in evaluator.evaluate()


def test_a_policy_with_other_leaves_is_refused() -> None:
    other = CanaryPolicy(tensors=5, size=10)
    with learning("in process") as (_, sync), ended(make_evaluator(other)) as evaluator:
        with pytest.raises(LayoutMismatch, match="of the collector's policy") as refusal:
            sync.pin(evaluator)
        assert in_three_lines(refusal.value)


def test_a_destination_that_the_evaluators_process_does_not_have_is_refused() -> None:
    learner = make_policy()
    with running(make_collector(copy.deepcopy(learner))) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.actor = learner
        sync = SyncWeights({"policy.module[0]": "actor.module[0]"})
        sync.register(trainer)
        with ended(make_evaluator(backend="process")) as evaluator:
            with pytest.raises(DestinationNotFound, match=r"no destination 'policy.module\[0\]'") as refusal:
                sync.pin(evaluator)
    assert in_three_lines(refusal.value)


def test_an_unbound_hook_pins_nothing() -> None:
    with ended(make_evaluator(make_small_canary())) as evaluator:
        with pytest.raises(ConfigError, match="has no trainer yet"):
            SyncWeights({"policy": "canary"}).pin(evaluator)

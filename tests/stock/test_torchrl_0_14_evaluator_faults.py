"""Faults of TorchRL 0.14's Evaluator that SyncWeights.pin works around."""

from __future__ import annotations

import pytest
from tensordict import TensorDictBase
from torchrl.collectors import Evaluator

from tests.stock.faults import still_happens
from tests.tools.parts import CanaryPolicy, CountingEnv, make_small_canary
from tests.tools.parts.evaluators import evaluator, make_canary, make_env

EVALUATORS = "rlsync/torchrl_plugin/compat/evaluators.py"


class WhileItLearns(CountingEnv):
    """Steps a learner at each of its own steps, as one in another thread does at some of them."""

    def __init__(self, learner: CanaryPolicy) -> None:
        super().__init__()
        self.learner = learner
        self.learned = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.learned += 1
        self.learner.fill(self.learned)
        return super()._step(tensordict)


def test_fault_27_an_evaluation_of_the_learners_policy_acts_with_whatever_the_optimizer_writes() -> None:
    learner = make_small_canary()
    stock = evaluator(WhileItLearns(learner), policy=learner)
    result = stock.evaluate()
    stock.shutdown()
    still_happens(23, result["eval/low"] < result["eval/high"], EVALUATORS)


def test_fault_28_an_evaluation_of_the_learners_policy_takes_back_what_it_has_learned_since() -> None:
    learner = make_small_canary().fill(5)
    stock = evaluator(make_env(), policy=learner)
    asked = Evaluator.extract_weights(learner)  # as trigger_eval(learner) does
    learner.fill(6)  # meanwhile the evaluating thread begins
    stock.evaluate(asked)
    stock.shutdown()
    still_happens(24, learner.canary.low_high() == (5, 5), EVALUATORS)


@pytest.mark.usefixtures("fork_workers")
def test_fault_29_an_evaluation_in_a_process_ends_episodes_of_the_one_before() -> None:
    stock = evaluator(make_env, policy_factory=make_canary, backend="process")
    learner = make_small_canary()
    results = [stock.evaluate(learner.fill(version)) for version in (1, 2, 3)]
    stock.shutdown()
    mixed = [(result["eval/low"], result["eval/high"]) for result in results[1:]]
    still_happens(25, mixed == [(1, 2), (2, 3)], EVALUATORS)


def test_fault_30_the_result_of_an_evaluation_does_not_name_its_weights() -> None:
    stock = evaluator(make_env(), policy=make_small_canary(), collector_kwargs={"track_policy_version": True})
    result = stock.evaluate(make_small_canary())
    stock.shutdown()
    still_happens(26, not any("version" in name for name in result), EVALUATORS)

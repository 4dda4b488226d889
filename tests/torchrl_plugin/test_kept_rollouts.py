"""Asynchronous workers go on collecting, whatever the learner asks them between two batches."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from torchrl.collectors import BaseCollector, MultiAsyncCollector

from rlsync import AdoptionTimeout, WatchWorkers
from tests.tools.parts import FRAMES_PER_BATCH, make_dqn_trainer, make_small_canary
from tests.tools.parts.envs import SlowEnv
from tests.tools.running import on_a_board

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_workers")]

#: More than the two rollouts that could have been under way when the learner asked.
BATCHES = 6


def ask_for_state(collector: BaseCollector) -> None:
    collector.state_dict()


def ask_for_an_attribute(collector: BaseCollector) -> None:
    collector.getattr_policy("training")


@pytest.mark.one_case
@pytest.mark.parametrize("ask", [ask_for_state, ask_for_an_attribute])
@pytest.mark.parametrize("watched", [True, False], ids=["watched", "unwatched"])
def test_workers_that_are_asked_between_batches_go_on_collecting(
    ask: Callable[[BaseCollector], None], watched: bool
) -> None:
    with on_a_board(make_small_canary(), MultiAsyncCollector) as collector:
        trainer = make_dqn_trainer(collector)  # its end would shut the collector down
        if watched:
            WatchWorkers(silent_timeout_s=60.0).register(trainer)
        batches = iter(collector)
        for _ in range(BATCHES):
            next(batches)
            ask(collector)
            ask(collector)


def test_no_step_is_lost_and_none_comes_twice() -> None:
    with on_a_board(make_small_canary(), MultiAsyncCollector, workers=1) as collector:
        batches, seen = iter(collector), []
        for _ in range(BATCHES):
            seen += next(batches)["observation"][..., 0].flatten().tolist()
            collector.state_dict()
    assert len(seen) == BATCHES * FRAMES_PER_BATCH
    assert seen == [float(step % 10) for step in range(len(seen))], "an episode has ten steps"


@pytest.mark.thorough
@pytest.mark.seconds
def test_a_question_to_a_worker_that_is_stopped_in_its_rollout_ends_when_the_watch_says_so() -> None:
    with on_a_board(make_small_canary(), MultiAsyncCollector, workers=1, env=SlowEnv) as collector:
        trainer = make_dqn_trainer(collector)
        WatchWorkers(silent_timeout_s=4.0).register(trainer)
        next(iter(collector))
        os.kill(collector.procs[0].pid, signal.SIGSTOP)  # the watch ends it
        with pytest.raises(AdoptionTimeout, match="stopped"):
            collector.state_dict()

"""Faults 3, 5, 6, 17, 19, 20 and 22: what reaches workers, and what of theirs reaches the learner."""

from __future__ import annotations

import multiprocessing
import time
from itertools import pairwise
from multiprocessing.connection import Connection

import pytest
import torch
from tensordict import TensorDictBase, from_modules
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector

from rlsync import AdoptionTimeout, ConfigError, PublishError, Source, SyncWeights
from tests.tools.parts import (
    CanaryPolicy,
    make_collector,
    make_dqn_trainer,
    make_policy,
    make_ppo_trainer,
    make_small_canary,
    stopped,
)
from tests.tools.programs import ENDS_WITHIN_S
from tests.tools.running import ACTOR, acted, in_three_lines, on_a_board, values

pytestmark = pytest.mark.usefixtures("fork_workers")

SOON_S = 10.0
both_kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
both_ways = pytest.mark.parametrize("adopt", ["alias", "copy"])


def _hooked(collector: object, policy: CanaryPolicy) -> SyncWeights:
    """A hook that publishes `policy`, on a real trainer whose own networks stay out of it."""
    trainer = make_dqn_trainer(collector)
    trainer.canary = policy
    hook = SyncWeights({"policy": "canary"})
    hook.register(trainer)
    return hook


# --------------------------------------------------------------------- fault 3: a killed worker


class Stacked(CanaryPolicy):
    """Acts with a tensordict of parameters, and holds a template without memory, as TdMpc2QEnsemble does."""

    def __init__(self) -> None:
        super().__init__(tensors=2, size=2)
        nets = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
        self.stack = from_modules(*nets, as_module=True)
        self.__dict__["template"] = nets[0].to("meta")

    def fill(self, version: float) -> Stacked:
        for weight in self.stack.data.values(include_nested=True, leaves_only=True):
            weight.fill_(version)
        return super().fill(version)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        stacked = self.stack.values(include_nested=True, leaves_only=True)
        weights = torch.cat([weight.flatten() for weight in stacked])
        tensordict = super().forward(tensordict)
        tensordict.set("canary_min", tensordict["canary_min"].clamp(max=weights.min().item()))
        return tensordict.set("canary_max", tensordict["canary_max"].clamp(min=weights.max().item()))


@both_ways
@pytest.mark.one_case
def test_weights_in_a_tensordict_of_parameters_reach_workers(adopt: str) -> None:
    policy = Stacked().fill(1)
    with on_a_board(policy, adopt=adopt) as collector:
        batches = iter(collector)
        assert acted(next(batches)) == {1}
        _hooked(collector, policy.fill(2)).publish()
        batch = next(batches)
    assert acted(batch) == values(batch, "policy_version") == {2}


# ------------------------------------------------------------- fault 5: memory of the learner's


@pytest.mark.one_case
@both_kinds
@both_ways
def test_workers_do_not_act_with_what_was_not_published(kind: type, adopt: str) -> None:
    policy = make_small_canary().fill(3)
    with on_a_board(policy, kind, adopt=adopt) as collector:
        batches = iter(collector)
        policy.fill(7)
        for _ in range(4):
            assert acted(next(batches)) == {3}


@both_ways
def test_the_learners_parameters_stay_where_they_are_and_are_not_shared(adopt: str) -> None:
    policy = make_policy()
    before = {name: (p, p.data_ptr()) for name, p in policy.named_parameters()}
    with on_a_board(policy, adopt=adopt) as collector:
        trainer = make_ppo_trainer(collector, policy, weight_update_map=ACTOR)
        hook = SyncWeights(ACTOR)
        hook.register(trainer)
        batches = iter(collector)
        hook.publish()
        next(batches)
        collector.update_policy_weights_(policy)
        next(batches)
    for name, parameter in policy.named_parameters():
        assert before[name] == (parameter, parameter.data_ptr())
        assert not parameter.is_shared()
        assert parameter.requires_grad


# ---------------------------------------------------------- fault 6: what was sent, to whom


def test_a_push_to_one_worker_of_two_is_refused_and_changes_nobody() -> None:
    policy = make_small_canary().fill(1)
    with on_a_board(policy) as collector:
        for some in ([0], 1, [1, 2], []):
            with pytest.raises(PublishError, match="all workers") as refusal:
                collector.update_policy_weights_(policy.fill(5), worker_ids=some)
            assert in_three_lines(refusal.value)
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {1}


def test_a_push_that_names_all_workers_reaches_all() -> None:
    policy = make_small_canary()
    with on_a_board(policy) as collector:
        collector.update_policy_weights_(policy.fill(2), worker_ids=[1, 0])
        batch = next(iter(collector))
    assert acted(batch) == values(batch, "policy_version") == {2}


def test_a_worker_acts_with_what_was_sent_even_if_the_learner_has_changed_it_since() -> None:
    policy = make_small_canary()
    with on_a_board(policy, workers=1) as collector:
        with stopped(collector.procs[0].pid):
            collector.update_policy_weights_(policy.fill(2))
            policy.fill(6)
        assert acted(next(iter(collector))) == {2}


@both_ways
def test_a_worker_that_was_asked_for_its_policy_still_acts_with_what_is_published(
    adopt: str,
) -> None:
    # To answer, torch moves the storages of what is pickled into shared memory of their own.
    policy = make_small_canary()
    with on_a_board(policy, adopt=adopt, workers=1) as collector:
        hook, batches = _hooked(collector, policy), iter(collector)
        for version in range(2, 8):
            policy.fill(version)
            hook.publish()
            batch = next(batches)
            assert acted(batch) == values(batch, "policy_version") == {version}
            shown = collector.getattr_policy("canary")
            assert shown.low_high() == (version, version)


# ----------------------------------------------------- fault 17: buffers that forward() mutates


@both_ways
def test_a_buffer_that_a_worker_mutates_stays_as_it_is_in_the_learners_policy(adopt: str) -> None:
    policy = make_small_canary()
    with on_a_board(policy, adopt=adopt, workers=1) as collector:
        batches = iter(collector)
        for _ in range(3):
            next(batches)
            collector.update_policy_weights_()
        in_worker = _calls(collector)
    assert policy.canary.calls.item() == 0
    assert in_worker > 0


def _calls(collector: BaseCollector) -> int:
    return collector.get_distant_attr("policy.canary.calls")[0].item()


def test_a_buffer_that_a_route_excludes_keeps_the_workers_own_value() -> None:
    policy = make_small_canary()
    with on_a_board(policy, workers=1, frames_per_batch=20) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.canary = policy
        hook = SyncWeights({"policy": Source("canary", exclude=("canary.calls",))})
        hook.register(trainer)
        batches, counts = iter(collector), []
        for version in (2, 3, 4):
            policy.fill(version)
            hook.publish()
            assert acted(next(batches)) == {version}
            counts.append(_calls(collector))
    assert [later - sooner for sooner, later in pairwise(counts)] == [20, 20]


# ------------------------------------------ faults 19 and 20: nothing is acknowledged, or piles up


def test_waiting_again_after_a_timeout_is_not_fooled_by_what_came_before() -> None:
    policy = make_small_canary()
    with on_a_board(policy, MultiAsyncCollector, workers=1) as collector:
        hook, batches, pid = _hooked(collector, policy), iter(collector), collector.procs[0].pid
        next(batches)
        with stopped(pid):
            hook.publish()
            with pytest.raises(AdoptionTimeout, match=f"pid {pid}, stopped") as late:
                hook.wait(0.2)
            assert in_three_lines(late.value)
        next(batches)
        next(batches)
        hook.wait(SOON_S)
        with stopped(pid):
            hook.publish()
            with pytest.raises(AdoptionTimeout):
                hook.wait(0.2)


@pytest.mark.thorough
def test_a_shutdown_after_thousands_of_pushes_is_as_quick_as_any() -> None:
    policy = make_small_canary()
    with on_a_board(policy, MultiAsyncCollector) as collector:
        batches = iter(collector)
        for version in range(2, 8002):
            policy.fill(version)
            collector.update_policy_weights_()
        stamp = max(values(next(batches), "policy_version"))
        started = time.monotonic()
        collector.shutdown(timeout=60)
        assert time.monotonic() - started < SOON_S
    assert stamp > 1
    assert [process.exitcode for process in collector.procs] == [0, 0]


# -------------------------------------------------------- fault 22: the stamp of the first frame


def _first_frames(batch: TensorDictBase) -> torch.Tensor:
    return batch["policy_version"].reshape(-1, batch.shape[-1])[:, 0]


@both_ways
def test_the_first_frame_of_a_workers_batch_names_the_version_that_acted(adopt: str) -> None:
    policy = make_small_canary()
    with on_a_board(policy, adopt=adopt) as collector:
        hook, batches = _hooked(collector, policy), iter(collector)
        for version in range(2, 6):
            policy.fill(version)
            hook.publish()
            batch = next(batches)
            assert set(_first_frames(batch).tolist()) == {version}
            assert values(batch, "policy_version") == {version}
            assert values(batch, "next", "policy_version") == {version}
            assert acted(batch) == {version}
            assert collector.policy_version == version


def test_the_first_frame_of_an_in_process_batch_names_the_version_that_acted() -> None:
    acting, learning = make_small_canary(), make_small_canary()
    collector = make_collector(acting, frames_per_batch=15)  # episodes end within batches
    hook, batches = _hooked(collector, learning), iter(collector)
    for version in range(1, 5):
        learning.fill(version)
        hook.publish()
        batch = next(batches)
        assert values(batch, "policy_version") == {version}
        assert values(batch, "next", "policy_version") == {version}
        assert acted(batch) == {version}
    collector.shutdown()


# ------------------------------------------------------------------- processes that may start none


def collect_in_daemon(pipe: Connection) -> None:
    try:
        with on_a_board(make_small_canary(), MultiSyncCollector):
            pipe.send("it collects")
    except ConfigError as error:
        pipe.send(str(error))


def test_a_collector_in_a_daemonic_process_is_refused_before_torchrl_starts_its_workers() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=collect_in_daemon, args=(theirs,), daemon=True)
    process.start()
    process.join(ENDS_WITHIN_S)
    assert ours.poll()
    assert "this process is daemonic" in ours.recv()

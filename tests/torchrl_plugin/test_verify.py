"""Workers that act with anything but what was published are named; those that do not are left alone."""

from __future__ import annotations

import copy
import logging
import os

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.modules import OneHotCategorical, ProbabilisticActor

from rlsync import BoardScheme, ConfigError, Every, PublishError, Source, SyncWeights, WeightBoard
from rlsync.core.trigger import Counters
from rlsync.sync.verification import Found, Prints, Verification
from rlsync.tensors.target import Target
from rlsync.torchrl_plugin.hooks.verify import VerifySync
from tests.tools.parts import (
    ACTIONS,
    FRAMES_PER_BATCH,
    CanaryPolicy,
    kill,
    make_collector,
    make_counting_env,
    make_dqn_trainer,
    make_env_with_module,
    make_mlp,
    make_policy,
    make_ppo_trainer,
    make_workers,
    stopped,
    wait_until,
)
from tests.tools.running import in_three_lines, on_a_board, running

ACTOR = "loss_module.actor_network"
MAP = {"policy": ACTOR}
BATCHES = 5


class Counted(nn.Module):
    """Adds what forward() and extra state do to a module: a buffer it changes, and a number it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.last = 0.5

    def get_extra_state(self) -> dict[str, float]:
        return {"last": self.last}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.last = state["last"]

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last += 1.0
        return observation


class Spoiled(CanaryPolicy):
    """A canary that can be told to overwrite one number of its own weights whenever it acts."""

    bad = False

    def spoil(self, bad: bool) -> None:
        self.bad = bad

    def forward(self, tensordict):
        if self.bad:
            self.canary.weights[3].data[7] += 1.0
        return super().forward(tensordict)


def make_counted_policy() -> ProbabilisticActor:
    net = nn.Sequential(Counted(), make_mlp(ACTIONS))
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def make_trained(collector, actor, batches: int = BATCHES):
    frames = batches * FRAMES_PER_BATCH
    needed = MAP if not isinstance(collector, Collector) else None
    return make_ppo_trainer(collector, actor, total_frames=frames, weight_update_map=needed)


def watch(trainer, sync_map=MAP, **options) -> tuple[SyncWeights, VerifySync]:
    sync = SyncWeights(sync_map)
    sync.register(trainer)
    options = {"timeout_s": 1e-6, "when": Every(1, "batches")} | options
    verify = VerifySync(sync, **options)
    verify.register(trainer)
    return sync, verify


def canaries(collector, policy, sync_map=None) -> tuple[SyncWeights, Verification]:
    """A hook that publishes a canary, and what compares it; driven by hand."""
    trainer = make_dqn_trainer(collector)
    trainer.canary = policy
    sync = SyncWeights(sync_map or {"policy": "canary"})
    sync.register(trainer)
    policy.fill(sync.version + 1)
    sync.publish()
    return sync, sync.bound.endpoint.verification()


def pids(collector) -> list[int]:
    return [process.pid for process in collector.procs]


def named(found: Found) -> list[str]:
    return [f"{deviation.what} | {deviation.where}" for deviation in found.deviations]


# ------------------------------------------------------------------------------- healthy workers


def test_a_collector_that_waits_for_the_next_publish_is_not_late() -> None:
    with running(make_collector(make_policy())) as collector:
        trainer = make_trained(collector, make_policy())
        sync = SyncWeights(MAP, when=Every(BATCHES, "batches"))
        sync.register(trainer)
        verify = VerifySync(sync, when=Every(1, "batches"), timeout_s=1e-6)
        verify.register(trainer)
        trainer.train()
    assert verify.deviations == []


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_training_goes_on_and_every_worker_proves_its_parameters_buffers_and_extra_state(adopt: str) -> None:
    actor = make_counted_policy()
    collector = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme(adopt)})
    trainer = make_trained(collector, actor, batches=6)
    _, verify = watch(trainer)
    trainer.train()
    assert verify.checks == 5  # asked after the batches 1 to 5, heard after 2 to 6
    assert verify.deviations == []
    logged = {name: trainer._log_dict[f"verify_sync/{name}"] for name in ("checks", "answered", "whole")}
    assert logged == {"checks": [0, 1, 2, 3, 4, 5], "answered": [2] * 5, "whole": [2] * 5}


@pytest.mark.usefixtures("fork_workers")
def test_asynchronous_workers_that_adopt_later_versions_are_compared_with_those() -> None:
    policy = CanaryPolicy(tensors=4, size=10)
    with on_a_board(policy, MultiAsyncCollector) as collector:
        sync, check = canaries(collector, policy)
        batches = iter(collector)
        check.ask()
        asked_about = sync.version
        while not (found := check.hear()).done:
            policy.fill(sync.version + 1)
            sync.publish()
            next(batches)
        assert (found.answered, found.deviations) == (2, ())
        assert sync.version > asked_about


@pytest.mark.usefixtures("fork_workers")
def test_buffers_that_forward_has_changed_since_the_adoption_are_no_deviation() -> None:
    policy = CanaryPolicy(tensors=4, size=10)
    with on_a_board(policy) as collector:
        _, check = canaries(collector, policy)
        batches = iter(collector)
        next(batches)  # `calls` grows in the workers
        check.ask()
        next(batches)
        next(batches)
        found = check.hear()
        assert (found.done, found.answered, found.whole, found.deviations) == (True, 2, 0, ())


@pytest.mark.usefixtures("fork_workers")
def test_a_version_costs_the_learner_a_digest_only_while_answers_are_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[int] = []
    of = Prints.of
    monkeypatch.setattr(Prints, "of", lambda leaves: digested.append(1) or of(leaves))
    policy = CanaryPolicy(tensors=4, size=10)
    with on_a_board(policy) as collector:
        sync, check = canaries(collector, policy)
        sync.publish()
        assert digested == []
        check.ask()
        sync.publish()
        assert len(digested) == 2, "the newest version, and the one that came after it"
        batches = iter(collector)
        next(batches)
        next(batches)
        assert check.hear().done
        sync.publish()
        assert len(digested) == 2


@pytest.mark.usefixtures("fork_workers")
def test_leaves_that_no_publish_brings_are_left_out() -> None:
    policy = Spoiled(tensors=4, size=10)
    with on_a_board(policy, adopt="copy") as collector:
        without = {"policy": Source("canary", exclude=("canary.weights.3",))}
        _, check = canaries(collector, policy, without)
        collector.map_fn("policy.spoil", [(True,), (True,)])  # of its own, and it may keep it
        check.ask()
        batches = iter(collector)
        next(batches)
        next(batches)
        found = check.hear()
        assert (found.answered, found.deviations) == (2, ())


# ------------------------------------------------------------------------- workers that deviate


@pytest.mark.usefixtures("fork_workers")
def test_a_worker_that_overwrites_its_own_weights_is_named_with_pid_destination_and_version() -> None:
    policy = Spoiled(tensors=4, size=10)
    with on_a_board(policy, adopt="copy") as collector:
        sync, check = canaries(collector, policy)
        collector.map_fn("policy.spoil", [(False,), (True,)])
        check.ask()
        batches = iter(collector)
        next(batches)
        next(batches)
        said = named(check.hear())
        assert said == [
            f"the parameters that act are not those published as version {sync.version} | "
            f"destination 'policy' of worker 1 (pid {pids(collector)[1]})"
        ]


@pytest.mark.usefixtures("fork_workers")
def test_weights_overwritten_once_between_rollouts_are_found_without_another_publish() -> None:
    policy = Spoiled(tensors=4, size=10)
    with on_a_board(policy, adopt="copy") as collector:
        _, check = canaries(collector, policy)
        batches = iter(collector)
        next(batches)
        collector.map_fn("policy.canary.fill", [(2.0,), (99.0,)])
        check.ask()
        next(batches)
        next(batches)
        [said] = named(check.hear())
        assert "worker 1" in said


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("lost", ["parameters", "buffers or extra state"])
def test_a_worker_that_claims_a_version_it_did_not_take_ends_the_training(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Target._copy

    def sloppy(self, views, which):
        honest(self, views, which)
        mine = self._buffers if lost != "parameters" else self._parameters
        for i in mine if "worker 1" in self.where else []:
            self._live[i].data.add_(1)

    monkeypatch.setattr(Target, "_copy", sloppy)  # workers are forked: they have it, too
    actor = make_counted_policy()
    collector = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme("copy")})
    with running(collector):
        trainer = make_trained(collector, actor)
        _, verify = watch(trainer)
        pid = pids(collector)[1]
        with pytest.raises(PublishError) as error:
            trainer.train()
        assert in_three_lines(error.value)
        assert f"the {lost} that act are not those published as version 3" in str(error.value)
        assert f"destination 'policy' of worker 1 (pid {pid})" in str(error.value)
        assert "worker 0" not in str(error.value)
        assert len(verify.deviations) == 1


@pytest.mark.usefixtures("fork_workers")
def test_a_worker_that_never_adopts_is_named_though_its_frames_arrive() -> None:
    actor = make_policy()
    collector = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme()})
    with running(collector):
        trainer = make_trained(collector, actor)
        watch(trainer)
        collector.map_fn("__setattr__", [("nothing", 0), ("nothing", 0)])
        collector.map_fn("__delattr__", [("nothing",), ("rollout",)])  # worker 1: past its boundary
        with pytest.raises(PublishError) as error:
            trainer.train()
        assert in_three_lines(error.value)
        assert "no rollout with version 3 or a later one has ended" in str(error.value)
        assert f"worker 1 (pid {pids(collector)[1]}, running, acts with version" in str(error.value)
        assert "worker 0" not in str(error.value)


@pytest.mark.usefixtures("fork_workers")
def test_a_stopped_worker_has_not_answered_and_a_dead_one_is_not_waited_for() -> None:
    policy = CanaryPolicy(tensors=4, size=10)
    with on_a_board(policy, MultiAsyncCollector) as collector:
        _, check = canaries(collector, policy)
        board = collector._weight_sync_schemes["policy"].board
        next(iter(collector))
        pid = pids(collector)[1]
        with stopped(pid):
            assert wait_until(lambda: board.status()[1].state == "stopped", 60)
            check.ask()
            assert [w for w in check.hear().waiting if "worker 1" in w and "stopped" in w]
        kill(pid)
        assert wait_until(lambda: board.status()[1].state == "dead", 60)
        assert not [worker for worker in check.hear().waiting if "worker 1" in worker]


@pytest.mark.usefixtures("fork_workers")
def test_the_destination_at_fault_is_named_and_the_other_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, honest = "env.transform[0].module", Target._copy

    def forgetful(self, views, which):
        if not (inner in self.where and "worker 0" in self.where):
            honest(self, views, which)

    monkeypatch.setattr(Target, "_copy", forgetful)
    policy, board = CanaryPolicy(tensors=4, size=10), WeightBoard()
    schemes = {"policy": board.scheme("copy"), inner: board.scheme("copy")}
    collector = make_workers(MultiSyncCollector, policy, schemes=schemes, env=make_env_with_module)
    with running(collector):
        trainer = make_dqn_trainer(collector)
        trainer.canary = policy
        trainer.inner = copy.deepcopy(make_env_with_module().transform[0].module)
        trainer.inner.fill(5.0)
        sync = SyncWeights({"policy": "canary", inner: "inner"})
        sync.register(trainer)
        sync.publish()
        check = sync.bound.endpoint.verification()
        check.ask()
        batches = iter(collector)
        next(batches)
        next(batches)
        [said] = named(check.hear())
        assert f"destination {inner!r} of worker 0" in said
    board.close()


@pytest.mark.usefixtures("fork_workers")
def test_a_deviation_can_be_logged_instead_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = Target._copy

    def sloppy(self, views, which):
        honest(self, views, which)
        self._live[0].data.add_(1)

    monkeypatch.setattr(Target, "_copy", sloppy)
    actor = make_policy()
    collector = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme("copy")})
    trainer = make_trained(collector, actor)
    _, verify = watch(trainer, action="log")
    with caplog.at_level(logging.ERROR, logger="rlsync"):
        trainer.train()
    assert verify.checks == BATCHES - 1
    assert len(verify.deviations) == 2 * verify.checks
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == verify.checks
    assert trainer._log_dict["verify_sync/deviations"][-1] == len(verify.deviations)


# --------------------------------------------------------------------------- in-process collectors


def test_an_in_process_collector_is_compared_with_what_it_was_given() -> None:
    actor = make_counted_policy()
    trainer = make_trained(make_collector(copy.deepcopy(actor)), actor)
    _, verify = watch(trainer)
    trainer.train()
    assert verify.checks >= 2
    assert verify.deviations == []


@pytest.mark.seconds
def test_a_question_that_all_have_answered_is_counted_once() -> None:
    actor = make_counted_policy()
    trainer = make_trained(make_collector(copy.deepcopy(actor)), actor, batches=7)
    _, verify = watch(trainer, when=Every(3, "batches"), behaviour=None)
    trainer.train()
    assert verify.checks == 1, "asked after batch 3, of which batch 5 answers, and after batch 6"


def test_an_in_process_collector_whose_policy_overwrites_itself_is_named() -> None:
    policy = Spoiled(tensors=4, size=10)
    collector = make_collector(copy.deepcopy(policy))
    sync, check = canaries(collector, policy)
    collector.policy.spoil(True)
    check.ask()
    assert not check.hear().done
    sync.publish()
    next(iter(collector))
    [said] = named(check.hear())
    assert f"version {sync.version} | destination 'policy' of the collector of this process" in said
    assert str(os.getpid()) in said
    collector.shutdown()


def test_a_policy_that_is_shared_with_the_learner_has_nothing_to_compare() -> None:
    actor = make_policy()
    trainer = make_trained(make_collector(actor), actor)
    _, verify = watch(trainer)
    trainer.train()
    assert verify.checks >= 1
    assert verify.deviations == []


# ------------------------------------------------------------------------------ the hook's manners


def test_an_unknown_action_is_refused() -> None:
    with pytest.raises(ConfigError, match="no action 'warn'"):
        VerifySync(SyncWeights(MAP), action="warn")


def test_a_resumed_hook_goes_on_in_phase() -> None:
    hook = VerifySync(SyncWeights(MAP))
    hook.checks, hook._last = 3, Counters(batches=30, optim_steps=60)
    again = VerifySync(SyncWeights(MAP))
    again.load_state_dict(hook.state_dict())
    assert (again.checks, again._last) == (3, hook._last)
    assert not again.when.due(again._last, Counters(batches=39))
    assert again.when.due(again._last, Counters(batches=40))


# ---------------------------------------------------------------------------------- finite weights


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused_with_their_name_and_the_workers_keep_theirs(
    bad: float,
) -> None:
    policy = CanaryPolicy(tensors=4, size=10)
    with on_a_board(policy) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.canary = policy
        sync = SyncWeights({"policy": "canary"}, finite=True)
        sync.register(trainer)
        policy.fill(sync.version + 1)
        sync.publish()
        version = sync.version
        policy.canary.weights[2].data[4] = bad
        with pytest.raises(PublishError, match=r"canary\.canary\.weights\.2 is not finite") as refusal:
            sync.publish()
        assert in_three_lines(refusal.value)
        assert sync.version == version
        assert len(sync.receipts) == 1
        batch = next(iter(collector))
        assert batch["canary_max"].unique().tolist() == [float(version)]
        assert batch["policy_version"].unique().tolist() == [version]
        policy.fill(version + 1)
        assert sync.publish().version == version + 1


def test_numbers_that_a_cast_makes_infinite_are_refused_too() -> None:
    policy = CanaryPolicy(tensors=4, size=10)
    trainer = make_dqn_trainer(make_collector(copy.deepcopy(policy).half()))
    trainer.canary = policy
    sync = SyncWeights({"policy": Source("canary", dtype=torch.float16)}, finite=True, trainer=trainer)
    assert sync.publish().version == 1
    policy.fill(1e30)
    with pytest.raises(PublishError, match="is not finite"):
        sync.publish()
    assert sync.version == 1
    trainer.collector.shutdown()


def test_large_finite_numbers_whose_sum_overflows_are_published() -> None:
    actor = make_policy()
    trainer = make_trained(make_collector(copy.deepcopy(actor)), actor)
    sync = SyncWeights(MAP, finite=True, trainer=trainer)
    with torch.no_grad():
        next(actor.parameters()).fill_(torch.finfo(torch.float32).max)
    assert sync.publish().version == 1
    trainer.collector.shutdown()


def test_without_the_guard_weights_are_published_as_they_are() -> None:
    actor = make_policy()
    trainer = make_trained(make_collector(copy.deepcopy(actor), env=make_counting_env), actor)
    sync = SyncWeights(MAP, trainer=trainer)
    with torch.no_grad():
        next(actor.parameters()).fill_(float("nan"))
    assert sync.publish().version == 1
    trainer.collector.shutdown()

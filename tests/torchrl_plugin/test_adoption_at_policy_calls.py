"""Adoption at every policy call: each frame names its version, and a rollout may have several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase, SerialEnv

from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    SyncWeights,
    VerifySync,
    WeightBoard,
)
from rlsync.sync.publisher import Publisher
from rlsync.sync.verification import WorkerAnswer
from rlsync.torchrl_plugin.worker import WorkerSync
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.contract import Note
from tests.laws.test_canary import FEW_VERSIONS, Census, Learner
from tests.tools.parts import (
    ACTIONS,
    CanaryPolicy,
    CountingEnv,
    make_collector,
    make_counting_env,
    make_dqn_trainer,
    make_small_canary,
)
from tests.tools.running import in_three_lines, running, values

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("fork_workers")]
modes = pytest.mark.parametrize("adopt", ["alias", "copy"])

SECONDS = 0.5
LONG = 200  #: frames of a rollout in which a learner publishes many times
ENDS_WITHIN_S = 60.0


class SlowEnv(CountingEnv):
    """Steps take a millisecond, as those of real environments do, so that a learner gets its turn."""

    def _step(self, tensordict: TensorDictBase) -> Any:
        time.sleep(0.001)
        return super()._step(tensordict)


def make_slow_env() -> EnvBase:
    return SlowEnv()


def two_slow_envs() -> EnvBase:
    return SerialEnv(2, make_slow_env)


class PlainCanary(nn.Module):
    """A plain module, which TorchRL wraps by itself: shows its weights in what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(2000) for _ in range(20))

    def fill(self, version: float) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(version)

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        action = torch.zeros(*observation.shape[:-1], ACTIONS, dtype=torch.int64)
        action[..., 0] = 1
        shape = observation.shape[:-1]
        low = torch.stack([weight.min() for weight in self.weights]).min()
        high = torch.stack([weight.max() for weight in self.weights]).max()
        return action, low.expand(shape), high.expand(shape)


class ShowsItself(TensorDictModuleBase):
    """Writes a view of its own weight on the frame, as a policy does whose scale depends on no state."""

    def __init__(self) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action", "canary_min", "canary_max"]
        self.weight = nn.Parameter(torch.zeros(2000))

    def fill(self, version: float) -> None:
        with torch.no_grad():
            self.weight.fill_(version)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.batch_size, ACTIONS, dtype=torch.int64)
        action[..., 0] = 1
        view = self.weight[7].expand(tensordict.batch_size)
        return tensordict.update({"action": action, "canary_min": view, "canary_max": view})


class ChangesItself(CanaryPolicy):
    """Writes to its own weights while it acts: what VerifySync must name."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        with torch.no_grad():
            for weight in self.canary.weights:
                weight.data = weight.data + 1.0
        return super().forward(tensordict)


def make_canary() -> CanaryPolicy:
    return CanaryPolicy(tensors=20, size=2000)


@contextmanager
def adopting(
    policy: nn.Module | None,
    kind: type[BaseCollector] = MultiAsyncCollector,
    *,
    adopt: str = "alias",
    env: Callable[[], EnvBase] = make_slow_env,
    frames_per_batch: int = LONG,
    **options: object,
) -> Iterator[BaseCollector]:
    """Two workers that adopt at every policy call."""
    scheme = BoardScheme(adopt, adopt_at="policy_call")
    size = {"frames_per_batch": frames_per_batch, "total_frames": -1}
    collector = kind([env] * 2, policy, weight_sync_schemes={"policy": scheme}, **size, **options)
    with running(collector):
        yield collector


class LongRollouts(Census):
    """Also counts the versions of each rollout."""

    most_versions = 0
    low_key, high_key = "canary_min", "canary_max"

    def take(self, batch: TensorDictBase) -> None:
        batch["canary_min"], batch["canary_max"] = batch[self.low_key], batch[self.high_key]
        super().take(batch)
        rows = batch["policy_version"].reshape(-1, batch.shape[-1])
        self.most_versions = max(self.most_versions, *(len(row.unique()) for row in rows))
        assert bool((rows.diff(dim=-1) >= 0).all())


def collected(collector: BaseCollector, learner: Learner, census: LongRollouts) -> LongRollouts:
    batches = iter(collector)
    with learner.publishing():
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or census.most_versions < 2 or len(census.versions) < FEW_VERSIONS:
            census.take(next(batches))
            assert time.monotonic() < end + ENDS_WITHIN_S
    return census


def learner_of(collector: BaseCollector, policy: nn.Module) -> Learner:
    return Learner(collector, policy=policy)


@modes
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.one_case
def test_each_frame_of_a_long_rollout_names_the_version_that_acted(
    kind: type[BaseCollector], adopt: str
) -> None:
    policy = make_canary()
    with adopting(policy, kind, adopt=adopt) as collector:
        census = collected(collector, learner_of(collector, policy), LongRollouts())
    census.assert_clean()
    assert census.most_versions >= 2


def test_a_plain_module_adopts_at_every_call() -> None:
    class Shown(LongRollouts):
        low_key, high_key = "output1", "output2"

    policy = PlainCanary()
    with adopting(policy, MultiSyncCollector) as collector:
        census = collected(collector, learner_of(collector, policy), Shown())
    census.assert_clean()


@pytest.mark.thorough
def test_a_vector_of_environments_adopts_at_every_call() -> None:
    policy = make_canary()
    with adopting(policy, MultiSyncCollector, env=two_slow_envs) as collector:
        census = collected(collector, learner_of(collector, policy), LongRollouts())
    census.assert_clean()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_policy_that_the_collector_compiles_adopts_at_every_call() -> None:
    policy = PlainCanary()

    class Shown(LongRollouts):
        low_key, high_key = "output1", "output2"

    compiled = {"compile_policy": {"backend": "eager"}}
    with adopting(policy, MultiSyncCollector, **compiled) as collector:
        census = collected(collector, learner_of(collector, policy), Shown())
    census.assert_clean()


@modes
@pytest.mark.one_case
def test_weights_that_a_policy_writes_on_a_frame_are_those_that_acted(adopt: str) -> None:
    policy = ShowsItself()
    with adopting(policy, MultiSyncCollector, adopt=adopt) as collector:
        census = collected(collector, learner_of(collector, policy), LongRollouts())
    census.assert_clean()


# ----------------------------------------------------------------- told, verified, bounded, refused


def trained(collector: BaseCollector, policy: nn.Module, batches: int) -> Any:
    """A trainer whose hook publishes the policy, and a publish in the middle of each of its rollouts."""
    trainer = make_dqn_trainer(collector, total_frames=batches * LONG)
    trainer.policy = policy
    return trainer


def test_the_plan_says_that_a_rollout_may_have_several_versions() -> None:
    policy = make_canary()
    with adopting(policy, frames_per_batch=20) as collector:
        sync = SyncWeights({"policy": "policy"})
        sync.register(trained(collector, policy, 1))
        assert sync.bound.endpoint.adopts_within_rollouts
        note = "workers adopt at every policy call: one rollout may have several versions"
        assert note in sync.plan.notes


@pytest.mark.one_case
@pytest.mark.parametrize("policy", [make_canary(), ChangesItself(4, 100)], ids=["whole", "changed"])
def test_a_verification_of_versions_within_a_rollout_accuses_those_who_changed_their_weights(
    policy: CanaryPolicy,
) -> None:
    with adopting(policy, frames_per_batch=60) as collector:
        learner = learner_of(collector, policy)
        hook = VerifySync(learner.hook, action="log", timeout_s=ENDS_WITHIN_S)
        hook.register(learner.hook.trainer)
        batches, asked = iter(collector), hook._verification
        answers = 0
        with learner.publishing():
            asked.ask()
            end = time.monotonic() + ENDS_WITHIN_S
            while not (found := asked.hear()).done:
                next(batches)
                assert time.monotonic() < end, found
            answers = found.answered
    assert answers == 2
    assert bool(found.deviations) == isinstance(policy, ChangesItself)


def test_a_rollout_of_random_frames_alone_answers_for_the_version_that_would_have_acted() -> None:
    board, policy = BoardWriter(), make_small_canary()
    Publisher(board).publish_modules({"policy": make_small_canary().fill(1)}, "the learner")
    with running(make_collector(policy)) as collector:
        collector.init_random_frames = 1_000_000
        worker = WorkerSync(board.handle, 0)
        worker.declare("policy", "copy", "policy_call", prove=False)
        worker.attach(collector)
        board.ask(lowest=1)
        batch = next(iter(collector))
        assert values(batch, "policy_version") == {1}
        note = board.note(0, Note.ANSWER)
        assert note is not None
        assert WorkerAnswer.from_json(note).version == 1
        worker.leave("policy")
    board.close()


def test_waiting_for_a_bound_is_refused_where_a_running_rollout_may_hold_older_frames() -> None:
    policy = make_canary()
    with adopting(policy, frames_per_batch=20) as collector:
        sync = SyncWeights({"policy": "policy"})
        trainer = trained(collector, policy, 1)
        sync.register(trainer)
        with pytest.raises(ConfigError, match="workers adopt within rollouts") as refused:
            BoundStaleness(sync, 2, "wait").register(trainer)
        assert in_three_lines(refused.value)
        BoundStaleness(sync, 2, "drop").register(trainer)


def test_destinations_that_are_adopted_at_different_times_are_refused() -> None:
    board = WeightBoard()
    schemes = {"policy": board.scheme(adopt_at="policy_call"), "postproc.net": board.scheme()}
    size = {"frames_per_batch": 20, "total_frames": -1}
    with pytest.raises(ConfigError, match="adopted at different times") as refused:
        MultiSyncCollector([make_counting_env] * 2, make_canary(), weight_sync_schemes=schemes, **size)
    assert in_three_lines(refused.value)
    board.close()

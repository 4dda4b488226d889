"""The canary (fault 4): every weight holds the version, and each frame says what it saw of it.

low != high in a frame is a torn read; a stamp that is not the value is a lie. The learner publishes as
fast as it can, from a thread, for as long as the workers collect.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer

from rlsync import BoardScheme, SyncWeights, WeightBoard
from tests.tools.parts import Canary, CanaryPolicy, make_dqn_trainer, wait_until
from tests.tools.running import ObservedPostproc, make_buffered_env, on_a_board, running

SECONDS = 20.0
SHORT_S, LONGER_S = 1.0, 3.0
PATIENT_S = 120.0  # until a loaded machine has shown anything
FEW_VERSIONS = 10  # fewer would prove nothing

modes = pytest.mark.parametrize("adopt", ["alias", "copy"])
some_time = pytest.mark.parametrize("seconds", [SHORT_S, LONGER_S])


def make_canary() -> CanaryPolicy:
    return CanaryPolicy(tensors=40, size=2000)


class Learner:
    """Publishes in a thread, without a pause, modules whose weights all hold the coming version."""

    def __init__(self, collector: BaseCollector, **sources: nn.Module) -> None:
        trainer = make_dqn_trainer(collector)
        for name, module in sources.items():
            setattr(trainer, name, module)
        self._canaries = [m.canary if isinstance(m, CanaryPolicy) else m for m in sources.values()]
        self.hook = SyncWeights(MAP if len(sources) > 1 else {"policy": "policy"})
        self.hook.register(trainer)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def publish(self) -> None:
        version = self.hook.version + 1
        for canary in self._canaries:
            canary.fill(version)
        assert self.hook.publish().version == version

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.publish()
        except BaseException as error:
            self._error = error

    @contextmanager
    def publishing(self) -> Iterator[None]:
        self.publish()  # from the first frame on all destinations hold a version
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(30)
        assert not self._thread.is_alive()
        assert self._error is None, self._error


MAP = {"policy": "policy", "env.transform[0].module": "scaler", "postproc.net": "ranker"}


class Census:
    """Counts frames, torn reads and stamps that lie."""

    def __init__(self) -> None:
        self.frames = self.mixed = self.lies = self.mixed_batches = 0
        self.versions: set[int] = set()

    def take(self, batch: TensorDictBase) -> None:
        low, high = batch["canary_min"], batch["canary_max"]
        root, stamp = batch["policy_version"], batch["next", "policy_version"]
        self.frames += batch.numel()
        self.mixed += int((low != high).sum())
        self.lies += int(((root != low) | (stamp != low)).sum())
        self.versions |= set(stamp.flatten().tolist())
        per_worker = stamp.reshape(-1, batch.shape[-1])
        self.mixed_batches += int((per_worker != per_worker[:, :1]).any())

    def verdict(self) -> dict[str, int]:
        return {"mixed steps": self.mixed, "wrong stamps": self.lies}

    def assert_clean(self) -> None:
        assert self.verdict() == {"mixed steps": 0, "wrong stamps": 0}, f"of {self.frames} frames"
        assert len(self.versions) >= FEW_VERSIONS


def _collect(collector: BaseCollector, learner: Learner, seconds: float) -> Census:
    census, batches = Census(), iter(collector)
    with learner.publishing():
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds or (
            len(census.versions) < FEW_VERSIONS and passed < PATIENT_S
        ):
            census.take(next(batches))
    return census


def _collect_into(
    buffer: ReplayBuffer, collector: BaseCollector, learner: Learner, seconds: float = LONGER_S
) -> None:
    """Let started workers write to the buffer, from their first batches on for a while."""
    with learner.publishing():
        collector.start()
        assert wait_until(lambda: len(buffer) >= 2 * FEW_VERSIONS * FRAMES, PATIENT_S)
        time.sleep(seconds)


@pytest.mark.slow
@modes
@pytest.mark.thorough
def test_two_asynchronous_workers_never_act_with_a_torn_or_a_misnamed_version(adopt: str) -> None:
    policy = make_canary()
    with on_a_board(policy, MultiAsyncCollector, adopt=adopt, frames_per_batch=10) as collector:
        census = _collect(collector, Learner(collector, policy=policy), SECONDS)
        slots = collector._weight_sync_schemes["policy"].board.writer.slot_count
    census.assert_clean()
    assert census.mixed_batches == 0  # adoption happens between rollouts
    assert slots <= 6  # two leases for each of two workers while it changes over, newest, and next


@pytest.mark.usefixtures("fork_workers")
@modes
@some_time
@pytest.mark.one_case
def test_synchronous_workers_never_act_with_a_torn_or_a_misnamed_version(adopt: str, seconds: float) -> None:
    policy = make_canary()
    with on_a_board(policy, MultiSyncCollector, adopt=adopt, frames_per_batch=10) as collector:
        census = _collect(collector, Learner(collector, policy=policy), seconds)
    census.assert_clean()


@pytest.mark.usefixtures("fork_workers")
@modes
@some_time
@pytest.mark.one_case
def test_forked_asynchronous_workers_never_act_with_a_torn_or_a_misnamed_version(
    adopt: str, seconds: float
) -> None:
    policy = make_canary()
    with on_a_board(policy, MultiAsyncCollector, adopt=adopt, frames_per_batch=10) as collector:
        census = _collect(collector, Learner(collector, policy=policy), seconds)
        slots = collector._weight_sync_schemes["policy"].board.writer.slot_count
    census.assert_clean()
    assert census.mixed_batches == 0  # adoption happens between rollouts
    assert slots <= 6  # two leases for each of two workers while it changes over, newest, and next


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_policies_made_by_a_factory_never_act_with_a_torn_or_a_misnamed_version() -> None:
    with on_a_board(kind=MultiAsyncCollector, policy_factory=make_canary, frames_per_batch=10) as collector:
        census = _collect(collector, Learner(collector, policy=make_canary()), LONGER_S)
    census.assert_clean()


@pytest.mark.thorough
@pytest.mark.processes
@modes
def test_frames_that_started_workers_write_to_a_replay_buffer_are_never_torn_or_misnamed(
    adopt: str,
) -> None:
    policy, buffer = make_canary(), _make_buffer()
    with running(_make_buffered(buffer, policy, {"policy": BoardScheme(adopt)})) as collector:
        _collect_into(buffer, collector, Learner(collector, policy=policy))
    census = Census()
    census.take(buffer[:])
    assert census.frames > 100
    census.assert_clean()


@pytest.mark.processes
@some_time
@pytest.mark.one_case
def test_three_destinations_on_one_board_show_one_version_in_every_frame(seconds: float) -> None:
    policy, buffer, board = make_canary(), _make_buffer(), WeightBoard()
    schemes = {path: board.scheme() for path in MAP}
    with running(_make_buffered(buffer, policy, schemes, postproc=ObservedPostproc())) as collector:
        learner = Learner(collector, policy=policy, scaler=Canary(4, 100), ranker=Canary(4, 100))
        _collect_into(buffer, collector, learner, seconds)

    census, frames = Census(), buffer[:]
    census.take(frames)
    census.assert_clean()
    # Under next stands what the transform made of this very step.
    stamp = frames["policy_version"].float()
    for made in ("transform_min", "transform_max"):
        assert torch.equal(frames["next", made], stamp)
    # The postproc saw the whole batch before the worker's next adoption.
    for shown in (0, 1):
        assert torch.equal(frames["observation"][:, shown], stamp)
    # At the root stands what the transform made of the step before: at the first frame of a batch with
    # the version before, in all others with the same one, and never with a mixture.
    assert torch.equal(frames["transform_min"], frames["transform_max"])
    batches = frames["transform_min"].reshape(-1, FRAMES)
    assert torch.equal(batches[:, 1:], stamp.reshape(-1, FRAMES)[:, 1:])
    assert bool((batches[:, 0] <= stamp.reshape(-1, FRAMES)[:, 0]).all())


FRAMES = 10
ROOM = 100_000


def _make_buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(ROOM), shared=True)


def _make_buffered(
    buffer: ReplayBuffer,
    policy: nn.Module,
    schemes: dict[str, BoardScheme],
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
) -> BaseCollector:
    return MultiAsyncCollector(
        [make_buffered_env] * 2,
        policy,
        frames_per_batch=FRAMES,
        total_frames=-1,
        weight_sync_schemes=schemes,
        replay_buffer=buffer,
        postproc=postproc,
    )

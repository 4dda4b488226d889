"""Faults of TorchRL 0.14 that show between processes: see test_torchrl_0_14_faults.py.

Workers are forked where that shows the same as spawning them, which costs seconds each.
"""

from __future__ import annotations

import multiprocessing
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from torchrl.weight_update._mp import MPTransport

from tests.stock.faults import hangs, still_happens
from tests.tools.parts import (
    Canary,
    CanaryPolicy,
    kill,
    make_critic,
    make_env_with_module,
    make_small_canary,
    make_workers,
    open_fds,
    stopped,
    wait_until,
)
from tests.tools.parts.envs import SlowEnv

pytestmark = pytest.mark.usefixtures("fork_workers")

SCHEME = "rlsync/torchrl_plugin/scheme.py"
BOARD = "rlsync/transport/board/writer.py"
SHARED, PROCESS = SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme
both_schemes = pytest.mark.parametrize("kind", [SHARED, PROCESS])

Workers = Callable[..., BaseCollector]


@pytest.fixture
def workers() -> Iterator[Workers]:
    """`workers(kind, policy, ...)` is a MultiSyncCollector of one worker, ended with the test."""
    made: list[BaseCollector] = []

    def make(scheme: SHARED, policy: CanaryPolicy, *, count: int = 1) -> BaseCollector:
        made.append(make_workers(MultiSyncCollector, policy, schemes={"policy": scheme}, workers=count))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown(timeout=2)


def _next_but_one(batches: Iterator[TensorDictBase]) -> TensorDictBase:
    """A batch begun after now: the next one may have been collected already."""
    next(batches)
    return next(batches)


@contextmanager
def _interrupt_after(delay_s: float) -> Iterator[None]:
    """Ctrl-C, which is what SIGUSR1 means inside the block. (SIGALRM belongs to pytest-timeout.)"""
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    main = threading.main_thread().ident
    timer = threading.Timer(delay_s, signal.pthread_kill, (main, signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def _acks(scheme: SHARED) -> int:
    return scheme._ack_queues[0].qsize()


# ----------------------------------------------------------------------------------------- hangs


@pytest.mark.thorough
def test_fault_2_a_destination_other_than_the_policy_is_never_acknowledged() -> None:
    multiprocessing.set_start_method("spawn", force=True)  # forked, it is refused at construction
    destination, module, scheme = "env.transform[0].module", Canary(4, 100), SHARED()
    weights = TensorDict.from_module(module)
    scheme.init_on_sender(model_id=destination, weights=weights, devices=[torch.device("cpu")])
    schemes = {"policy": SHARED(), destination: scheme}
    collector = make_workers(
        MultiSyncCollector,
        make_small_canary(),
        schemes=schemes,
        workers=1,
        env=make_env_with_module,
    )

    hung = hangs(lambda: collector.update_policy_weights_(weights_dict={destination: weights}), scheme)

    collector.shutdown()
    still_happens(2, hung, SCHEME)


@both_schemes
def test_fault_3_a_killed_worker_hangs_the_next_push(kind: type, workers: Workers) -> None:
    scheme = kind()
    collector = workers(scheme, make_small_canary())
    kill(collector.procs[0].pid)
    still_happens(3, hangs(collector.update_policy_weights_, scheme), SCHEME)


def test_fault_3_an_error_in_the_receiver_hangs_the_push(workers: Workers) -> None:
    scheme = PROCESS()
    collector = workers(scheme, make_small_canary())
    other_shape = CanaryPolicy(4, 11)
    hung = hangs(lambda: collector.update_policy_weights_(other_shape), scheme)
    still_happens(3, hung, SCHEME)


def test_fault_19_after_an_interrupted_push_the_next_one_takes_the_old_acknowledgement(
    workers: Workers,
) -> None:
    scheme = SHARED()
    collector = workers(scheme, make_small_canary())
    worker = collector.procs[0].pid

    with stopped(worker), _interrupt_after(0.3), pytest.raises(KeyboardInterrupt):
        collector.update_policy_weights_()
    assert wait_until(lambda: not scheme._ack_queues[0].empty(), timeout_s=60)

    with stopped(worker):  # so it cannot have applied anything
        returned = not hangs(collector.update_policy_weights_, scheme)
    still_happens(19, returned, SCHEME)


def test_fault_20_acknowledgements_of_a_push_without_waiting_pile_up(workers: Workers) -> None:
    scheme = SHARED(sync=False)
    collector = workers(scheme, make_small_canary())

    for _ in range(50):
        collector.update_policy_weights_()

    still_happens(20, wait_until(lambda: _acks(scheme) == 50, timeout_s=60), SCHEME)


@pytest.mark.thorough
def test_fault_31_a_worker_that_is_asked_during_a_rollout_drops_it_and_never_collects_again() -> None:
    collector = make_workers(MultiAsyncCollector, make_small_canary(), workers=1, env=SlowEnv)
    next(iter(collector))
    lost = False
    for _ in range(3):  # on a slow machine the rollout may be over before the message is sent
        collector.state_dict()
        try:
            collector.queue_out.get(timeout=5.0)
            collector.pipes[0].send((None, "continue"))
        except queue.Empty:
            lost = True
            break
    collector.shutdown(timeout=2)
    still_happens(31, lost, "rlsync/torchrl_plugin/ending/waits.py")


# ---------------------------------------------------------------- whose weights, whose version


def test_fault_4_steps_are_torn_and_stamps_lie_while_the_learner_pushes() -> None:
    policy = CanaryPolicy(tensors=40, size=10_000)
    collector = make_workers(MultiAsyncCollector, policy, schemes={"policy": SHARED()})
    batches = iter(collector)
    torn = lies = False

    deadline = time.monotonic() + 20
    while not (torn and lies) and time.monotonic() < deadline:
        for _ in range(3):
            policy.fill(policy.canary.weights[0][0].item() + 1)
            collector.update_policy_weights_()
        batch = next(batches)
        low, high, stamp = batch["canary_min"], batch["canary_max"], batch["next", "policy_version"]
        torn |= bool((low != high).any())
        lies |= bool(((stamp < low) | (stamp > high)).any())

    collector.shutdown()
    still_happens(4, torn and lies, BOARD)


def test_fault_4_the_learners_process_does_not_count_versions() -> None:
    collector = make_workers(MultiSyncCollector, make_small_canary(), schemes={"policy": SHARED()}, workers=1)
    collector.update_policy_weights_()
    version = collector.policy_version
    collector.shutdown()
    still_happens(4, version == 0, "rlsync/torchrl_plugin/compat/stamps.py (announce_version)")


@both_schemes
def test_fault_5_workers_act_with_the_learners_own_memory_which_was_never_pushed(
    kind: type, workers: Workers
) -> None:
    policy = make_small_canary()
    assert not policy.canary.weights[0].is_shared()
    batches = iter(workers(kind(), policy))

    policy.fill(7)
    batch = _next_but_one(batches)

    acted, stamp = batch["canary_min"][:, -1].item(), batch["next", "policy_version"][:, -1].item()
    moved = policy.canary.weights[0].is_shared()
    still_happens(5, acted == 7 and stamp == 0 and moved, SCHEME)


@both_schemes
def test_fault_6_a_push_to_worker_0_changes_worker_1(kind: type, workers: Workers) -> None:
    policy = make_small_canary()
    collector = workers(kind(), policy, count=2)
    policy.fill(5)
    collector.update_policy_weights_(worker_ids=[0])

    batch = _next_but_one(iter(collector))

    acted = batch["canary_min"].reshape(2, -1)[:, -1].tolist()
    stamps = batch["next", "policy_version"].reshape(2, -1)[:, -1].tolist()
    still_happens(6, acted == [5, 5] and stamps == [1, 0], SCHEME)


def test_fault_6_a_worker_applies_what_the_learner_holds_now_not_what_was_sent(
    workers: Workers,
) -> None:
    scheme, policy, sent = PROCESS(sync=False), make_small_canary(), make_small_canary().fill(5)
    collector = workers(scheme, policy)

    with stopped(collector.procs[0].pid):
        collector.update_policy_weights_(sent)
        # A thread moves one tensor after the other to shared memory; what is written during a copy is lost.
        assert wait_until(lambda: all(weight.is_shared() for weight in sent.canary.weights), timeout_s=60)
        sent.fill(6)
    assert wait_until(lambda: _acks(scheme) == 1, timeout_s=60)

    batch = _next_but_one(iter(collector))
    still_happens(6, batch["canary_min"][:, -1].item() == 6, SCHEME)


def test_fault_7_a_map_with_an_unknown_model_raises_after_the_policy_was_updated(
    workers: Workers,
) -> None:
    policy = make_small_canary()
    collector = workers(SHARED(), policy)
    weights = {"policy": make_small_canary().fill(5), "critic": make_critic()}

    with pytest.raises(KeyError, match="critic"):
        collector.update_policy_weights_(weights_dict=weights)

    batch = _next_but_one(iter(collector))
    still_happens(7, batch["canary_min"][:, -1].item() == 5, SCHEME)


def test_fault_17_a_buffer_that_a_worker_mutates_changes_in_the_main_process(
    workers: Workers,
) -> None:
    policy = make_small_canary()
    next(iter(workers(SHARED(), policy)))
    still_happens(17, policy.canary.calls.item() > 0, SCHEME)


# ----------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize(("kind", "per_tensor"), [(SHARED, 1), (PROCESS, 2)])
def test_fault_10_every_tensor_costs_a_worker_descriptors(
    kind: type, per_tensor: int, workers: Workers
) -> None:
    inherited = set(open_fds())
    collector = workers(kind(), CanaryPolicy(tensors=100, size=10))
    collector.update_policy_weights_(CanaryPolicy(tensors=100, size=10))
    held = set(open_fds(collector.procs[0].pid)) - inherited
    still_happens(10, len(held) >= 100 * per_tensor, BOARD)


def _build_short_of_descriptors(answer: Connection) -> None:
    limit = len(open_fds()) + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        policy = CanaryPolicy(tensors=150, size=10)
        make_workers(MultiSyncCollector, policy, schemes={"policy": PROCESS()}, workers=1)
    except Exception as error:
        answer.send((type(error), str(error)))


def test_fault_21_running_out_of_descriptors_is_reported_as_an_empty_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MPTransport.__init__, "__defaults__", (None, 1.0))  # not 10 s
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_build_short_of_descriptors, args=(theirs,))
    process.start()
    answered = ours.poll(30)
    kind, message = ours.recv() if answered else (None, "")
    process.kill()
    process.join()
    still_happens(21, kind is queue.Empty and "Too many open files" not in message, BOARD)


def test_fault_50_several_environments_in_one_lose_the_last_observation_and_add_a_step_between_episodes() -> (
    None
):
    """GymEnv(num_envs=...) leaves gymnasium's vector environment on resets in the step after an episode."""
    env = GymEnv("CartPole-v1", num_envs=2)
    env.set_seed(0)
    torch.manual_seed(0)  # of the random actions: an episode has about 20
    try:
        frames = env.rollout(200, break_when_any_done=False)[0]
    finally:
        env.close()
    end = int(frames["next", "done"].flatten().nonzero()[0])
    lost = not frames["next", "observation"][end].any()
    no_step = float(frames["next", "reward"][end + 1]) == 0.0
    still_happens(50, lost and no_step, "docs/how_to/off_policy.md (GymEnv)")

"""Faults of TorchRL 0.14 in inference servers: see test_torchrl_0_14_faults.py."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from tests.stock.faults import still_happens
from tests.tools.parts import CanaryPolicy
from tests.tools.parts.servers import make_server, request, serving

pytestmark = [pytest.mark.processes, pytest.mark.seconds]

SERVER = "rlsync/torchrl_plugin/worker.py"
Client = Callable[[TensorDictBase], TensorDictBase]


def make_large_canary() -> CanaryPolicy:
    return CanaryPolicy(tensors=40, size=10_000)


@contextmanager
def _served(scheme: SharedMemWeightSyncScheme, learner: CanaryPolicy) -> Iterator[Client]:
    """The client of a server in a process, which gets its weights by a stock scheme."""
    scheme.init_on_sender(
        model_id="policy",
        weights=TensorDict.from_module(learner).data,
        devices=[torch.device("cpu")],
        ctx=multiprocessing.get_context("forkserver"),
    )
    server, (client,) = make_server("process", scheme, factory=make_large_canary)
    connecting = threading.Thread(target=scheme.connect, daemon=True)  # it waits for the server
    connecting.start()
    with serving(server):
        connecting.join(60)
        assert not connecting.is_alive()
        yield client


@contextmanager
def _publishing(scheme: SharedMemWeightSyncScheme, learner: CanaryPolicy) -> Iterator[None]:
    """The learner publishes without a pause; the number of each version is in all of its weights."""
    stop = threading.Event()

    def publish() -> None:
        version = 1
        while not stop.is_set():
            version += 1
            scheme.send(TensorDict.from_module(learner.fill(version)).data)

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


def _asked(client: Client) -> tuple[float, float, int]:
    answer = client(request())
    return answer["canary_min"].item(), answer["canary_max"].item(), answer["policy_version"].item()


def _misnamed(client: Client, scheme: SharedMemWeightSyncScheme, learner: CanaryPolicy) -> tuple[bool, bool]:
    """Whether an answer was torn, and whether an untorn one did not name the weights that made it."""
    scheme.send(TensorDict.from_module(learner.fill(1)).data)
    low, _, stamp = _asked(client)
    apart = stamp - low  # how the server counts is its own affair: only what moves is a lie
    torn = lies = False
    with _publishing(scheme, learner):
        deadline = time.monotonic() + 20
        while not (torn and lies) and time.monotonic() < deadline:
            low, high, stamp = _asked(client)
            torn |= low != high
            lies |= low == high and stamp - low != apart
    return torn, lies


def test_fault_26_answers_of_a_server_are_torn_and_misnamed_while_the_learner_pushes() -> None:
    learner, scheme = make_large_canary(), SharedMemWeightSyncScheme()
    with _served(scheme, learner) as client:
        torn, lies = _misnamed(client, scheme, learner)
    still_happens(23, torn and lies, SERVER)


@pytest.mark.thorough
def test_fault_26_answers_of_a_server_are_misnamed_with_the_other_scheme_too() -> None:
    learner, scheme = make_large_canary(), MultiProcessWeightSyncScheme()
    with _served(scheme, learner) as client:
        torn, lies = _misnamed(client, scheme, learner)
    still_happens(23, torn or lies, SERVER)

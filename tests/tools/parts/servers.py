"""Inference servers of all makes, with a canary as their policy."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import AsyncBatchedCollector
from torchrl.modules.inference_server import (
    InferenceServer,
    InferenceServerConfig,
    MPTransport,
    ProcessInferenceServer,
    ProcessSlotTransport,
    SharedMemoryTransport,
    SlotTransport,
    ThreadingTransport,
)

from tests.tools.parts.canary import CanaryPolicy
from tests.tools.parts.envs import make_counting_env
from tests.tools.parts.sizes import ACTIONS, OBSERVATIONS

#: How a plain server gets its requests, by name.
TRANSPORTS = ("thread", "direct", "process", "shared_memory", "process_slot")

#: How an AsyncBatchedCollector reaches its environments and its server, by name.
COLLECTORS = ("thread", "shared environments", "process", "slots", "auto")


def make_canary_policy() -> CanaryPolicy:
    """A policy_factory: 40 tensors, 320 kB."""
    return CanaryPolicy(tensors=40, size=2000)


def request() -> TensorDict:
    return TensorDict({"observation": torch.zeros(OBSERVATIONS)})


def response() -> TensorDict:
    return TensorDict(
        {
            "action": torch.zeros(ACTIONS, dtype=torch.int64),
            "canary_min": torch.zeros(()),
            "canary_max": torch.zeros(()),
            "policy_version": torch.zeros((), dtype=torch.int64),
        }
    )


def make_server(
    transport: str,
    scheme: object,
    *,
    factory: Callable[[], Any] = make_canary_policy,
    clients: int = 1,
    start: str = "forkserver",
) -> tuple[InferenceServer | ProcessInferenceServer, list[Callable[[TensorDictBase], TensorDictBase]]]:
    """A server that was not started, and its clients. Processes come from the fork server of the tests."""
    context = multiprocessing.get_context(start)
    match transport:
        case "thread":
            path = ThreadingTransport()
        case "direct":
            path = SlotTransport(clients)
        case "process":
            path = MPTransport(ctx=context)
        case "shared_memory":
            path = SharedMemoryTransport(request(), response(), num_slots=clients, ctx=context)
        case "process_slot":
            path = ProcessSlotTransport(request(), response(), num_slots=clients, ctx=context)
    if transport in ("thread", "direct"):
        server = InferenceServer(factory(), path, weight_sync=scheme)
    else:
        server = ProcessInferenceServer(
            policy_factory=factory, transport=path, mp_context=context, weight_sync=scheme
        )
    return server, [path.client() for _ in range(clients)]


@contextmanager
def serving(server: InferenceServer | ProcessInferenceServer) -> Iterator[None]:
    """A server that runs in the block."""
    server.start()
    try:
        yield
    finally:
        server.shutdown(timeout=2)


def make_async_batched(
    how: str,
    scheme: object = None,
    *,
    policy: CanaryPolicy | None = None,
    factory: Callable[[], Any] = make_canary_policy,
    frames_per_batch: int = 20,
    envs: int = 2,
    env: Callable[[], Any] = make_counting_env,
    **options: Any,
) -> AsyncBatchedCollector:
    """An AsyncBatchedCollector on counting environments; a policy makes the server a thread.

    Args:
        how: one of COLLECTORS.
        scheme: its ``weight_sync``.
        policy: given instead of the factory, where the server is a thread.
        factory: makes the policy.
        frames_per_batch: as it says.
        envs: how many environments.
        env: makes one of them.
        options: more arguments of the collector.
    """
    match how:
        case "thread":
            options |= {"env_backend": "threading"}
        case "shared environments":
            options |= {"env_backend": "multiprocessing", "transport": "driver"}
        case "process":
            config = InferenceServerConfig(service_backend="process")
            options |= {"env_backend": "threading", "server_config": config}
        case "slots":
            context = multiprocessing.get_context("forkserver")
            path = ProcessSlotTransport(request(), response(), num_slots=envs, ctx=context)
            options |= {"transport": path, "transition_chunk_size": 5}
        case "auto":  # what TorchRL 0.15 will do with a policy_factory
            options |= {"env_backend": "multiprocessing", "transport": "auto", "transition_chunk_size": 5}
    in_a_thread = how in ("thread", "shared environments")
    served = {"policy": policy} if in_a_thread and policy is not None else {"policy_factory": factory}
    return AsyncBatchedCollector(
        [env] * envs,
        **served,
        frames_per_batch=frames_per_batch,
        total_frames=options.pop("total_frames", -1),
        weight_sync=scheme,
        **options,
    )

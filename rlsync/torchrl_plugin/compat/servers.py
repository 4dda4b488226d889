"""TorchRL's inference servers, and the collector that asks one for its actions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torchrl.collectors import AsyncBatchedCollector
from torchrl.modules.inference_server import (
    InferenceServer,
    ProcessInferenceServer,
    ProcessSlotTransport,
    SharedMemoryTransport,
)
from torchrl.modules.inference_server._server import _RayInferenceServer as RayInferenceServer
from torchrl.weight_update import WeightSyncScheme

from rlsync.torchrl_plugin.compat import in_place_of
from rlsync.torchrl_plugin.compat.stamps import STAMP

#: A server whose loop is a thread of this process, a process, or an actor of Ray.
Server: TypeAlias = InferenceServer | ProcessInferenceServer | RayInferenceServer

#: Transports whose answers have the keys that were declared when they were made, and no others.
_DECLARED = (ProcessSlotTransport, SharedMemoryTransport)


def server_of(holder: object) -> Server | None:
    """The server that ``holder`` is, or asks for actions. Until AsyncBatchedCollector shows its server."""
    if isinstance(holder, AsyncBatchedCollector):
        return holder._server
    if isinstance(holder, (InferenceServer, ProcessInferenceServer)):
        return holder
    return None


def scheme_of_server(server: Server) -> object:
    """What was passed as ``weight_sync``; ``None`` for a server whose loop is a Ray actor."""
    if isinstance(server, RayInferenceServer):
        return None
    return _given(server, "weight_sync")


def destination_of_server(server: Server) -> Any:
    """What was passed as ``weight_sync_model_id``."""
    return _given(server, "_weight_sync_model_id")


def policy_like_served(holder: object) -> object:
    """A policy like the one that a server, or the server of a collector, has; perhaps made for this call."""
    if isinstance(holder, AsyncBatchedCollector):
        if holder._policy is None:
            return holder._policy_factory()
        return holder._policy
    if isinstance(holder, ProcessInferenceServer):
        return holder.policy_factory()
    if isinstance(holder, InferenceServer):
        return holder.model
    return None


def process_of(server: Server) -> BaseProcess | None:
    """The process of ``server``; ``None`` for a thread, and before the start."""
    if isinstance(server, ProcessInferenceServer):
        return server._process
    return None


def serve_version(server: InferenceServer, version: int) -> None:
    """Make the coming answers carry ``version``; called between two batches, in the thread that computes."""
    if server.policy_version != version:
        server._mark_weight_update(version)


def is_stamped_by(server: Server) -> bool:
    """Whether the answers of ``server`` carry the version, under ``policy_version``."""
    transport = server.transport
    declared = not isinstance(transport, _DECLARED) or STAMP in transport._response_keys
    return declared and _given(server, "policy_version_key") == STAMP


def _given(server: Server, attribute: str) -> Any:
    """What the constructor was given; a server in a process keeps it for its other half."""
    if isinstance(server, ProcessInferenceServer):
        return server._server_kwargs[attribute.removeprefix("_")]
    return vars(server)[attribute]


def send_by(collector: AsyncBatchedCollector, schemes: dict[str, WeightSyncScheme]) -> None:
    """Let the collector send by ``schemes``. Until the constructor of AsyncBatchedCollector takes them."""
    collector._weight_sync_schemes = schemes


def stamp_both_ends(collector: AsyncBatchedCollector) -> None:
    """Write the server's version of a step under ``("next", "policy_version")``, too."""

    def stamped(name: str, self: AsyncBatchedCollector) -> TensorDictBase:
        frames: TensorDictBase = getattr(type(self), name)(self)
        stamps = frames.get(STAMP, None)
        if stamps is not None:
            frames.set(("next", STAMP), stamps.clone())
        return frames

    for name in ("_rollout_frames", "_rollout_yield_trajs"):
        in_place_of(collector, name)(partial(stamped, name))


def around_results(collector: AsyncBatchedCollector, wrap: Callable[[Any], object]) -> None:
    """Call ``wrap(queue)`` with the queue through which frames arrive, as soon as there is one."""
    wrapped: object = None

    @in_place_of(collector, "_ensure_started")
    def ensure_started(self: AsyncBatchedCollector) -> None:
        nonlocal wrapped
        type(self)._ensure_started(self)
        queue = self._result_queue
        if queue is not None and queue is not wrapped:
            wrapped = queue
            wrap(queue)

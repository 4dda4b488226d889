"""An inference server on a board: one worker as the learner sees it, and its own side."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from torch import nn
from torchrl.collectors import AsyncBatchedCollector
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update import WeightSyncScheme

from rlsync.core.errors import ConfigError, DestinationNotFound, PublishError
from rlsync.sync.adopter import Adopt, Adopter, Destination
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin.compat import schemes, servers
from rlsync.transport.contract import Handle


class ServedServer:
    """What a publisher asks of the collector whose workers it serves, asked of an inference server.

    ConfigError: ``holder``, the server or the collector that has it, was not given ``scheme`` as
    ``weight_sync``, or is an actor of Ray.
    """

    num_workers = 1

    def __init__(self, holder: Any, scheme: object) -> None:
        server = servers.server_of(holder)
        if server is None or isinstance(server, servers.RayInferenceServer):
            raise ConfigError(
                "a board serves inference servers of this host, in a thread or in a process",
                f"BoardScheme, {type(holder).__name__}",
                "use service_backend='thread' or 'process'; an actor of Ray takes weights by its own "
                "update_model_weights",
            )
        if servers.scheme_of_server(server) is not scheme:
            raise ConfigError(
                f"this scheme is not the weight_sync of that {type(holder).__name__}",
                "BoardScheme.init_on_sender",
                "pass one scheme to both: weight_sync=scheme when the server or the collector is made",
            )
        self._holder = weakref.ref(holder)
        self._server = weakref.ref(server)
        self.in_a_process = servers.is_in_a_process(server)
        self.destination: str = servers.destination_of_server(server)
        self.stamped = servers.is_stamped_by(server)
        self._specs: list[LeafSpec] | None = None

    def serves(self, holder: object) -> bool:
        """Whether this is the server that ``holder`` is or has."""
        return servers.server_of(holder) is self._server()

    def connect(self, scheme: WeightSyncScheme, publisher: WorkersPublisher) -> str:
        """Let the collector's own method publish, and its frames carry versions at both ends of a step.

        Returns the name of the server's policy.
        """
        holder = self._holder()
        if isinstance(holder, AsyncBatchedCollector):
            servers.send_by(holder, {self.destination: scheme})
            schemes.around_updates(holder, publisher.one_publish)
            servers.stamp_both_ends(holder)
        return self.destination

    @property
    def procs(self) -> list[BaseProcess]:
        """The process of the server; none for a thread, and before the start."""
        server = self._server()
        process = None if server is None else servers.process_of(server)
        return [] if process is None else [process]

    @property
    def closed(self) -> bool:
        return self._server() is None

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's module for a destination; ValueError if it holds none."""
        holder = self._holder()
        if isinstance(holder, AsyncBatchedCollector) and isinstance(holder.policy, nn.Module):
            return holder.policy
        raise ValueError(f"the learner holds no module {model_id!r}")

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """End the server, and the collector that asks it."""
        holder = self._holder()
        if isinstance(holder, AsyncBatchedCollector):
            holder.shutdown(timeout=timeout, raise_on_error=raise_on_error)
        elif holder is not None:
            holder.shutdown(timeout=timeout)

    def expected(self, destination: str) -> list[LeafSpec] | None:
        """The leaves of the policy, told by the learner's side before the server has started.

        The policy of a server in a process is made once by its factory, and dropped. DestinationNotFound: it
        is no module.
        """
        if destination != self.destination:
            return None
        if self._specs is None:
            self._specs = specs_of(self._holder())
        if self._specs is None:
            raise DestinationNotFound(
                f"the {destination!r} of this inference server is no module, so it has no weights",
                "BoardScheme as weight_sync",
                "serve an nn.Module, or leave weight_sync out",
            )
        return self._specs


def specs_of(holder: object) -> list[LeafSpec] | None:
    """The leaves of the policy that a server serves, or a collector's server; ``None`` if it is no module."""
    policy = servers.policy_like_served(holder)
    return Leaves(policy, "the served policy").specs() if isinstance(policy, nn.Module) else None


class ServerSync:
    """Brings the policy of an inference server up to date, between two of its batches.

    The server is one reader, number 0. Its own loop calls :meth:`between_batches`, in the thread that
    computes and under the lock that a forward pass takes. Beside the learner, in a thread, it gets a policy
    of its own.

    BoardClosed: the learner has closed the board or died. PublishError: another living server reads it.
    """

    def __init__(
        self,
        handle: Handle,
        destination: str,
        adopt: Adopt,
        server: InferenceServer,
        *,
        beside_learner: bool,
    ) -> None:
        if beside_learner:
            servers.give_own_policy(server)
        self._server = weakref.ref(server)
        self._batches: AbstractContextManager[int] | None = None
        self._adopter = Adopter(handle, 0)
        if not beside_learner:
            self._adopter.end_with_the_learner()
        recorded = servers.records_a_graph(server)
        self._adopter.place({destination: Destination(self._policy, "copy" if recorded else adopt)})
        self._adopter.tell()
        servers.refuse_updates(server, _refuse_update)

    def between_batches(self) -> None:
        """Answer the learner's question about the batches before, adopt the newest version, and stamp."""
        server = self._server()
        if server is None:
            return
        if self._batches is not None:
            if self._adopter.settled():
                return
            self._batches.__exit__(None, None, None)
        self._batches = self._adopter.acting()
        servers.serve_version(server, self._batches.__enter__())

    def _policy(self) -> object:
        server = self._server()
        return None if server is None else server.model


def _refuse_update(*_: object, **__: object) -> NoReturn:
    raise PublishError(
        "the weights of this inference server come from a board",
        "the server's update_model, or update_policy_weights_ of a collector that was not told of its board",
        "call scheme.init_on_sender(model_id='policy', context=server_or_collector) once, then scheme.send()",
    )

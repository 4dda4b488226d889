"""This process as a driver of Ray, and its nodes in a file; Ray is imported only where it is used."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsync import ConfigError
from rlsync.seams import ReaderStatus, first_line, machine, whole_file

CONNECT_TIMEOUT_S = 5.0  #: how long a cluster may take to accept a connection

ADDRESS_KEY = "cluster.address"  #: where errors say that an address stands

#: A Ray that is started here. By itself it gives its processes, and so the workers, a low priority (nice 15):
#: beside a learner on the same machine they would hardly act.
_OWN_RAY = {
    "address": "local",
    "include_dashboard": False,
    "_system_config": {"worker_niceness": 0},
}


class Session:
    """Ray, for as long as a run needs it.

    A connection that is there stays; else one to ``address``, ``None`` starting a Ray that ends with
    :meth:`close`. ConfigError: not installed, refused, or nothing answers.
    """

    def __init__(self, address: str | None = None) -> None:
        check_address(address)
        import ray

        self._connected_here = not ray.is_initialized()
        if not self._connected_here:
            return
        if address is not None and address != "auto":
            check_reachable(address)
        try:
            with _signal_handlers_kept():
                if address is None:
                    ray.init(logging_level="WARNING", **_OWN_RAY)
                else:
                    ray.init(logging_level="WARNING", address=address)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            problem = f"Ray refuses: {first_line(error)}"
            raise ConfigError(problem, f"{ADDRESS_KEY}={address}", _cure(error)) from error

    def close(self) -> None:
        """Disconnect, and end the Ray that was started here. A second call does nothing."""
        if self._connected_here:  # asked first: at the end of the program nothing can be imported
            import ray

            self._connected_here = False
            ray.shutdown()


def _cure(error: BaseException) -> str:
    if "auth" in str(error).lower() or "token" in str(error).lower():
        return (
            "the cluster wants a token, or has none: set RAY_AUTH_MODE (token or disabled) as on the head "
            "node, and with token put the same token into ~/.ray/auth_token or RAY_AUTH_TOKEN everywhere"
        )
    return "look at the whole message above; learner and cluster need the same versions of Ray and Python"


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM; the run's own has to stay."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_address(address: str | None) -> None:
    """Refuse a missing Ray, or an address that :class:`Session` cannot use; connects to nothing."""
    if not machine.has_package("ray"):
        raise ConfigError("ray is not installed", "cluster=ray", "pip install 'rlsync[ray]'")
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        problem = f"{address!r} is not the address of a cluster"
        where = f"{ADDRESS_KEY}={address}"
        cure = "give HOST:PORT of its head node, for example 10.0.0.1:6379, and run the learner on a node of "
        cure += "the cluster; or auto, or null for a Ray on this machine alone"
        raise ConfigError(problem, where, cure)


def check_reachable(address: str) -> None:
    """Refuse a ``HOST:PORT`` where nothing listens. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        problem = f"nothing answers at {address}: {error}"
        where = f"{ADDRESS_KEY}={address}"
        cure = (
            "look whether the cluster runs (ray status, on its head node), or a firewall is between"
        )
        raise ConfigError(problem, where, cure) from error


@dataclass(frozen=True, slots=True)
class NodeStatus:
    node: str  # where it is
    version: int  # the newest on its board; 0 while it has said nothing
    workers: tuple[ReaderStatus, ...]  # as it said last

    def __str__(self) -> str:
        workers = (f"  {worker}" for worker in self.workers)
        return "\n".join([f"{self.node}: version {self.version}", *workers])


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A run on a cluster at one moment, in a file that others read while it runs."""

    pid: int  # of the learner
    at_s: float  # when this was written, seconds since the epoch
    version: int  # the newest published one
    nodes: tuple[NodeStatus, ...]  # those whose workers act
    lost: int  # agents that were lost so far
    rollouts_lost: int  # rollouts known to have been lost with them

    @property
    def workers(self) -> tuple[ReaderStatus, ...]:
        return tuple(worker for node in self.nodes for worker in node.workers)

    def __str__(self) -> str:
        age_s = max(0.0, time.time() - self.at_s)
        if len(self.nodes) == 1:
            nodes = "1 node acts"
        else:
            nodes = f"{len(self.nodes)} nodes act"
        headline = f"newest version {self.version}; {nodes}, {self.lost} lost so far; told {age_s:.0f} s ago"
        return "\n".join([headline, *map(str, self.nodes)])

    def write(self, file: Path) -> None:
        """Write it, so that a reader finds the old or the new file whole."""
        whole_file.write_whole(file, lambda beside: beside.write_text(json.dumps(asdict(self))))

    @classmethod
    def read(cls, file: Path) -> ClusterStatus:
        fields: dict[str, Any] = json.loads(file.read_text())
        nodes = []
        for node in fields.pop("nodes"):
            workers = tuple(ReaderStatus(**worker) for worker in node["workers"])
            nodes.append(NodeStatus(node["node"], node["version"], workers))
        return cls(nodes=tuple(nodes), **fields)

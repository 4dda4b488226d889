"""This process as a driver of Ray: connected to a cluster, or to a Ray of its own on this machine.

An address is looked at before Ray is imported.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rlsync.core.errors import ConfigError, first_line

#: How long a cluster may take to accept a connection.
CONNECT_TIMEOUT_S = 5.0

#: Where errors say that an address stands.
ADDRESS_KEY = "cluster.address"

#: Ray gives its processes, and so the workers, a low priority (nice 15). Beside a learner on the same machine
#: they would hardly act.
_OWN_RAY = {"worker_niceness": 0}


class Session:
    """Ray, for as long as a run needs it; a ConfigError if it is not installed, refuses, or nothing answers.

    If this process is connected already, that connection is used, and left as it is. Otherwise this connects
    to ``address``, ``HOST:PORT`` or ``"auto"`` for a cluster that was started on this machine. ``None``
    starts a Ray here, which ends with :meth:`close` and with this process.
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
                    ray.init(
                        address="local",
                        include_dashboard=False,
                        logging_level="WARNING",
                        _system_config=_OWN_RAY,
                    )
                else:
                    ray.init(address=address, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"Ray refuses: {first_line(error)}", f"{ADDRESS_KEY}={address}", _cure(error)
            ) from error

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
    """Refuse an address that is not written as :class:`Session` needs it, or a missing Ray; connects to
    nothing.

    Example:
        >>> check_address("10.0.0.1:6379")
        >>> check_address("ray://10.0.0.1:10001")
        Traceback (most recent call last):
        rlsync.core.errors.ConfigError: 'ray://10.0.0.1:10001' is not the address of a cluster
          where  cluster.address=ray://10.0.0.1:10001
          cure   give HOST:PORT of its head node, for example 10.0.0.1:6379, and run the learner on a node of
          the cluster; or auto, or null for a Ray on this machine alone
    """
    if find_spec("ray") is None:
        raise ConfigError("ray is not installed", "cluster=ray", "pip install 'rlsync[ray]'")
    if address is None or address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"{address!r} is not the address of a cluster",
            f"{ADDRESS_KEY}={address}",
            "give HOST:PORT of its head node, for example 10.0.0.1:6379, and run the learner on a node of "
            "the cluster; or auto, or null for a Ray on this machine alone",
        )


def check_reachable(address: str) -> None:
    """Refuse a ``HOST:PORT`` where nothing listens. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {address}: {error}",
            f"{ADDRESS_KEY}={address}",
            "look whether the cluster runs (ray status, on its head node) and whether a firewall is between",
        ) from error

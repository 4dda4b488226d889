"""The address of a cluster, looked at before Ray is imported."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from rlsync.core.errors import ConfigError

#: How long a cluster may take to accept a connection.
CONNECT_TIMEOUT_S = 5.0

#: Where errors say that an address stands.
ADDRESS_KEY = "cluster.address"


def check_address(address: str | None) -> None:
    """Refuse an address that cannot work; connects to nothing.

    Args:
        address: as of :class:`Session`.

    Raises:
        ConfigError: it is not written as ``HOST:PORT``, or Ray is not installed.

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
    """Refuse an address where nothing listens. Ray itself would try for minutes.

    Args:
        address: ``HOST:PORT``.

    Raises:
        ConfigError: no connection is accepted within :data:`CONNECT_TIMEOUT_S`.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"nothing answers at {address}: {error}",
            f"{ADDRESS_KEY}={address}",
            "look whether the cluster runs (ray status, on its head node) and whether a firewall is between",
        ) from error

"""Transports by name: rlsync's board, and those of installed packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

from rlsync.core.extensions import TRANSPORTS, imported, installed, unknown
from rlsync.transport.contract import Transport

#: The transport that collectors of processes have if none is named.
BOARD = "board"

_SHIPPED = {BOARD: EntryPoint(BOARD, "rlsync.transport.board:BoardWriter", TRANSPORTS)}


def transports() -> dict[str, EntryPoint]:
    """Every transport that can be chosen by its name, not imported."""
    return _SHIPPED | installed(TRANSPORTS, _SHIPPED)


def transport_named(name: str, where: str) -> Transport:
    """Make a transport; ConfigError, which names the place ``where`` the name stands, if there is none."""
    found = transports()
    if name not in found:
        raise unknown("transport", name, where, found)
    transport: Transport = imported(found[name], "transport")()
    return transport

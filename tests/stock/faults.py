"""How a test of a stock fault speaks, and how it survives a hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torchrl.weight_update import SharedMemWeightSyncScheme

HANG_AFTER_S = 1.5


def still_happens(fault: int, seen: bool, workaround: str) -> None:
    """Pass while TorchRL has the fault; when it has it no more, say what may go from rlsync."""
    if not seen:
        pytest.fail(f"TorchRL fixed fault {fault}: drop the workaround in {workaround}")


def hangs(call: Callable[[], None], scheme: SharedMemWeightSyncScheme) -> bool:
    """Whether a send waits for an acknowledgement that does not come; it is then set free.

    Slowness of the machine can only make it say True, so it never announces a fix that is none.
    """
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG_AFTER_S)
    hung = thread.is_alive()
    if hung:
        _free(scheme)
        thread.join(5.0)
        assert not thread.is_alive(), "could not free the send"
    return hung


def _free(scheme: SharedMemWeightSyncScheme) -> None:
    """Forge the acknowledgements, past the queue's lock: a killed worker may have held it."""
    for queue in scheme._ack_queues.values():
        queue._writer.send("updated")

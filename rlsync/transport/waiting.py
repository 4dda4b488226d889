"""Waiting for readers to adopt: one loop for every transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rlsync.core.errors import AdoptionTimeout, WorkerLost
from rlsync.transport.contract import ReaderStatus

# Waits poll: they must look at the workers' locks anyway, and nothing on the data path waits.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3


def await_adoption(
    status: Callable[[], list[ReaderStatus]],
    version: int,
    timeout_s: float,
    readers: Iterable[int] | None,
    newest: Callable[[], int],
) -> None:
    """Look at the readers until all that are expected have adopted ``version`` or a newer one.

    Args:
        status: the readers of a transport, now.
        version: the version to wait for.
        timeout_s: give up after this many seconds.
        readers: the numbers expected; ``None`` for those attached, of which there must be one.
        newest: the newest published version, for the error.

    Raises:
        WorkerLost: at once, when a reader is dead.
        AdoptionTimeout: the deadline passed; names each reader that is missing, its pid and state.
    """
    expected = None if readers is None else sorted(set(readers))
    deadline = time.monotonic() + timeout_s
    pause_s = FIRST_PAUSE_S
    while missing := _missing(status(), version, expected, newest()):
        dead = {reader: reader.state for reader in missing if reader.state == "dead"}
        if dead:
            raise worker_lost(dead, f"waiting for version {version} to be adopted")
        if time.monotonic() >= deadline:
            raise AdoptionTimeout(
                f"version {version} was not adopted within {timeout_s:g} s",
                "; ".join(map(str, missing)),
                "wait for at least one rollout, or look at why the worker does not move",
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)


def _missing(
    attached: list[ReaderStatus], version: int, expected: list[int] | None, newest: int
) -> list[ReaderStatus]:
    known = {reader.reader: reader for reader in attached}
    absent = ReaderStatus(0, 0, False, "never attached", 0, newest, 0.0)
    wanted = (sorted(known) or [0]) if expected is None else expected
    asked = [known.get(number) or replace(absent, reader=number) for number in wanted]
    return [reader for reader in asked if reader.adopted_version < version]


def worker_lost(dead: Mapping[ReaderStatus, str], where: str) -> WorkerLost:
    """The error for dead workers: how each ended, in words, and what the learner needed them for.

    Example:
        >>> status = ReaderStatus(1, 4242, False, "dead", 7, 2, 0.4)
        >>> print(worker_lost({status: "killed by SIGKILL"}, "waiting for frames").what)
        worker 1 (pid 4242, killed by SIGKILL, acted with version 7, 2 behind, last seen 0.4 s ago)
    """
    workers = (
        f"worker {status.reader} (pid {status.pid}, {how}, acted with version {status.adopted_version}, "
        f"{status.lag_versions} behind, last seen {status.heartbeat_age_s:.1f} s ago)"
        for status, how in dead.items()
    )
    return WorkerLost(
        "; ".join(workers),
        where,
        "look for the worker's own error above, or in the kernel's log if memory was short; "
        "restart the run or the worker",
    )

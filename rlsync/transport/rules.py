"""What every transport does alike: refuse an old stamp, keep what is not given, wait for adoptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from rlsync.core.errors import AdoptionTimeout, BoardClosed, PublishError, WorkerLost
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.bell import pauses
from rlsync.transport.contract import ReaderStatus, Transport

Key = tuple[str, str]  #: a destination and the name of one of its leaves


def check_newer(stamp: Stamp, newest: Stamp) -> None:
    """Refuse a stamp that is not greater than the newest one.

    Raises:
        PublishError: it is not.
    """
    if stamp <= newest:
        problem = f"version {stamp.version} of generation {stamp.generation} is not newer than "
        problem += f"version {newest.version} of generation {newest.generation}"
        cure = "draw the stamp from the learner's ledger; of two learners, end the older one"
        raise PublishError(problem, "publish", cure)


def keyed(layout: Layout, tensors: Sequence[Tensor]) -> dict[Key, Tensor]:
    """The tensors of a publish by destination and leaf; tied leaves included."""
    spread = zip(layout.entries, layout.spread(tensors), strict=True)
    return {(entry.destination, entry.leaf.name): tensor for entry, tensor in spread}


def completed(
    tensors: Sequence[Tensor | None], layout: Layout, kept: Mapping[Key, Tensor]
) -> list[Tensor]:
    """The tensors of a publish, with the kept value wherever there is ``None``.

    Args:
        tensors: one for each entry of ``layout`` that owns its bytes.
        layout: what is published.
        kept: values of the version before.

    Raises:
        LayoutMismatch: there are more or fewer tensors than entries.
        PublishError: a leaf has no value to keep.
    """
    layout.check_count(tensors)
    whole = []
    for entry, tensor in zip(layout.owned, tensors, strict=True):
        if tensor is None:
            value = kept.get((entry.destination, entry.leaf.name))
        else:
            value = tensor
        if value is None:
            problem = f"{entry.leaf.name} has no value to keep: no version before had it"
            cure = "publish every leaf the first time"
            raise PublishError(problem, f"destination {entry.destination!r}", cure)
        whole.append(value)
    return whole


def whole(transport: Transport, tensors: Sequence[Tensor | None], stamp: Stamp) -> list[Tensor]:
    """What a publish brings, checked and whole: the newest version's value wherever there is ``None``.

    Args:
        transport: keeps a copy of its newest version.
        tensors: one for each entry of its layout that owns its bytes.
        stamp: generation and number of the version.

    Raises:
        BoardClosed: nothing is laid out yet.
        LayoutMismatch: a tensor does not have the shape of its leaf.
        PublishError: the stamp is not greater than the newest one, or a leaf has no value to keep.
    """
    layout = laid_out(transport)
    values = [tensor for tensor in tensors if tensor is not None]
    if len(values) < len(tensors):
        values = completed(tensors, layout, held(transport))
    layout.check(values)
    check_newer(stamp, transport.newest_stamp)
    return values


def held(transport: Transport) -> dict[Key, Tensor]:
    """The newest version's tensors by destination and leaf; none where the transport keeps no copy."""
    newest = transport.newest_leaves()
    if newest is None:
        return {}
    return keyed(*newest)


def laid_out(transport: Transport) -> Layout:
    """What a publish carries; BoardClosed if nothing is laid out yet."""
    if transport.layout is None:
        where = f"{type(transport).__name__}.publish"
        raise BoardClosed("nothing is laid out yet", where, "call lay_out first")
    return transport.layout


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
    for pause_s in pauses():
        missing = _missing(status(), version, expected, newest())
        if not missing:
            return
        dead = [reader for reader in missing if reader.state == "dead"]
        if dead:
            raise worker_lost(dead, f"waiting for version {version} to be adopted")
        if time.monotonic() >= deadline:
            problem = f"version {version} was not adopted within {timeout_s:g} s"
            cure = "wait for at least one rollout, or look at why the worker does not move"
            raise AdoptionTimeout(problem, "; ".join(map(str, missing)), cure)
        time.sleep(pause_s)


def _missing(
    attached: list[ReaderStatus], version: int, expected: list[int] | None, newest: int
) -> list[ReaderStatus]:
    known = {reader.reader: reader for reader in attached}
    if expected is None:
        expected = sorted(known) or [0]
    absent = ReaderStatus(0, 0, True, "never attached", 0, newest, 0.0)
    missing = []
    for number in expected:
        reader = known.get(number) or replace(absent, reader=number)
        if reader.adopted_version < version:
            missing.append(reader)
    return missing


def living(transport: Transport, below: int) -> list[ReaderStatus]:
    """The readers with numbers below this one that live; others may read along: an evaluator."""
    return [reader for reader in transport.status() if reader.alive and reader.reader < below]


def worker_lost(dead: Iterable[ReaderStatus], where: str) -> WorkerLost:
    """The error for dead workers, whose states say how each ended, and what the learner needed them for."""
    return WorkerLost(
        "; ".join(map(str, dead)),
        where,
        "look for the worker's own error above, or in the kernel's log if memory was short; "
        "restart the run or the worker",
    )

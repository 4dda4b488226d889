"""The laws of rlsync/transport/contract.py, held against every transport; and those of the local one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from rlsync.core.errors import AdoptionTimeout
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.testing import test_transports as laws
from rlsync.testing.acting import Acts, filled, low_high, plain_layout
from rlsync.testing.test_transports import *  # noqa: F403
from rlsync.testing.test_transports import Ends, InOneProcess, Learner, Open
from rlsync.transport.board import BoardReader, BoardWriter
from rlsync.transport.contract import Apply
from rlsync.transport.local import LocalTransport
from tests.conftest import is_quick, may_start_processes
from tests.tools.board_workers import Remote
from tests.tools.queue_transport import QueueTransport


class There(Learner):
    """The subscriber in a process of its own."""

    def __init__(self, board: BoardWriter, remote: Remote, mode: str) -> None:
        super().__init__(board)
        self.remote = remote
        remote.ask("attach", board.handle, mode)

    def adopt(self) -> int:
        return self.remote.ask("adopt")

    def bits(self) -> list[bytes]:
        return self.remote.ask("bits")

    def values(self) -> tuple[float, float]:
        return self.remote.ask("values")


@pytest.fixture(scope="module", autouse=True)  # so that it is there before a test counts processes
def spawned(request: pytest.FixtureRequest) -> Iterator[Remote | None]:
    tests = [item for item in request.session.items if item.path == request.path]
    if all(map(is_quick, tests)):
        yield None
        return
    with may_start_processes():
        remote = Remote("spawn")
    yield remote
    remote.end()


@contextmanager
def local(layout: Layout) -> Iterator[Ends]:
    acts = Acts("copy")
    own = filled(layout, 0.0)

    def write_into_the_module(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        acts.version = version
        with torch.no_grad():
            torch._foreach_copy_(layout.spread(own), list(views))  # as Target.copy does
        acts.tensors = layout.spread(own)
        return False

    transport = LocalTransport()
    reader = transport.subscribe(write_into_the_module)
    transport.lay_out(layout)
    yield InOneProcess(transport, reader, acts)


@contextmanager
def queued(layout: Layout) -> Iterator[Ends]:
    acts = Acts("alias")
    transport = QueueTransport()
    transport.lay_out(layout)
    yield InOneProcess(transport, transport.subscribe(acts), acts)


def board_here(mode: str) -> Open:
    @contextmanager
    def opened(layout: Layout) -> Iterator[Ends]:
        board = BoardWriter()
        board.lay_out(layout)
        acts = Acts(mode)
        reader = BoardReader(board.handle, acts)
        try:
            yield InOneProcess(board, reader, acts)
        finally:
            reader.close()
            board.close()

    return opened


def board_there(mode: str, remote: Remote) -> Open:
    @contextmanager
    def opened(layout: Layout) -> Iterator[Ends]:
        board = BoardWriter()
        board.lay_out(layout)
        try:
            yield There(board, remote, mode)
        finally:
            remote.ask("detach")
            board.close()

    return opened


IN_PROCESS = ["local", "queue", "board-alias", "board-copy"]
ALL = [
    *IN_PROCESS,
    *(pytest.param(f"board-{mode}-process", marks=pytest.mark.processes) for mode in ("alias", "copy")),
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "connect" in metafunc.fixturenames:
        kinds = IN_PROCESS if metafunc.function in laws.BOTH_ENDS_HERE else ALL
        left_out = "local" if metafunc.function in laws.KEEPS_A_COPY else ""
        metafunc.parametrize("connect", [kind for kind in kinds if kind != left_out], indirect=True)


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Open:
    kind, *rest = request.param.split("-")
    if kind == "local":
        return local
    if kind == "queue":
        return queued
    if rest[-1] == "process":
        return board_there(rest[0], request.getfixturevalue("spawned"))
    return board_here(rest[0])


# ------------------------------------------------------------------ the local transport's own


class Local:
    """A local transport, its reader, and a ledger."""

    def __init__(self, apply: Apply, layout: Layout) -> None:
        self.transport = LocalTransport()
        self.reader = self.transport.subscribe(apply)
        self.transport.lay_out(layout)
        self.learner = Learner(self.transport)
        self.publish = self.learner.publish
        self.acting = self.reader.acting


def test_a_local_publish_waits_for_the_rollout_to_end_before_it_acts() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    local = Local(acts, layout)
    local.publish(filled(layout, 1.0))
    with local.acting() as version:
        assert version == 1
        learner = threading.Thread(target=local.publish, args=(filled(layout, 2.0),))
        learner.start()
        learner.join(10)
        assert not learner.is_alive(), "the publish waited for the rollout"
        assert local.transport.newest_stamp == Stamp(1, 2)
        assert local.reader.version == 1
        assert low_high(acts.tensors) == (1.0, 1.0)
    with local.acting() as version:
        assert version == 2
        assert low_high(acts.tensors) == (2.0, 2.0)


def test_waiting_for_a_local_version_takes_it_up_when_the_rollout_has_ended() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    local = Local(acts, layout)
    with local.acting():
        local.publish(filled(layout, 1.0))
        with pytest.raises(AdoptionTimeout):
            local.transport.wait(1, timeout_s=0.05)
    local.transport.wait(1, timeout_s=5.0)
    assert low_high(acts.tensors) == (1.0, 1.0)


def test_the_newest_of_the_staged_local_publishes_acts() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    local = Local(acts, layout)
    with local.acting():
        for number in (1.0, 2.0, 3.0):
            local.publish(filled(layout, number))
    assert local.reader.adopt() == 3
    assert low_high(acts.tensors) == (3.0, 3.0)


def test_a_staged_local_publish_is_a_copy() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    local = Local(acts, layout)
    tensors = filled(layout, 1.0)
    with local.acting():
        local.publish(tensors)
        for tensor in tensors:
            tensor.fill_(-1.0)  # the optimizer steps on while the rollout lasts
    local.reader.adopt()
    assert low_high(acts.tensors) == (1.0, 1.0)


def test_a_local_version_is_never_overtaken_by_an_older_staged_one() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    local = Local(acts, layout)
    with local.acting():
        local.publish(filled(layout, 1.0))
    local.publish(filled(layout, 2.0))
    assert local.reader.adopt() == 2
    assert low_high(acts.tensors) == (2.0, 2.0)


def test_a_staged_local_version_keeps_the_layout_it_was_published_under() -> None:
    narrow, wide = plain_layout(1, 4), plain_layout(3, 4)
    taken: list[tuple[int, int]] = []

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        taken.append((len(layout.entries), len(views)))
        return False

    local = Local(apply, narrow)
    with local.acting():
        local.publish(filled(narrow, 1.0))
        local.transport.lay_out(wide)
    local.reader.adopt()
    assert taken == [(1, 1)]


def test_a_staged_local_version_is_not_lost_to_one_that_brings_other_leaves() -> None:
    both = plain_layout(2, 4)
    live = {"w0": torch.zeros(4), "w1": torch.zeros(4)}

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        for entry, view in zip(layout.entries, views, strict=True):
            live[entry.leaf.name].copy_(view)
        return False

    local = Local(apply, both)
    with local.acting():
        local.publish([torch.full((4,), 1.0), None])
        local.publish([None, torch.full((4,), 2.0)])
    assert local.reader.adopt() == 2
    assert (live["w0"].unique().tolist(), live["w1"].unique().tolist()) == ([1.0], [2.0])


def test_a_local_reader_is_seen_to_live_when_it_begins_a_rollout() -> None:
    local = Local(Acts("copy"), plain_layout())
    local.reader._rollout_at -= 1e6
    (before,) = local.transport.status()
    local.reader.adopt()
    (after,) = local.transport.status()
    assert before.heartbeat_age_s >= 1e6 > after.heartbeat_age_s


def test_a_local_apply_that_fails_leaves_the_version_to_be_published_again() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    broken = [True]

    def apply(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        if broken.pop():
            broken.append(False)
            raise OSError("the module is not there")
        broken.append(False)
        return acts(version, layout, views)

    local = Local(apply, layout)
    with pytest.raises(OSError, match="not there"):
        local.publish(filled(layout, 1.0))
    assert (local.learner.ledger.version, local.reader.version) == (0, 0)
    assert local.publish(filled(layout, 2.0)) == 1
    assert local.reader.adopt() == 1
    assert low_high(acts.tensors) == (2.0, 2.0)

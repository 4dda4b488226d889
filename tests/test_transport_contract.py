"""The laws of rlsync/transport/base.py, held against every transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.base import Publisher, Subscriber
from rlsync.transport.board import BoardReader, WeightBoard
from rlsync.transport.local import LocalTransport
from tests.board_workers import Acts, Remote, bits, filled, low_high, plain_layout


class Link(Protocol):
    """A publisher, one subscriber, and what acts behind it."""

    def publish(self, tensors: Sequence[torch.Tensor]) -> int | None: ...
    def version(self) -> int: ...
    def advance_to(self, version: int) -> None: ...
    def adopt(self) -> int: ...
    def bits(self) -> list[bytes]: ...
    def values(self) -> tuple[float, float]: ...


class Here:
    """Both ends in this process."""

    def __init__(self, publisher: Publisher, subscriber: Subscriber, acts: Acts) -> None:
        self.publisher, self.subscriber, self.acts = publisher, subscriber, acts
        self.publish = publisher.publish
        self.adopt = subscriber.adopt
        self.advance_to = publisher.advance_to  # type: ignore[attr-defined]

    def version(self) -> int:
        return self.publisher.version

    def bits(self) -> list[bytes]:
        return [bits(tensor) for tensor in self.acts.tensors]

    def values(self) -> tuple[float, float]:
        return low_high(self.acts.tensors)


class There:
    """The subscriber in a process of its own."""

    def __init__(self, board: WeightBoard, remote: Remote, mode: str) -> None:
        self.board, self.remote = board, remote
        self.publish = board.publish
        self.advance_to = board.advance_to
        remote.ask("attach", board.handle, mode)

    def version(self) -> int:
        return self.board.version

    def adopt(self) -> int:
        return self.remote.ask("adopt")

    def bits(self) -> list[bytes]:
        return self.remote.ask("bits")

    def values(self) -> tuple[float, float]:
        return self.remote.ask("values")


Open = Callable[[Layout], "contextmanager[Link]"]


@pytest.fixture(scope="module", autouse=True)  # so that it is there before a test counts processes
def spawned() -> Iterator[Remote]:
    remote = Remote("spawn")
    yield remote
    remote.end()


@contextmanager
def local(layout: Layout) -> Iterator[Link]:
    acts = Acts("copy")
    own = filled(layout, 0.0)

    def write_into_the_module(version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        del version
        with torch.no_grad():
            torch._foreach_copy_(layout.spread(own), list(views))  # as Target.copy does
        acts.tensors = layout.spread(own)
        return False

    transport = LocalTransport(layout, write_into_the_module)
    yield Here(transport, transport, acts)


def board_here(mode: str) -> Open:
    @contextmanager
    def opened(layout: Layout) -> Iterator[Link]:
        board = WeightBoard()
        board.lay_out(layout)
        acts = Acts(mode)
        reader = BoardReader(board.handle, acts)
        try:
            yield Here(board, reader, acts)
        finally:
            reader.close()
            board.close()

    return opened


def board_there(mode: str, remote: Remote) -> Open:
    @contextmanager
    def opened(layout: Layout) -> Iterator[Link]:
        board = WeightBoard()
        board.lay_out(layout)
        try:
            yield There(board, remote, mode)
        finally:
            remote.ask("detach")
            board.close()

    return opened


IN_PROCESS = ["local", "board-alias", "board-copy"]
ALL = [*IN_PROCESS, "board-alias-process", "board-copy-process"]


@pytest.fixture(params=ALL)
def connect(request: pytest.FixtureRequest) -> Open:
    kind, *rest = request.param.split("-")
    if kind == "local":
        return local
    if rest[-1] == "process":
        return board_there(rest[0], request.getfixturevalue("spawned"))
    return board_here(rest[0])


in_process = pytest.mark.parametrize("connect", IN_PROCESS, indirect=True)

MIXED = Layout.build(
    {
        "policy": [
            LeafSpec("weight", "parameter", (5, 3), torch.float32),
            LeafSpec("bias", "parameter", (), torch.bfloat16),
            LeafSpec("tied", "parameter", (5, 3), torch.float32, tie="weight"),
            LeafSpec("empty", "parameter", (0, 4), torch.float32),
            LeafSpec("phase", "buffer", (3,), torch.complex64),
        ],
        "env.transform[0]": [
            LeafSpec("loc", "buffer", (7,), torch.float64),
            LeafSpec("count", "extra_state", (), torch.int64),
            LeafSpec("mask", "buffer", (9,), torch.bool),
        ],
    }
)


def random_tensors(layout: Layout, seed: int) -> list[torch.Tensor]:
    """Random bits, NaNs and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for entry in layout.owned:
        leaf = entry.leaf
        top = 2 if leaf.dtype is torch.bool else 256
        raw = torch.randint(0, top, (leaf.payload_bytes,), dtype=torch.uint8, generator=generator)
        empty = torch.empty(leaf.shape, dtype=leaf.dtype)
        out.append(raw.view(leaf.dtype).view(leaf.shape) if raw.numel() else empty)
    return out


def expected(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [bits(tensor) for tensor in layout.spread(tensors)]


few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


# ------------------------------------------------------------------ 1  as a whole, or not at all


@few
@given(seed=st.integers(0, 2**32))
def test_every_leaf_of_every_destination_arrives_bit_for_bit(connect: Open, seed: int) -> None:
    tensors = random_tensors(MIXED, seed)
    with connect(MIXED) as link:
        assert link.publish(tensors) == 1
        assert link.adopt() == 1
        assert link.bits() == expected(MIXED, tensors)


def test_what_is_published_is_a_copy(connect: Open) -> None:
    layout = plain_layout()
    tensors = filled(layout, 1.0)
    with connect(layout) as link:
        link.publish(tensors)
        for tensor in tensors:
            tensor.fill_(-1.0)
        link.adopt()
        assert link.values() == (1.0, 1.0)
        for tensor in tensors:
            tensor.fill_(-2.0)
        assert link.values() == (1.0, 1.0)


def test_a_publish_leaves_the_source_as_it_was(connect: Open) -> None:
    layout = plain_layout()
    tensors = [torch.nn.Parameter(tensor) for tensor in filled(layout, 1.0)]
    before = [(t.data_ptr(), t.is_shared(), t.requires_grad, t.grad) for t in tensors]
    with connect(layout) as link:
        assert link.publish(tensors) == 1
        link.adopt()
    assert [(t.data_ptr(), t.is_shared(), t.requires_grad, t.grad) for t in tensors] == before
    assert low_high([t.detach() for t in tensors]) == (1.0, 1.0)


def _too_few(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors[:-1]


def _too_many(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors, torch.zeros(1000)]


def _last_of_a_wrong_shape(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors[:-1], torch.zeros(7)]


def _last_to_be_broadcast(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors[:-1], torch.full((1,), 66.0)]


@pytest.mark.parametrize("spoil", [_too_few, _too_many, _last_of_a_wrong_shape, _last_to_be_broadcast])
def test_a_publish_that_does_not_fit_raises_and_changes_nothing(
    connect: Open, spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        assert link.adopt() == 1
        with pytest.raises(LayoutMismatch):
            link.publish(spoil(filled(layout, 66.0)))
        assert link.version() == 1
        assert link.adopt() == 1
        assert link.values() == (1.0, 1.0)
        assert link.publish(filled(layout, 2.0)) == 2
        assert link.adopt() == 2
        assert link.values() == (2.0, 2.0)


# ------------------------------------------------------------------ 2  versions


def test_versions_begin_at_one_and_grow_by_one(connect: Open) -> None:
    layout = plain_layout(1, 4)
    with connect(layout) as link:
        assert link.version() == 0
        for version in range(1, 30):
            assert link.publish(filled(layout, version)) == version
            assert link.version() == version


def test_versions_up_to_the_one_advanced_to_are_never_given_out_again(connect: Open) -> None:
    layout = plain_layout(1, 4)
    with connect(layout) as link:
        link.advance_to(41)
        assert link.publish(filled(layout, 42)) == 42
        assert link.adopt() == 42
        link.advance_to(7)
        assert link.publish(filled(layout, 43)) == 43
        assert link.adopt() == 43
        assert link.values() == (43.0, 43.0)


def test_advancing_changes_nothing_of_what_acts(connect: Open) -> None:
    layout = plain_layout(1, 4)
    with connect(layout) as link:
        link.publish(filled(layout, 1))
        assert link.adopt() == 1
        link.advance_to(10)
        assert link.adopt() == 1
        assert link.values() == (1.0, 1.0)


# ------------------------------------------------------------------ 3, 4  adoption


def test_before_the_first_publish_there_is_nothing_to_adopt(connect: Open) -> None:
    with connect(plain_layout()) as link:
        assert link.adopt() == 0
        assert link.bits() == []
        assert link.adopt() == 0


def test_an_adoption_takes_the_newest_version_and_skips_the_others(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        for number in range(1, 8):
            link.publish(filled(layout, number))
        assert link.adopt() == 7
        assert link.values() == (7.0, 7.0)
        assert link.adopt() == 7


@few
@given(publishes=st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_what_acts_is_always_exactly_the_version_adopted_last(connect: Open, publishes: list[int]) -> None:
    """`publishes` says how many versions come out between one adoption and the next."""
    sent: dict[int, list[bytes]] = {0: []}
    with connect(MIXED) as link:
        last = 0
        for count in publishes:
            for _ in range(count):
                tensors = random_tensors(MIXED, len(sent))
                version = link.publish(tensors)
                assert version == len(sent)
                sent[version] = expected(MIXED, tensors)
            adopted = link.adopt()
            assert adopted == link.version() >= last
            assert link.bits() == sent[adopted]
            last = adopted


@pytest.mark.parametrize("connect", [kind for kind in ALL if kind != "local"], indirect=True)
def test_what_acts_stays_as_it_is_until_the_next_adoption(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        link.adopt()
        for number in range(2, 40):
            link.publish(filled(layout, number))
            assert link.values() == (1.0, 1.0)
        assert link.adopt() == 39
        assert link.values() == (39.0, 39.0)


@in_process
def test_two_threads_never_see_a_mixture(connect: Open) -> None:
    layout = plain_layout(tensors=8, size=5000)
    found: list[tuple[int, tuple[float, float]]] = []
    stop = threading.Event()

    with connect(layout) as link:
        transport = link.subscriber  # type: ignore[attr-defined]

        def act() -> None:
            while not stop.is_set():
                if isinstance(transport, LocalTransport):
                    with transport.acting() as version:
                        looks = [link.values() for _ in range(3)] if version else []
                else:
                    version = transport.adopt()
                    looks = [link.values() for _ in range(3)] if version else []
                found.extend((version, look) for look in looks)

        worker = threading.Thread(target=act)
        worker.start()
        number, until = 0, time.monotonic() + 20
        try:
            while len({version for version, _ in found}) < 40 and time.monotonic() < until:
                number += 1
                assert link.publish(filled(layout, number)) == number
        finally:
            stop.set()
            worker.join(20)
        assert not worker.is_alive()
        assert link.adopt() == number
        assert link.values() == (number, number)
    assert len({version for version, _ in found}) >= 40, "the worker adopted next to nothing"
    assert all(look == (version, version) for version, look in found)
    versions = [version for version, _ in found]
    assert versions == sorted(versions)


# ------------------------------------------------------------------ 5  nobody waits


def test_a_subscriber_that_never_adopts_holds_nothing_up(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        for number in range(1, 201):
            assert link.publish(filled(layout, number)) == number
        assert link.adopt() == 200


def test_an_adoption_with_nothing_new_changes_nothing(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        assert [link.adopt() for _ in range(50)] == [1] * 50
        assert link.values() == (1.0, 1.0)


# ------------------------------------------------------------------ the local transport's own


def test_a_local_publish_waits_for_the_rollout_to_end_before_it_acts() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    transport = LocalTransport(layout, acts)
    transport.publish(filled(layout, 1.0))
    with transport.acting() as version:
        assert version == 1
        learner = threading.Thread(target=transport.publish, args=(filled(layout, 2.0),))
        learner.start()
        learner.join(10)
        assert not learner.is_alive(), "the publish waited for the rollout"
        assert transport.version == 2
        assert transport.adopted == 1
        assert low_high(acts.tensors) == (1.0, 1.0)
    with transport.acting() as version:
        assert version == 2
        assert low_high(acts.tensors) == (2.0, 2.0)


def test_the_newest_of_the_staged_local_publishes_acts() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    transport = LocalTransport(layout, acts)
    with transport.acting():
        for number in (1.0, 2.0, 3.0):
            transport.publish(filled(layout, number))
    assert transport.adopt() == 3
    assert low_high(acts.tensors) == (3.0, 3.0)


def test_a_staged_local_publish_is_a_copy() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    transport = LocalTransport(layout, acts)
    tensors = filled(layout, 1.0)
    with transport.acting():
        transport.publish(tensors)
        for tensor in tensors:
            tensor.fill_(-1.0)  # the optimizer steps on while the rollout lasts
    transport.adopt()
    assert low_high(acts.tensors) == (1.0, 1.0)


def test_a_local_version_is_never_overtaken_by_an_older_staged_one() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    transport = LocalTransport(layout, acts)
    with transport.acting():
        transport.publish(filled(layout, 1.0))
    transport.publish(filled(layout, 2.0))
    assert transport.adopt() == 2
    assert low_high(acts.tensors) == (2.0, 2.0)


def test_a_staged_local_version_keeps_its_number_whatever_is_advanced_to() -> None:
    layout = plain_layout()
    acts = Acts("copy")
    transport = LocalTransport(layout, acts)
    with transport.acting():
        transport.publish(filled(layout, 1.0))
        transport.advance_to(10)
    assert transport.adopt() == 1
    assert transport.publish(filled(layout, 11.0)) == 11


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

    transport = LocalTransport(layout, apply)
    with pytest.raises(OSError, match="not there"):
        transport.publish(filled(layout, 1.0))
    assert (transport.version, transport.adopted) == (0, 0)
    assert transport.publish(filled(layout, 2.0)) == 1
    assert transport.adopt() == 1
    assert low_high(acts.tensors) == (2.0, 2.0)

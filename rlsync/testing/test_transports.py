"""The laws of :mod:`rlsync.transport.contract`, held against every transport that has a name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsync.core.errors import AdoptionTimeout, BoardClosed, LayoutMismatch, PublishError
from rlsync.core.extensions import transports
from rlsync.core.ledger import Ledger, Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.testing.acting import Acts, bits, filled, low_high, plain_layout
from rlsync.transport.contract import Note, Subscriber, TellsAtOnce, Transport, transport_named
from rlsync.transport.local import LocalReader


class Ends(Protocol):
    """A learner's end with a ledger, one subscriber, and what acts behind it."""

    ledger: Ledger
    transport: Transport

    def publish(self, tensors: Sequence[torch.Tensor | None]) -> int | None: ...
    def adopt(self) -> int: ...
    def bits(self) -> list[bytes]: ...
    def values(self) -> tuple[float, float]: ...


class Learner:
    """Publishes through a transport under numbers from a ledger, as a Publisher does."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.ledger = Ledger()

    def publish(self, tensors: Sequence[torch.Tensor | None]) -> int | None:
        stamp = self.ledger.next
        version = self.transport.publish(tensors, stamp=stamp)
        self.transport.join()
        if version is not None:
            self.ledger.record(stamp)
        return version


class InOneProcess(Learner):
    """Both ends in this process."""

    def __init__(self, transport: Transport, subscriber: Subscriber, acts: Acts) -> None:
        super().__init__(transport)
        self.subscriber = subscriber
        self.acts = acts

    def adopt(self) -> int:
        adopted = self.subscriber.adopt()
        assert self.acts.version == adopted, "what applies it was told another version"
        return adopted

    def bits(self) -> list[bytes]:
        return [bits(tensor) for tensor in self.acts.tensors]

    def values(self) -> tuple[float, float]:
        return low_high(self.acts.tensors)


#: ``connect(layout)`` opens :class:`Ends`.
Open = Callable[[Layout], AbstractContextManager[Any]]


@pytest.fixture(params=transports())
def connect(request: pytest.FixtureRequest) -> Open:
    @contextmanager
    def opened(layout: Layout) -> Iterator[Ends]:
        transport = transport_named(request.param)
        acts = Acts("alias")
        try:
            transport.lay_out(layout)
            subscriber = transport.handle.subscribe(acts)
            try:
                yield InOneProcess(transport, subscriber, acts)
            finally:
                subscriber.close()
        finally:
            transport.close()

    return opened


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
        size = (leaf.payload_bytes,)
        raw = torch.randint(0, top, size, dtype=torch.uint8, generator=generator, device="cpu")
        if raw.numel():
            out.append(raw.view(leaf.dtype).view(leaf.shape))
        else:
            out.append(torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"))
    return out


def expected(layout: Layout, tensors: Sequence[torch.Tensor]) -> list[bytes]:
    return [bits(tensor) for tensor in layout.spread(tensors)]


few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


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
        _, newest = link.transport.newest_leaves() or (None, [])
        assert all(leaf.eq(1.0).all() for leaf in newest)
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
    return [*tensors, torch.zeros(1000, device="cpu")]


def last_of_a_wrong_shape(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors[:-1], torch.zeros(7, device="cpu")]


def _last_to_be_broadcast(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*tensors[:-1], torch.full((1,), 66.0, device="cpu")]


@pytest.mark.parametrize(
    "spoil", [_too_few, _too_many, last_of_a_wrong_shape, _last_to_be_broadcast]
)
def test_a_publish_that_does_not_fit_raises_and_changes_nothing(
    connect: Open, spoil: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        assert link.adopt() == 1
        with pytest.raises(LayoutMismatch):
            link.publish(spoil(filled(layout, 66.0)))
        assert link.ledger.version == 1
        assert link.adopt() == 1
        assert link.values() == (1.0, 1.0)
        assert link.publish(filled(layout, 2.0)) == 2
        assert link.adopt() == 2
        assert link.values() == (2.0, 2.0)


# ------------------------------------------------------------------ 2  versions


def test_versions_begin_at_one_and_grow_by_one(connect: Open) -> None:
    layout = plain_layout(1, 4)
    with connect(layout) as link:
        assert link.ledger.version == 0
        for version in range(1, 30):
            assert link.publish(filled(layout, version)) == version
            assert link.ledger.version == version


def test_versions_up_to_the_one_advanced_to_are_never_given_out_again(connect: Open) -> None:
    layout = plain_layout(1, 4)
    with connect(layout) as link:
        link.ledger.advance_to(41)
        assert link.publish(filled(layout, 42)) == 42
        assert link.adopt() == 42
        link.ledger.advance_to(7)
        assert link.publish(filled(layout, 43)) == 43
        assert link.adopt() == 43
        assert link.values() == (43.0, 43.0)


def test_advancing_changes_nothing_of_what_acts(connect: Open) -> None:
    layout = plain_layout(1, 4)
    with connect(layout) as link:
        link.publish(filled(layout, 1))
        assert link.adopt() == 1
        link.ledger.advance_to(10)
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
def test_what_acts_is_always_exactly_the_version_adopted_last(
    connect: Open, publishes: list[int]
) -> None:
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
            assert adopted == link.ledger.version >= last
            assert link.bits() == sent[adopted]
            last = adopted


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


def test_two_threads_never_see_a_mixture(connect: Open) -> None:
    layout = plain_layout(tensors=8, size=5000)
    seen_with: list[tuple[int, tuple[float, float]]] = []
    stop = threading.Event()

    with connect(layout) as link:
        transport = link.subscriber

        def look(version: int) -> None:
            if version:
                for _ in range(3):
                    seen_with.append((version, link.values()))

        def act() -> None:
            while not stop.is_set():
                if isinstance(transport, LocalReader):
                    with transport.acting() as version:
                        look(version)
                else:
                    look(transport.adopt())

        worker = threading.Thread(target=act)
        worker.start()
        number = 0
        until = time.monotonic() + 20
        try:
            while len(dict(seen_with)) < 40 and time.monotonic() < until:
                number += 1
                assert link.publish(filled(layout, number)) == number
        finally:
            stop.set()
            worker.join(20)
        assert not worker.is_alive()
        assert link.adopt() == number
        assert link.values() == (number, number)
    assert len(dict(seen_with)) >= 40, "the worker adopted next to nothing"
    assert all(values == (version, version) for version, values in seen_with)
    versions = [version for version, _ in seen_with]
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


def test_a_subscriber_that_forgets_takes_the_newest_version_again(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        link.adopt()
        link.subscriber.forget()
        assert link.adopt() == 1
        assert link.values() == (1.0, 1.0)
        link.publish(filled(layout, 2.0))
        assert link.subscriber.begin() == 2
        assert link.values() == (2.0, 2.0)


# ------------------------------------------------------------------ the stamp


def test_a_stamp_that_is_not_newer_is_refused_and_changes_nothing(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.transport.publish(filled(layout, 1.0), stamp=Stamp(2, 5))
        assert link.adopt() == 5
        for stamp in (Stamp(2, 5), Stamp(2, 4), Stamp(1, 9)):
            with pytest.raises(PublishError, match="is not newer than version 5 of generation 2"):
                link.transport.publish(filled(layout, 66.0), stamp=stamp)
        assert link.transport.newest_stamp == Stamp(2, 5)
        assert link.adopt() == 5
        assert link.values() == (1.0, 1.0)


def test_the_next_life_of_a_learner_may_publish_a_lower_number(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.transport.publish(filled(layout, 1.0), stamp=Stamp(1, 15))
        assert link.adopt() == 15
        link.transport.publish(filled(layout, 2.0), stamp=Stamp(2, 11))  # resumed from version 10
        assert link.adopt() == 11
        assert link.values() == (2.0, 2.0)


def test_numbers_may_be_left_out(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        for version in (3, 4, 90):
            assert (
                link.transport.publish(filled(layout, version), stamp=Stamp(1, version)) == version
            )
            assert link.adopt() == version
        assert link.values() == (90.0, 90.0)


# ------------------------------------------------------------------ what a publish leaves out


def test_an_entry_that_is_left_out_keeps_its_value(connect: Open) -> None:
    layout = plain_layout(2)
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        link.adopt()
        link.publish([None, torch.full((1000,), 2.0, device="cpu")])
        assert link.adopt() == 2
        # the local transport hands out what it was given
        if link.transport.newest_leaves() is not None:
            assert link.values() == (1.0, 2.0)
        link.publish([torch.full((1000,), 3.0, device="cpu"), None])
        assert link.adopt() == 3
        if link.transport.newest_leaves() is not None:
            assert link.values() == (2.0, 3.0)


def test_an_entry_without_a_value_before_cannot_be_left_out(connect: Open) -> None:
    layout = plain_layout(2)
    with connect(layout) as link:
        with pytest.raises(PublishError, match="w0 has no value to keep"):
            link.publish([None, torch.ones(1000, device="cpu")])
        assert link.ledger.version == 0
        assert link.adopt() == 0


def test_a_value_is_kept_across_a_new_layout(connect: Open) -> None:
    first = plain_layout(2)
    second = plain_layout(3)
    with connect(first) as link:
        link.publish(filled(first, 1.0))
        link.adopt()
        link.transport.lay_out(second)
        link.publish([None, None, torch.full((1000,), 2.0, device="cpu")])
        assert link.adopt() == 2
        assert link.values() == (1.0, 2.0)


# ------------------------------------------------------------------ readers, questions, closing


def test_readers_are_told_with_what_they_act_with_and_waiting_for_them_has_an_end(
    connect: Open,
) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        link.publish(filled(layout, 1.0))
        link.adopt()
        (reader,) = link.transport.status()
        assert (reader.reader, reader.alive, reader.adopted_version, reader.lag_versions) == (
            0,
            True,
            1,
            0,
        )
        if isinstance(link.transport, TellsAtOnce):
            assert link.transport.adopted(2) == [1, 0]
            assert link.transport.adopted(0) == []
            assert 0.0 <= link.transport.age_s(0) < 60.0
            assert link.transport.lives(0)
            assert not link.transport.lives(1)
        link.transport.wait(1, timeout_s=5.0)
        link.transport.wait(1, timeout_s=5.0, readers=[0])
        with pytest.raises(AdoptionTimeout, match="version 2 was not adopted"):
            link.transport.wait(2, timeout_s=0.05)
        with pytest.raises(AdoptionTimeout, match="version 1 was not adopted"):
            link.transport.wait(1, timeout_s=0.05, readers=[0, 1])


def test_a_reader_is_asked_about_the_version_it_acts_with(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        subscriber: Subscriber = link.subscriber
        link.publish(filled(layout, 1.0))
        link.adopt()
        assert subscriber.asked == 0
        question = link.transport.ask(lowest=2)
        assert subscriber.asked == 0, "it acts with version 1"
        link.publish(filled(layout, 2.0))
        link.adopt()
        assert subscriber.asked == question
        assert link.transport.note(0, Note.ANSWER) is None
        subscriber.leave_note(b"mine", Note.ANSWER)
        subscriber.leave_note(b"leaves", Note.LEAVES)
        assert link.transport.note(0, Note.ANSWER) == b"mine"
        assert link.transport.note(0, Note.LEAVES) == b"leaves"
        assert link.transport.note(1, Note.ANSWER) is None


def test_a_closed_transport_publishes_nothing_and_says_so(connect: Open) -> None:
    layout = plain_layout()
    with connect(layout) as link:
        subscriber: Subscriber = link.subscriber
        link.publish(filled(layout, 1.0))
        link.adopt()
        assert not subscriber.closed_by_learner
        link.transport.close()
        link.transport.close()
        assert subscriber.closed_by_learner
        assert link.values() == (1.0, 1.0)
        with pytest.raises(BoardClosed):
            link.publish(filled(layout, 2.0))


#: Laws whose tests look at a subscriber in this process.
BOTH_ENDS_HERE = {
    test_two_threads_never_see_a_mixture,
    test_readers_are_told_with_what_they_act_with_and_waiting_for_them_has_an_end,
    test_a_reader_is_asked_about_the_version_it_acts_with,
    test_a_subscriber_that_forgets_takes_the_newest_version_again,
    test_a_closed_transport_publishes_nothing_and_says_so,
}
#: Laws that hold for a transport that keeps a copy of what it published.
KEEPS_A_COPY = {
    test_what_acts_stays_as_it_is_until_the_next_adoption,
    test_an_entry_without_a_value_before_cannot_be_left_out,
    test_a_value_is_kept_across_a_new_layout,
}

"""Versions on a Ray cluster of two nodes; tests/laws/test_on_ray.py runs this in a network of its own.

Nothing here expects that something has happened at once in another process: it is waited for.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

from rlsync.core.errors import AdoptionTimeout, BoardClosed, WorkerLost
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.board import BoardWriter
from rlsync.transport.contract import Note
from rlsync.transport.ray.learner import RayTransport
from rlsync.transport.ray.receiver import NodeReceiver, RaySubscriber
from rlsync.transport.relay.ends import KEPT_IMAGES
from rlsync.transport.relay.mailbox import WAVE, Message
from tests.laws import test_transport_contract as laws
from tests.tools.board_workers import Acts, filled, plain_layout
from tests.tools.parts.ray_cluster import add_node
from tests.tools.processes import wait_until
from tests.tools.ray_nodes import start_node

pytestmark = [pytest.mark.slow, pytest.mark.processes]

LONG_S = 120.0  # for what takes a second on a machine that has nothing else to do
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
LAYOUT = plain_layout(4, 5000, "env.transform[0]")


@dataclass
class Nodes:
    """A cluster, and an actor on each of its nodes."""

    cluster: Cluster
    actors: list[Any]

    def attached(self, transport: RayTransport, mode: str = "alias") -> list[Any]:
        """All of them, attached to a learner."""
        ray.get(
            [a.attach.remote(transport.mailbox, f"node {i}", i, mode) for i, a in enumerate(self.actors)],
            timeout=LONG_S,
        )
        return self.actors


@pytest.fixture(scope="module")
def nodes(one_node: Cluster) -> Nodes:
    add_node(one_node, **NODE)
    actors = [start_node(node.node_id) for node in one_node.list_all_nodes()]
    ray.get([actor.pid.remote() for actor in actors], timeout=LONG_S)
    return Nodes(one_node, actors)


@contextmanager
def learner(layout: Layout = LAYOUT) -> Iterator[RayTransport]:
    transport = RayTransport(repeat_s=0.2)
    try:
        transport.lay_out(layout)
        yield transport
    finally:
        transport.close()


def publish(transport: RayTransport, version: int, generation: int = 1) -> Stamp:
    assert transport.layout is not None
    stamp = Stamp(generation, version)
    transport.publish(filled(transport.layout, version), stamp=stamp)
    return stamp


def reach(actors: list[Any], stamp: Stamp) -> None:
    """All of them act with a version, and with nothing else."""
    stamps = ray.get([actor.await_stamp.remote(stamp, LONG_S) for actor in actors], timeout=2 * LONG_S)
    assert stamps == [stamp] * len(actors)


def posted(transport: RayTransport, stamp: Stamp) -> Message:
    """The message about a version, once it is on its way."""
    sender = transport.thread.sender
    assert wait_until(lambda: sender.stamp == stamp, LONG_S)
    assert sender.message is not None
    return sender.message


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# ------------------------------------------------------------------ the contract


class InOneProcess(laws.InOneProcess):
    """A subscriber in the learner's own process; an adoption waits until the newest version has come."""

    def adopt(self) -> int:
        assert isinstance(self.subscriber, RaySubscriber)
        assert isinstance(self.transport, RayTransport)
        receiver, where = self.subscriber.receiver, self.subscriber.where
        receiver.await_stamp(self.transport.newest_stamp, LONG_S, where)
        return super().adopt()


def opened(mode: str) -> laws.Open:
    @contextmanager
    def connect(layout: Layout) -> Iterator[laws.Ends]:
        with learner(layout) as transport:
            acts = Acts(mode)
            subscriber = transport.handle.subscribe(acts)
            try:
                yield InOneProcess(transport, subscriber, acts)
            finally:
                subscriber.close()

    return connect


#: Each starts a mailbox, which takes Ray a second. `make test` runs those of MORE on other transports alone.
LAWS = [
    laws.test_what_is_published_is_a_copy,
    laws.test_what_acts_stays_as_it_is_until_the_next_adoption,
    laws.test_the_next_life_of_a_learner_may_publish_a_lower_number,
]
MORE = [
    laws.test_an_adoption_takes_the_newest_version_and_skips_the_others,
    laws.test_a_value_is_kept_across_a_new_layout,
    laws.test_a_publish_leaves_the_source_as_it_was,
    laws.test_versions_begin_at_one_and_grow_by_one,
    laws.test_versions_up_to_the_one_advanced_to_are_never_given_out_again,
    laws.test_before_the_first_publish_there_is_nothing_to_adopt,
    laws.test_a_subscriber_that_never_adopts_holds_nothing_up,
    laws.test_an_adoption_with_nothing_new_changes_nothing,
    laws.test_a_stamp_that_is_not_newer_is_refused_and_changes_nothing,
    laws.test_numbers_may_be_left_out,
    laws.test_an_entry_that_is_left_out_keeps_its_value,
    laws.test_an_entry_without_a_value_before_cannot_be_left_out,
]


@pytest.mark.usefixtures("nodes")
@pytest.mark.parametrize(
    "law",
    [*LAWS, *(pytest.param(law, marks=pytest.mark.thorough) for law in MORE)],
    ids=[law.__name__.removeprefix("test_") for law in [*LAWS, *MORE]],
)
def test_the_contract_of_transports_holds(law: Callable[[laws.Open], None]) -> None:
    law(opened("alias"))


@pytest.mark.usefixtures("nodes")
def test_a_publish_that_does_not_fit_raises_and_changes_nothing() -> None:
    laws.test_a_publish_that_does_not_fit_raises_and_changes_nothing(
        opened("copy"), laws.last_of_a_wrong_shape
    )


@pytest.mark.usefixtures("nodes")
def test_every_leaf_of_every_destination_arrives_bit_for_bit() -> None:
    with opened("copy")(laws.MIXED) as link:
        for seed in range(20):
            tensors = laws.random_tensors(laws.MIXED, seed)
            assert link.publish(tensors) == seed + 1
            assert link.adopt() == seed + 1
            assert link.bits() == laws.expected(laws.MIXED, tensors)


@pytest.mark.usefixtures("nodes")
def test_the_learner_hears_what_workers_adopt_and_leave_and_they_hear_its_questions() -> None:
    with opened("alias")(LAYOUT) as link:
        transport, subscriber = link.transport, link.subscriber  # type: ignore[attr-defined]
        link.publish(filled(LAYOUT, 1.0))
        link.adopt()
        transport.wait(1, LONG_S, readers=[0])
        (reader,) = transport.status()
        assert (reader.reader, reader.pid, reader.alive) == (0, os.getpid(), True)
        assert (reader.adopted_version, reader.lag_versions) == (1, 0)
        with pytest.raises(AdoptionTimeout, match="version 2 was not adopted"):
            transport.wait(2, timeout_s=0.05)
        assert subscriber.asked == 0
        question = transport.ask(lowest=1)
        assert wait_until(lambda: subscriber.asked == question, LONG_S)
        assert transport.note(0, Note.ANSWER) is None
        subscriber.leave_note(b"mine", Note.ANSWER)
        subscriber.leave_note(b"leaves", Note.LEAVES)
        assert transport.note(0, Note.LEAVES) == b"leaves"
        assert wait_until(lambda: transport.note(0, Note.ANSWER) == b"mine", LONG_S)
        transport.close()
        transport.close()
        assert wait_until(lambda: subscriber.closed_by_learner, LONG_S)
        assert not subscriber.learner_died
        assert link.values() == (1.0, 1.0)
        with pytest.raises(BoardClosed):
            transport.publish(filled(LAYOUT, 2.0), stamp=Stamp(1, 2))


# ------------------------------------------------------------------ an actor on each node


@pytest.mark.one_case
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_no_node_ever_acts_with_a_torn_or_a_misnamed_version(nodes: Nodes, mode: str) -> None:
    with learner() as transport:
        actors = nodes.attached(transport, mode)
        stop = threading.Event()

        def publish_on() -> None:
            version = 0
            while not stop.is_set():
                version += 1
                publish(transport, version)
                time.sleep(1e-3)

        thread = threading.Thread(target=publish_on)
        thread.start()
        try:
            seen = ray.get([a.watch.remote(20, LONG_S) for a in actors], timeout=2 * LONG_S)
        finally:
            stop.set()
            thread.join(LONG_S)
        reach(actors, transport.newest_stamp)
        assert all(torn == wrong == 0 for _, torn, wrong in seen), seen
        assert all(versions >= 20 for versions, _, _ in seen), seen
        assert len(transport.thread.sender.kept) <= KEPT_IMAGES
        # The mailbox says who pulls what, and the learner lets go of what nobody needs.
        assert wait_until(lambda: transport.thread.sender.kept == [transport.newest_stamp], LONG_S)


def test_nobody_waits_for_the_learner_to_repeat_itself(nodes: Nodes) -> None:
    transport = RayTransport(repeat_s=3600.0)
    transport.lay_out(LAYOUT)
    subscriber = transport.handle.subscribe(Acts("copy"))
    for version in (1, 2):
        subscriber.receiver.await_stamp(publish(transport, version), LONG_S, subscriber.where)
        assert subscriber.adopt() == version
        question = transport.ask(lowest=version)
        assert wait_until(lambda question=question: subscriber.asked == question, LONG_S)
    subscriber.close()
    transport.close()


def test_an_image_that_takes_long_arrives(nodes: Nodes) -> None:
    """Ray throws away what has come of an object when a ``ray.get`` of it times out."""
    with learner(plain_layout(1, 5_000_000)) as transport:
        actors = nodes.attached(transport)
        reach(actors, publish(transport, 1))


@pytest.mark.usefixtures("nodes")
def test_more_nodes_than_a_wave_all_get_the_newest_version() -> None:
    with learner() as transport, ExitStack() as ends:
        receivers = []
        for number in range(3 * WAVE):
            board = BoardWriter()
            ends.callback(board.close)
            receiver = NodeReceiver(transport.mailbox, f"node {number}", board, numbers=[number])
            ends.callback(receiver.close)
            receivers.append(receiver)
        for version in range(1, 4):
            stamp = publish(transport, version)
            for receiver in receivers:
                receiver.await_stamp(stamp, LONG_S, receiver.node)
        assert wait_until(lambda: not transport.thread.sender.spreading, LONG_S)


@pytest.mark.thorough
def test_a_node_that_joins_late_gets_the_newest_version_without_the_learner(nodes: Nodes) -> None:
    with learner() as transport:
        for version in (1, 2, 3):
            stamp = publish(transport, version)
        reach(nodes.attached(transport), stamp)
        late = start_node(nodes.cluster.head_node.node_id)
        ray.get(late.attach.remote(transport.mailbox, "late", 7, "alias"), timeout=LONG_S)
        reach([late], stamp)
        assert wait_until(lambda: 7 in {status.reader for status in transport.status()}, LONG_S)
        ray.kill(late)


def test_a_mailbox_that_was_killed_comes_back_and_everybody_repeats_what_they_said(nodes: Nodes) -> None:
    with learner() as transport:
        actors = nodes.attached(transport)
        reach(actors, publish(transport, 1))
        ray.kill(transport.mailbox, no_restart=False)
        stamp = publish(transport, 2)  # raises nothing, and does not wait
        reach(actors, stamp)
        transport.wait(2, LONG_S, readers=range(len(actors)))
        ray.kill(transport.mailbox, no_restart=False)
        late = start_node(nodes.cluster.head_node.node_id)
        ray.get(late.attach.remote(transport.mailbox, "late", 3, "alias"), timeout=LONG_S)
        reach([late], stamp)
        ray.kill(late)


def test_a_stopped_node_holds_nobody_up_and_comes_back_to_the_newest_version(nodes: Nodes) -> None:
    with learner() as transport:
        actors = nodes.attached(transport)
        reach(actors, publish(transport, 1))
        with stopped(ray.get(actors[-1].pid.remote(), timeout=LONG_S)):
            for version in range(2, 12):
                reach(actors[:-1], publish(transport, version))
                assert len(transport.thread.sender.kept) <= KEPT_IMAGES
        reach(actors, transport.newest_stamp)


def test_an_image_that_was_damaged_in_the_store_is_put_again(nodes: Nodes) -> None:
    with learner() as transport:
        node = nodes.actors[-1]
        ray.get(node.attach.remote(transport.mailbox, "node", 1, "alias"), timeout=LONG_S)
        reach([node], publish(transport, 1))
        with stopped(ray.get(node.pid.remote(), timeout=LONG_S)):
            stamp = publish(transport, 2)
            message = posted(transport, stamp)
            held = ray.get(message.address, timeout=LONG_S)
            ctypes.memset(held.ctypes.data + held.nbytes // 2, 0x5A, 1)  # it is mapped as the store has it
        reach([node], stamp)
        assert transport.thread.sender.message is not None
        assert transport.thread.sender.message.number > message.number


@pytest.mark.thorough
def test_an_image_that_the_store_lost_before_it_was_pulled_is_put_again(nodes: Nodes) -> None:
    with learner() as transport:
        here = nodes.cluster.head_node.node_id
        node = start_node(next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] != here))
        ray.get(node.attach.remote(transport.mailbox, "node", 0, "alias", 10.0), timeout=LONG_S)
        reach([node], publish(transport, 1))
        for version in range(2, 7):
            with stopped(ray.get(node.pid.remote(), timeout=LONG_S)):
                stamp = publish(transport, version)
                message = posted(transport, stamp)
                lose(message.address)
            reach([node], stamp)
            assert transport.thread.sender.message is not None
            if transport.thread.sender.message.number > message.number:
                break  # else the store had the image in its memory still, and the node has pulled it
        assert transport.thread.sender.message.number > message.number
        ray.kill(node)


def lose(address: ray.ObjectRef) -> None:
    """Fill the store until it has an object on disk only, then remove it from there."""
    others: list[ray.ObjectRef] = []

    def put_more() -> None:
        others[:] = [*others[-13:], ray.put(np.zeros(10 * 2**20, np.uint8))]  # there is room for eight

    def spilled() -> bool:
        put_more()
        return bool(ray.experimental.get_object_locations([address])[address]["did_spill"])

    assert wait_until(spilled, LONG_S)
    for _ in range(14):
        put_more()
    for file in Path(os.environ["RAY_TMPDIR"]).glob("ray/session_2*/ray_spilled_objects*/*"):
        file.unlink(missing_ok=True)


@pytest.mark.thorough
def test_a_learner_that_has_closed_keeps_no_image_in_the_store(nodes: Nodes) -> None:
    counts = [objects_in_stores()]

    def settled() -> bool:  # what earlier learners had goes by and by
        counts.append(objects_in_stores())
        return len(counts) > 10 and len(set(counts[-10:])) == 1

    assert wait_until(settled, LONG_S, 0.1)
    before = counts[-1]
    with learner() as transport:
        reach(nodes.attached(transport), publish(transport, 1))
        assert objects_in_stores() > before
    assert wait_until(lambda: objects_in_stores() <= before, LONG_S, 0.1)
    assert transport.thread.sender.message is None, "the transport is there, and has let go"


def objects_in_stores() -> int:
    """Objects in the stores of all living nodes."""
    return sum(
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], False).store_stats.num_local_objects
        for node in ray.nodes()
        if node["Alive"]
    )


def test_a_learner_that_comes_back_is_the_next_generation_for_the_same_nodes(nodes: Nodes) -> None:
    with learner() as transport:
        actors = nodes.attached(transport)
        reach(actors, publish(transport, 15))
        reach(actors, publish(transport, 11, generation=2))  # resumed from version 10


def test_nodes_hear_that_the_learner_has_closed(nodes: Nodes) -> None:
    with learner() as transport:
        actors = nodes.attached(transport)
        reach(actors, publish(transport, 1))
    told = ray.get([actor.learner_gone.remote(LONG_S) for actor in actors], timeout=2 * LONG_S)
    assert told == [(True, False)] * len(actors)


def nodes_alive() -> int:
    """The nodes that Ray takes for alive."""
    return sum(node["Alive"] for node in ray.nodes())


def test_a_node_that_dies_is_named_and_the_others_go_on(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of these tests: the node does not come back."""
    with learner() as transport:
        actors = nodes.attached(transport)
        last = len(actors) - 1
        transport.watch(dict(enumerate(actors)))
        reach(actors, publish(transport, 1))
        transport.wait(1, LONG_S, readers=range(len(actors)))
        alive = nodes_alive()
        nodes.cluster.remove_node(nodes.cluster.list_all_nodes()[-1], allow_graceful=False)
        reach(actors[:last], publish(transport, 2))
        transport.wait(2, LONG_S, readers=range(last))
        # A loaded machine's Ray takes minutes to see it.
        with pytest.raises(WorkerLost, match=f"worker {last}"):
            transport.wait(2, 2 * LONG_S, readers=range(len(actors)))
        monkeypatch.setattr(transport, "_refresh", lambda: None)
        transport._reports = {}  # as when the mailbox has forgotten all of them
        assert [(status.reader, status.state) for status in transport.status()] == [(last, "dead")]
    # Until Ray knows of it, actors of the tests that follow would be started there.
    assert wait_until(lambda: nodes_alive() < alive, 2 * LONG_S)

"""Publisher, map, adopter and verification over any transport, without TorchRL."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from rlsync.core.errors import AdoptionTimeout, ConfigError, LayoutMismatch, PublishError
from rlsync.core.ledger import Stamp
from rlsync.core.trigger import Counters
from rlsync.sync.adopter import Adopter, Destination
from rlsync.sync.bound_map import BoundMap, VersionCopies
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.publisher import Publisher
from rlsync.sync.trained import Training
from rlsync.sync.verification import Verification
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board import BoardReader, BoardWriter
from rlsync.transport.contract import Transport
from rlsync.transport.rules import Key, keyed
from tests.tools.queue_transport import QueueTransport

W = ("policy", "w")
TRANSPORTS: dict[str, Callable[[], Transport]] = {"queue": QueueTransport, "board": BoardWriter}


@pytest.fixture(params=list(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made = TRANSPORTS[request.param]()
    yield made
    made.close()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def fill(module: nn.Module, number: float) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.fill_(number)


def low_high(module: nn.Module) -> tuple[float, float]:
    tensors = [t.double() for t in (*module.parameters(), *module.buffers())]
    return float(min(t.min() for t in tensors).detach()), float(max(t.max() for t in tensors).detach())


class Learner(nn.Module):
    """Where the sources of the map are."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = net(), net()


class Workers(Endpoint):
    """The endpoint of one worker in a thread: all that sync needs, over any transport."""

    description, notes, stamped, num_workers, in_flight = "a test", (), True, 1, True

    def __init__(self, transport: Transport, **modules: nn.Module) -> None:
        self.modules, self.destinations = modules, list(modules)
        self.publisher = Publisher(transport, leaves_at=self.specs)

    def locate(self, path: object, where: str) -> Key:
        return str(path), ""

    def specs(self, destination: str) -> list[LeafSpec]:
        from rlsync.tensors.leaves import Leaves

        return Leaves(self.modules[destination], destination).specs()

    def wait(self, timeout_s: float) -> None:
        self.publisher.transport.wait(self.publisher.version, timeout_s, [0])

    def verification(self) -> Verification:
        return Verification(self.publisher, lambda: 1)


def test_a_map_is_published_adopted_and_verified_over_any_transport(transport: Transport) -> None:
    learner, player, critic = Learner(), net(), net()
    endpoint = Workers(transport, policy=player, critic=critic)
    bound = BoundMap({"policy": "actor", "critic": "critic"}, learner, endpoint)
    verification = endpoint.verification()
    found: list[tuple[int, tuple[float, float], tuple[float, float]]] = []
    stop = threading.Event()

    def act() -> None:
        adopter = Adopter(transport.handle, 0)
        adopter.place({"policy": Destination(lambda: player), "critic": Destination(lambda: critic)})
        adopter.tell()
        while not stop.is_set():
            with adopter.acting() as version:
                if version:
                    found.append((version, low_high(player), low_high(critic)))
        adopter.close()

    worker = threading.Thread(target=act)
    worker.start()
    try:
        for number in range(1, 50):
            fill(learner.actor, number)
            fill(learner.critic, number)
            assert bound.publish("call", Counters()).version == number
            if number == 25:
                verification.ask()
        endpoint.wait(20.0)
        for _ in range(6000):
            if (heard := verification.hear()).done:
                break
            stop.wait(0.01)
    finally:
        stop.set()
        worker.join(20.0)
    assert not worker.is_alive()
    assert found[-1][0] == 49
    assert all(ends == (version, version) for version, *both in found for ends in both)
    assert (heard.done, heard.answered, heard.deviations) == (True, 1, ())


def test_what_a_later_publish_leaves_out_stays_as_it_was(transport: Transport) -> None:
    player, critic = net(), net()
    endpoint = Workers(transport, policy=player, critic=critic)
    adopter = Adopter(transport.handle, 0)
    adopter.place(
        {"policy": Destination(lambda: player, "copy"), "critic": Destination(lambda: critic, "copy")}
    )
    learner = Learner()
    fill(learner.actor, 1.0)
    fill(learner.critic, 2.0)
    endpoint.publisher.publish_modules({"policy": learner.actor}, "the learner")
    endpoint.publisher.publish_modules({"critic": learner.critic}, "the learner")
    assert adopter.adopt() == 2
    assert (low_high(player), low_high(critic)) == ((1.0, 1.0), (2.0, 2.0))
    fill(learner.critic, 3.0)
    endpoint.publisher.publish_modules({"critic": learner.critic}, "the learner")
    assert adopter.adopt() == 3
    assert (low_high(player), low_high(critic)) == ((1.0, 1.0), (3.0, 3.0))
    adopter.close()


def test_a_publish_that_fails_uses_no_number_up(transport: Transport) -> None:
    publisher = Publisher(transport)
    publisher.publish({("policy", "w"): torch.zeros(2)})
    with pytest.raises(LayoutMismatch):
        publisher.publish({("policy", "w"): torch.zeros(3)})
    assert publisher.version == 1
    assert publisher.publish({("policy", "w"): torch.zeros(2)}) == 2


@contextmanager
def no_copies(board: BoardWriter) -> Iterator[None]:
    """The thread that copies in the background is busy until the block ends."""
    gate = threading.Event()
    board._copier.submit(gate.wait)
    try:
        yield
    finally:
        gate.set()


def test_a_background_publish_that_was_refused_is_not_recorded_and_uses_no_number_up() -> None:
    board, weight, told = BoardWriter(), torch.zeros(2), []
    publisher = Publisher(board)
    publisher.announce = told.append
    assert publisher.publish({W: weight}) == 1
    with no_copies(board):
        assert publisher.publish({W: weight}, steady={W}) == 2
        weight.add_(1)
    with pytest.raises(PublishError, match="written to while version 2"):
        publisher.join()
    assert (publisher.ledger.version, publisher.version, board.newest, told) == (1, 1, 1, [1])
    assert publisher.ledger.known(2) is None
    assert publisher.publish({W: weight}, steady={W}) == 2, "the number was free"
    publisher.join()
    assert (publisher.ledger.version, board.newest, told) == (2, 2, [1, 2])
    board.close()


def test_a_refused_background_publish_is_told_when_the_next_one_begins() -> None:
    board, weight = BoardWriter(), torch.zeros(2)
    publisher = Publisher(board)
    with no_copies(board):
        publisher.publish({W: weight}, steady={W})
        weight.add_(1)
    with pytest.raises(PublishError, match="written to while version 1"):
        publisher.publish({W: weight})
    assert publisher.publish({W: weight}) == 1
    board.close()


def test_the_next_publish_waits_for_the_one_in_the_background() -> None:
    board = BoardWriter()
    publisher = Publisher(board)
    for number in (1, 2):
        publisher.publish({W: torch.full((10_000,), float(number))}, steady={W})
    assert publisher.ledger.version == 1, "the second one goes on"
    publisher.publish({W: torch.full((10_000,), 3.0)})
    assert (publisher.ledger.version, board.newest) == (3, 3)
    assert board.newest_leaves()[1][0].unique().tolist() == [3.0]
    board.close()


def test_a_board_that_still_copies_a_version_refuses_the_next_one() -> None:
    board, weight = BoardWriter(), torch.zeros(2)
    publisher = Publisher(board)
    with no_copies(board):
        publisher.publish({W: weight}, steady={W})
        for call in (
            lambda: board.publish([weight], stamp=Stamp(1, 2)),
            lambda: board.lay_out(Layout.build({"policy": [LeafSpec("v", "parameter", (1,), torch.int8)]})),
        ):
            with pytest.raises(PublishError, match="version 1 is still being copied"):
                call()
    publisher.join()
    assert board.newest == 1
    board.close()


def test_a_background_publish_that_is_visible_counts_before_it_is_joined() -> None:
    board = BoardWriter()
    publisher = Publisher(board)
    publisher.publish({W: torch.zeros(2)}, steady={W})
    board._copying[0].result()
    assert (publisher.ledger.version, publisher.version) == (0, 1)
    publisher.join()
    assert (publisher.ledger.version, publisher.version) == (1, 1)
    board.close()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


def test_a_receipt_counts_the_bytes_of_tied_leaves_once_and_none_where_there_was_no_room() -> None:
    board, learner = BoardWriter(max_slots=3), nn.ModuleDict({"actor": Tied()})
    optimizer = torch.optim.SGD(learner.parameters(), lr=1.0)
    bound = BoundMap(
        {"policy": "actor"},
        learner,
        Workers(board, policy=Tied()),
        training=Training(lambda: [optimizer]),
    )
    readers = [BoardReader(board.handle, lambda version, layout, views: True) for _ in range(2)]
    for reader in readers:
        receipt = bound.publish("call", Counters(), in_background=True)
        assert (receipt.copied_leaves, receipt.copied_bytes, receipt.background_bytes) == (2, 36, 36)
        bound.endpoint.publisher.join()
        reader.adopt()
    bound.publish("call", Counters())
    full = bound.publish("call", Counters(), in_background=True)
    assert (full.coalesced, full.version) == (True, 3)
    assert (full.copied_leaves, full.cast_leaves, full.copied_bytes, full.background_bytes) == (0, 0, 0, 0)
    for reader in readers:
        reader.close()
    board.close()


def test_an_answer_to_an_earlier_question_is_not_taken_for_one_to_the_last(transport: Transport) -> None:
    player = net()
    endpoint = Workers(transport, policy=player)
    adopter = Adopter(transport.handle, 0)
    adopter.place({"policy": Destination(lambda: player)})
    verification = endpoint.verification()
    endpoint.publisher.publish_modules({"policy": net()}, "the learner")
    for _ in range(2):
        verification.ask()
        assert verification.hear().answered == 0
        with adopter.acting():
            pass
        assert (verification.hear().done, verification.hear().answered) == (True, 1)
    adopter.close()


def test_a_copy_of_the_newest_version_is_made_again_if_another_was_published_meanwhile() -> None:
    board, learner = BoardWriter(), Learner()
    bound = BoundMap({"policy": "actor"}, learner, Workers(board, policy=net()))
    newest_leaves, meanwhile = board.newest_leaves, [5, 4, 3, 2]

    def publish(number: float) -> None:
        fill(learner.actor, number)
        bound.publish("call", Counters())

    def held_while_others_are_published() -> tuple[Layout, list[torch.Tensor]] | None:
        held = newest_leaves()
        while meanwhile:
            publish(meanwhile.pop())
        return held

    publish(1)
    board.newest_leaves = held_while_others_are_published  # type: ignore[method-assign]
    copied = VersionCopies(bound).newest()
    assert copied is not None
    assert copied.version == 5
    assert {float(value) for leaf in copied.leaves.values() for value in leaf.flatten()} == {5.0}
    board.close()


def test_a_block_that_fills_nothing_uses_no_number_up(transport: Transport) -> None:
    publisher = Publisher(transport)
    with publisher.begin() as publish:
        assert publish.stamp == Stamp(1, 1)
    assert (publisher.version, publisher.publish({W: torch.zeros(2)})) == (0, 1)


def test_leaves_that_are_one_no_more_are_noticed_at_the_next_publish(transport: Transport) -> None:
    publisher, one = Publisher(transport), torch.zeros(2)
    first, second = ("policy", "first"), ("policy", "second")
    publisher.publish({first: one, second: one})
    assert [entry.leaf.tie for entry in transport.layout.entries] == ["", "first"]
    publisher.publish({first: one, second: torch.ones(2)})
    sent = keyed(*transport.newest_leaves())
    assert (sent[first].tolist(), sent[second].tolist()) == ([0.0, 0.0], [1.0, 1.0])
    publisher.publish({first: one, second: torch.full((2,), 2.0)})
    assert keyed(*transport.newest_leaves())[second].tolist() == [2.0, 2.0]


def test_what_is_published_outside_a_hook_has_the_steps_of_its_time(transport: Transport) -> None:
    publisher, steps = Publisher(transport), [0]
    publisher.ledger.count_with(lambda: steps[0])
    for steps[0] in (100, 500):
        publisher.publish({("policy", "w"): torch.zeros(2)})
    assert publisher.ledger.optim_steps_since(2, now=510) == 10


def test_a_second_verification_of_the_same_workers_is_refused(transport: Transport) -> None:
    endpoint = Workers(transport, policy=net())
    endpoint.verification()
    with pytest.raises(ConfigError, match="the workers are verified already"):
        endpoint.verification()


# ------------------------------------------------------------------ faults of the adopter and of the board


def test_a_layout_that_does_not_fit_is_refused_again_and_never_half_adopted() -> None:
    board = BoardWriter()
    publisher = Publisher(board)
    fits, narrow = nn.Linear(2, 1), nn.Linear(3, 1)
    before = fits.weight.detach().clone()
    publisher.publish_modules({"fits": nn.Linear(2, 1), "narrow": nn.Linear(2, 1)}, "the learner")
    adopter = Adopter(board.handle, 0)
    adopter.place({"fits": Destination(lambda: fits, "copy"), "narrow": Destination(lambda: narrow, "copy")})
    for _ in range(2):
        with pytest.raises(LayoutMismatch):
            adopter.adopt()
        assert torch.equal(fits.weight, before), "one of the two destinations was written"
        assert adopter.reader.version == 0
    (status,) = board.status()
    assert status.adopted_version == 0
    adopter.close()
    board.close()


def test_waiting_for_a_board_that_nobody_reads_has_a_deadline() -> None:
    board = BoardWriter()
    Publisher(board).publish({("policy", "w"): torch.zeros(2)})
    with pytest.raises(AdoptionTimeout, match="version 1 was not adopted"):
        board.wait(1, timeout_s=0.05)
    board.close()


def test_a_reader_refuses_a_lower_generation_than_it_has_acted_with() -> None:
    board = BoardWriter()
    publisher = Publisher(board)
    publisher.publish({("policy", "w"): torch.zeros(2)})
    reader = BoardReader(board.handle, lambda version, layout, views: False)
    assert reader.adopt() == 1
    publisher.ledger.load_state_dict({"version": 7, "generation": 4, "published": []})
    publisher.publish({("policy", "w"): torch.ones(2)})
    assert (reader.adopt(), reader.stamp) == (8, Stamp(5, 8))
    reader.stamp = Stamp(6, 1)  # as if it had acted with what a later learner published
    reader._head = 0
    with pytest.raises(PublishError, match="is of generation 5; this worker has acted with generation 6"):
        reader.adopt()
    reader.close()
    board.close()


def test_a_handle_of_a_later_life_does_not_open_an_older_board() -> None:
    board = BoardWriter()
    publisher = Publisher(board)
    publisher.publish({("policy", "w"): torch.zeros(2)})
    handle = board.handle
    assert handle.generation == 1
    newer = type(handle)(handle.address, handle.board_id, generation=2)
    with pytest.raises(Exception, match="the board is of generation 1, older than 2"):
        newer.subscribe(lambda version, layout, views: False)
    board.close()


class OneWorker:
    """A collector with one worker that never told its leaves."""

    num_workers = 1


def test_a_bare_send_that_found_no_room_is_told(caplog: pytest.LogCaptureFixture) -> None:
    board = BoardWriter(max_slots=3)
    publisher = WorkersPublisher(board)
    collector = OneWorker()
    publisher.serve(collector, "policy")
    readers = []
    weights = {"w": torch.zeros(2)}
    while publisher.coalesced == 0:
        publisher.send("policy", weights)
        readers.append(BoardReader(board.handle, lambda version, layout, views: True))
        readers[-1].adopt()
        assert len(readers) < 9
    assert "a publish was coalesced" in caplog.text
    version = publisher.version
    publisher.send("policy", weights)
    assert (publisher.version, publisher.coalesced) == (version, 2)
    for reader in readers:
        reader.close()
    board.close()


def send_both(publisher: WorkersPublisher, critic: torch.Tensor) -> None:
    with publisher.one_publish(["policy", "critic"]):
        publisher.send("policy", None)
        publisher.send("critic", {"w": critic})


def test_what_the_map_brings_and_what_is_sent_explicitly_become_one_version() -> None:
    board = BoardWriter()
    publisher = WorkersPublisher(board)
    collector = OneWorker()
    for destination in ("policy", "critic"):
        publisher.serve(collector, destination)
    of_the_map = {("policy", "w"): torch.full((2,), 1.0), ("critic", "w"): torch.full((2,), 1.0)}
    publisher.publish_default = lambda: publisher.publish(of_the_map)
    send_both(publisher, torch.full((2,), 9.0))
    assert publisher.version == 1
    assert [view.tolist() for view in board.newest_leaves()[1]] == [[1.0, 1.0], [9.0, 9.0]]
    publisher.publish(of_the_map)
    assert [view.tolist() for view in board.newest_leaves()[1]] == [[1.0, 1.0], [1.0, 1.0]], "and no longer"
    publisher._specs = {"critic": [LeafSpec("w", "parameter", (2,), torch.float32)]}
    with pytest.raises(LayoutMismatch):
        send_both(publisher, torch.zeros(5))
    assert publisher.version == 2, "one version, or none"
    board.close()

"""Versions reach every node in a network that delays, drops, doubles and overtakes messages.

Each law of the simulation is broken on purpose, to show that it can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from rlsync.core.errors import LayoutMismatch, PublishError
from rlsync.core.ledger import NOTHING, Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.relay import ends
from rlsync.transport.relay.ends import Agent, Sender
from rlsync.transport.relay.image import digest_in, digest_of, unpack
from rlsync.transport.relay.mailbox import ImageId, Mailbox, Message, Reply, Request
from tests.tools.relay_network import SLOW, LawBrokenError, Network, pack

SEEDS = 10_000
BLOCK = 500
#: Enough to find each broken law; the others are for `make test-all`.
FEW = 150


def run(seeds: range, *, steady: bool = False) -> None:
    for seed in seeds:
        Network(seed, steady=steady).run()


@pytest.mark.seconds
@pytest.mark.parametrize(
    "seeds",
    [
        range(FEW),
        *(
            pytest.param(range(first, first + BLOCK), marks=pytest.mark.thorough)
            for first in range(0, SEEDS, BLOCK)
        ),
    ],
    ids=str,
)
def test_every_law_holds_in_every_seed(seeds: range) -> None:
    run(seeds)


@pytest.mark.thorough
@pytest.mark.seconds
def test_a_slow_node_keeps_the_image_that_it_pulls_and_holds_nobody_up() -> None:
    for seed in range(150):
        network = Network(seed, steady=True)
        network.run()
        published = {name: len(node.published) for name, node in network.nodes.items()}
        assert min(published.values()) == published[SLOW] >= 3, published
        assert all(node.agent.met["lost"] == 0 for node in network.nodes.values())


@pytest.mark.thorough
@pytest.mark.seconds
def test_the_network_does_what_it_is_there_for() -> None:
    seen = Counter[str]()
    for seed in range(500):
        network = Network(seed)
        network.run()
        for node in network.nodes.values():
            seen.update(node.agent.met)
    assert all(seen[name] for name in ("skipped", "old", "older generation", "damaged", "lost")), seen


def trust_every_message(patch: pytest.MonkeyPatch) -> None:
    stock = Agent.to_pull

    def to_pull(agent: Agent, message: Message | None, now_s: float) -> Message | None:
        stamp, agent.stamp = agent.stamp, NOTHING
        pull = stock(agent, message, now_s)
        agent.stamp = stamp
        return pull

    patch.setattr(Agent, "to_pull", to_pull)


def trust_every_image(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ends, "unpack", unpack_unseen)
    patch.setattr(ends, "digest_in", Anything)


def unpack_unseen(flat: torch.Tensor) -> object:
    """An image whatever its digest, unless it is too broken to read."""
    whole = flat.clone()
    try:
        whole[:8] = torch.tensor([digest_of(whole)]).view(torch.uint8)
        return unpack(whole)
    except Exception as error:
        raise PublishError("unreadable", "here", "none") from error


class Anything:
    """Equal to everything."""

    def __init__(self, _: object) -> None: ...

    def __ne__(self, _: object) -> bool:
        return False


def never_check_which_image(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ends, "digest_in", Anything)


def never_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ends, "KEPT_IMAGES", 1000)


def never_repeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "repeat", lambda *_: None)


def never_put_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mailbox, "lost", None)


def never_ask_again(patch: pytest.MonkeyPatch) -> None:
    make = Agent.__init__
    patch.setattr(Agent, "__init__", lambda self, *a, **k: make(self, *a, **(k | {"answer_s": 1e9})))


def never_give_up(patch: pytest.MonkeyPatch) -> None:
    make = Agent.__init__
    patch.setattr(Agent, "__init__", lambda self, *a, **k: make(self, *a, **(k | {"pull_s": 1e9})))


def pull_all_at_once(patch: pytest.MonkeyPatch) -> None:
    to_pull = Agent.to_pull

    def forgetful(self: Agent, message: Message | None, now_s: float) -> Message | None:
        self._pulling = None
        return to_pull(self, message, now_s)

    patch.setattr(Agent, "to_pull", forgetful)


def never_forget_a_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mailbox, "_forget", lambda *_: None)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("break_it", "law"),
    [
        (trust_every_message, "went from"),
        (trust_every_image, "has .* as|went from"),
        (never_check_which_image, "has .* as|went from"),
        (never_free, "images of one learner are in the store"),
        (never_repeat, "the newest is"),
        (never_put_again, "the newest is"),
        (never_ask_again, "the newest is"),
        (never_give_up, "the newest is"),
        (pull_all_at_once, "images at once"),
        (never_forget_a_node, "the mailbox remembers"),
    ],
)
def test_each_law_can_be_broken(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], law: str
) -> None:
    break_it(monkeypatch)
    with pytest.raises(LawBrokenError, match=law):
        run(range(FEW))


def never_say_what_is_pulled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mailbox, "pulled", frozenset())


def never_hear_what_is_pulled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "replied", lambda *_: None)
    patch.setattr(Sender, "full", False)


def never_wait_for_pulls_to_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sender, "full", False)


@pytest.mark.parametrize(
    "break_it", [never_say_what_is_pulled, never_hear_what_is_pulled, never_wait_for_pulls_to_end]
)
def test_a_slow_node_loses_its_image_if_nobody_knows_what_it_pulls(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_it(monkeypatch)
    with pytest.raises(LawBrokenError, match="an image was freed that a node pulled"):
        run(range(FEW), steady=True)


LAYOUT = Layout.build(
    {
        "policy": [
            LeafSpec("w", "parameter", (2, 3), torch.float32),
            LeafSpec("tied", "parameter", (2, 3), torch.float32, tie="w"),
            LeafSpec("scalar", "buffer", (), torch.int64),
        ],
        "critic": [LeafSpec("b", "parameter", (5,), torch.bfloat16)],
    }
)


def tensors() -> list[torch.Tensor]:
    return [torch.rand(2, 3), torch.tensor(41), torch.rand(5).bfloat16()]


def test_an_image_gives_back_what_was_packed() -> None:
    given = tensors()
    image = unpack(pack(Stamp(3, 812), LAYOUT, given))
    assert (image.stamp, image.layout) == (Stamp(3, 812), LAYOUT)
    assert all(torch.equal(a, b) for a, b in zip(image.leaves, given, strict=True))


def test_every_flipped_bit_of_an_image_is_seen() -> None:
    flat = pack(Stamp(1, 2), LAYOUT, tensors())
    for at in range(flat.numel()):
        damaged = flat.clone()
        damaged[at] ^= 1 << (at % 8)
        with pytest.raises(PublishError, match="damaged on its way"):
            unpack(damaged)


def test_an_image_that_was_cut_is_seen() -> None:
    flat = pack(Stamp(1, 2), LAYOUT, tensors())
    for size in range(flat.numel()):
        with pytest.raises(PublishError, match="damaged on its way"):
            unpack(flat[:size])


def test_a_sender_refuses_what_does_not_fit_or_is_not_newer() -> None:
    sender = Sender(lambda image: image, lambda _: None, lambda _: None)
    with pytest.raises(LayoutMismatch):
        sender.send(Stamp(1, 1), pack(Stamp(1, 1), LAYOUT, tensors()[:2]), now_s=0.0)
    assert sender.stamp == NOTHING
    sender.send(Stamp(1, 2), pack(Stamp(1, 2), LAYOUT, tensors()), now_s=0.0)
    with pytest.raises(PublishError, match="is not newer than"):
        sender.send(Stamp(1, 2), pack(Stamp(1, 2), LAYOUT, tensors()), now_s=0.0)


def test_a_message_that_a_newer_one_has_overtaken_is_not_taken() -> None:
    box = Mailbox()
    older, newer = (Message(Stamp(1, v), digest=0, image_bytes=64, address="a", number=v) for v in (1, 2))
    assert box.post(newer, now_s=0.0).accepted
    assert not box.post(older, now_s=1.0).accepted
    assert box.message == newer


def test_a_node_is_not_told_again_of_an_image_that_it_could_not_get() -> None:
    box = Mailbox()
    first = Message(Stamp(1, 1), digest=0, image_bytes=64, address="a")
    box.post(first, now_s=0.0)
    lost = Request("node", lost=first.image_id)
    assert box.ask(lost, now_s=1.0) is None
    assert box.post(first, now_s=1.0).lost == first.image_id, "the learner hears of it"
    assert box.ask(Request("other"), now_s=1.0) == first
    again = Message(Stamp(1, 1), digest=0, image_bytes=64, address="b", number=2)
    box.post(again, now_s=2.0)
    assert box.ask(lost, now_s=2.0) == again


def asked(box: Mailbox, node: str, stamp: Stamp, now_s: float = 0.0) -> bool:
    """Whether a node that asks is told of a version."""
    return box.ask(Request(node, stamp), now_s) is not None


def test_a_version_spreads_in_waves_and_who_waits_longest_is_told_first() -> None:
    box = Mailbox(wave=2)
    nodes = [f"node {number}" for number in range(40)]
    for node in nodes:
        assert not asked(box, node, NOTHING)
    first = Message(Stamp(1, 1), digest=0, image_bytes=64, address="a")
    assert box.post(first, now_s=0.0).spreading

    told: list[str] = []
    pulling: list[str] = []
    have = 0
    while len(told) < len(nodes):
        for node in box.next_told(nodes, now_s=0.0):
            assert asked(box, node, NOTHING)
            told.append(node)
            pulling.append(node)
        assert 0 < len(pulling) <= box.wave + have
        assert not asked(box, nodes[-1], NOTHING) or told[-1] == nodes[-1]
        assert not asked(box, pulling.pop(0), first.stamp)
        have += 1
    assert told == nodes
    assert not box.post(first, now_s=0.0).spreading


def test_a_node_that_was_told_and_died_holds_nobody_up_for_ever() -> None:
    box = Mailbox(wave=1)
    box.post(Message(Stamp(1, 1), digest=0, image_bytes=64, address="a"), now_s=0.0)
    assert asked(box, "dies", NOTHING)
    assert not asked(box, "waits", NOTHING, now_s=20.0)
    assert box.next_told(["waits"], now_s=20.0) == []
    assert box.next_told(["waits"], now_s=31.0) == ["waits"]
    assert asked(box, "waits", NOTHING, now_s=31.0)


def test_a_version_spreads_while_more_nodes_pull_it_than_have_it() -> None:
    box = Mailbox(wave=1)
    message = Message(Stamp(1, 1), digest=0, image_bytes=64, address="a")
    box.post(message, now_s=0.0)
    for have in range(3):
        assert asked(box, f"pulls {have}", NOTHING)
        assert not asked(box, f"pulls {have}", message.stamp)
    for pulling in range(4):
        assert asked(box, f"is slow {pulling}", NOTHING)
    assert box.post(message, now_s=0.0).spreading
    assert not asked(box, "is slow 0", message.stamp)
    assert not box.post(message, now_s=0.0).spreading


def test_a_newer_version_waits_for_nodes_that_wait_and_not_for_those_that_pull_or_died() -> None:
    box = Mailbox(wave=1)
    sender = Sender(lambda image: None, lambda address: None, lambda message: None)
    sender.send(Stamp(1, 1), pack(Stamp(1, 1), LAYOUT, tensors()), now_s=0.0)
    message = sender.message
    assert message is not None
    box.post(message, now_s=0.0)
    assert asked(box, "slow", NOTHING)
    sender.replied(message, box.post(message, now_s=0.0))
    assert not sender.spreading
    assert not asked(box, "waits", NOTHING)
    sender.replied(message, box.post(message, now_s=0.0))
    assert sender.spreading
    sender.replied(message, box.post(message, now_s=15.0))  # it has not asked again
    assert not sender.spreading


def test_another_thread_may_ask_what_a_sender_keeps() -> None:
    """Reading the stamp of an image gives other threads a chance to put one."""
    sender = Sender(lambda image: None, lambda address: None, lambda message: None)
    numbers = iter(range(1, 100))

    class SlowId(ImageId):
        @property
        def stamp(self) -> Stamp:  # type: ignore[override]
            found = Stamp(1, next(numbers))
            sender._kept[ImageId(found, 99)] = None
            return found

    sender._kept = {SlowId(Stamp(1, 1), 1): None, SlowId(Stamp(1, 2), 2): None}
    assert len(sender.kept) == 2


def test_a_message_has_the_digest_of_the_image_that_was_put() -> None:
    put: list[torch.Tensor] = []
    posted: list[Message] = []
    sender = Sender(lambda image: put.append(image) or 0, lambda _: None, posted.append)
    sender.send(Stamp(1, 1), pack(Stamp(1, 1), LAYOUT, tensors()), now_s=0.0)
    assert posted[0].digest == digest_in(put[0]) == digest_of(put[0])
    assert posted[0].image_bytes == put[0].numel()


def packed(stamp: Stamp) -> tuple[Message, torch.Tensor]:
    """The image of a version, and the message about it."""
    flat = pack(stamp, LAYOUT, tensors())
    return Message(stamp, digest_in(flat), flat.numel(), address=None), flat


def test_an_agent_tells_of_a_lost_image_after_a_pause_and_until_it_has_a_newer_one() -> None:
    agent = Agent("node", lambda image: None, again_s=1.0)
    message, _ = packed(Stamp(1, 1))
    agent.to_pull(message, now_s=5.0)
    agent.arrived(message, None, now_s=5.0)
    assert agent.request(now_s=5.5) is None
    assert agent.request(now_s=6.0) == Request("node", NOTHING, message.image_id)
    newer, flat = packed(Stamp(1, 2))
    agent.to_pull(newer, now_s=6.5)
    agent.arrived(newer, flat, now_s=7.0)
    assert agent.request(now_s=7.0) == Request("node", Stamp(1, 2), None)


def test_a_sender_makes_room_by_its_oldest_image_and_lets_the_oldest_pull_end() -> None:
    posted: list[Message] = []
    sender = Sender(lambda image: None, lambda _: None, posted.append)
    for version in range(1, 5):  # the mailbox answers nothing
        sender.send(Stamp(1, version), pack(Stamp(1, version), LAYOUT, tensors()), 0.0)
    assert sender.kept == [Stamp(1, 2), Stamp(1, 3), Stamp(1, 4)]
    pulled = frozenset(message.image_id for message in posted[1:3])
    sender.replied(posted[3], Reply(accepted=True, pulled=pulled))
    assert sender.full
    sender.send(Stamp(1, 5), pack(Stamp(1, 5), LAYOUT, tensors()), 0.0)
    assert sender.kept == [Stamp(1, 2), Stamp(1, 4), Stamp(1, 5)]


def test_a_message_is_repeated_once_in_each_interval() -> None:
    posted: list[Message] = []
    sender = Sender(lambda image: None, lambda _: None, posted.append, repeat_s=1.0)
    sender.send(Stamp(1, 1), pack(Stamp(1, 1), LAYOUT, tensors()), 0.0)
    for now_s in (0.5, 1.0, 1.5, 1.9, 2.0):
        sender.repeat(now_s)
    assert len(posted) == 3


def test_the_learner_hears_of_an_image_that_one_node_of_several_could_not_get() -> None:
    box = Mailbox()
    message, _ = packed(Stamp(1, 1))
    box.post(message, now_s=0.0)
    box.ask(Request("has it", message.stamp), now_s=1.0)
    box.ask(Request("lost it", lost=message.image_id), now_s=1.0)
    assert box.post(message, now_s=1.0).lost == message.image_id


def test_a_reply_that_a_newer_one_has_overtaken_is_not_believed() -> None:
    layout = Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]})
    store: dict[int, torch.Tensor] = {}
    posted: list[Message] = []

    def put(image: torch.Tensor) -> int:
        store[len(posted) + 1] = image
        return len(posted) + 1

    sender, mailbox = Sender(put, store.pop, posted.append), Mailbox()
    sender.send(Stamp(1, 1), pack(Stamp(1, 1), layout, [torch.ones(2)]), now_s=0.0)
    early = mailbox.post(posted[0], now_s=0.0)
    assert mailbox.ask(Request("node"), now_s=0.0) is posted[0]
    sender.send(Stamp(1, 2), pack(Stamp(1, 2), layout, [torch.ones(2)]), now_s=0.0)
    late = mailbox.post(posted[1], now_s=0.0)
    sender.replied(posted[1], late)
    sender.replied(posted[0], early)  # it does not know yet that a node pulls the first image
    for version in (3, 4):
        sender.send(Stamp(1, version), pack(Stamp(1, version), layout, [torch.ones(2)]), now_s=0.0)
    assert 1 in store
    assert 2 not in store, "the image that nobody pulls makes room"

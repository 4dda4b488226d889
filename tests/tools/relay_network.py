"""A simulated network, seeded: a learner that may crash and come back, a mailbox, and agents.

The sender, the mailbox and the agents are the real ones. Time, messages, the store and the boards are
simulated. A message may be delayed, dropped, doubled and overtaken. The store may lose an image, damage it,
or give another one. Nodes leave and join. After `CALM_S` nothing fails any more, and everybody has time to
reach the newest version.

In a steady network nothing ever fails, and the learner hears the mailbox before it sends another version.
But one node is slow: many versions come out while it pulls one. No image may be freed that somebody pulls.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlsync.core.ledger import NOTHING, Ledger, Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.relay.ends import KEPT_IMAGES, Agent, Sender
from rlsync.transport.relay.image import Image, ImageBuffer
from rlsync.transport.relay.mailbox import Mailbox, Message, Reply, Request

CALM_S = 12.0
END_S = 24.0
PULL_S = 3.0
FORGET_S = 4.0
SLOW = "node 0"
LAYOUT = Layout.build({"policy": [LeafSpec("w", "parameter", (3,), torch.float32)]})


def pack(stamp: Stamp, layout: Layout, tensors: Sequence[Tensor]) -> Tensor:
    """The flat image of a version."""
    buffer = ImageBuffer(layout)
    buffer.write(stamp, tensors)
    return buffer.sealed()


class LawBrokenError(AssertionError):
    """Says which law, in which seed, and when."""


class CountedAgent(Agent):
    """An agent that counts what it meets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.met: Counter[str] = Counter()

    def request(self, now_s: float) -> Request | None:
        was_pulling = self.pulling
        asked = super().request(now_s)
        self.met["lost"] += was_pulling and not self.pulling
        return asked

    def to_pull(self, message: Message | None, now_s: float) -> Message | None:
        if message is not None and not self.pulling and message.stamp <= self.stamp:
            self.met["old"] += 1
            self.met["older generation"] += message.stamp.generation < self.stamp.generation
        return super().to_pull(message, now_s)

    def arrived(self, message: Message, flat: Tensor | None, now_s: float) -> None:
        awaited, before = message is self._pulling, self.stamp
        super().arrived(message, flat, now_s)
        if awaited and self.stamp == before:
            self.met["lost" if flat is None else "damaged"] += 1
        elif awaited:
            one_life = self.stamp.generation == before.generation
            self.met["skipped"] += one_life and self.stamp.version - before.version - 1


@dataclass
class Node:
    """A node's agent, and what its board has seen since this agent began."""

    agent: CountedAgent
    published: list[Stamp] = field(default_factory=list)
    pulls: dict[int, float] = field(default_factory=dict)  # when each that is under way began


class Network:
    """One run.

    Args:
        seed: decides everything.
        nodes: how many.
        steady: nothing fails, and one node is slow.
    """

    def __init__(self, seed: int, nodes: int = 3, *, steady: bool = False) -> None:
        self.seed = seed
        self.steady = steady
        self.random = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.drop = self.random.choice([0.0, 0.1, 0.4])
        self.double = self.random.choice([0.0, 0.2])
        self.slow_s = self.random.choice([0.01, 0.5, 3.0])
        self.store: dict[int, tuple[Any, Tensor]] = {}
        self.given: dict[Stamp, list[float]] = {}
        self.wave = self.random.choice([1, 2, 100])
        if steady:  # one that is told of a version with the slow node need not wait for it
            self.wave = max(2, self.wave)
        self.mailbox = Mailbox(FORGET_S, self.wave)
        self.nodes: dict[str, Node] = {}
        self.left: dict[str, float] = {}
        self.ledger = Ledger()
        self.checkpoint = self.ledger.state_dict()
        self.sender: Sender | None = None
        self.life = 0
        for i in range(nodes):
            self._join(f"node {i}")
        if steady:
            self.drop, self.double, self.slow_s = 0.0, 0.0, 0.05
        self._learn()
        if not steady:
            self._at(self.random.uniform(0.5, 4.0), self._fault)

    # ------------------------------------------------------------------ time

    def run(self) -> None:
        """Run to the end, and check every law."""
        while self._queue and self._queue[0][0] <= END_S:
            self.now, _, event = heapq.heappop(self._queue)
            event()
        assert self.sender is not None
        newest = self.sender.stamp
        for name, node in self.nodes.items():
            if node.agent.stamp != newest:
                self._broken(f"{name} ended with {node.agent.stamp}, the newest is {newest}")

    @property
    def calm(self) -> bool:
        return self.now >= CALM_S

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, event))

    def _message(self, deliver: Callable[[], None]) -> None:
        """Send: perhaps never, perhaps twice, some time later."""
        if not self.calm and self.random.random() < self.drop:
            return
        times = 1 + (not self.calm and self.random.random() < self.double)
        for _ in range(times):
            self._at(self.random.uniform(0.001, 0.05 if self.calm else self.slow_s), deliver)

    def _broken(self, what: str) -> None:
        raise LawBrokenError(f"seed {self.seed}, at {self.now:.3f} s: {what}")

    # --------------------------------------------------------------- learner

    def _learn(self) -> None:
        """Begin a life of the learner."""
        self.life += 1
        life = self.life

        def post(message: Message) -> None:
            self._message(lambda: self._posted(sender, message))

        self.sender = sender = Sender(lambda image: self._put(life, image), self._free, post, repeat_s=0.5)
        self._at(0.1, lambda: self._publish(life))
        self._at(0.5, lambda: self._repeat(life))

    def _publish(self, life: int) -> None:
        if life != self.life or self.sender is None:
            return
        if self.steady and self.sender.full:
            self.sender.post_again(self.now)  # to hear which pulls have ended
            self._at(0.15, lambda: self._publish(life))
            return
        if not self.calm or self.sender.stamp == NOTHING:
            stamp = self.ledger.next
            values = [float(stamp.generation), float(stamp.version), self.random.random()]
            self.given[stamp] = torch.tensor(values).tolist()
            self.sender.send(stamp, pack(stamp, LAYOUT, [torch.tensor(values)]), self.now)
            self.ledger.record(stamp)
            if self.random.random() < 0.2:
                self.checkpoint = self.ledger.state_dict()
        least_s = 0.15 if self.steady else 0.05  # there and back again takes 0.1 s in a steady network
        self._at(self.random.uniform(least_s, 0.5 if self.steady else 2.0), lambda: self._publish(life))

    def _posted(self, sender: Sender, message: Message) -> None:
        reply = self.mailbox.post(message, self.now)
        self._message(lambda: self._replied(sender, message, reply))

    def _replied(self, sender: Sender, message: Message, reply: Reply) -> None:
        if sender is self.sender:  # it was not killed meanwhile
            sender.replied(message, reply)

    def _repeat(self, life: int) -> None:
        if life != self.life or self.sender is None:
            return
        self.sender.repeat(self.now)
        self._at(0.5, lambda: self._repeat(life))

    def _crash(self) -> None:
        """The learner dies, its images with it; it comes back from its last checkpoint."""
        self.sender = None
        self.store = {at: held for at, held in self.store.items() if held[0] != self.life}
        self.life += 1
        generation = self.ledger.generation
        self.ledger = Ledger()
        self.ledger.load_state_dict(
            self.checkpoint | {"generation": generation}
        )  # the next life of the learner
        self._at(self.random.uniform(0.1, 3.0), self._learn)

    # ----------------------------------------------------------------- store

    def _put(self, life: int, image: Tensor) -> int:
        self._count += 1
        self.store[self._count] = (life, image.clone())
        of_life = sum(1 for owner, _ in self.store.values() if owner == life)
        if of_life > KEPT_IMAGES:
            self._broken(f"{of_life} images of one learner are in the store")
        return self._count

    def _free(self, address: int) -> None:
        self.store.pop(address, None)

    def _get(self, address: int) -> Tensor | None:
        held = self.store.get(address)
        if held is None and self.steady:
            self._broken("an image was freed that a node pulled")
        if held is None or self.calm or self.steady:
            return None if held is None else held[1]
        fate = self.random.random()
        if fate < 0.01:
            self._free(address)  # gone for good: nobody else will get it
        if fate < 0.03:
            return None
        image = held[1].clone()
        if fate < 0.10:
            at = self.random.randrange(image.numel())
            image[at] = int(image[at]) ^ (1 << self.random.randrange(8))
        elif fate < 0.13:
            image = self.random.choice(list(self.store.values()))[1]
        elif fate < 0.16:
            image = image[: self.random.randrange(image.numel())]
        return image

    # ---------------------------------------------------------------- agents

    def _join(self, name: str) -> None:
        node = Node(
            CountedAgent(
                name, lambda image: self._published(node, image), answer_s=2.0, pull_s=PULL_S, again_s=0.3
            )
        )
        self.nodes[name] = node
        self._at(self.random.uniform(0, 1), lambda: self._tick(name, node))

    def _leave(self, name: str) -> None:
        del self.nodes[name]
        self.left[name] = self.now

    def _tick(self, name: str, node: Node) -> None:
        if self.nodes.get(name) is not node:
            return  # it was killed
        request = node.agent.request(self.now)
        if request is not None:
            self._message(lambda: self._asked(name, node, request))
        self._at(0.5, lambda: self._tick(name, node))

    def _asked(self, name: str, node: Node, request: Request) -> None:
        message = self.mailbox.ask(request, self.now)
        for there in self.mailbox.requests:
            gone_s = self.now - self.left.get(there.node, self.now)
            if gone_s > FORGET_S + self.slow_s:
                self._broken(f"the mailbox remembers {there.node}, which left {gone_s:.1f} s ago")
        self._message(lambda: self._answered(name, node, message))

    def _answered(self, name: str, node: Node, message: Message | None) -> None:
        if self.nodes.get(name) is not node:
            return
        pull = node.agent.to_pull(message, self.now)
        if pull is None:
            return
        self._count += 1
        number = self._count
        node.pulls[number] = self.now
        awaited = [begun for begun in node.pulls.values() if self.now - begun < PULL_S]
        if len(awaited) > 1:
            self._broken(f"{name} pulls {len(awaited)} images at once")
        fails = not (self.calm or self.steady)
        if fails and self.random.random() < 0.03:
            return  # no image, and no word of it
        late = 2 * PULL_S if fails and self.random.random() < 0.05 else 0.0
        if self.steady and name == SLOW:
            late = self.random.uniform(0.3, 0.9) * PULL_S
        delay_s = late + self.random.uniform(0.01, self.slow_s)
        self._at(delay_s, lambda: self._pulled(name, node, pull, number))

    def _pulled(self, name: str, node: Node, message: Message, number: int) -> None:
        if self.nodes.get(name) is node:
            del node.pulls[number]
            node.agent.arrived(message, self._get(message.address), self.now)

    def _published(self, node: Node, image: Image) -> None:
        if node.published and image.stamp <= node.published[-1]:
            self._broken(f"{node.agent.node} went from {node.published[-1]} to {image.stamp}")
        if self.given.get(image.stamp) != image.leaves[0].tolist():
            self._broken(f"{node.agent.node} has {image.leaves[0].tolist()} as {image.stamp}")
        node.published.append(image.stamp)

    # ---------------------------------------------------------------- faults

    def _fault(self) -> None:
        if self.calm:
            return
        match self.random.randrange(3):
            case 0:
                self._crash()
            case 1:
                self.mailbox = Mailbox(FORGET_S, self.wave)
            case 2:
                name = self.random.choice(list(self.nodes))
                if self.random.random() < 0.5:
                    self._leave(name)
                    name = f"node {self._count}"
                self._join(name)
        self._at(self.random.uniform(0.5, 6.0), self._fault)

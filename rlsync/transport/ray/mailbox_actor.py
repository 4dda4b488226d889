"""The mailbox as an actor of Ray. It loads neither torch nor anything that needs it."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsync.transport.relay.letter import Letter
from rlsync.transport.relay.mailbox import Mailbox, NodeReport, Receipt

#: A mailbox answers a node that asks after at most so many seconds.
LONG_POLL_S = 5.0

#: Calls that the mailbox may have open at once: one or two for each node.
_OPEN_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Question:
    """What the learner asks all workers, on whatever node.

    Args:
        number: which question it is, from 1; 0 is none.
        lowest: the lowest version that an answer may be about.
    """

    number: int = 0
    lowest: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What the mailbox says to a node that asks.

    Args:
        letter: word of a version that the node does not have; ``None`` if there is none.
        question: the learner's last question.
        closed: whether the learner has closed the transport.
    """

    letter: Letter | None
    question: Question
    closed: bool


class MailboxActor:
    """Holds the newest letter, and what nodes say of their workers.

    It runs in a process of its own and may be killed at any time: Ray starts it again, empty, and learner and
    nodes repeat what they said. All of its methods run in one thread.

    Args:
        forget_s: a node that says nothing for so long is forgotten.
    """

    def __init__(self, forget_s: float = 90.0) -> None:
        self._box = Mailbox(forget_s)
        self._question = Question()
        self._closed = False
        self._words: dict[str, tuple[float, bytes]] = {}
        self._news = asyncio.Event()

    async def post(self, letter: Letter | None, question: Question) -> Receipt | None:
        """Take what the learner says.

        Args:
            letter: word of its newest version; ``None`` if there is none yet.
            question: its last question.
        """
        receipt = None if letter is None else self._box.post(letter, time.monotonic())
        if question.number > self._question.number:
            self._question = question
        self._tell_everybody()
        return receipt

    async def ask(self, report: NodeReport, asked: int, wait_s: float = LONG_POLL_S) -> Reply:
        """Wait until there is something that a node does not know, or the time is up.

        Args:
            report: what the node says of itself.
            asked: the number of the last question that it knows.
            wait_s: how long to wait, seconds.
        """
        until_s = time.monotonic() + wait_s
        while True:
            letter = self._box.ask(report, now_s := time.monotonic())
            news = self._news
            if letter is not None or self._question.number > asked or self._closed or now_s >= until_s:
                return Reply(letter, self._question, self._closed)
            try:
                await asyncio.wait_for(news.wait(), until_s - now_s)
            except asyncio.TimeoutError:
                continue  # the last look

    async def tell(self, node: str, word: bytes) -> None:
        """Take what a node says of its workers, for the learner.

        Args:
            node: its name.
            word: for the learner; the mailbox does not look into it.
        """
        self._words[node] = (time.monotonic(), word)

    async def leave(self, node: str) -> None:
        """Forget a node that says goodbye."""
        self._words.pop(node, None)

    async def words(self) -> dict[str, tuple[float, bytes]]:
        """What each node said last, and how many seconds ago."""
        now_s = time.monotonic()
        said = {node: (now_s - at_s, word) for node, (at_s, word) in self._words.items()}
        self._words = {n: w for n, w in self._words.items() if said[n][0] <= self._box.forget_s}
        return {n: w for n, w in said.items() if n in self._words}

    async def close(self) -> None:
        """Tell every node that the learner has closed the transport, and let go of the newest image."""
        self._closed = True
        self._box.letter = None
        self._tell_everybody()

    def _tell_everybody(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def start_mailbox(name: str | None = None) -> Any:
    """Start a mailbox beside the caller; it ends when nobody has its handle any more, or with the caller.

    Args:
        name: an actor's name in the caller's namespace; by default one that nobody else has.

    Returns:
        Its handle, which can be sent to any process of the cluster.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": name or f"rlsync-mailbox-{uuid.uuid4().hex[:12]}",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": _OPEN_CALLS,
        "scheduling_strategy": here,
    }
    return ray.remote(MailboxActor).options(**options).remote()

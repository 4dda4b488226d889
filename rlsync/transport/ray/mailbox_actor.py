"""The mailbox as an actor of Ray. It loads neither torch nor anything that needs it."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsync.transport.relay.mailbox import Mailbox, Message, Reply, Request

LONG_POLL_S = 5.0  #: a mailbox answers a node that asks after at most so many seconds

_OPEN_CALLS = 4096  #: calls that the mailbox may have open at once: one or two for each node


@dataclass(frozen=True, slots=True)
class Question:
    """What the learner asks all workers, on whatever node."""

    number: int = 0  #: which question it is, from 1; 0 is none
    lowest: int = 0  #: the lowest version that an answer may be about


@dataclass(frozen=True, slots=True)
class NodeReply:
    """What the mailbox answers to a node's request."""

    #: about a version that the node does not have; ``None`` if there is none
    message: Message | None
    question: Question  #: the learner's last
    closed: bool  #: whether the learner has closed the transport
    nodes: int = 1  #: how many nodes ask this mailbox


class MailboxActor:
    """Holds message and reports, for ``forget_s`` seconds. Killed, it starts empty, and all repeat theirs."""

    def __init__(self, forget_s: float = 90.0) -> None:
        self._box = Mailbox(forget_s)
        self._question = Question()
        self._closed = False
        self._reports: dict[str, tuple[float, bytes]] = {}  # by node: when it came, and the report
        self._asking: dict[str, asyncio.Event] = {}  # by node that waits for an answer: wakes it

    async def post(self, message: Message | None, question: Question) -> Reply | None:
        """Take the learner's newest message, if there is one yet, and its last question."""
        reply = None
        if message is not None:
            reply = self._box.post(message, now_s := time.monotonic())
            self._wake_next(now_s)
        if question.number > self._question.number:
            self._question = question
            self._wake_everybody()
        return reply

    async def ask(self, request: Request, asked: int, wait_s: float = LONG_POLL_S) -> NodeReply:
        """Answer when there is news for a node, whose last question is ``asked``, or after ``wait_s``."""
        until_s = time.monotonic() + wait_s
        while True:
            message = self._box.ask(request, now_s := time.monotonic())
            self._wake_next(now_s)  # this one may have the version now
            if (
                message is not None
                or self._question.number > asked
                or self._closed
                or now_s >= until_s
            ):
                return NodeReply(message, self._question, self._closed, self._box.nodes)
            news = self._asking[request.node] = asyncio.Event()
            with suppress(asyncio.TimeoutError):  # then it is the last look
                await asyncio.wait_for(news.wait(), until_s - now_s)
            if self._asking.get(request.node) is news:
                del self._asking[request.node]

    async def report(self, node: str, report: bytes) -> None:
        """Take a node's report of its workers for the learner; the mailbox does not look into it."""
        self._reports[node] = (time.monotonic(), report)

    async def leave(self, node: str) -> None:
        """Forget a node that leaves."""
        self._reports.pop(node, None)

    async def reports(self) -> dict[str, tuple[float, bytes]]:
        """The last report of each node, and how many seconds old it is."""
        now_s = time.monotonic()
        aged: dict[str, tuple[float, bytes]] = {}
        for node, (came_at_s, report) in list(self._reports.items()):
            age_s = now_s - came_at_s
            if age_s <= self._box.forget_s:
                aged[node] = (age_s, report)
            else:
                del self._reports[node]
        return aged

    async def close(self) -> None:
        """Tell every node that the learner has closed the transport, and let go of the newest image."""
        self._closed = True
        self._box.message = None
        self._wake_everybody()

    def _wake_next(self, now_s: float) -> None:
        for node in self._box.next_told(self._asking, now_s):
            self._asking[node].set()

    def _wake_everybody(self) -> None:
        for news in self._asking.values():
            news.set()


def start_mailbox() -> ActorHandle:
    """Start a mailbox beside the caller; it ends with its last handle, or with the caller."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {
        "name": f"rlsync-mailbox-{uuid.uuid4().hex[:12]}",
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": _OPEN_CALLS,
        "scheduling_strategy": here,
    }
    return ray.remote(MailboxActor).options(**options).remote()

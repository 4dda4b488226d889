"""The parts of the transport over Ray that need no cluster: the mailbox, the buffers, the age of reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

pytest.importorskip("ray")

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.contract import ReaderStatus
from rlsync.transport.ray import learner
from rlsync.transport.ray.learner import SenderThread
from rlsync.transport.ray.mailbox_actor import MailboxActor, NodeReply, Question
from rlsync.transport.relay.mailbox import Message, Request

WITHIN_S = 60.0
LAYOUT = Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]})


def heard(tell: Callable[[MailboxActor], Awaitable[object]], asked: int = 0) -> NodeReply:
    """What a node that waits for an hour hears when the learner says something meanwhile."""

    async def wait() -> NodeReply:
        box = MailboxActor()
        waiting = asyncio.create_task(box.ask(Request("node"), asked, wait_s=3600.0))
        await asyncio.sleep(0)  # it waits now
        assert not waiting.done()
        await tell(box)
        return await asyncio.wait_for(waiting, WITHIN_S)

    return asyncio.run(wait())


def test_a_node_that_waits_hears_at_once_what_the_learner_says() -> None:
    message = Message(Stamp(1, 1), digest=0, image_bytes=64, address="here")
    assert heard(lambda box: box.post(message, Question())) == NodeReply(message, Question(), closed=False)
    question = Question(1, lowest=3)
    assert heard(lambda box: box.post(None, question)) == NodeReply(None, question, closed=False)
    assert heard(lambda box: box.close()) == NodeReply(None, Question(), closed=True)


def test_a_node_that_waits_for_its_turn_is_told_when_another_one_has_the_version() -> None:
    message = Message(Stamp(1, 1), digest=0, image_bytes=64, address="here")

    async def both() -> NodeReply:
        box = MailboxActor()
        box._box.wave = 1
        await box.post(message, Question())
        assert (await box.ask(Request("first"), asked=0)).message == message
        waiting = asyncio.create_task(box.ask(Request("second"), asked=0, wait_s=3600.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        again = asyncio.create_task(box.ask(Request("first", message.stamp), asked=0, wait_s=3600.0))
        reply = await asyncio.wait_for(waiting, WITHIN_S)
        again.cancel()
        return reply

    assert asyncio.run(both()) == NodeReply(message, Question(), closed=False, nodes=2)


def test_a_question_that_comes_late_does_not_take_the_place_of_a_later_one() -> None:
    async def ask_both() -> Question:
        box = MailboxActor()
        await box.post(None, Question(2, lowest=7))
        await box.post(None, Question(1, lowest=3))
        return (await box.ask(Request("node"), asked=0)).question

    assert asyncio.run(ask_both()) == Question(2, lowest=7)


def test_a_node_that_knows_the_question_waits_for_the_next_one() -> None:
    async def ask_again() -> NodeReply:
        box = MailboxActor()
        await box.post(None, Question(1, lowest=3))
        waiting = asyncio.create_task(box.ask(Request("node"), asked=1, wait_s=3600.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await box.post(None, Question(2, lowest=3))
        return await asyncio.wait_for(waiting, WITHIN_S)

    assert asyncio.run(ask_again()).question.number == 2


def test_neither_the_newest_version_nor_one_that_is_being_sent_is_written_over() -> None:
    thread = SenderThread(None, repeat_s=3600.0)  # without a cluster it sends nothing
    thread.lay_out(LAYOUT)
    for version in range(1, 6):
        thread.publish(Stamp(1, version), [torch.full((2,), float(version))])
        if version == 2:
            sent = thread._take()
    assert sent is not None
    assert (sent.stamp, sent.leaves[0].tolist()) == (Stamp(1, 2), [2.0, 2.0])
    newest = thread._take()
    assert newest is not None
    assert newest is thread.newest
    assert (newest.stamp, newest.leaves[0].tolist()) == (Stamp(1, 5), [5.0, 5.0])


@pytest.mark.parametrize(("age_s", "state"), [(1.0, "running"), (60.0, "silent")])
def test_what_an_old_report_says_of_a_worker_is_as_old_as_the_report(age_s: float, state: str) -> None:
    reported = ReaderStatus(3, 4242, True, "running", 7, 0, 0.5)
    known = learner._aged(reported, age_s)
    assert (known.state, known.heartbeat_age_s) == (state, 0.5 + age_s)
    dead = learner._aged(ReaderStatus(3, 4242, False, "dead", 7, 0, 0.5), age_s)
    assert dead.state == "dead"

"""Bells: who waits is woken, whoever dies, and costs nothing meanwhile."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from rlsync.transport import bell
from rlsync.transport.bell import EVERYBODY, Bell
from rlsync.transport.shared_file import PAGE_BYTES, SharedFile
from tests.tools.processes import wait_until

pytestmark = pytest.mark.processes

FORK = multiprocessing.get_context("fork")
WAIT_S = 30.0

RUNG, WAITING, WOKEN = range(3)  # words: the bell, and how often a process has begun to wait, and was woken


@pytest.fixture
def words() -> Iterator[memoryview]:
    file = SharedFile.create("bell")
    file.allocate(0, PAGE_BYTES)
    yield file.words(PAGE_BYTES, 0)
    file.close()


@contextmanager
def process(target: Callable[..., object], *arguments: Any) -> Iterator[Any]:
    started = FORK.Process(target=target, args=arguments, daemon=True)
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def wait_for_ever(words: memoryview, place: int = 0) -> None:
    """Count the waits, and those that ended because it was rung."""
    waited_for = Bell(words, RUNG)
    while True:
        heard = waited_for.read()
        words[8 * place + WAITING] += 1
        words[8 * place + WOKEN] += waited_for.wait(heard, WAIT_S)


def test_who_waits_in_another_process_is_woken_each_time(words: memoryview) -> None:
    rung = Bell(words, RUNG)
    with process(wait_for_ever, words):
        for times in range(1, 100):
            assert wait_until(lambda times=times: words[WAITING] > words[WOKEN] >= times - 1, WAIT_S)  # type: ignore[misc]
            rung.ring()
            assert wait_until(lambda times=times: words[WOKEN] >= times, WAIT_S)  # type: ignore[misc]


def test_what_was_rung_between_the_look_and_the_wait_is_not_missed(words: memoryview) -> None:
    rung = Bell(words, RUNG)
    heard = rung.read()
    rung.ring()
    assert rung.wait(heard, WAIT_S)
    assert not rung.wait(rung.read(), 0.01)


def test_one_of_many_is_woken_and_the_others_wait_on(words: memoryview, monkeypatch: Any) -> None:
    if bell._futex() is None:
        pytest.skip("without futex(2) all are woken")
    monkeypatch.setattr(bell, "LOOK_AGAIN_S", WAIT_S)  # by nothing else
    count = 4
    with process(wait_for_ever, words, 1), process(wait_for_ever, words, 2), process(wait_for_ever, words, 3):
        waiting = [8 * place + WAITING for place in range(1, count)]
        woken = [8 * place + WOKEN for place in range(1, count)]
        assert wait_until(lambda: all(words[at] for at in waiting), WAIT_S)
        time.sleep(0.2)  # they have counted, and are about to wait
        for rings in (1, 2):
            Bell(words, RUNG).ring(1)
            assert wait_until(lambda rings=rings: sum(words[at] for at in woken) == rings, WAIT_S)  # type: ignore[misc]
            assert not wait_until(lambda rings=rings: sum(words[at] for at in woken) > rings, 0.3)  # type: ignore[misc]


def test_who_waits_looks_again_where_nobody_is_left_to_ring(words: memoryview) -> None:
    with process(wait_for_ever, words):
        assert wait_until(lambda: words[WAITING] >= 3, WAIT_S)
        assert words[WOKEN] == 0


def test_to_wait_is_to_sleep(words: memoryview) -> None:
    if bell._futex() is None:
        pytest.skip("without futex(2) the word is read again and again")
    with process(wait_for_ever, words) as waiting:
        assert wait_until(lambda: words[WAITING] >= 2, WAIT_S)
        its = psutil.Process(waiting.pid)
        waits, switches = words[WAITING], its.num_ctx_switches().voluntary
        assert wait_until(lambda: words[WAITING] >= waits + 5, WAIT_S)
        assert its.num_ctx_switches().voluntary - switches < 20, "a look each millisecond would be hundreds"


def test_without_futex_the_word_is_read_again_and_again(words: memoryview, monkeypatch: Any) -> None:
    monkeypatch.setattr(bell, "_futex", lambda: None)  # before the bell is made
    rung = Bell(words, RUNG)
    with process(wait_for_ever, words):
        for times in range(1, 20):
            assert wait_until(lambda times=times: words[WAITING] > words[WOKEN] >= times - 1, WAIT_S)  # type: ignore[misc]
            rung.ring(EVERYBODY)
            assert wait_until(lambda times=times: words[WOKEN] >= times, WAIT_S)  # type: ignore[misc]
    assert not rung.wait(rung.read(), 0.01)

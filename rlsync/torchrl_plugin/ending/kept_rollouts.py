"""Rollouts that arrive while the learner asks its asynchronous workers for something else.

A worker of TorchRL 0.14's MultiAsyncCollector that finds a message after its rollout drops the rollout,
answers, and waits for the word "continue". The learner sends that word only when a rollout arrives, so the
worker never collects again. Each checkpoint asks all workers for their state, so a run with checkpoints loses
its workers one by one, and then waits for ever. Here a question waits until the rollout is there.
"""

from __future__ import annotations

import weakref
from collections import deque
from queue import Empty
from typing import Any

from torchrl.collectors import MultiAsyncCollector

from rlsync.sync.processes import LOOK_EVERY_S
from rlsync.torchrl_plugin.compat import in_place_of

#: Words after which a worker collects one rollout and sends it.
_COLLECT = frozenset({"continue", "continue_random"})
#: Words that may cost a rollout: the workers end, begin anew, or fill a replay buffer by themselves.
_DO_NOT_WAIT = frozenset({"close", "reset", "run_free", "pause", "restart"})


class KeptRollouts:
    """Which workers owe a rollout, and those that came unasked; nothing here keeps the collector alive."""

    def __init__(self, collector: MultiAsyncCollector) -> None:
        self.owing: set[int] = set()
        self._kept: deque[Any] = deque()
        self._collector = weakref.ref(collector)

    def sent(self, worker: int, word: str) -> None:
        """Note what was sent to a worker."""
        if word in _COLLECT:
            self.owing.add(worker)
        elif word == "run_free":
            self.owing.clear()

    def got(self, item: Any) -> Any:
        """Note what came through the queue: ``(data, count)``, or ``(worker, "paused")``."""
        data = item[0]
        self.owing.discard(data if isinstance(data, int) else data[1])
        return item

    def next(self) -> Any | None:
        """The oldest rollout that was kept, if there is one."""
        return self._kept.popleft() if self._kept else None

    def wait_for(self, worker: int) -> None:
        """Keep what arrives until the rollout of ``worker`` does, by the queue's own ``get``, through which
        WatchWorkers looks; without it TorchRL finds a dead worker when it sends.
        """
        collector = self._collector()
        if collector is None or worker not in self.owing:
            return
        kept, self._kept = self._kept, deque()  # so that get() does not return them to us
        try:
            while worker in self.owing and collector.procs[worker].is_alive():
                try:
                    kept.append(collector.queue_out.get(True, LOOK_EVERY_S))
                except Empty:
                    continue
        finally:
            self._kept = kept


def keep_rollouts(collector: MultiAsyncCollector) -> None:
    """Let every question to a worker wait for the rollout that it owes; call it once, when pipes and queue
    exist, before :mod:`rlsync.torchrl_plugin.ending.waits` wraps them.
    """
    kept = KeptRollouts(collector)

    @in_place_of(collector.queue_out, "get")
    def get(queue: Any, block: bool = True, timeout: float | None = None) -> Any:
        item = kept.next()
        return kept.got(type(queue).get(queue, block, timeout)) if item is None else item

    for worker, pipe in enumerate(collector.pipes):
        _ask_after_the_rollout(kept, worker, pipe)


def _ask_after_the_rollout(kept: KeptRollouts, worker: int, pipe: Any) -> None:
    @in_place_of(pipe, "send")
    def send(self: Any, message: tuple[object, str]) -> None:
        word = message[1]
        if word not in _COLLECT and word not in _DO_NOT_WAIT:
            kept.wait_for(worker)
        type(self).send(self, message)
        kept.sent(worker, word)

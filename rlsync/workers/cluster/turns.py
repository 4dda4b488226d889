"""Turns: calls that were numbered by their caller are served in the order of their numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from rlsync.core.errors import PublishError


class Turns:
    """Serves numbered calls one at a time, in order. Ray does not promise that an actor with several threads
    begins calls in the order in which they were made.

    Every number must be used. A call ends its turn however it ends.

    Args:
        first: the number of the first call.

    Example:
        >>> turns = Turns()
        >>> with turns.turn(0, timeout_s=1.0):
        ...     pass
        >>> with turns.turn(2, timeout_s=0.0):  # 1 was not served yet
        ...     pass
        Traceback (most recent call last):
        rlsync.core.errors.PublishError: call 2 waited 0 s for its turn; call 1 is next
          where  a node's agent
          cure   look what holds that call up; the learner ends this agent and starts another one
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._next = first
        self._changed = Condition()

    @contextmanager
    def turn(self, number: int, timeout_s: float) -> Iterator[None]:
        """Wait for the turn of a call; the next one begins when the block ends.

        Args:
            number: of the call, from ``first``.
            timeout_s: how long to wait, seconds.

        Raises:
            PublishError: the calls before it did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._next != number:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and self._next != number:
                    raise PublishError(
                        f"call {number} waited {timeout_s:g} s for its turn; call {self._next} is next",
                        "a node's agent",
                        "look what holds that call up; the learner ends this agent and starts another one",
                    )
        try:
            yield
        finally:
            with self._changed:
                self._next = number + 1
                self._changed.notify_all()

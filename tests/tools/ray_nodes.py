"""A node of a Ray cluster as a test has it: an actor with a board, a receiver, and a worker that looks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.transport.board import BoardReader, BoardWriter
from rlsync.transport.ray.receiver import NodeReceiver

# Nothing from tests.tools.parts: it loads all of TorchRL in each process.


class Node:
    """Runs on one node, in a process of its own."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._receiver: NodeReceiver | None = None

    def pid(self) -> int:
        return os.getpid()

    def attach(self, mailbox: Any, name: str, number: int, mode: str, pull_s: float = 60.0) -> None:
        """Begin with a board and a receiver of its own."""
        self.detach()
        self._mode = mode
        self._acts: list[torch.Tensor] = []
        self.torn = self.wrong = 0
        self.versions: set[int] = set()
        self._board = BoardWriter()
        self._reader = BoardReader(self._board.handle, self._apply, 0)
        self._receiver = NodeReceiver(
            mailbox, name, self._board, numbers=[number], pull_s=pull_s, again_s=0.1
        )

    def detach(self) -> None:
        if self._receiver is not None:
            self._receiver.close(60.0)
            self._reader.close()
            self._board.close()
            self._receiver = None

    def watch(self, versions: int, timeout_s: float) -> tuple[int, int, int]:
        """Adopt and look, until so many versions were seen.

        Returns:
            How many versions were seen, how many looks were torn, and how many were not of the stamp.
        """
        until_s = time.monotonic() + timeout_s
        while len(self.versions) < versions and time.monotonic() < until_s:
            self._reader.adopt()
            self._look()
        return len(self.versions), self.torn, self.wrong

    def await_stamp(self, stamp: Stamp, timeout_s: float) -> Stamp:
        """Adopt until a version acts, or a newer one."""
        until_s = time.monotonic() + timeout_s
        while self._reader.stamp < stamp and time.monotonic() < until_s:
            self._reader.adopt()
            time.sleep(0.005)
        self._look()
        assert (self.torn, self.wrong) == (0, 0)
        return self._reader.stamp

    def learner_gone(self, timeout_s: float) -> tuple[bool, bool]:
        """Whether the learner has closed the transport, and whether it died, once one of them is so."""
        assert self._receiver is not None
        until_s = time.monotonic() + timeout_s
        receiver = self._receiver
        while not (receiver.closed_by_learner or receiver.learner_died) and time.monotonic() < until_s:
            time.sleep(0.01)
        return receiver.closed_by_learner, receiver.learner_died

    def _apply(self, version: int, layout: Layout, views: Sequence[torch.Tensor]) -> bool:
        self._acts = list(views) if self._mode == "alias" else [view.clone() for view in views]
        return self._mode == "alias"

    def _look(self) -> None:
        if not self._reader.version:
            return
        ends = [torch.aminmax(tensor) for tensor in self._acts]
        low, high = min(float(e.min) for e in ends), max(float(e.max) for e in ends)
        self.torn += low != high
        self.wrong += low != self._reader.version
        self.versions.add(self._reader.version)


def start_node(node_id: str) -> Any:
    """A :class:`Node` on one node of the cluster."""
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(Node).options(num_cpus=0, scheduling_strategy=there, max_concurrency=2).remote()

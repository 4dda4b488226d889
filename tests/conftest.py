"""Every test: one thread, a fixed seed, no process left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterator
from multiprocessing import resource_tracker

# Before torch: spawned workers inherit it, and one thread each is all a test machine has to give.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from tests.parts.processes import child_pids, kill, open_fds, shared_mappings, wait_until

LEAVE_TIMEOUT_S = 5.0

#: Read by mypy, not run.
collect_ignore = ["typing_cases"]


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    torch.set_num_threads(1)  # a TorchRL collector changes it when it shuts down
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_left_behind() -> Iterator[None]:
    """A test that leaves child processes fails; they are killed for the sake of the next one."""
    before = child_pids()
    yield
    left = _left_after(before)
    for pid in left:
        kill(pid)
    multiprocessing.active_children()  # reaps them
    assert not left, f"the test left child processes behind (killed now): {sorted(left)}"


def _left_after(before: set[int]) -> set[int]:
    def left() -> set[int]:
        multiprocessing.active_children()
        return child_pids() - before

    if left():
        gc.collect()  # a collector without a shutdown() ends its workers when it is collected
        wait_until(lambda: not left(), LEAVE_TIMEOUT_S)
    return left()


@pytest.fixture
def fork_workers() -> Iterator[None]:
    """Collectors built in the test fork their workers: 0.05 s each, a spawned one takes seconds."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


class LeakCheck:
    """The descriptors and shared memory this process holds, against a baseline.

    Only this process counts: /dev/shm itself is shared with everybody else on the machine.
    """

    def __init__(self) -> None:
        resource_tracker.ensure_running()  # else its pipe would count against the first test
        self.rebase()

    def rebase(self) -> None:
        """Take the present state as the baseline: call it after a first, warming round."""
        self._baseline = self._held()

    def leaks(self) -> dict[str, int]:
        """What is held now and was not, with how many of each."""
        return dict(self._held() - self._baseline)

    def _held(self) -> Counter[str]:
        gc.collect()
        return Counter(map(_kind, open_fds())) + Counter(map(_kind, shared_mappings()))


def _kind(name: str) -> str:
    """`pipe:[123]`, `/dev/shm/torch_1_2`: the numbers are new each time, only how many counts."""
    if name.startswith("/dev/shm/"):
        return "/dev/shm"
    return name.partition(":[")[0]


@pytest.fixture
def no_leaks() -> Iterator[LeakCheck]:
    """Fails a test that leaves descriptors or shared memory; `rebase()` after a warming round."""
    check = LeakCheck()
    yield check
    wait_until(lambda: not check.leaks(), LEAVE_TIMEOUT_S, poll_s=0.1)
    assert not check.leaks(), f"the test left behind: {check.leaks()}"

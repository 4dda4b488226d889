"""A run whose workers stop, die or hang, and the Stop that ends it: for workers here and on a cluster."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from torchrl.trainers import Trainer

from rlsync import Stop

#: What happens to the workers before the stop.
FAULTS = ("stopped", "killed", "hanging")


@dataclass(frozen=True)
class Ended:
    """How it went: the stop, and how long the block took from the first call on, in seconds."""

    stop: Stop
    seconds: float


def stopped_run(
    trainer: Trainer, within_s: float, fault: str, flag: Path, pids: Callable[[], Collection[int]]
) -> Ended:
    """Train three batches, let the fault happen, and ask for a stop when the learner waits.

    Args:
        trainer: of an endless run.
        within_s: the deadline.
        fault: one of FAULTS.
        flag: while this file is there, environments hang.
        pids: the processes that are stopped or killed.
    """
    count, asked = iter(range(10**9)), [0.0]

    def wait_and_stop() -> None:
        before = -1
        while before != (before := trainer.collected_frames):
            time.sleep(1.0)  # what had arrived is used up then
        asked[0] = time.monotonic()
        stop(fault)

    def after_a_batch() -> None:
        if next(count) != 2:
            return
        if fault == "hanging":
            flag.touch()
        else:
            for pid in pids():
                os.kill(pid, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        threading.Thread(target=wait_and_stop, daemon=True).start()

    with Stop(trainer, within_s) as stop:
        trainer.register_op("post_steps", after_a_batch)
        trainer.train()
    return Ended(stop, time.monotonic() - asked[0])

"""A program for test_program_end.py: it makes worker processes, and ends without shutting them down.

python -m tests.tools.ending_program SCHEME COLLECTOR END
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from rlsync import BoardScheme, SyncWeights
from rlsync.runs.recipes.impala import Categorical, CollectSettings, GymnasiumEnvs, ImpalaNet, UnrollCollector
from tests.tools.parts import make_a2c_trainer, make_policy, make_workers

SCHEMES = {"board": BoardScheme, "stock": MultiProcessWeightSyncScheme, "shared": SharedMemWeightSyncScheme}
SOURCE = "loss_module.actor_network"


def unrolls() -> UnrollCollector:
    net = ImpalaNet((4,), Categorical(2))
    env = GymnasiumEnvs("CartPole-v1")
    return UnrollCollector(net, env, CollectSettings(steps=5, envs_per_worker=1, start_method="fork"))


def collector_of(scheme: str, kind: str) -> BaseCollector:
    if kind == "unrolls":
        return unrolls()
    kinds = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
    return make_workers(kinds[kind], make_policy(), schemes={"policy": SCHEMES[scheme]()})


def hooked(collector: BaseCollector, source: str = SOURCE) -> Trainer:
    trainer = make_a2c_trainer(collector, total_frames=10**9, weight_update_map={"policy": SOURCE})
    SyncWeights({"policy": source}).register(trainer)
    return trainer


def in_training(collector: BaseCollector, act: Callable[[], object]) -> None:
    """Train, and act after the first batch."""
    trainer = hooked(collector)
    trainer.register_op("post_steps", act)
    trainer.train()


def mistake() -> None:
    raise ValueError("a mistake in the script")


def raises(collector: BaseCollector) -> None:
    mistake()


def raises_beside_a_stopped_worker(collector: BaseCollector) -> None:
    os.kill(collector.procs[0].pid, signal.SIGSTOP)
    mistake()


def raises_in_training(collector: BaseCollector) -> None:
    in_training(collector, mistake)


def is_refused(collector: BaseCollector) -> None:
    hooked(collector, source=SOURCE + "_TYPO")


def is_interrupted(collector: BaseCollector) -> None:
    in_training(collector, lambda: signal.raise_signal(signal.SIGINT))


def is_terminated(collector: BaseCollector) -> None:
    in_training(collector, lambda: signal.raise_signal(signal.SIGTERM))


def is_killed(collector: BaseCollector) -> None:
    in_training(collector, lambda: os.kill(os.getpid(), signal.SIGKILL))


def leaves_at_once(collector: BaseCollector) -> None:
    in_training(collector, lambda: os._exit(7))


def forgets_to_shut_down(collector: BaseCollector) -> None:
    next(iter(collector))


def drops_a_hooked_trainer(collector: BaseCollector) -> None:
    hooked(collector)
    held.clear()


held: list[Any] = []  # as a notebook's or a script's global would hold them


def main(scheme: str, kind: str, end: str) -> None:
    collector = collector_of(scheme, kind)
    held.append(collector)
    print("workers", *(process.pid for process in collector.procs), flush=True)  # noqa: T201
    globals()[end](collector)


if __name__ == "__main__":
    main(*sys.argv[1:])

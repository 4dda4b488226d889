"""Programs that test_forkserver.py runs: collectors whose workers start from the fork server.

python -m tests.tools.forkserver_program compare FOLDER
python -m tests.tools.forkserver_program sleep
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import EnvBase, GymEnv, ParallelEnv, TransformedEnv

import rlsync

WORKERS = 2
#: What ray puts on the path when it is imported, as TorchRL's collectors do where it is installed.
RAYS = "ray/thirdparty_files"


class Coin(nn.Module):
    """Acts by chance, with torch's own generator of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return (torch.rand(observation.shape[:-1]) + self.bias > 0.5).long()


def policy() -> TensorDictModule:
    return TensorDictModule(Coin(), in_keys=["observation"], out_keys=["action"])


def cartpole() -> EnvBase:
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def telling_env(folder: Path) -> EnvBase:
    """Writes down how the worker that makes it was started."""
    facts = {
        "numpy": np.random.random(),
        "random": random.random(),
        "torch": torch.initial_seed(),
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "cwd": str(Path.cwd()),
        "path": [entry for entry in sys.path if not entry.endswith(RAYS)],
        "cuda": torch.cuda.is_initialized(),
        "python_threads": [thread.name for thread in threading.enumerate()],
        "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "main": sys.modules["__main__"].__spec__ is not None,
    }
    (folder / f"{os.getpid()}.json").write_text(json.dumps(facts))
    return cartpole()


def broken_env() -> EnvBase:
    raise LookupError("this environment cannot be made")


def nested_env() -> EnvBase:
    return TransformedEnv(ParallelEnv(1, cartpole))


def collector(env: Any, workers: int = WORKERS, **more: Any) -> MultiSyncCollector:
    return MultiSyncCollector(
        [env] * workers,
        policy(),
        frames_per_batch=32,
        total_frames=-1,
        num_sub_threads=1,
        weight_sync_schemes={"policy": rlsync.BoardScheme()},
        **more,
    )


def life_of_workers(folder: Path) -> dict[str, Any]:
    """How two workers were started, what they play, and what a learner is told when one is killed."""
    folder.mkdir()
    made = collector(partial(telling_env, folder))
    try:
        made.set_seed(7)
        batches = iter(made)
        return {
            "facts": [json.loads(file.read_text()) for file in folder.iterdir()],
            "played": played(batches),
            "killed": end_of_a_killed_worker(made, batches),
        }
    finally:
        made.shutdown()


def played(batches: Iterator[TensorDictBase]) -> list[Any]:
    """The frames of three batches, as numbers."""
    keys = ("observation", "action", ("next", "reward"), ("next", "policy_version"))
    return [[batch[key].tolist() for key in keys] for batch in islice(batches, 3)]


def end_of_a_killed_worker(made: MultiSyncCollector, batches: Iterator[TensorDictBase]) -> list[Any]:
    """Exit code of a killed worker, and what a learner that waits for it is told."""
    killed = made.procs[1]
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(20)
    try:
        for _ in range(3):
            next(batches)
    except Exception as error:
        return [killed.exitcode, type(error).__name__]
    return [killed.exitcode, ""]


def error_of_a_worker() -> str:
    try:
        collector(broken_env, workers=1).shutdown()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def compare(folder: Path) -> dict[str, Any]:
    """The same things done with spawned workers and with those of the fork server."""
    warnings.simplefilter("ignore")
    told: dict[str, Any] = {}
    server = rlsync.Forkserver()
    told["method_before"] = multiprocessing.get_start_method()
    for name, start in (("spawn", contextlib.nullcontext()), ("forkserver", server)):
        with start:
            told[name] = {
                "method": multiprocessing.get_start_method(),
                **life_of_workers(folder / name),
            }
    told["method_after"] = multiprocessing.get_start_method()
    with server:
        told["error"] = error_of_a_worker()
        nested = collector(nested_env, workers=1)
    try:
        told["nested"] = list(next(iter(nested)).shape)
    finally:
        nested.shutdown()
    return told


def sleep() -> None:
    """Start two workers, write their pids, and wait for the end."""
    with rlsync.Forkserver(preload=["rlsync.runs.recipes.parts"]):  # as recipes do
        made = collector(cartpole)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            next(iter(made))
            sys.stdout.write(json.dumps([process.pid for process in made.procs]) + "\n")
            sys.stdout.flush()
            while True:
                time.sleep(0.1)
        finally:
            made.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        sys.stdout.write(json.dumps(compare(Path(sys.argv[2]))))
    else:
        sleep()

"""A process of its own that evaluates one version after the other, while training goes on."""

from __future__ import annotations

import copy
import csv
import logging
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import BoardClosed
from rlsync.recipes.impala.adopt import AdoptedNetwork
from rlsync.recipes.impala.env_base import Envs
from rlsync.recipes.impala.envs import EnvSpec, make_venv
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.tensors.target import materialise
from rlsync.torchrl_plugin.waits import ending
from rlsync.transport.board_format import MAX_READERS
from rlsync.transport.board_handle import BoardHandle

_log = logging.getLogger(__name__)

#: The evaluator's line on the board: the last one, which no worker has.
READER = MAX_READERS - 1

_LOOK_EVERY_S = 0.2
_NICE = 10
_LEAVE_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What one version is worth.

    Args:
        version: the one that acted in every step of every episode.
        episodes: how many were played.
        return_mean, return_std, return_min, return_max: of their returns, rewards not clipped.
        length_mean: steps of an episode.
        seconds: how long it took.
    """

    version: int
    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """What the process is told; small and picklable.

    Args:
        board: where versions come from.
        network: what acts, without its memory.
        env: what it acts in.
        episodes: of one evaluation.
        every_versions: at least so many lie between two evaluations.
        file: CSV, one line an evaluation.
        seed: of environments and actions, of every evaluation.
    """

    board: BoardHandle
    network: ImpalaNet
    env: EnvSpec
    episodes: int
    every_versions: int
    file: Path
    seed: int


@torch.inference_mode()
def play(
    network: ImpalaNet, envs: Envs, episodes: int, seed: int, going_on: Callable[[], bool] = lambda: True
) -> tuple[list[float], list[int]]:
    """Returns and lengths of episodes with the network as it is, actions drawn.

    Each environment plays an equal share to its end, so that short episodes are not counted more often.

    Args:
        network: what acts.
        envs: where; as many play at once.
        episodes: how many; a multiple of ``envs.num_envs``.
        seed: of environments and actions.
        going_on: asked at every step; false ends it early, with the episodes that are over.

    Example:
        >>> from rlsync.recipes.impala import Categorical
        >>> from rlsync.recipes.impala.envs import GymnasiumEnvs
        >>> envs = make_venv(GymnasiumEnvs("CartPole-v1"), 2)
        >>> returns, lengths = play(ImpalaNet((4,), Categorical(2)), envs, episodes=4, seed=0)
        >>> len(returns), returns == lengths  # one for each step
        (4, True)
        >>> envs.close()
    """
    count = envs.num_envs
    generator = torch.Generator().manual_seed(seed)
    left = [episodes // count] * count
    total, length = torch.zeros(count), torch.zeros(count, dtype=torch.int64)
    observation, is_init = envs.reset(seed), torch.ones(count, dtype=torch.bool)
    action = torch.zeros(count, *network.head.action_shape, dtype=network.head.action_dtype)
    state, reward = network.initial_state(count), torch.zeros(count)
    returns: list[float] = []
    lengths: list[int] = []
    while any(left) and going_on():
        out = network.step(observation, is_init, state, action, reward)
        action, state = network.head.act(out.params, generator)[0], out.state
        envs.send(action)
        answer = envs.recv()
        observation, reward = answer.observation, answer.reward.clone()
        is_init = answer.terminated | answer.truncated
        total += reward
        length += 1
        for env in is_init.nonzero().flatten().tolist():
            if left[env]:
                left[env] -= 1
                returns.append(float(total[env]))
                lengths.append(int(length[env]))
            total[env], length[env] = 0.0, 0
    return returns, lengths


def run_evaluator(job: EvaluationJob) -> None:
    """The process: adopt, play, write, until the learner is gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    torch.set_num_threads(1)
    network = job.network.requires_grad_(False)
    materialise(network)
    try:
        adopted = AdoptedNetwork(job.board, READER, network)
    except BoardClosed:
        return
    envs = make_venv(job.env, next(n for n in (4, 2, 1) if job.episodes % n == 0))
    evaluated = -job.every_versions
    while not adopted.learner_gone:
        if adopted.newest - evaluated < job.every_versions:
            time.sleep(_LOOK_EVERY_S)
            continue
        evaluated, started = adopted.adopt(), time.monotonic()
        found = play(network, envs, job.episodes, job.seed, lambda: not adopted.learner_gone)
        if len(found[0]) == job.episodes:
            _write(job.file, _summary(evaluated, *found, time.monotonic() - started))


def _summary(version: int, returns: list[float], lengths: list[int], seconds: float) -> Evaluated:
    return Evaluated(
        version,
        len(returns),
        statistics.fmean(returns),
        statistics.pstdev(returns),
        min(returns),
        max(returns),
        statistics.fmean(lengths),
        round(seconds, 3),
    )


def _write(file: Path, evaluated: Evaluated) -> None:
    with file.open("a", newline="") as opened:
        writer = csv.writer(opened)
        if not opened.tell():
            writer.writerow([field.name for field in fields(Evaluated)])
        writer.writerow(asdict(evaluated).values())


class Evaluator(TrainerHookBase):
    """Runs the process, and logs what it writes: ``eval/version``, ``eval/return``.

    A version stays pinned while it is evaluated: the learner publishes past it, and workers adopt past it.

    Args:
        job: what it is told.
        start_method: as of :class:`UnrollCollector`.
    """

    def __init__(self, job: EvaluationJob, start_method: str = "forkserver") -> None:
        blank = copy.deepcopy(job.network).to("meta")
        told = replace(job, network=blank)
        make: Any = get_context(start_method)
        self._file = job.file
        self._seen = 0
        self._process: BaseProcess = make.Process(
            target=run_evaluator, args=(told,), name="rlsync evaluator", daemon=True
        )
        self._process.start()
        self._failed = False

    def register(self, trainer: Trainer, name: str = "evaluator") -> None:
        """Log after every batch, and end the process with the trainer."""
        trainer.register_op("post_steps_log", self)
        trainer.register_op("shutdown", self.close)

    def __call__(self, batch: TensorDictBase | None = None) -> dict[str, Any] | None:
        if not self._failed and self._process.exitcode is not None:
            self._failed = True
            _log.error("the evaluator %s; training goes on without it", ending(self._process.exitcode))
        size = self._file.stat().st_size if self._file.exists() else 0
        if size == self._seen:
            return None
        self._seen = size
        last = self.evaluations()[-1]
        return {"eval/version": last.version, "eval/return": last.return_mean}

    def evaluations(self) -> list[Evaluated]:
        """What was found so far, oldest first."""
        if not self._file.exists():
            return []
        with self._file.open(newline="") as opened:
            return [
                Evaluated(int(row["version"]), int(row["episodes"]), *map(float, list(row.values())[2:]))
                for row in csv.DictReader(opened)
            ]

    def close(self) -> None:
        """End the process; twice is once."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_LEAVE_WITHIN_S)
            if self._process.is_alive():
                self._process.kill()
                self._process.join()

"""UnrollCollector: worker processes that act all the time, and the learner's end of what they bring."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.recipes.impala.envs import EnvSpec
from rlsync.recipes.impala.intake import Intake
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.recipes.impala.policy_on_board import PolicyOnBoard
from rlsync.recipes.impala.supervise import Restarts, Workers
from rlsync.recipes.impala.unrolls import RolloutShape
from rlsync.recipes.impala.worker import Job, start_worker
from rlsync.transport.rollout_ring import RingCounters, RolloutRing

#: How long workers are given to complete a step and leave.
_LEAVE_TIMEOUT_S = 5.0


class UnrollCollector(PolicyOnBoard):
    """Collects unrolls for :class:`ImpalaLoss` with worker processes that never wait for the learner's steps.

    Each worker steps its environments with one forward pass for all of them, straight into a slot of a
    :class:`RolloutRing`; between rollouts it adopts the newest version from a board, and every step is
    stamped with the version that acted. It stands in the stock ``Trainer``, whose weights
    ``SyncWeights({"policy": "loss_module.actor_network"})`` publishes.

    A batch is what :mod:`rlsync.recipes.impala.batch` describes, with ``rollouts_per_batch *
    envs_per_worker`` unrolls, and what :func:`batch_of` adds under ``"collector"``. With one rollout a batch
    the batch is the slot itself, not copied: it is good until the next batch is asked for, or
    :meth:`release`; clone what is to live longer.

    Workers stand when the constructor returns, and begin when the first batch is asked for. They end with
    :meth:`shutdown`, and when this process dies.

    Args:
        network: the network; the workers act with copies of it, and begin with its weights as version 1.
        env: which environments; see :mod:`rlsync.recipes.impala.envs`.
        steps: T, of one unroll.
        envs_per_worker: environments that one worker steps.
        num_workers: worker processes.
        overlap: split a worker's environments in two: one half steps while the network is busy with the
            other. Of use where stepping does not need the interpreter (``AtariEnvs``).
        rollouts_per_batch: slots in one batch.
        slots: of the ring; by default one a worker and two a rollout of a batch. When all are full, workers
            wait. More slots smooth, and make frames older.
        total_frames: after which iteration ends; -1 never.
        store_params: store ``behaviour_params``; a trust region reads them.
        store_value: store the value that the worker's network gave, as ``("collector", "value")``.
        dtype: in which workers hold the network, and receive it, for example ``torch.bfloat16``; ``None``
            for its own. Let the sync map declare it: ``Source("loss_module.actor_network", dtype=...)``.
        seed: of environments and actions; ``None`` draws one.
        restarts: how often a worker that ended is started again.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``. With the first two the program needs
            ``if __name__ == "__main__"``, and the environment's parts must be picklable.
        start_timeout_s: for all workers to stand, seconds.
        silent_timeout_s: how long a worker may take to begin, after it was started again, and for a rollout,
            seconds. One that takes longer is killed and started again; when all do, the run ends.

    Raises:
        ConfigError: a number is out of range.
        WorkerLost: a worker ended before it stood, with its own error; and, while iterating, when one ended
            more often than ``restarts`` allows or when all were killed.
        AdoptionTimeout: workers do not stand in time; or, while iterating, all are silent for too long.

    Source: IMPALA, arXiv 1802.01561; torchrl.collectors.MultiAsyncCollector.

    Example:
        >>> from rlsync.recipes.impala import Categorical, GymnasiumEnvs
        >>> net = ImpalaNet((4,), Categorical(2))
        >>> collector = UnrollCollector(
        ...     net, GymnasiumEnvs("CartPole-v1"), steps=5, envs_per_worker=2, num_workers=1,
        ...     start_method="fork",
        ... )
        >>> next(iter(collector))["observation"].shape
        torch.Size([6, 2, 4])
        >>> collector.shutdown()
    """

    init_random_frames = 0

    def __init__(
        self,
        network: ImpalaNet,
        env: EnvSpec,
        *,
        steps: int,
        envs_per_worker: int,
        num_workers: int = 2,
        overlap: bool = False,
        rollouts_per_batch: int = 1,
        slots: int | None = None,
        total_frames: int = -1,
        store_params: bool = False,
        store_value: bool = False,
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        restarts: Restarts | None = None,
        start_method: str = "forkserver",
        start_timeout_s: float = 300.0,
        silent_timeout_s: float = 300.0,
    ) -> None:
        slots = num_workers + 2 * rollouts_per_batch if slots is None else slots
        _check(steps, envs_per_worker, num_workers, overlap, rollouts_per_batch, slots)
        super().__init__(network, num_workers, dtype)
        self.total_frames = total_frames
        self.frames_per_batch = steps * envs_per_worker * rollouts_per_batch
        self.requested_frames_per_batch = self.frames_per_batch
        self._envs = num_workers * envs_per_worker
        self._frames = self._batches = 0
        self._closed = False
        self._pid = os.getpid()
        shape = RolloutShape(steps, envs_per_worker, store_params, store_value)
        self._ring = RolloutRing(shape.layout(network), slots, num_workers)
        seed = int(torch.randint(2**30, ())) if seed is None else seed
        board = self.board_sender.board.handle
        job = Job(self._ring.handle, board, self.worker_network, env, shape, overlap, seed)
        start = partial(start_worker, start_method, job)
        self._workers = Workers(start, num_workers, self._ring, restarts or Restarts(), silent_timeout_s)
        self._intake = Intake(self._ring, self._workers, rollouts_per_batch, silent_timeout_s)
        try:
            self._workers.await_start(start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes of this moment."""
        return self._workers.procs

    @property
    def ring(self) -> RolloutRing:
        """Where rollouts come from; ``ring.handle`` lets another process watch."""
        return self._ring

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    @property
    def last_workers(self) -> tuple[int, ...]:
        """The numbers of the workers that made the last batch."""
        return self._intake.writers

    @property
    def restarted(self) -> int:
        """How many workers were started again."""
        return self._workers.restarts

    def counters(self) -> RingCounters:
        """Slots by state, rollouts passed, and who has waited how long for whom."""
        return self._ring.counters()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Batches, until ``total_frames``.

        Raises:
            BoardClosed: the collector was shut down.
        """
        while self.total_frames < 0 or self._frames < self.total_frames:
            yield self._next_batch()

    def release(self) -> None:
        """Give the slot of the last batch back before the next one is asked for."""
        self._intake.release()

    def pause(self) -> AbstractContextManager[None]:
        """Workers begin no further rollout inside the block; what they have begun they complete."""
        return self._intake.paused()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Let every worker begin anew with seeds from here on, at its next rollout.

        Args:
            seed: of the first environment of the first worker.
            static_seed: return the same seed.

        Returns:
            The first seed that was not given away.
        """
        self._ring.seed(seed)
        return seed if static_seed else seed + self._envs

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counters; environments are not saved: after a resume they begin anew."""
        return OrderedDict(frames=self._frames, batches=self._batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._frames, self._batches = int(state_dict["frames"]), int(state_dict["batches"])

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the workers; twice is once.

        Args:
            timeout: how long they may take to leave by themselves, seconds; then they are ended.
            close_env: not used: environments go with their workers.
            raise_on_error: not used.
        """
        if not self._closed and os.getpid() == self._pid:  # a forked worker has a copy of this object
            self._closed = True
            self.release()
            self._ring.close()
            self._workers.end(_LEAVE_TIMEOUT_S if timeout is None else timeout)
            self.board_sender.board.close()

    def __del__(self) -> None:
        if "_intake" in self.__dict__:
            self.shutdown()

    def _next_batch(self) -> TensorDict:
        if self._closed:
            raise BoardClosed("this collector was shut down", "iterating over it", "make a new one")
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        batch = self._intake.batch()
        self._frames += self.frames_per_batch
        self._batches += 1
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch


def _check(steps: int, envs: int, workers: int, overlap: bool, rollouts: int, slots: int) -> None:
    named = {"steps": steps, "envs_per_worker": envs, "num_workers": workers, "rollouts_per_batch": rollouts}
    for name, value in named.items():
        if value < 1:
            raise ConfigError(f"{name} is at least 1, got {value}", f"UnrollCollector({name}={value})", "")
    if slots < rollouts:
        raise ConfigError(
            f"a batch of {rollouts} rollouts does not fit into {slots} slots",
            f"UnrollCollector(rollouts_per_batch={rollouts}, slots={slots})",
            "give as many slots as rollouts, or leave slots out",
        )
    if overlap and envs < 2:
        raise ConfigError(
            "one environment cannot be split in two",
            f"UnrollCollector(overlap=True, envs_per_worker={envs})",
            "give two or more, or overlap=False",
        )

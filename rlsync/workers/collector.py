"""UnrollCollector: worker processes that act all the time, and the learner's end of their rollouts."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, get_args

import torch
from tensordict import TensorDict, TensorDictBase

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.sync.adopter import Adopt
from rlsync.sync.program_end import end_with_program
from rlsync.transport.ring.reader import RingCounters, RolloutRing
from rlsync.workers.devices import device_named, device_of_each
from rlsync.workers.envs.specs import EnvSpec
from rlsync.workers.intake import Intake
from rlsync.workers.player import Playable, Player, player_of
from rlsync.workers.policy_on_board import PolicyOnBoard
from rlsync.workers.supervision import Restarts, Supervisor
from rlsync.workers.unrolls import RolloutShape
from rlsync.workers.worker import WorkerJob, start_worker

#: How long workers may take to complete a step and leave.
_LEAVE_TIMEOUT_S = 5.0


class UnrollCollector(PolicyOnBoard):
    """Collects unrolls with worker processes that never wait for the learner's optimizer steps.

    Each worker steps its environments with one call of the player for all of them, straight into a slot of a
    :class:`RolloutRing`. Between rollouts it adopts the newest version from a board; every step is stamped
    with the version that acted. The collector works in the stock ``Trainer``; publish with
    ``SyncWeights({"policy": "loss_module.actor_network"})``.

    A batch is what :mod:`rlsync.workers.frames` describes, with ``rollouts_per_batch * envs_per_worker``
    unrolls, and what :func:`batch_of` adds under ``"collector"``. With one rollout a batch, the batch is the
    slot itself, not a copy: it is valid until the next batch is asked for, or :meth:`release`. Clone what you
    keep longer.

    All workers are ready when the constructor returns, and start to act when the first batch is asked for.
    They end with :meth:`shutdown`, and when this process dies.

    Args:
        network: what acts in the workers: a network that knows its player, such as ``ImpalaNet``, or a
            :class:`~rlsync.workers.player.Player`. Workers act with copies; its weights are version 1.
        env: which environments; see :mod:`rlsync.workers.envs.specs`.
        steps: T, of one unroll.
        envs_per_worker: environments that one worker steps.
        num_workers: worker processes.
        overlap: split a worker's environments in two groups: one steps while the player acts in the other. It
            helps where stepping does not need the interpreter (``AtariEnvs``).
        rollouts_per_batch: slots in one batch.
        slots: of the ring; by default one for each worker and two for each rollout of a batch. When all are
            full, workers wait. More slots even out the load, and make frames older.
        total_frames: iteration ends after so many; -1 never ends.
        store_params: for a network: store ``behaviour_params``, which a trust region reads.
        store_value: for a network: store the value that the worker's copy gave, as
            ``("collector", "value")``.
        dtype: in which workers hold and receive the weights, for example ``torch.bfloat16``; ``None`` for the
            player's own. Declare it in the sync map: ``Source("loss_module.actor_network", dtype=...)``.
        adopt: ``"alias"`` points the workers' parameters at the board; ``"copy"`` copies each version out of
            it, for code that keeps the address of a parameter. Compiled modules, and workers that act on an
            accelerator, copy in any case.
        policy_device: where the workers' players act: one device for all of them, or one for each. Their
            environments and slots are in host memory.
        storing_device: where the batches are: the learner's device. What lies under ``"collector"`` stays in
            host memory. On an accelerator a batch is a copy.
        seed: of environments and actions; ``None`` draws one.
        restarts: how often a worker that ended is started again.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``. With the first two the program needs
            ``if __name__ == "__main__"``, and the parts of player and environment must be picklable.
        start_timeout_s: how long all workers together may take to be ready, seconds.
        silent_timeout_s: how long a worker may take for a rollout, or to begin after a restart, seconds. If
            it takes longer it is killed and started again; if all do, the run ends.

    Raises:
        ConfigError: a number is out of range, ``adopt`` is neither of the two, or a device is not there.
        WorkerLost: a worker ended before it was ready; its own error is in the message. While iterating: one
            ended more often than ``restarts`` allows, or all were killed.
        AdoptionTimeout: workers are not ready in time. While iterating: all are silent for too long.

    Source: IMPALA, arXiv 1802.01561; torchrl.collectors.MultiAsyncCollector.

    Example:
        >>> from rlsync.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet
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
        network: Player | Playable,
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
        adopt: Adopt = "alias",
        policy_device: str | torch.device | Sequence[str | torch.device] = "cpu",
        storing_device: str | torch.device = "cpu",
        seed: int | None = None,
        restarts: Restarts | None = None,
        start_method: str = "forkserver",
        start_timeout_s: float = 300.0,
        silent_timeout_s: float = 300.0,
    ) -> None:
        slots = num_workers + 2 * rollouts_per_batch if slots is None else slots
        _check_numbers(steps, envs_per_worker, num_workers, overlap, rollouts_per_batch, slots)
        _check_adopt(adopt)
        devices = device_of_each(policy_device, num_workers, "UnrollCollector(policy_device=...)")
        stored_on = device_named(storing_device, "UnrollCollector(storing_device=...)")
        acting = player_of(network, store_params=store_params, store_value=store_value)
        super().__init__(acting, num_workers, dtype, adopt)
        self.total_frames = total_frames
        self.frames_per_batch = steps * envs_per_worker * rollouts_per_batch
        self.requested_frames_per_batch = self.frames_per_batch
        self._envs = num_workers * envs_per_worker
        self._frames = self._batches = 0
        self._closed = False
        self._pid = os.getpid()
        end_with_program(self)
        shape = RolloutShape(steps, envs_per_worker)
        self._ring = RolloutRing(shape.layout(acting), slots, num_workers)
        seed = int(torch.randint(2**30, ())) if seed is None else seed
        worker_player = self.worker_player
        board = self.board.handle
        job = WorkerJob(
            self._ring.handle, board, worker_player, env, shape, num_workers, adopt, overlap, seed, devices
        )
        start = partial(start_worker, start_method, job)
        self._workers = Supervisor(start, num_workers, self._ring, restarts or Restarts(), silent_timeout_s)
        records = acting.records
        self._intake = Intake(
            self._ring, self._workers, rollouts_per_batch, records, silent_timeout_s, stored_on
        )
        try:
            self._workers.await_start(start_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes that run now."""
        return self._workers.procs

    @property
    def ring(self) -> RolloutRing:
        """The ring that rollouts come from; another process can watch it through ``ring.handle``."""
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
        """How many times a worker was started again."""
        return self._workers.restarts

    def counters(self) -> RingCounters:
        """Slots by state, rollouts written and taken, seconds that workers and learner have waited."""
        return self._ring.counters()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Iterate over batches, until ``total_frames``.

        Raises:
            BoardClosed: the collector was shut down.
        """
        while self.total_frames < 0 or self._frames < self.total_frames:
            yield self._next_batch()

    def release(self) -> None:
        """Give the slot of the last batch back before the next one is asked for."""
        self._intake.release()

    def pause(self) -> AbstractContextManager[None]:
        """Inside the block workers begin no new rollout; those that they have begun they complete."""
        return self._intake.paused()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Reset all environments and random numbers with new seeds; each worker does so at its next rollout.

        Args:
            seed: of the first environment of the first worker.
            static_seed: return the same seed.

        Returns:
            The first seed that was not used.
        """
        self._ring.seed(seed)
        return seed if static_seed else seed + self._envs

    def state_dict(self) -> OrderedDict[str, Any]:
        """The counters. Environments are not saved: after a resume they begin new episodes."""
        return OrderedDict(frames=self._frames, batches=self._batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counters.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self._frames, self._batches = int(state_dict["frames"]), int(state_dict["batches"])

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the workers. A second call does nothing.

        Args:
            timeout: how long they may take to leave, seconds; then they are killed.
            close_env: not used: environments end with their workers.
            raise_on_error: not used.
        """
        if not self._closed and os.getpid() == self._pid:  # a forked worker has a copy of this object
            self._closed = True
            self._intake.close()
            self._ring.close()
            self._workers.end(_LEAVE_TIMEOUT_S if timeout is None else timeout)
            self.board.close()

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


def _check_adopt(adopt: str) -> None:
    if adopt not in get_args(Adopt):
        raise ConfigError(
            f"workers cannot adopt by {adopt!r}",
            f"UnrollCollector(adopt={adopt!r})",
            f"give one of {', '.join(get_args(Adopt))}",
        )


def _check_numbers(steps: int, envs: int, workers: int, overlap: bool, rollouts: int, slots: int) -> None:
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

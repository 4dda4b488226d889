"""UnrollCollector: worker processes that act all the time, and the learner's end of their rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from rlsync import ConfigError
from rlsync.core.path import check_count, check_timeouts
from rlsync.runs.actors.devices import device_named, device_of_each
from rlsync.runs.actors.envs.specs import EnvSpec
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.intake import Intake, Rollouts
from rlsync.runs.actors.own_process import OwnProcess
from rlsync.runs.actors.player import Playable, Player, check_player, player_of
from rlsync.runs.actors.ring.format import WhenFull
from rlsync.runs.actors.ring.reader import RingCounters, RolloutRing
from rlsync.runs.actors.rollout_collector import RolloutCollector, check_settings
from rlsync.runs.actors.supervision import Restarts, Supervisor
from rlsync.runs.actors.worker import CollectSettings, WorkerJob, start_workers
from rlsync.sync.adopter import Adopt
from rlsync.sync.starting import StartLogs
from rlsync.tensors.sendable import check_sendable
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.board.writer import BoardWriter


class UnrollCollector(RolloutCollector):
    """Collects unrolls with worker processes that never wait for the learner's optimizer steps.

    Each worker steps its environments with one call of the player for all of them, straight into a slot of a
    :class:`RolloutRing`. Between rollouts it adopts the newest version from a board; every step is stamped
    with the version that acted. The collector works in the stock ``Trainer``; publish with
    ``SyncWeights({"policy": "loss_module.actor_network"})``.

    A batch is what :mod:`rlsync.runs.actors.frames` describes, with ``rollouts_per_batch * envs_per_worker``
    unrolls, and what :func:`batch_of` adds under ``"collector"``. With one rollout a batch, the batch is the
    slot itself, not a copy: it is valid until the next batch is asked for, or :meth:`release`. Clone what you
    keep longer.

    All workers are ready when the constructor returns, and start to act when the first batch is asked for.
    They end with :meth:`shutdown`, and when this process dies.

    Args:
        network: what acts in the workers: a network that knows its player, such as ``ImpalaNet``, or a
            :class:`~rlsync.runs.actors.player.Player`, such as ``net.player(store_params=True)``. Workers act
            with copies; its weights are version 1.
        env: which environments; see :mod:`rlsync.runs.actors.envs.specs`.
        steps: T, of one unroll.
        envs_per_worker: environments that one worker steps.
        num_workers: worker processes. 0: there is none, and the learner's own process acts whenever it waits
            for a rollout, as one worker would that waits for each of its versions.
        overlap: split a worker's environments in two groups: one steps while the player acts in the other. It
            helps where stepping does not need the interpreter (``AtariEnvs``).
        rollouts_per_batch: slots in one batch.
        slots: of the ring; by default one for each worker and two for each rollout of a batch. When all are
            full, workers wait. More slots even out the load, and make frames older.
        when_full: what happens in place of that; see :class:`~rlsync.runs.actors.ring.reader.RolloutRing`.
        total_frames: iteration ends after so many; -1 never ends.
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
        transitions: make batches of TorchRL's transitions, ``[B, T]``; see
            :mod:`rlsync.runs.actors.transitions`.
        random_frames: frames whose actions are random, if the player is a
            :class:`~rlsync.runs.actors.players.prefill.PrefilledPlayer`; the next publish after them ends it.
        start_method: ``"forkserver"``, ``"spawn"`` or ``"fork"``. With the first two the program needs
            ``if __name__ == "__main__"``, and the parts of player and environment must be picklable.
        start_timeout_s: how long all workers together may take to be ready, seconds.
        silent_timeout_s: how long a worker may take for a rollout, or to begin after a restart, seconds. If
            it takes longer it is killed and started again; if all do, the run ends.
        versions_file: version numbers are reserved here; see :class:`rlsync.SyncWeights`.

    Raises:
        ConfigError: a number is out of range, ``adopt`` is neither of the two, or a device is not there.
        WorkerLost: a worker ended before it was ready; its own error is in the message. While iterating: one
            ended more often than ``restarts`` allows, or all were killed.
        AdoptionTimeout: workers are not ready in time. While iterating: all are silent for too long.

    Source: IMPALA, arXiv 1802.01561; torchrl.collectors.MultiAsyncCollector.

    Example:
        >>> from rlsync.runs.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet
        >>> net = ImpalaNet((4,), Categorical(2))
        >>> collector = UnrollCollector(
        ...     net, GymnasiumEnvs("CartPole-v1"), steps=5, envs_per_worker=2, num_workers=1,
        ...     start_method="fork",
        ... )
        >>> next(iter(collector))["observation"].shape
        torch.Size([6, 2, 4])
        >>> collector.shutdown()
    """

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
        when_full: WhenFull = "block",
        total_frames: int = -1,
        dtype: torch.dtype | None = None,
        adopt: Adopt = "alias",
        policy_device: str | torch.device | Sequence[str | torch.device] = "cpu",
        storing_device: str | torch.device = "cpu",
        seed: int | None = None,
        restarts: Restarts | None = None,
        transitions: bool = False,
        random_frames: int = 0,
        start_method: str = "forkserver",
        start_timeout_s: float = 300.0,
        silent_timeout_s: float = 300.0,
        versions_file: str | Path | None = None,
    ) -> None:
        player = player_of(network)
        where = f"UnrollCollector(num_workers={num_workers!r})"
        check_count(
            "num_workers", num_workers, 0, where, "give 0 to act in the learner's own process"
        )
        acting = max(1, num_workers)
        #: Whether a worker acts in the learner's own process, and there is no other.
        self.in_process = num_workers == 0
        if not self.in_process:
            check_player(player, start_method, "UnrollCollector")
            way_out = "give start_method='fork'"
            check_sendable(
                env,
                "the environment",
                {},
                where="UnrollCollector",
                start_method=start_method,
                way_out=way_out,
            )
        settings = CollectSettings(
            player=player,
            env=env,
            shape=RolloutShape(steps, envs_per_worker),
            slots=acting + 2 * rollouts_per_batch if slots is None else slots,
            adopt=adopt,
            overlap=overlap,
            devices=device_of_each(policy_device, acting, "UnrollCollector(policy_device=...)"),
            restarts=restarts or Restarts(),
            start_method=start_method,
            silent_timeout_s=silent_timeout_s,
        )
        timeouts = {"start_timeout_s": start_timeout_s, "silent_timeout_s": silent_timeout_s}
        check_timeouts("UnrollCollector", may_be_none=False, **timeouts)
        counts = {"num_workers": acting, "rollouts_per_batch": rollouts_per_batch}
        check_settings(settings, counts, "UnrollCollector")
        if settings.slots < rollouts_per_batch:
            problem = (
                f"a batch of {rollouts_per_batch} rollouts does not fit into {settings.slots} slots"
            )
            where = (
                f"UnrollCollector(rollouts_per_batch={rollouts_per_batch}, slots={settings.slots})"
            )
            raise ConfigError(problem, where, "give as many slots as rollouts, or leave slots out")
        stored_on = device_named(storing_device, "UnrollCollector(storing_device=...)")
        self.board = self._made_board()
        self._counted: RingCounters | None = None
        super().__init__(
            settings,
            self.board,
            dtype=dtype,
            rollouts_per_batch=rollouts_per_batch,
            total_frames=total_frames,
            transitions=transitions,
            random_frames=random_frames,
            versions_file=versions_file,
        )
        #: The ring that rollouts come from; another process can watch it through ``ring.handle``.
        self.ring = RolloutRing(settings.shape.layout(player), settings.slots, acting, when_full)
        if seed is None:
            seed = int(torch.randint(2**30, (), device="cpu"))
        logs = StartLogs(acting, start_timeout_s)
        self._workers: Supervisor | OwnProcess
        if self.in_process:
            self._workers = OwnProcess(self._job(seed, logs))
        else:
            self._workers = self._started(seed, logs)
        self._intake = Intake(
            self._source(),
            self._workers,
            rollouts_per_batch,
            self.form,
            silent_timeout_s,
            stored_on,
        )
        try:
            self._workers.await_start(start_timeout_s, logs)
        except BaseException:
            self.shutdown()
            raise

    def _made_board(self) -> BoardWriter:
        return BoardWriter()

    def _job(self, seed: int, logs: StartLogs) -> WorkerJob:
        return WorkerJob(
            self.worker_settings, self.ring.handle, self.board.handle, seed, tuple(logs.each)
        )

    def _started(self, seed: int, logs: StartLogs) -> Supervisor:
        return start_workers(self._job(seed, logs), self.ring)

    def _source(self) -> Rollouts:
        """Where the learner takes rollouts from."""
        return self.ring

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes that run now."""
        return self._workers.procs

    @property
    def restarted(self) -> int:
        """How many times a worker was started again."""
        return self._workers.restarts

    def board_here(self) -> BoardHandle:
        return self.board.handle

    def counters(self) -> RingCounters:
        """Slots by state, rollouts written and taken, seconds that workers and learner have waited.

        After the end they are those of the end: a run writes its statistics then.
        """
        if self._counted is None:
            return self.ring.counters()
        return self._counted

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Reset all environments and random numbers with new seeds; each worker does so at its next rollout.

        Args:
            seed: that of the first environment of the first worker; the others count on from it.
            static_seed: return the same seed.

        Returns:
            The first seed that was not used, or with ``static_seed`` the same one.
        """
        self.ring.seed(seed)
        if static_seed:
            return seed
        return seed + self.num_workers * self.worker_settings.shape.num_envs

    def _end(self, timeout_s: float) -> None:
        self._counted = self.ring.counters()
        self.ring.close()
        self._workers.end(timeout_s)

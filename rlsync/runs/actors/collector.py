"""UnrollCollector: worker processes that act all the time, and the learner's end of their rollouts."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

from rlsync import ConfigError
from rlsync.runs.actors.envs.specs import EnvSpec
from rlsync.runs.actors.intake import Rollouts
from rlsync.runs.actors.own_process import OwnProcess
from rlsync.runs.actors.player import Playable, Player, check_player, player_of
from rlsync.runs.actors.ring.format import Lost, WhenFull
from rlsync.runs.actors.ring.reader import RingCounters, RolloutRing
from rlsync.runs.actors.rollout_collector import RolloutCollector, crew_of
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Supervisor
from rlsync.runs.actors.trail import TrailHandle
from rlsync.runs.actors.worker import WorkerJob, start_workers
from rlsync.seams import BoardHandle, BoardWriter, sendable, starting, user_input


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
        settings: what a rollout and a batch are, how workers act and are kept running; see
            :class:`CollectSettings`.
        num_workers: worker processes. 0: there is none, and the learner's own process acts whenever it waits
            for a rollout, as one worker would that waits for each of its versions.
        when_full: what happens when all slots are full, in place of waiting; see
            :class:`~rlsync.runs.actors.ring.reader.RolloutRing`.
        start_timeout_s: how long all workers together may take to be ready, seconds.

    Raises:
        ConfigError: a number is out of range, a device is not there, or player or environment cannot be sent
            to worker processes.
        WorkerLost: a worker ended before it was ready; its own error is in the message. While iterating: one
            ended more often than ``restarts`` allows, or all were killed.
        AdoptionTimeout: workers are not ready in time. While iterating: all are silent for too long.

    Source: IMPALA, arXiv 1802.01561; torchrl.collectors.MultiAsyncCollector.

    Example:
        >>> from rlsync.runs.recipes.impala import Categorical, CollectSettings, GymnasiumEnvs, ImpalaNet
        >>> net = ImpalaNet((4,), Categorical(2))
        >>> settings = CollectSettings(steps=5, envs_per_worker=2, start_method="fork")
        >>> collector = UnrollCollector(net, GymnasiumEnvs("CartPole-v1"), settings, num_workers=1)
        >>> next(iter(collector))["observation"].shape
        torch.Size([6, 2, 4])
        >>> collector.shutdown()
    """

    def __init__(
        self,
        network: Player | Playable,
        env: EnvSpec,
        settings: CollectSettings,
        *,
        num_workers: int = 2,
        when_full: WhenFull = "block",
        start_timeout_s: float = 300.0,
    ) -> None:
        player = player_of(network)
        where = f"UnrollCollector(num_workers={num_workers!r})"
        user_input.check_count(
            "num_workers", num_workers, 0, where, "give 0 to act in the learner's own process"
        )
        user_input.check_timeouts(
            "UnrollCollector", may_be_none=False, start_timeout_s=start_timeout_s
        )
        acting = max(1, num_workers)
        #: Whether a worker acts in the learner's own process, and there is no other.
        self.in_process = num_workers == 0
        if not self.in_process:
            start_method = settings.start_method
            check_player(player, start_method, "UnrollCollector")
            way_out = "give start_method='fork'"
            sendable.check_sendable(
                env,
                "the environment",
                {},
                where="UnrollCollector",
                start_method=start_method,
                way_out=way_out,
            )
        slots = ring_slots(settings, acting)
        if slots < settings.rollouts_per_batch:
            rollouts = settings.rollouts_per_batch
            problem = f"a batch of {rollouts} rollouts does not fit into {slots} slots"
            where = f"CollectSettings(rollouts_per_batch={rollouts}, slots={slots})"
            raise ConfigError(problem, where, "give as many slots as rollouts, or leave slots out")
        crew = crew_of(player, env, settings, workers=acting, slots=slots)
        self.board = self._made_board()
        self._counted: RingCounters | None = None
        super().__init__(crew, self.board)
        #: The ring that rollouts come from; another process can watch it through ``ring.handle``.
        self.ring = RolloutRing(crew.layout(), slots, acting, when_full)
        seed = self._first_seed()
        logs = starting.StartLogs(acting, start_timeout_s)
        self._workers: Supervisor | OwnProcess
        if self.in_process:
            self._workers = OwnProcess(self._job(seed, logs))
        else:
            self._workers = self._started(seed, logs)
        self._take_from(self._source(), self._workers)
        try:
            self._workers.await_start(start_timeout_s, logs)
        except BaseException:
            self.shutdown()
            raise

    def _made_board(self) -> BoardWriter:
        return BoardWriter()

    def _job(self, seed: int, logs: starting.StartLogs) -> WorkerJob:
        return WorkerJob(
            crew=self.crew,
            ring=self.ring.handle,
            board=self.board.handle,
            seed=seed,
            logs=tuple(logs.each),
            trails=self._trails(),
        )

    def _trails(self) -> TrailHandle | None:
        """Where workers note what they have done, if those that die are replaced by others that do the same."""
        return None

    def _started(self, seed: int, logs: starting.StartLogs) -> Supervisor:
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

    def lost(self) -> Lost:
        if self._counted is None:
            return self.ring.lost()
        return super().lost()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Reset all environments and random numbers with new seeds; each worker does so at its next rollout.

        Args:
            seed: that of the first environment of the first worker; the others count on from it.
            static_seed: return the same seed.

        Returns:
            The first seed that was not used, or with ``static_seed`` the same one.
        """
        self.ring.seed(seed, self._frames)
        if static_seed:
            return seed
        return seed + self.num_workers * self.crew.settings.envs_per_worker

    def _end(self, timeout_s: float) -> None:
        self._counted = self.ring.counters()
        self.ring.close()
        self._workers.end(timeout_s)


def ring_slots(settings: CollectSettings, workers: int) -> int:
    """The slots of the ring of one machine's workers."""
    if settings.slots is None:
        return workers + 2 * settings.rollouts_per_batch
    return settings.slots

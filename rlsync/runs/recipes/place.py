"""Where a run's workers are, and the collectors that they make there: processes here, or on a cluster."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torchrl.trainers import Trainer

from rlsync import ConfigError, Forkserver
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.player import Player
from rlsync.runs.actors.players.prefill import PREFILL, PrefilledPlayer
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes.networks import workers_dtype, workers_player
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import VERSIONS
from rlsync.runs.recipes.spaces import making, naming_env
from rlsync.seams import schedule


class Here:
    """Workers on this machine. A run has it, or a ``Cluster``."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run
        self._settings = run.config.collector
        self.workers = run.config.workers_per_node  #: on each machine

    def collector(self, player: Player, settings: CollectSettings) -> RolloutCollector:
        """Start workers that act with a player; see :func:`collect_settings`."""
        config = self._run.config
        settings = replace(settings, start_method=start_method())
        num_workers = self._settings.num_workers
        start_timeout_s = self._settings.start_timeout_s
        lag = 0
        if self._settings.lag is not None and not config.in_process:
            lag = self._settings.lag
        life: schedule.Life | schedule.FixedLag | None = self._run.again
        if self._run.life_length is not None:
            # Also of a run that is made again: what its seed decides needs no record.
            per_batch = settings.rollouts_per_batch
            life = schedule.FixedLag(lag, self.workers, per_batch, settings.life_rollouts)
        if config.in_process:
            starting = making(config.env)
        else:
            starting = self._starting(player)
        with starting:
            env = config.env.spec()
            if life is None:
                return UnrollCollector(
                    player,
                    env,
                    settings,
                    num_workers=num_workers,
                    when_full=config.recipe.ring_policy(),  # type: ignore[arg-type]
                    start_timeout_s=start_timeout_s,
                )
            return RepeatedUnrolls(
                player,
                env,
                settings,
                life=life,
                lag=lag,
                num_workers=num_workers,
                start_timeout_s=start_timeout_s,
            )

    @contextmanager
    def _starting(self, player: Player) -> Iterator[None]:
        """Inside, processes are started, which can be late, or fail; a fork server has their modules."""
        with naming_env(self._run.config.env), Forkserver(preload=[type(player).__module__]):
            yield

    def watch(self, trainer: Trainer) -> None:
        """Nothing: a ring's collector watches its workers."""


def start_method() -> str:
    """How worker processes are started: from a fork server, unless the program chose ``fork``."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    if chosen == "fork":
        return "fork"
    return "forkserver"


def collect_settings(run: Run[Any]) -> CollectSettings:
    """What the config of a run says of its workers and batches, wherever they are; a recipe adds its own."""
    config = run.config
    batches = run.recipe.batches(config)
    life_rollouts = None
    if run.life_length is not None:
        step = config.env.num_envs * config.workers_per_node
        life_rollouts = run.life_length // (batches.steps * step)
    return CollectSettings(
        life_rollouts=life_rollouts,
        steps=batches.steps,
        envs_per_worker=config.env.num_envs,
        rollouts_per_batch=batches.rollouts,
        adopt=config.collector.adopt,  # type: ignore[arg-type]
        policy_device=run.worker_devices,
        seed=config.seed,
        clip_reward=config.env.clip_reward,
        silent_timeout_s=config.collector.silent_timeout_s or float("inf"),
        versions_file=run.file(VERSIONS),
    )


@contextmanager
def started_collector(
    run: Run[Any], player: Player, *, random_frames: int = 0
) -> Iterator[RolloutCollector]:
    """Workers, here or on a cluster, and a collector of their transitions.

    They act with ``player`` and adopt weights from a board.

    A batch is one rollout of each worker, ``collector.frames_per_batch`` frames in all. Players act on the
    devices that the config names, in the dtype that its sync map declares; environments step on the CPU, and
    frames arrive in host memory. Workers keep running after the ``with`` block; if it raises, they are shut
    down. Their actions are random in the first ``random_frames`` frames. ConfigError if an environment
    cannot be made or a cluster cannot be used; WorkerLost or AdoptionTimeout if workers did not start.
    """
    if not isinstance(player, Player):
        problem = f"the workers' player is a {type(player).__name__}"
        cure = "pass a player, such as parts.HeadPlayer, in place of a network"
        raise ConfigError(problem, "parts.started_collector(run, player)", cure)
    acting = workers_player(run.config.sync, player, run.device)
    if random_frames:
        acting = PrefilledPlayer(acting)
    settings = replace(collect_settings(run), transitions=True, random_frames=random_frames)
    with _ended_by_errors(run.place.collector(acting, settings)) as collector:
        yield collector


@contextmanager
def started_unrolls(run: Run[Any], player: Player) -> Iterator[RolloutCollector]:
    """The same workers, and a collector of their unrolls, whose batches are on the learner's device."""
    dtype = workers_dtype(run.config.sync)
    settings = replace(collect_settings(run), dtype=dtype, storing_device=run.device)
    with _ended_by_errors(run.place.collector(player, settings)) as collector:
        yield collector


@contextmanager
def _ended_by_errors(collector: RolloutCollector) -> Iterator[RolloutCollector]:
    try:
        yield collector
    except BaseException:
        collector.shutdown()
        raise


def prefill_route(collector: object) -> dict[str, str]:
    """What is published besides the sync map of the config: whether the workers' actions are random."""
    if isinstance(collector, RolloutCollector) and collector.prefill is not None:
        return {PREFILL: "collector.prefill"}
    return {}

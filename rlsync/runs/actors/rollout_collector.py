"""What collectors of unrolls have in common, wherever their workers run."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector

from rlsync import BoardClosed, PublishError, RlsyncError
from rlsync.runs.actors.envs.specs import EnvSpec, check_resets
from rlsync.runs.actors.frames import Unrolls
from rlsync.runs.actors.intake import Form, Intake, RolloutId, RolloutMakers, Rollouts
from rlsync.runs.actors.player import Player, in_dtype, without_memory
from rlsync.runs.actors.players.prefill import Prefill, PrefilledPlayer
from rlsync.runs.actors.ring.format import Lost
from rlsync.runs.actors.ring.reader import RingCounters, TakenRollout
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import LEAVE_TIMEOUT_S
from rlsync.runs.actors.transitions import Transitions
from rlsync.runs.actors.worker import Crew
from rlsync.seams import POLICY, BoardHandle, Transport, WorkersPublisher, processes


class RolloutCollector(BaseCollector):
    """A collector of batches that an :class:`Intake` makes of rollouts. A subclass starts the workers.

    The crew has the learner's player, whose weights are version 1. Batches are what
    :mod:`rlsync.runs.actors.frames` says, or with ``settings.transitions`` what
    :mod:`rlsync.runs.actors.transitions` says. The actions of a :class:`PrefilledPlayer` are random until
    ``settings.random_frames`` were collected, and a version came after that.
    """

    _intake: Intake  #: made by the constructor of a subclass

    def __init__(self, crew: Crew, transport: Transport) -> None:
        super().__init__()
        settings = crew.settings
        self.player = player = crew.player
        self.form: Form
        if settings.transitions:
            self.form = Transitions(player.actions, player.records)
        else:
            self.form = Unrolls(player.records)
        #: Says whether actions are random; the source of the destination ``"prefill"``. None: they never are.
        self.prefill: Prefill | None = None
        if isinstance(player, PrefilledPlayer):
            self.prefill = player.prefill
        self._random_frames = settings.random_frames
        self.num_workers = len(crew.devices)
        self.adopt = settings.adopt
        self.transport = transport
        self.publisher = WorkersPublisher(transport)
        if settings.versions_file is not None:
            self.publisher.ledger.reserve_in(settings.versions_file)
        acting = in_dtype(player, settings.dtype)
        for destination in acting.modules:
            self.publisher.serve(self, destination)
        self.publisher.publish_modules(acting.modules, "the collector's player")
        #: What workers begin with: the player in their dtype, without memory.
        self.worker_player = without_memory(acting)
        self.crew = replace(crew, player=self.worker_player)
        self.total_frames = settings.total_frames
        self.rollouts_per_batch = settings.rollouts_per_batch
        frames = settings.steps * settings.envs_per_worker * settings.rollouts_per_batch
        self.frames_per_batch = self.requested_frames_per_batch = frames
        self._frames = self._batches = 0
        self.closed = False  #: whether it was shut down
        self._pid = os.getpid()
        processes.end_with_program(self)

    def _first_seed(self) -> int:
        """The seed of the first environment of the first worker; drawn if the settings have none."""
        seed = self.crew.settings.seed
        if seed is None:
            seed = int(torch.randint(2**30, (), device="cpu"))
        return seed

    def _take_from(self, rollouts: Rollouts, workers: RolloutMakers) -> None:
        """Make batches of these rollouts, and look after their makers meanwhile."""
        settings = self.crew.settings
        self._intake = Intake(
            ring=rollouts,
            workers=workers,
            rollouts=settings.rollouts_per_batch,
            form=self.form,
            silent_timeout_s=settings.silent_timeout_s,
            device=settings.learner_device(),
        )

    @property
    @abstractmethod
    def procs(self) -> list[BaseProcess]:
        """The worker processes that run now."""

    @property
    def policy_version(self) -> int:
        """The newest published version."""
        return self.publisher.version

    @property
    def last_rollouts(self) -> tuple[RolloutId, ...]:
        """The rollouts that the last batch is made of, in its order."""
        return self._intake.last

    @property
    def last_workers(self) -> tuple[int, ...]:
        """The numbers of the workers that made the last batch."""
        return tuple(rollout.worker for rollout in self._intake.last)

    @property
    def init_random_frames(self) -> int:  # type: ignore[override]  # TorchRL has an attribute
        """Frames after which the player acts; 0 ends the random actions with the next publish."""
        return self._random_frames

    @init_random_frames.setter
    def init_random_frames(self, frames: int) -> None:
        self._random_frames = frames
        self._count_random()

    def tell_of_rollouts(self, tell: Callable[[TakenRollout, bool], object]) -> None:
        """Say which rollouts the learner takes, in which order; for :class:`rlsync.RecordSchedule`.

        Args:
            tell: called with each rollout that it takes or drops, when it does, and whether it is dropped.
        """
        self._intake.tell_of_rollouts(tell)

    @abstractmethod
    def board_here(self) -> BoardHandle:
        """A board of this machine with every version, for readers that are no workers."""

    @abstractmethod
    def counters(self) -> RingCounters:
        """Slots by state, rollouts written and taken, seconds that workers and learner have waited."""

    def lost(self) -> Lost:
        """Of these counters, what is asked for at each batch."""
        counted = self.counters()
        return Lost(counted.worker_wait_s, counted.dropped)

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's module of a destination, of which workers have copies.

        Args:
            model_id: the destination.

        Raises:
            ValueError: there is no such destination.
        """
        if model_id not in self.player.modules:
            known = ", ".join(map(repr, self.player.modules)) or "none"
            raise ValueError(f"this collector has no model {model_id!r}; it has: {known}")
        return self.player.modules[model_id]

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Publish weights as one version: those given, those that a SyncWeights names, or the player's own.

        Args:
            policy_or_weights, weights, policy: what is published: a module, a tensordict, a dict of tensors.
            worker_ids: must be ``None``.
            model_id: the destination of these weights; by default ``"policy"``.
            weights_dict: weights by destination, in place of the above.
            kwargs: TorchRL's other arguments, which must be absent.

        Raises:
            PublishError: ``worker_ids`` is given: a board has one newest version for all.
            DestinationNotFound: the player has no such module.
            LayoutMismatch: the weights do not fit.
        """
        if worker_ids is not None or kwargs:
            problem = "a board publishes to all workers alike"
            cure = "pass weights alone, or nothing"
            raise PublishError(
                problem, f"update_policy_weights_({', '.join(['worker_ids', *kwargs])})", cure
            )
        weights = next((w for w in (policy_or_weights, weights, policy) if w is not None), None)
        if weights_dict is not None:
            sent = weights_dict
        elif weights is None and model_id is None:
            sent = dict.fromkeys(self.player.modules)
        else:
            sent = {model_id or POLICY: weights}
        with self.publisher.one_publish(sent):
            for destination, weights in sent.items():
                self.publisher.send(destination, weights)

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

    def stop_waiting(self, error: RlsyncError) -> None:
        """Raise an error where the learner waits for rollouts, now or next; any thread may call it.

        Args:
            error: the error to raise there.
        """
        self._intake.stop_waiting(error)

    def pause(self) -> AbstractContextManager[None]:
        """Inside the block workers begin no new rollout; those that they have begun they complete."""
        return self._intake.paused()

    def state_dict(self) -> OrderedDict[str, Any]:
        """The counters. Environments are not in it: after a resume they begin new episodes.

        But with a lag, where they can be saved: see ``RepeatedUnrolls.saved_envs``.
        """
        return OrderedDict(frames=self._frames, batches=self._batches)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counters. Those of another kind of collector are not read: a trainer has its own.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        if {"frames", "batches"} <= state_dict.keys():
            self._frames = int(state_dict["frames"])
            self._batches = int(state_dict["batches"])
            self._count_random()

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the workers. A second call does nothing.

        Args:
            timeout: seconds after which they are killed.
            close_env: not used: environments end with their workers.
            raise_on_error: not used.
        """
        # a forked worker has a copy of this object
        if not self.closed and os.getpid() == self._pid:
            self.closed = True
            if timeout is None:
                timeout = LEAVE_TIMEOUT_S
            if "_intake" in vars(self):  # the constructor came as far as the workers
                self._intake.close()
                self._end(timeout)
            self.transport.close()

    @abstractmethod
    def _end(self, timeout_s: float) -> None:
        """End the workers, and close what carried their rollouts."""

    def __del__(self) -> None:
        if "_pid" in vars(self):
            self.shutdown()

    def _next_batch(self) -> TensorDict:
        if self.closed:
            raise BoardClosed("this collector was shut down", "iterating over it", "make a new one")
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        batch = self._intake.batch()
        self._frames += self.frames_per_batch
        self._batches += 1
        self._count_random()
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _count_random(self) -> None:
        if self.prefill is not None:
            self.prefill.random.fill_(self._frames < self._random_frames)


def crew_of(
    player: Player, env: EnvSpec, settings: CollectSettings, *, workers: int, slots: int
) -> Crew:
    """The workers of a machine; ConfigError: they cannot reset these environments, or have no such device."""
    check_resets(env)
    return Crew(player, env, settings.worker_devices(workers), slots, settings)

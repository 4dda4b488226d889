"""RecordSchedule writes down what decides a run, and Rerun makes the run again from that."""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.core.user_input import check_count
from rlsync.record.planned import PlannedBoard
from rlsync.record.schedule import EVERYBODY, Comparison, Life, ScheduleWriter, compared, lives_in
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Layout
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat.collectors import around_arrivals
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.compat.trainers import let_it_be_absent, registered_modules
from rlsync.torchrl_plugin.hooks.misuse import require_trainer
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights
from rlsync.torchrl_plugin.scheme import WeightBoard

#: What a rerun may differ by, if it is not the same.
_PACKAGES = ("rlsync", "torch", "torchrl", "tensordict", "numpy", "gymnasium")


class MadeRollout(Protocol):
    """A rollout that the learner takes: of which worker and life, and which of its rollouts, from 0."""

    slot: int
    writer: int
    life: int
    number: int
    views: dict[str, Tensor]  #: its arrays by name, the policy version among them


@runtime_checkable
class TellsOfRollouts(Protocol):
    """A collector that says which rollout the learner takes, or drops, and when."""

    rollouts_per_batch: int

    def tell_of_rollouts(self, tell: Callable[[MadeRollout, bool], object]) -> None: ...


class RecordSchedule(TrainerHookBase):
    """Write the schedule of a run: who made each rollout with which version, and when each publish fell.

    With the config, the seed and the schedule, the run can be made again: see ``rlsync rerun``,
    :class:`rlsync.Rerun`, and :mod:`rlsync.record.schedule` for the format. A rollout costs about a
    microsecond and 17 bytes. Every so many versions, and at the end, it has a digest of each leaf that was
    published.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        file: where it is written. A file that an earlier life of the run has left is continued.
        every: digest the versions whose numbers are multiples of this.
        facts: what else to say of the run at the beginning of the record; plain data.
        way: says how an update was just made, in a word or two. It is recorded with the number of the first
            update of this life that was made so.

    Raises:
        ConfigError: ``every`` is wrong. At :meth:`register`: the file is no schedule, or damaged; or ``sync``
            is bound to another trainer.

    Example:
        >>> from rlsync import RecordSchedule, SyncWeights
        >>> sync = SyncWeights({"policy": "loss_module.actor_network"})
        >>> hook = RecordSchedule(sync, "runs/a/schedule.bin", every=10)
        >>> # after the SyncWeights: hook.register(trainer)
    """

    def __init__(
        self,
        sync: SyncWeights,
        file: str | Path,
        *,
        every: int = 100,
        facts: Mapping[str, Any] | None = None,
        way: Callable[[], str | None] | None = None,
    ) -> None:
        where = f"RecordSchedule(every={every!r})"
        check_count(
            "the number of versions for one digest", every, 1, where, "for example every=100"
        )
        self.sync = sync
        self.file = Path(file).absolute()
        self._every = every
        self._facts = facts or {}
        # updates of this life
        self._way = way
        self._updates = 0
        self._last_way: str | None = None
        #: the newest version with digests, and they
        self.digested: tuple[int, Mapping[str, int]] = 0, {}
        self._writer: ScheduleWriter | None = None
        # by slot of a ring, where its version stands
        self._stamps: dict[int, tuple[object, memoryview]] = {}
        self.counts: dict[int, int] = {}  #: rollouts of each worker of TorchRL's

    def register(self, trainer: Trainer, name: str = "record_schedule") -> None:
        """Begin to record.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints.
        """
        require_trainer(self.sync, trainer, "RecordSchedule.register")
        collector = trainer.collector
        workers = endpoint_of(collector).num_workers
        facts = {**machine(), **self._facts, "every": self._every, "workers": workers}
        self._writer = ScheduleWriter(self.file, facts)
        self._writer.publish(self.sync.version, 0)
        if isinstance(collector, TellsOfRollouts):
            collector.tell_of_rollouts(self._taken)
        elif isinstance(collector, MultiAsyncCollector):
            around_arrivals(collector, self._arrived)
        else:
            trainer.register_op("batch_process", partial(self._arrived, EVERYBODY))
        self.sync.bound.endpoint.publisher.seen.append(self._published)
        if self._way is not None:
            trainer.register_op("post_optim", partial(self._updated, self._way))
        trainer.register_op("shutdown", self._end)
        trainer.register_module(name, self)
        let_it_be_absent(trainer, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the record is a file of its own. It says that a checkpoint was written here."""
        if self._writer is not None:
            self._writer.note("checkpoint", {"version": self.sync.version})
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Say that the run goes on from a checkpoint.

        Args:
            state_dict: not used.
        """
        if self._writer is not None:
            self._writer.note("resumed", {})

    def _taken(self, rollout: MadeRollout, dropped: bool) -> None:
        known = self._stamps.get(rollout.slot)
        if known is None or known[0] is not rollout.views:
            # read without a call of torch
            stamps = rollout.views[STAMP].numpy().data
            known = self._stamps[rollout.slot] = rollout.views, stamps
        if self._writer is not None:
            version = known[1][0, 0]
            self._writer.rollout(
                rollout.writer,
                life=rollout.life,
                number=rollout.number,
                version=version,
                dropped=dropped,
            )

    def _arrived(self, worker: int, frames: TensorDictBase) -> None:
        number = self.counts.get(worker, 0)
        self.counts[worker] = number + 1
        if self._writer is None:
            return
        stamps = frames.get(STAMP).flatten()
        if self.sync.bound.endpoint.adopts_within_rollouts:
            at = (stamps.diff().nonzero().flatten() + 1).tolist()
            if at:
                versions = stamps[at].tolist()
                adopted = {"worker": worker, "number": number, "at": at, "versions": versions}
                self._writer.note("adopted", adopted)
        self._writer.rollout(worker, life=0, number=number, version=int(stamps[0]))

    def _updated(self, newest_way: Callable[[], str | None]) -> None:
        self._updates += 1
        way = newest_way()
        if way != self._last_way and self._writer is not None:
            self._writer.note("updates", {"way": way, "update": self._updates})
            self._last_way = way

    def _published(self, version: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        if self._writer is None:
            return
        publish = self.sync.ledger.known(version)
        if publish is None:
            optim_steps = 0
        else:
            optim_steps = publish.optim_steps or 0
        self._writer.publish(version, optim_steps)
        if version % self._every == 0:
            newest = self._newest_leaves()
            if newest is not None:
                layout, tensors = newest
            self._digest(version, layout, tensors)

    def _newest_leaves(self) -> tuple[Layout, Sequence[Tensor]] | None:
        return self.sync.bound.endpoint.publisher.transport.newest_leaves()

    def _digest(self, version: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        leaves: dict[str, Tensor | None] = {}
        for entry, tensor in zip(layout.owned, tensors, strict=True):
            leaves[f"{entry.destination}.{entry.leaf.name}"] = tensor
        for key, aliased in self.sync.bound.aliased():
            leaves[".".join(key)] = aliased
        digests: dict[str, int] = {}
        for name, leaf in leaves.items():
            if leaf is not None:
                digests[name] = digest([leaf])
        assert self._writer is not None, "it records"
        self._writer.digests(version, digests)
        self.digested = version, digests

    def _end(self) -> None:
        if self._writer is None:
            return
        version = self.sync.version
        with suppress(BoardClosed):  # by a stop that workers did not answer
            newest = self._newest_leaves()
            if newest is not None and self.digested[0] != version:
                self._digest(version, *newest)
        self._writer.note("end", {"version": version})
        self._writer.close()
        self._writer = None


def machine() -> dict[str, Any]:
    """What a run computes with, as far as it may decide the last bit of a number."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    with suppress(OSError):
        models = re.findall("^model name.*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        facts["processor"] = ", ".join(sorted(set(models)))
    return facts


class Rerun:
    """Make a recorded run again, and compare each version whose digests it has, leaf by leaf.

    Build the trainer as it was built for the run, with the same seeds, but give its collector
    ``board.scheme()``, and its :class:`RecordSchedule` another file. Then each worker waits for the version
    that its rollout had, and the learner takes rollouts in the recorded order.

    Args:
        schedule: the file of the run's RecordSchedule, whose last life is made again; or another life of it.
        until: stop when this version is published.

    Raises:
        ConfigError: there is no schedule, it is damaged, or it has no rollouts.

    Example:
        >>> print(Rerun("schedule.bin").run(trainer))  # doctest: +SKIP
        equal up to version 2502: 25 digests of 25
    """

    def __init__(self, schedule: str | Path | Life, until: int | None = None) -> None:
        if isinstance(schedule, Life):
            lives = [schedule]
        else:
            lives = lives_in(Path(schedule))
        lives = [life for life in lives if life.rollouts]
        if not lives:
            raise ConfigError(
                "the schedule has no rollouts yet", str(schedule), "let the run go on, or end"
            )
        self._life = lives[-1]
        self._until = until or 0
        self._order = [rollout.worker for rollout in self._life.rollouts]
        self._by_one = EVERYBODY not in self._order  # each rollout by one worker

    @cached_property
    def board(self) -> WeightBoard:
        """What the collector of the rerun takes its schemes from; it numbers versions as they were."""
        writer = None  # workers that make a batch together take turns
        if self._by_one:
            writer = PlannedBoard(
                self._life.plan(max(self._order) + 1), stays=False, order=self._order
            )
        board = WeightBoard(_writer=writer)
        board.ledger.advance_to(self._life.publishes[0].version - 1)
        return board

    def run(self, trainer: Trainer) -> Comparison:
        """Train until the record ends, a version differs or is ``until``.

        Then shut the trainer down, and say how many versions are equal, and which is the first that is not,
        with its leaves.

        Args:
            trainer: ready to train; its RecordSchedule is registered.

        Raises:
            ConfigError: this trainer cannot make the run again. Nothing has run then.
        """
        # What makes an equal run impossible is an error; what makes a difference likely, a warning.
        records = [part for part in registered_modules(trainer) if isinstance(part, RecordSchedule)]
        for problem, cure in self._why_not(trainer, records):
            raise ConfigError(
                f"this run cannot be made again: {problem}", "Rerun.run(trainer)", cure
            )
        for name, now in machine().items():
            then = self._life.facts.get(name)
            if then != now:
                message = "the last bits of numbers may differ: %s was %s, and is %s"
                logging.getLogger(__name__).warning(message, name, then, now)

        # The record may end before the training would: at its last whole batch.
        collector = trainer.collector
        if isinstance(collector, TellsOfRollouts):
            per_batch = collector.rollouts_per_batch
        else:
            per_batch = 1
        used = [rollout for rollout in self._life.rollouts if not rollout.dropped]
        last = len(used) // per_batch
        batches = count(1)
        record = records[0]

        def batch_done(batch: object) -> None:
            version, digests = record.digested
            differs = self._life.digests.get(version, digests) != digests
            if differs or next(batches) == last or 0 < self._until <= record.sync.version:
                stop(trainer)

        trainer.register_op("post_steps_log", batch_done)
        trainer.register_op("shutdown", partial(stop, trainer))
        try:
            trainer.train()
        finally:
            stop(trainer)
            trainer.shutdown()
        return compared(self._life, lives_in(record.file)[-1])

    def _why_not(
        self, trainer: Trainer, records: list[RecordSchedule]
    ) -> Iterator[tuple[str, str]]:
        """What of the trainer keeps it from making the run again, and what to do about it."""
        if not records:
            yield "its trainer has no RecordSchedule", "register one, with another file"

        # Its collector must let the plan decide who makes which rollout, with which version.
        collector = trainer.collector
        endpoint = endpoint_of(trainer.collector)
        if self._by_one:
            kinds = MultiAsyncCollector | TellsOfRollouts
        else:
            kinds = MultiSyncCollector | Collector
        planned = isinstance(endpoint.publisher.transport, PlannedBoard)
        if not isinstance(collector, kinds) or planned != self._by_one or trainer.async_collection:
            problem = f"this {type(collector).__name__} does not keep to its schedule"
            yield (
                problem,
                "take the run's kind, with weight_sync_schemes={'policy': rerun.board.scheme()}",
            )
        workers = endpoint.num_workers
        recorded_workers = self._life.facts.get("workers", workers)
        if recorded_workers != workers:
            yield (
                f"it had {recorded_workers} workers, and this collector has {workers}",
                "give the collector as many",
            )

        # Nothing else may decide it: neither what has run already, nor time, nor a wait for workers.
        if records[0].counts:
            yield "collection has begun", "call run(trainer) in place of trainer.train()"
        if "seconds" in records[0].sync.when.units():
            yield "it published every so many seconds", "count batches, frames or optim_steps"
        if self._by_one and endpoint.adopts_within_rollouts:
            yield "its workers adopted at every policy call", "record a run with adopt_at='rollout'"
        saves = trainer.save_trainer_file or trainer.checkpoint_rotation
        if self._by_one and saves and trainer.save_trainer_interval < trainer.total_frames:
            yield (
                "checkpoints ask workers that wait",
                "leave save_trainer_file and checkpoint_rotation out",
            )


def stop(trainer: Trainer) -> None:
    """Let a rerun end after this batch; no worker waits for a version any more, which may not come."""
    trainer.request_stop("the rerun is over")
    transport = endpoint_of(trainer.collector).publisher.transport
    if isinstance(transport, PlannedBoard):
        transport.let_go()

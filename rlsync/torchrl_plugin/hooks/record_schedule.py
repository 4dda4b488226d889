"""RecordSchedule: writes down what decides a run, so that it can be made again."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import MultiAsyncCollector
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import BoardClosed
from rlsync.core.schedule import EVERYBODY, ScheduleWriter
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Layout
from rlsync.torchrl_plugin.compat.collectors import around_arrivals
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.compat.trainers import let_it_be_absent
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights
from rlsync.transport.ring.reader import TakenRollout

#: What a rerun may differ by, if it is not the same.
_PACKAGES = ("rlsync", "torch", "torchrl", "tensordict", "numpy", "gymnasium")


@runtime_checkable
class TellsOfRollouts(Protocol):
    """A collector that says which rollout the learner takes, or drops, and when."""

    def tell_of_rollouts(self, tell: Callable[[TakenRollout, bool], object]) -> None: ...


class RecordSchedule(TrainerHookBase):
    """Write the schedule of a run: who made each rollout with which version, and when each publish fell.

    With the config, the seed and the schedule, the run can be made again: see ``rlsync rerun``, and
    :mod:`rlsync.core.schedule` for the format. A rollout costs about a microsecond and 17 bytes. Every so
    many versions, and at the end, it also has a digest of each leaf that was published.

    Args:
        sync: the hook that publishes, bound to the same trainer.
        file: where it is written. A file that an earlier life of the run has left is continued.
        every: digest the versions whose numbers are multiples of this.
        facts: what else to say of the run at the beginning of the record; plain data.
        way: says how an update was just made, in a word or two. It is recorded with the number of the first
            update of this life that was made so.

    Raises:
        ConfigError: at :meth:`register`: the file is no schedule, or damaged; or ``sync`` is bound to another
            trainer.

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
        self._sync, self._file, self._every, self._facts = sync, Path(file), every, facts or {}
        self._way, self._updates = way, 0  # updates of this life
        self._last_way: str | None = None
        #: Called with each version that is digested, and its digests.
        self.digested: Callable[[int, Mapping[str, int]], object] | None = None
        self._writer: ScheduleWriter | None = None
        self._stamps: dict[int, tuple[object, memoryview]] = {}  # by slot of a ring, where its version stands
        self._counts: dict[int, int] = {}  # rollouts of each worker of TorchRL's
        self._newest = 0  # the newest version that was digested

    def register(self, trainer: Trainer, name: str = "record_schedule") -> None:
        """Begin to record.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints.
        """
        self._sync.require_trainer(trainer, "RecordSchedule.register")
        self._writer = ScheduleWriter(self._file, {**machine(), **self._facts, "every": self._every})
        self._writer.publish(self._sync.version, 0)
        collector = trainer.collector
        if isinstance(collector, TellsOfRollouts):
            collector.tell_of_rollouts(self._taken)
        elif isinstance(collector, MultiAsyncCollector):
            around_arrivals(collector, self._arrived)
        else:
            trainer.register_op("batch_process", self._batch)
        self._sync.watch(self._published)
        if self._way is not None:
            trainer.register_op("post_optim", partial(self._updated, self._way))
        trainer.register_op("shutdown", self._end)
        trainer.register_module(name, self)
        let_it_be_absent(trainer, self)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the record is a file of its own. It says that a checkpoint was written here."""
        if self._writer is not None:
            self._writer.note("checkpoint", version=self._sync.version)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Say that the run goes on from a checkpoint.

        Args:
            state_dict: not used.
        """
        if self._writer is not None:
            self._writer.note("resumed")

    def _taken(self, rollout: TakenRollout, dropped: bool) -> None:
        known = self._stamps.get(rollout.slot)
        if known is None or known[0] is not rollout.views:
            stamps = memoryview(cast("Any", rollout.views[STAMP].numpy()))  # read without a call of torch
            known = self._stamps[rollout.slot] = rollout.views, stamps
        if self._writer is not None:
            version = known[1][0, 0]
            self._writer.rollout(rollout.writer, rollout.life, rollout.number, version, dropped=dropped)

    def _arrived(self, worker: int, frames: TensorDictBase) -> None:
        number = self._counts.get(worker, 0)
        self._counts[worker] = number + 1
        if self._writer is not None:
            self._writer.rollout(worker, 0, number, int(frames.get(STAMP).flatten()[0]))

    def _batch(self, batch: TensorDictBase) -> TensorDictBase:
        self._arrived(EVERYBODY, batch)
        return batch

    def _updated(self, made: Callable[[], str | None]) -> None:
        self._updates += 1
        way = made()
        if way != self._last_way and self._writer is not None:
            self._writer.note("updates", way=way, update=self._updates)
            self._last_way = way

    def _published(self, version: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        if self._writer is None:
            return
        known = self._sync.ledger.known(version)
        self._writer.publish(version, (known and known.optim_steps) or 0)
        if version % self._every == 0:
            self._digest(version, *(self._sync.newest_leaves() or (layout, tensors)))

    def _digest(self, version: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        names = (f"{entry.destination}.{entry.leaf.name}" for entry in layout.owned)
        leaves = dict(zip(names, tensors, strict=True)) | self._sync.aliased_leaves()
        found = {name: digest([tensor]) for name, tensor in leaves.items() if tensor is not None}
        assert self._writer is not None, "it records"
        self._writer.digests(version, found)
        self._newest = version
        if self.digested is not None:
            self.digested(version, found)

    def _end(self) -> None:
        if self._writer is None:
            return
        version = self._sync.version
        with suppress(BoardClosed):  # by a stop that workers did not answer
            newest = self._sync.newest_leaves()
            if newest is not None and self._newest != version:
                self._digest(version, *newest)
        self._writer.note("end", version=version)
        self._writer.close()
        self._writer = None


def machine() -> dict[str, Any]:
    """What a run computes with, as far as it may decide the last bit of a number."""
    found: dict[str, Any] = {"python": platform.python_version(), "threads": torch.get_num_threads()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    with suppress(OSError):
        models = re.findall("^model name.*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        found["processor"] = ", ".join(sorted(set(models)))
    return found

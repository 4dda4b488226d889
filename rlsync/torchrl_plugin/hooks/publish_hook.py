"""PublishHook: what publishes when its trigger is due, whatever sends the weights."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import Any, Protocol

import torch
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import ConfigError, NothingPublished, warn
from rlsync.core.ledger import Ledger
from rlsync.core.path import Path, parse
from rlsync.core.plan import Receipt
from rlsync.core.trigger import Counters, Trigger
from rlsync.core.user_input import check_count
from rlsync.core.whole_file import check_folder
from rlsync.sync.bound_map import BoundMap, VersionCopies
from rlsync.sync.publisher import Publisher
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.hooks.misuse import Calls, no_trainer, refuse_arguments, require_trainer

_log = logging.getLogger(__name__)


class Sending(Protocol):
    """How the weights of a hook reach its workers: all in which publishing hooks differ."""

    #: The collector that gets the weights, or an object that sends them.
    feeds: object

    @property
    def ledger(self) -> Ledger:
        """Numbers and times of the versions that the workers read, whoever published them; or of sends."""

    @property
    def version(self) -> int:
        """The newest one; 0 before the first."""

    def destinations(self) -> Iterable[str]:
        """Paths on the collector."""

    def publish(self, reason: str, now: Counters) -> Receipt:
        """Send the present weights as one version."""

    def publish_due(self, gates: Iterable[Callable[[], bool]], now: Counters) -> Receipt | None:
        """Send what the trigger asks for; ``None`` if a gate holds it."""

    def pass_over(self) -> None:
        """Nothing is due at this call of the hook."""

    def published(self) -> None:
        """A publish was recorded."""

    def join(self) -> None:
        """Wait until what was sent is visible."""


class MapSending:
    """Sends what a map names; ``in_background`` what the trigger asks for, as far as that can be."""

    def __init__(self, bound: BoundMap, feeds: object, *, in_background: bool = False) -> None:
        self.bound = bound
        self.feeds = feeds
        #: copies for evaluations, which are told of each version
        self.pinned: list[VersionCopies] = []
        self._in_background = in_background

    @property
    def publisher(self) -> Publisher:
        """What publishes to the collector's workers."""
        return self.bound.endpoint.publisher

    @property
    def ledger(self) -> Ledger:
        return self.publisher.ledger

    @property
    def version(self) -> int:
        return self.publisher.version

    def destinations(self) -> Iterable[str]:
        return [route.destination for route in self.bound.plan.routes]

    def publish(self, reason: str, now: Counters) -> Receipt:
        return self.bound.publish(reason, now)

    def publish_due(self, gates: Iterable[Callable[[], bool]], now: Counters) -> Receipt | None:
        return self.bound.publish_unless_held(
            gates, "trigger", now, in_background=self._in_background
        )

    def pass_over(self) -> None:
        self.publisher.pass_over()

    def published(self) -> None:
        for copies in self.pinned:
            copies.published()

    def join(self) -> None:
        self.publisher.join()


class PublishHook(TrainerHookBase):
    """A Trainer hook that publishes when its trigger is due.

    It counts, asks the trigger, keeps the receipts, owes a publish at the start and after a resume, and goes
    into checkpoints. A subclass gives it what sends the weights, and enrols it with a trainer.
    """

    kept_as: str  #: its name in checkpoints, unless :meth:`register` is given another

    def __init__(
        self, when: Trigger, *, history: int = 1000, receipts_file: str | FilePath | None = None
    ) -> None:
        if not isinstance(when, Trigger):
            problem = f"'when' is a trigger, got {type(when).__name__}"
            raise ConfigError(problem, f"when={when!r}", "for example when=Every(4, 'optim_steps')")
        file = None
        if receipts_file is not None:
            file = FilePath(receipts_file).absolute()
            check_folder(file, f"receipts_file={str(file)!r}")
        check_count(
            "the number of receipts", history, 0, f"history={history!r}", "for example 1000"
        )
        self.when = when
        self.trainer: Trainer | None = None
        self.receipts: deque[Receipt] = deque(maxlen=int(history))
        #: what it did with the UpdateWeights that it found on its trainer
        self.beside: tuple[str, ...] = ()
        #: a publish that is due is put off while one is false
        self.gates: list[Callable[[], bool]] = []
        self._sending: Sending | None = None
        self._receipts_file = file
        self._batches = 0
        self._optim_steps = 0
        self._seconds_before = 0.0
        self._started = time.monotonic()
        self._last = Counters()
        self._owed: str | None = None
        self._told_never_due = False
        self._calls = Calls(type(self).__name__, when.units())

    @property
    def sending(self) -> Sending:
        """What sends the weights.

        Raises:
            ConfigError: this hook has no trainer, and so nothing to send.
        """
        if self._sending is None:
            raise no_trainer(self, f"pass trainer=trainer to {type(self).__name__}, or ")
        return self._sending

    @property
    def ledger(self) -> Ledger:
        """Numbers and times of the versions that the workers read, whoever published them; or of sends."""
        return self.sending.ledger

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first. Sends count where a sender does the sending."""
        return self.sending.version

    @property
    def feeds(self) -> object:
        """The collector to which this hook publishes, or the sender that does it; None while it has none."""
        if self._sending is None:
            return None
        return self._sending.feeds

    def register(self, trainer: Trainer, name: str = "") -> None:
        """Resolve, check, and register at the stages where the trigger's counters change.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints; by default :attr:`kept_as`.
        """
        if self.trainer is None:
            self._bind(trainer, name)
        require_trainer(self, trainer, f"{type(self).__name__}.register")
        units = self.when.units()
        if "optim_steps" in units:
            trainer.register_op("post_optim", self)
        if units - {"optim_steps"}:
            trainer.register_op("post_steps", self)

    def _bind(self, trainer: Trainer, name: str = "") -> None:
        raise NotImplementedError

    def join(self) -> None:
        """Wait until what was published in the background is visible.

        Raises:
            PublishError: it was written to meanwhile, and is not published.
        """
        if self._sending is not None:
            self._sending.join()

    def counters(self) -> Counters:
        """The learner's counters now."""
        frames = 0
        optim_steps = self._optim_steps
        if self.trainer is not None:
            frames = self.trainer.collected_frames
            optim_steps = trainers.optimizer_steps(self.trainer, optim_steps)
        seconds = self._seconds_before + time.monotonic() - self._started
        return Counters(
            batches=self._batches, frames=frames, optim_steps=optim_steps, seconds=seconds
        )

    def __call__(self, *arguments: object) -> None:
        """Publish if it is due; registered at a stage of the trainer that passes no arguments."""
        sending = self.sending
        refuse_arguments(self, arguments)
        now = self.counters()
        self._calls.called(now)
        if self._owed is not None:
            self._settle()
        elif not self.when.due(self._last, now):
            sending.pass_over()
        else:
            receipt = sending.publish_due(self.gates, now)
            if receipt is not None:  # else a gate holds it
                self._record(receipt, now)

    def publish(self, reason: str = "call") -> Receipt:
        """Publish now, whatever the trigger says.

        Args:
            reason: what the receipt says. With another than ``"call"`` the trigger counts on as if nothing
                had been published.
        """
        now = self.counters()
        return self._record(self.sending.publish(reason, now), now)

    def _record(self, receipt: Receipt, now: Counters) -> Receipt:
        self._calls.published()
        self.sending.published()
        if not receipt.coalesced and receipt.reason in ("trigger", "call"):
            self._last = now
        receipt = replace(receipt, run_id=self.ledger.run_id)
        self.receipts.append(receipt)
        if self._receipts_file is not None:
            with self._receipts_file.open("a") as file:
                file.write(receipt.to_json() + "\n")
        return receipt

    def _settle(self) -> None:
        """Make the publish that is owed: before the first frame, or after a resume."""
        if self._owed is not None:
            now = self.counters()
            receipt = self._record(self.sending.publish(self._owed, now), now)
            if not receipt.coalesced:
                self._owed = None

    def _owe(self, reason: str) -> None:
        """Publish before the next frame; at once where frames may come before ``setup`` runs."""
        self._owed = reason
        if self.trainer is not None and self.trainer.async_collection:
            self._settle()

    def _warn_if_never_due(self) -> None:
        assert self.trainer is not None, "bound, since its trainer calls it"
        planned = trainers.planned(self.trainer)
        if not self._told_never_due and not self.when.due(Counters(), planned):
            problem = f"this {type(self).__name__} is never due in the planned run: {self.when}"
            where = f"{planned.batches} batches, {planned.frames} frames; the first weights act all the time"
            warn(NothingPublished(problem, where, "choose a shorter interval"))
            self._told_never_due = True

    def _count_batch(self) -> None:
        self._batches += 1

    def _batch_done(self) -> None:
        self._calls.batch_done(self._optim_steps)

    def _count_optim_step(self) -> None:
        self._optim_steps += 1

    @contextmanager
    def _enrolled(self, trainer: Trainer, name: str) -> Iterator[None]:
        """Replace TorchRL's own hook and join the checkpoints if the block succeeds; else change nothing."""
        trainers.refuse_remote_learner(trainer)
        self._refuse_second(trainer)
        with trainers.all_or_nothing(trainer):
            try:
                self.trainer = trainer
                self._make_room(trainer)
                trainer.register_module(trainers.free_name(trainer, name or self.kept_as), self)
                trainers.let_it_be_absent(trainer, self)
                for again in (
                    lambda: self._make_room(trainer),
                    self._settle,
                    self._warn_if_never_due,
                ):
                    # hooks may come until then, and plans change
                    trainer.register_op("setup", again)
                self._warn_if_never_due()
                yield
            except BaseException:
                self.trainer = None
                self.beside = ()
                self._owed = None
                raise
        self.ledger.count_with(lambda: self.counters().optim_steps)
        trainers.bridge_for_trainer(trainer.collector)

    def _refuse_second(self, trainer: Trainer) -> None:
        for other in trainers.registered_modules(trainer):
            if isinstance(other, PublishHook) and other.feeds is self.feeds:
                raise ConfigError(
                    f"this trainer already has a hook that publishes to this {type(self.feeds).__name__}",
                    f"{type(self).__name__} beside {type(other).__name__}",
                    "put all destinations of one collector into one map; for another collector, say which: "
                    "SyncWeights(..., collector=...)",
                )

    def _make_room(self, trainer: Trainer) -> None:
        """Remove TorchRL's hooks that send to where this one publishes, and no others."""
        stock_hooks = trainers.stock_update_weights(trainer)
        replaced = [stock for stock in stock_hooks if stock.feeds is self.feeds]
        ours = list(map(parse, self.sending.destinations()))

        def reached(theirs: Path) -> bool:  # the destination, or a part of it
            return any(path.startswith(theirs) or theirs.startswith(path) for path in ours)

        for stock in replaced:
            lost = [name for name in stock.destinations if not reached(parse(name))]
            if lost:
                problem = f"{', '.join(map(repr, lost))} would get no weights any more"
                cure = "add the destination to the map, or leave it out of the trainer's weight_update_map"
                raise ConfigError(problem, f"{type(self).__name__}, which replaces {stock}", cure)
        trainers.remove_stock_update_weights(trainer, replaced)
        for stock in stock_hooks:
            if stock in replaced:
                note = f"replaces {stock}"
            else:
                note = f"keeps {stock}"
            if note not in self.beside:
                self.beside += (note,)
                _log.info("%s %s", type(self).__name__, note)

    def state_dict(self) -> dict[str, Any]:
        """Counters, phase, and the ledger, for the trainer's checkpoint."""
        self.join()
        now = self.counters()
        last = {f"last_{name}": value for name, value in asdict(self._last).items()}
        ledger = self.ledger.state_dict()
        pairs: dict[str, Any] = {}
        for name in ("published", "lost"):
            numbers = torch.tensor(ledger[name], dtype=torch.int64, device="cpu")
            pairs[name] = numbers.view(-1, 2)
        return ledger | {"version": self.version} | pairs | asdict(now) | last

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the same phase; the restored weights are published before the next frame.

        Args:
            state_dict: what :meth:`state_dict` returned; empty if the checkpoint was written without this
                hook, which then begins to count.
        """
        if not state_dict:
            self._owe("resume")
            return
        now = Counters.from_dict(state_dict)
        self._batches = int(now.batches)
        self._optim_steps = int(now.optim_steps)
        self._seconds_before = float(now.seconds)
        self._started = time.monotonic()
        last = {}
        for name, value in state_dict.items():
            if name.startswith("last_"):
                last[name.removeprefix("last_")] = value
        self._last = Counters.from_dict(last)
        self.join()
        self.ledger.load_state_dict({**state_dict, "published": state_dict["published"].tolist()})
        self._owe("resume")

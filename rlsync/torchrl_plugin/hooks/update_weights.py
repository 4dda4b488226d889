"""UpdateWeights: TorchRL's hook, with its own arguments, through rlsync's transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.core.ledger import Ledger
from rlsync.core.path import parse
from rlsync.core.plan import POLICY, Receipt
from rlsync.core.trigger import Counters, Every
from rlsync.core.user_input import check_choice
from rlsync.sync.bound_map import BoundMap
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.publisher import Publisher
from rlsync.tensors.compare import Fit
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of, training_of, warn_without_board
from rlsync.torchrl_plugin.hooks.misuse import notice_silence
from rlsync.torchrl_plugin.hooks.publish_hook import MapSending, PublishHook


class Sender(Protocol):
    """What may send in a hook's place."""

    def update_weights(self) -> object: ...


class UpdateWeights(PublishHook):
    """A drop-in for :class:`torchrl.trainers.UpdateWeights` that checks what it sends.

    The arguments mean what they mean there. A map is resolved and checked here, at construction, and
    reaches in-process collectors, too. The interval is phase-locked. With ``trainer`` the counters are
    part of its checkpoints, also when the hook is registered with ``register_op``, and the built-in hook
    of a stock trainer makes room.

    Args:
        collector: the collector; not needed with a ``sender``.
        update_weights_interval: publish every so many units.
        policy_weights_getter: returns the policy's weights (module, tensordict or dict of tensors).
        weight_update_map: ``{destination: source path on the trainer}``; takes precedence over the
            getter.
        trainer: needed for a map, and to count optimizer steps.
        sender: an object with ``update_weights()``, which then does the sending.
        interval_unit: ``"batches"`` (calls of the hook) or ``"optim_steps"``.

    Raises:
        ConfigError: arguments are missing or exclude each other.
        SyncMapError: the map cannot be carried out.

    Example:
        >>> from rlsync import UpdateWeights
        >>> UpdateWeights(None, 1)
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: nothing to send to
          where  UpdateWeights(collector=None, sender=None)
          cure   pass a collector or a sender
    """

    kept_as = "update_weights"

    def __init__(
        self,
        collector: BaseCollector | None = None,
        update_weights_interval: int = 1,
        policy_weights_getter: Callable[[], object] | None = None,
        weight_update_map: Mapping[str, str] | None = None,
        trainer: Trainer | None = None,
        *,
        sender: Sender | None = None,
        interval_unit: Literal["batches", "optim_steps"] = "batches",
    ) -> None:
        _check_arguments(
            collector,
            sender,
            getter=policy_weights_getter,
            sync_map=weight_update_map,
            trainer=trainer,
            unit=interval_unit,
        )
        super().__init__(Every(update_weights_interval, interval_unit))
        self.collector = collector
        self.update_weights_interval = update_weights_interval
        self.interval_unit = interval_unit
        self.policy_weights_getter = policy_weights_getter
        self.weight_update_map = weight_update_map
        self.sender = sender

        # With a map it sends as SyncWeights does, else as TorchRL's hook.
        endpoint: Endpoint | None = None
        if collector is not None:
            endpoint = endpoint_of(collector)
        if weight_update_map is not None and trainer is not None and endpoint is not None:
            bound = BoundMap(weight_update_map, trainer, endpoint, training=training_of(trainer))
            self._sending = MapSending(bound, collector)
        else:
            self._sending = StockSending(collector, endpoint, policy_weights_getter, sender)

        # From here on the trainer and the collector know it.
        if endpoint is not None:
            warn_without_board(endpoint, "UpdateWeights")
        if trainer is not None:
            self._bind(trainer)
        elif isinstance(collector, BaseCollector) and not isinstance(endpoint, BoardEndpoint):
            problem = "this UpdateWeights is registered with no trainer, so it sends nothing"
            notice_silence(collector, problem, lambda: (self.version, self._batches))
        if endpoint is not None and (
            weight_update_map is not None or policy_weights_getter is not None
        ):
            endpoint.connect(self.publish)

    def _bind(self, trainer: Trainer, name: str = "") -> None:
        with self._enrolled(trainer, name):
            trainer.register_op("post_optim", self._count_optim_step)
            if self.interval_unit != "batches":  # else its own calls are the batches
                trainer.register_op("post_steps", self._count_batch)
            trainer.register_op("post_steps", self._batch_done)

    def __call__(self, *arguments: object) -> None:
        """Count one batch, when batches are counted, and publish if it is due."""
        if self.interval_unit == "batches":
            self._count_batch()
        super().__call__(*arguments)

    @property
    def counter(self) -> int:
        """How often the hook was called, over resumed runs too; 0 when optimizer steps are counted.

        TorchRL's hook has the same attribute.
        """
        if self.interval_unit == "batches":
            return self._batches
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Counters, phase and version; TorchRL's own hook can load it and goes on in phase."""
        theirs = {"counter": self.counter, "last_update_count": int(self._last.optim_steps)}
        return super().state_dict() | theirs

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in phase; the restored weights are published before the next frame.

        Args:
            state_dict: from :meth:`state_dict`, or from that of TorchRL's own hook; empty if the checkpoint
                has neither, as with a hook that TorchRL's ``register_op`` was given.
        """
        if state_dict and "version" not in state_dict:
            state_dict = self._translated(**state_dict)
        super().load_state_dict(state_dict)

    def _translated(self, counter: int = 0, last_update_count: int = 0) -> dict[str, Any]:
        """TorchRL's state as one of ours; it knows no versions, so they go on from this hook's."""
        now = {"batches": counter, "optim_steps": last_update_count}
        last = {f"last_{name}": count for name, count in now.items()}
        published = torch.empty(0, 2, dtype=torch.int64, device="cpu")
        return {"version": self.version, "published": published} | now | last


class StockSending:
    """Sends as TorchRL's hook does: what a getter returns, what the collector has, or what a sender knows."""

    def __init__(
        self,
        collector: BaseCollector | None,
        endpoint: Endpoint | None,
        getter: Callable[[], object] | None,
        sender: Sender | None,
    ) -> None:
        self.feeds: BaseCollector | Sender | None = sender
        if sender is None:
            self.feeds = collector
        self._collector = collector
        self._endpoint = endpoint
        self._sent = Ledger()  # of sends that no endpoint of rlsync numbers
        self._getter = getter
        self._sender = sender
        self._fit = Fit("policy_weights_getter()", "of 'policy'")
        if getter is not None and endpoint is not None:
            endpoint.locate(parse("policy"), "UpdateWeights(policy_weights_getter=...)")

    @property
    def _publisher(self) -> Publisher | None:
        if self._endpoint is None:
            return None
        return self._endpoint.publisher

    @property
    def ledger(self) -> Ledger:
        if self._publisher is None:
            return self._sent
        return self._publisher.ledger

    @property
    def version(self) -> int:
        if self._publisher is None:
            return self._sent.version
        return self._publisher.version

    def destinations(self) -> Iterable[str]:
        return (POLICY,)

    def publish(self, reason: str, now: Counters) -> Receipt:
        started = time.perf_counter()
        moved = self._send()
        tensors: Collection[Tensor] = moved or ()
        return Receipt(
            version=self.version,
            reason=reason,
            copied_leaves=len(tensors),
            aliased_leaves=0,
            cast_leaves=0,
            copied_bytes=sum(tensor.nbytes for tensor in tensors),
            aliased_bytes=0,
            background_bytes=0,
            duration_s=time.perf_counter() - started,
            coalesced=moved is None,
            repaired=(),
            batches=now.batches,
            frames=now.frames,
            optim_steps=now.optim_steps,
            time_s=time.time(),
        )

    def publish_due(self, gates: Iterable[Callable[[], bool]], now: Counters) -> Receipt | None:
        for gate in gates:
            if not gate():
                return None
        return self.publish("trigger", now)

    def pass_over(self) -> None:
        pass

    def published(self) -> None:
        pass

    def join(self) -> None:
        pass

    def _send(self) -> Collection[Tensor] | None:
        """Send the weights; what was moved, as far as this hook can tell; ``None`` if it was coalesced."""
        publisher = self._publisher
        if self._getter is not None and publisher is not None:
            checked = publisher.fitted(self._fit, POLICY, self._getter())
            if publisher.publish(checked) is None:
                return None
            return checked.values()

        version_before = self.version
        coalesced_before = 0
        if publisher is not None:
            coalesced_before = publisher.coalesced
        if self._sender is not None:
            self._sender.update_weights()
        else:
            assert self._collector is not None, "_check_arguments has looked"
            self._collector.update_policy_weights_()
        if publisher is not None and publisher.coalesced > coalesced_before:
            return None
        if self.version == version_before:  # no publisher of rlsync, which records, was involved
            self.ledger.record(self.ledger.next)
        return ()


def _check_arguments(
    collector: BaseCollector | None,
    sender: Sender | None,
    *,
    getter: object,
    sync_map: object,
    trainer: Trainer | None,
    unit: str,
) -> None:
    if sender is None and collector is None:
        problem = "nothing to send to"
        raise ConfigError(
            problem, "UpdateWeights(collector=None, sender=None)", "pass a collector or a sender"
        )
    if sender is not None and (getter is not None or sync_map is not None):
        where = "UpdateWeights(sender=..., policy_weights_getter or weight_update_map)"
        raise ConfigError(
            "a sender knows its own weights", where, "leave out the getter and the map"
        )
    if sync_map is not None and trainer is None:
        problem = "the sources of a map are paths on a trainer"
        raise ConfigError(
            problem, "UpdateWeights(weight_update_map=..., trainer=None)", "pass trainer="
        )
    where = f"UpdateWeights(interval_unit={unit!r})"
    check_choice("interval unit", unit, ("batches", "optim_steps"), where)
    if unit == "optim_steps" and trainer is None:
        problem = "optimizer steps are counted by a trainer"
        raise ConfigError(
            problem, "UpdateWeights(interval_unit='optim_steps', trainer=None)", "pass trainer="
        )

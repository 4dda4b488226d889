"""UpdateWeights: TorchRL's hook, with its own arguments, through rlsync's transports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlsync.core.errors import ConfigError
from rlsync.core.path import parse
from rlsync.core.plan import Receipt
from rlsync.core.trigger import Counters, Every
from rlsync.tensors.compare import fitted
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.endpoints import Endpoint, endpoint_of
from rlsync.torchrl_plugin.hooks.publish_hook import PublishHook
from rlsync.torchrl_plugin.sync import Sync


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

    def __init__(
        self,
        collector: Any = None,
        update_weights_interval: int = 1,
        policy_weights_getter: Callable[[], Any] | None = None,
        weight_update_map: Mapping[str, str] | None = None,
        trainer: compat.Trainer | None = None,
        *,
        sender: Any = None,
        interval_unit: Literal["batches", "optim_steps"] = "batches",
    ) -> None:
        _check_arguments(collector, policy_weights_getter, weight_update_map, trainer, sender, interval_unit)
        super().__init__(Every(update_weights_interval, interval_unit))
        self.collector = collector
        self.update_weights_interval = update_weights_interval
        self.interval_unit = interval_unit
        self.policy_weights_getter = policy_weights_getter
        self.weight_update_map = weight_update_map
        self.sender = sender
        self._sent = 0
        self._endpoint: Endpoint | None = None if collector is None else endpoint_of(collector)
        self._sync: Sync | None = None
        if weight_update_map is not None and trainer is not None and self._endpoint is not None:
            self._sync = Sync(weight_update_map, trainer, self._endpoint)
        elif policy_weights_getter is not None and self._endpoint is not None:
            self._endpoint.locate(parse("policy"), "UpdateWeights(policy_weights_getter=...)")
        if self._endpoint is not None and (self._sync or policy_weights_getter):
            self._endpoint.connect(self.publish)
        if trainer is not None:
            self._bind(trainer, "update_weights")

    def register(self, trainer: compat.Trainer, name: str = "update_weights") -> None:
        """Stand at ``post_steps``, or at ``post_optim`` when optimizer steps are counted.

        Args:
            trainer: the trainer.
            name: under which the hook is kept in checkpoints.
        """
        if self.trainer is None:
            self._bind(trainer, name)
        self.require_trainer(trainer, "UpdateWeights.register")
        stage = "post_optim" if self.interval_unit == "optim_steps" else "post_steps"
        trainer.register_op(stage, self)

    def _bind(self, trainer: compat.Trainer, name: str) -> None:
        self._enrol(trainer, name)
        trainer.register_op("post_optim", self._count_optim_step)
        if self.interval_unit == "optim_steps":  # else its own calls are the batches
            trainer.register_op("post_steps", self._count_batch)

    def __call__(self) -> None:
        """Count one batch, when batches are counted, and publish if it is due."""
        if self.interval_unit == "batches":
            self._count_batch()
        super().__call__()

    @property
    def version(self) -> int:
        """The newest version; sends counted, where a sender or the collector itself does the sending."""
        return max(self._sent, 0 if self._endpoint is None else self._endpoint.version)

    def _publish(self, reason: str, now: Counters) -> Receipt:
        if self._sync is not None:
            return self._sync.publish(reason, now)
        started = time.perf_counter()
        leaves, moved_bytes = self._send()
        return Receipt(
            version=self.version,
            reason=reason,
            copied_leaves=leaves,
            aliased_leaves=0,
            cast_leaves=0,
            copied_bytes=moved_bytes,
            aliased_bytes=0,
            background_bytes=0,
            duration_s=time.perf_counter() - started,
            coalesced=False,
            repaired=(),
            batches=now.batches,
            frames=now.frames,
            optim_steps=now.optim_steps,
            time_s=time.time(),
        )

    def _send(self) -> tuple[int, int]:
        if self.sender is not None:
            self.sender.update_weights()
        elif self.policy_weights_getter is not None and self._endpoint is not None:
            return self._send_checked(self.policy_weights_getter(), self._endpoint)
        else:
            self.collector.update_policy_weights_()
        self._sent += 1
        return 0, 0

    def _send_checked(self, weights: Any, endpoint: Endpoint) -> tuple[int, int]:
        sent = fitted(weights, "policy_weights_getter()", endpoint.specs("policy"), "of 'policy'")
        endpoint.publish({("policy", name): tensor for name, tensor in sent.items()})
        return len(sent), sum(tensor.nbytes for tensor in sent.values())

    def _restore_version(self, version: int) -> None:
        self._sent = version
        if self._endpoint is not None:
            self._endpoint.advance_to(version)


def _check_arguments(
    collector: Any, getter: Any, sync_map: Any, trainer: Any, sender: Any, unit: str
) -> None:
    if sender is None and collector is None:
        raise ConfigError(
            "nothing to send to",
            "UpdateWeights(collector=None, sender=None)",
            "pass a collector or a sender",
        )
    if sender is not None and (getter is not None or sync_map is not None):
        raise ConfigError(
            "a sender knows its own weights",
            "UpdateWeights(sender=..., policy_weights_getter or weight_update_map)",
            "leave out the getter and the map",
        )
    if sync_map is not None and trainer is None:
        raise ConfigError(
            "the sources of a map are paths on a trainer",
            "UpdateWeights(weight_update_map=..., trainer=None)",
            "pass trainer=",
        )
    if unit not in ("batches", "optim_steps"):
        raise ConfigError(
            f"no interval unit {unit!r}",
            f"UpdateWeights(interval_unit={unit!r})",
            "choose one of: batches, optim_steps",
        )
    if unit == "optim_steps" and trainer is None:
        raise ConfigError(
            "optimizer steps are counted by a trainer",
            "UpdateWeights(interval_unit='optim_steps', trainer=None)",
            "pass trainer=",
        )

"""TorchRL's weight-sync schemes, and the updates that go through them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torchrl.collectors import BaseCollector
from torchrl.weight_update import WeightSyncScheme


def schemes_of(collector: object) -> dict[str, WeightSyncScheme]:
    """The sender schemes of a collector by destination.

    TorchRL 0.14 has no public accessor. Remove this function when collectors have one.
    """
    held = getattr(collector, "_weight_sync_schemes", None)
    return dict(held) if held else {}


def forget_sender(scheme: WeightSyncScheme) -> None:
    """Reset a scheme that a forked worker inherited from the learner, so that it can be a receiver.

    Pickled schemes arrive without this state. Goes when ``init_on_receiver`` resets it in all cases.
    """
    scheme._initialized_on_sender = scheme._synchronized_on_sender = False
    scheme._context_ref = scheme._model_ref = None


def set_context(scheme: WeightSyncScheme, collector: object) -> None:
    """Set ``scheme.context`` as TorchRL does, for a subclass that overrides the property."""
    WeightSyncScheme.context.fset(scheme, collector)


def around_updates(
    collector: BaseCollector, enter: Callable[[Iterable[str]], AbstractContextManager[object]]
) -> None:
    """Run every ``update_policy_weights_`` of ``collector`` inside ``enter(destinations)``.

    TorchRL sends the destinations of a ``weights_dict`` one by one. Inside ``enter``, they become one
    publish, or none.
    """
    _around_updates(collector, lambda arguments: enter(arguments.get("weights_dict") or ()))


def around_partial_updates(
    collector: BaseCollector, enter: Callable[[object], AbstractContextManager[object]]
) -> None:
    """Run every ``update_policy_weights_`` of ``collector`` inside ``enter(worker_ids)``."""
    _around_updates(collector, lambda arguments: enter(arguments.get("worker_ids")))


def _around_updates(
    collector: BaseCollector, enter: Callable[[dict[str, Any]], AbstractContextManager[object]]
) -> None:
    ref = weakref.ref(collector)

    def update(*args: Any, **kwargs: Any) -> Any:
        self = ref()
        if self is None:
            raise ReferenceError("the collector is gone")
        with enter(kwargs):
            return type(self)._weight_update_impl(self, *args, **kwargs)

    collector._weight_update_impl = update

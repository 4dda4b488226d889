"""The endpoint of any other collector: third-party, distributed, or with TorchRL's own schemes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

import torch
from tensordict import TensorDict
from torch import Tensor

from rlsync.core.errors import ConfigError, DestinationNotFound, PublishError
from rlsync.core.path import Path, nearest_name
from rlsync.core.plan import no_destination
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.sender import Key


class ForeignEndpoint:
    """Any other collector: its own ``update_policy_weights_`` carries weights that were checked."""

    def __init__(self, collector: object, destinations: list[str]) -> None:
        self.collector = collector
        self._schemed = bool(destinations)
        self.destinations = destinations or ["policy"]
        self._version = 0

    @property
    def transport(self) -> str:
        return f"{type(self.collector).__name__}.update_policy_weights_, as TorchRL does it"

    @property
    def notes(self) -> tuple[str, ...]:
        return (
            "this transport makes none of rlsync's promises: reads may be torn and stamps may lie; "
            "weight_sync_schemes={'policy': rlsync.BoardScheme()} makes them",
        )

    @property
    def version(self) -> int:
        return self._version

    @property
    def stamped(self) -> bool:
        return compat.is_stamped(self.collector)

    def connect(self, publish_default: Callable[[], object]) -> None:
        """Nothing to do: weights go through the collector's own method."""

    def locate(self, path: Path, where: str) -> Key:
        name = str(path)
        if name not in self.destinations:
            near = nearest_name(name, self.destinations)
            raise no_destination(name, where, self.destinations, near)
        if name != "policy" and isinstance(self.collector, compat.MultiCollector):
            raise DestinationNotFound(
                f"TorchRL's schemes hang on the destination {name!r} of a process collector",
                where,
                "take the scheme from a board: board = rlsync.WeightBoard(); board.scheme()",
            )
        return name, ""

    def specs(self, destination: str) -> list[LeafSpec] | None:
        get_model = getattr(self.collector, "get_model", None)
        if not callable(get_model):
            return None
        try:
            model = get_model(destination)
        except (ValueError, AttributeError, KeyError):
            return None
        if not isinstance(model, torch.nn.Module):
            return None
        return Leaves(model, f"collector.{destination}").specs()

    def tensors(self, destination: str) -> None:
        return None

    @property
    def publishes_in_background(self) -> bool:
        return False

    def join(self) -> None:
        """Nothing to wait for: a publish is made when it returns."""

    def publish(self, leaves: Mapping[Key, Tensor], steady: Collection[Key] = ()) -> int:
        weights: dict[str, TensorDict] = {}
        for (destination, name), tensor in leaves.items():
            held = weights.setdefault(destination, TensorDict())
            held.set(tuple(name.split(".")), tensor.detach().clone())  # it may be queued, or be shared
        update = getattr(self.collector, "update_policy_weights_", None)
        if not callable(update):
            raise PublishError(
                f"{type(self.collector).__name__} takes no weights",
                "SyncWeights",
                "use a TorchRL collector, or one that has update_policy_weights_",
            )
        if self._schemed:
            update(weights_dict=weights)
        else:
            update(weights["policy"])
        self._version += 1
        return self._version

    def advance_to(self, version: int) -> None:
        self._version = max(self._version, version)

    def acting_versions(self) -> list[int]:
        return []

    @property
    def in_flight(self) -> bool:
        return compat.collects_in_the_background(self.collector)

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for: TorchRL's update returns when it is done."""

    def check(self) -> NoReturn:
        raise ConfigError(
            f"the workers of this {type(self.collector).__name__} cannot be asked what they act with",
            "VerifySync.register",
            "weight_sync_schemes={'policy': rlsync.BoardScheme()} lets them answer",
        )

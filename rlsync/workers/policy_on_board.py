"""The learner's end of a player whose weights workers adopt from a board."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn
from torchrl.collectors import BaseCollector

from rlsync.core.errors import PublishError
from rlsync.core.ledger import Ledger
from rlsync.core.plan import POLICY
from rlsync.sync.adopter import Adopt
from rlsync.sync.numbered_board import NumberedBoard
from rlsync.sync.workers_publisher import WorkersPublisher
from rlsync.transport.contract import Transport
from rlsync.workers.player import Player, in_dtype, without_memory


class PolicyOnBoard(BaseCollector):
    """A collector whose own workers act with copies of one player, whose weights they adopt from a board.

    It has what TorchRL and :class:`SyncWeights` ask of a collector for its weights.

    Args:
        player: the learner's player; its weights are version 1. One without modules publishes nothing.
        num_workers: worker processes.
        dtype: of the floating weights of the workers' copies; ``None`` for the player's own.
        adopt: whether workers point their parameters at the board, or copy them out of it.
        transport: what carries the weights to them.
        ledger: of the versions, if an earlier life of the learner has published some; a transport that has a
            ledger of its own needs none.
    """

    def __init__(
        self,
        player: Player,
        num_workers: int,
        dtype: torch.dtype | None,
        adopt: Adopt,
        transport: Transport,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__()
        self.player = player
        self.num_workers = num_workers
        self.adopt = adopt
        self.transport = transport
        ledger = transport.ledger if isinstance(transport, NumberedBoard) else ledger or Ledger()
        self.publisher = WorkersPublisher(transport, ledger)
        acting = in_dtype(player, dtype)
        for destination in acting.modules:
            self.publisher.serve(self, destination)
        self.publisher.publish_modules(acting.modules, "the collector's player")
        #: What a worker begins with: the player in its dtype, without memory.
        self.worker_player = without_memory(acting)

    @property
    @abstractmethod
    def procs(self) -> list[BaseProcess]:
        """The worker processes that run now."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it was shut down."""

    @property
    def policy_version(self) -> int:
        """The newest published version."""
        return self.publisher.version

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's module, of which workers have copies.

        Args:
            model_id: its destination, for example ``"policy"``.

        Raises:
            ValueError: the player has no such module.
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
            raise PublishError(
                "a board publishes to all workers alike",
                f"update_policy_weights_({', '.join(['worker_ids', *kwargs])})",
                "pass weights alone, or nothing",
            )
        given = next((w for w in (policy_or_weights, weights, policy) if w is not None), None)
        if weights_dict is not None:
            sent = weights_dict
        elif given is None and model_id is None:
            sent = dict.fromkeys(self.player.modules)
        else:
            sent = {model_id or POLICY: given}
        with self.publisher.one_publish(sent):
            for destination, what in sent.items():
                self.publisher.send(destination, what)

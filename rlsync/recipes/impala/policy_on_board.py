"""The learner's end of a network that workers adopt from a board."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import nn
from torchrl.collectors import BaseCollector

from rlsync.core.errors import PublishError
from rlsync.recipes.impala.models import ImpalaNet
from rlsync.recipes.impala.worker import POLICY
from rlsync.torchrl_plugin.sender import BoardSender
from rlsync.transport.board import WeightBoard


class PolicyOnBoard(BaseCollector):
    """A collector whose own workers act with copies of one network, which they adopt from a board.

    It has what TorchRL and :class:`SyncWeights` ask of a collector for its weights.

    Args:
        network: the learner's network; its weights are version 1.
        num_workers: worker processes.
        dtype: of the floating weights of the workers' copies; ``None`` for the network's own.
    """

    def __init__(self, network: ImpalaNet, num_workers: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.network = network
        self.num_workers = num_workers
        self.board_sender = BoardSender(WeightBoard())
        self.board_sender.serve(self, POLICY)
        acting = copy.deepcopy(network).to(dtype=dtype)
        self.board_sender.publish_module(POLICY, acting, "the collector's network")
        #: What a worker begins with: the network in its dtype, without its memory.
        self.worker_network = acting.to("meta")

    @property
    @abstractmethod
    def procs(self) -> list[BaseProcess]:
        """The worker processes of this moment."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether it was shut down."""

    @property
    def policy_version(self) -> int:
        """The newest published version."""
        return self.board_sender.board.version

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's network, of which workers have copies.

        Args:
            model_id: ``"policy"``.

        Raises:
            ValueError: there is no other model than "policy".
        """
        if model_id != POLICY:
            raise ValueError(f"this collector has no model {model_id!r}, but {POLICY!r}")
        return self.network

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
        """Publish weights as one version: those given, those that a SyncWeights names, or the network's.

        Args:
            policy_or_weights, weights, policy: what is published: a module, a tensordict, a dict of tensors.
            worker_ids: must be ``None``.
            model_id: ``"policy"``.
            weights_dict: ``{"policy": weights}``, in place of the above.
            kwargs: TorchRL's others, which must be absent.

        Raises:
            PublishError: ``worker_ids`` is given: a board has one newest version for all.
            DestinationNotFound: the weights are for something else than "policy".
            LayoutMismatch: they do not fit.
        """
        if worker_ids is not None or kwargs:
            raise PublishError(
                "a board publishes to all workers alike",
                f"update_policy_weights_({', '.join(['worker_ids', *kwargs])})",
                "pass weights alone, or nothing",
            )
        given = next((w for w in (policy_or_weights, weights, policy) if w is not None), None)
        sent = {model_id or POLICY: given} if weights_dict is None else weights_dict
        with self.board_sender.one_publish(sent):
            for destination, what in sent.items():
                self.board_sender.send(destination, what)

"""TransitionCollector: the workers of all nodes of a cluster, with the frames of a stock collector."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rlsync.workers.cluster.collector import ClusterCollector
from rlsync.workers.envs.specs import EnvSpec
from rlsync.workers.frames import COLLECTOR
from rlsync.workers.players.torchrl_policy import PIECES, ActingPolicy, Prefill, transitions

#: How long a batch may wait until every node says that it has the newest version, seconds. Rollouts of older
#: ones are left out in any case.
_ARRIVAL_S = 2.0
_LOOK_S = 0.005


class TransitionCollector(ClusterCollector):
    """Collects transitions as TorchRL's ``MultiSyncCollector`` or ``MultiAsyncCollector`` does, on a cluster.

    Batches are those of :func:`~rlsync.workers.players.torchrl_policy.transitions`: B unrolls of T steps,
    ``[B, T]``. All frames are stamped with the version that acted.

    With ``waits``, each batch has frames of the newest version alone. Between two batches no worker begins a
    rollout; rollouts of older versions, or beyond the batch, are left out and counted as dropped. Without it,
    workers never wait for the learner, and a batch is what arrives.

    Workers draw their actions uniformly until ``random_frames`` were collected and a version was published
    after that. Publish ``collector.prefill`` as ``"prefill"``, with the weights. The other arguments, and the
    errors, are those of :class:`ClusterCollector`.
    """

    def __init__(
        self,
        acting: ActingPolicy,
        env: EnvSpec,
        *,
        waits: bool,
        random_frames: int = 0,
        **settings: Any,
    ) -> None:
        self._waits = waits
        self._actions = acting.actions
        self._random_frames = random_frames
        self._pieces = 0
        self._began = False
        self.prefill: Prefill | None = acting.prefill
        super().__init__(acting, env, **settings)

    @property
    def init_random_frames(self) -> int:  # type: ignore[override]  # TorchRL has an attribute
        """Frames after which the policy acts; 0 ends the prefill with the next publish."""
        return self._random_frames

    @init_random_frames.setter
    def init_random_frames(self, frames: int) -> None:
        self._random_frames = frames
        self._count()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the counters. Those of a collector on one host are not read: the trainer has its own."""
        if {"frames", "batches"} <= state_dict.keys():
            super().load_state_dict(state_dict)
            self._count()

    def _next_batch(self) -> Any:
        if self._waits or not self._began:
            self._await_nodes()
        self._began = True
        if self._waits:
            self._arrivals.oldest_version = self.policy_version
            self._arrivals.run()
        batch = super()._next_batch()
        if self._waits:
            self._arrivals.pause()
        self._count()
        made = transitions(batch, self._actions, self._pieces)
        self._pieces = int(made[COLLECTOR, PIECES].max()) + 1
        return made

    def _count(self) -> None:
        if self.prefill is not None:
            self.prefill.random.fill_(self._frames < self._random_frames)

    def _await_nodes(self) -> None:
        """Wait until the nodes say that they have the newest version; not for long."""
        until_s, newest = time.monotonic() + _ARRIVAL_S, self._transport.newest_stamp
        while time.monotonic() < until_s:
            reports = self._transport.nodes
            if all(name in reports and reports[name].stamp >= newest for name in map(str, self.nodes)):
                return
            time.sleep(_LOOK_S)

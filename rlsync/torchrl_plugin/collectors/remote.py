"""The endpoint of distributed, RPC and Ray collectors with TorchRL's own schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tensordict import TensorDictBase
from torchrl.collectors.distributed import RayCollector

from rlsync.core.errors import PublishError
from rlsync.torchrl_plugin.collectors.foreign import ForeignEndpoint
from rlsync.torchrl_plugin.compat import distributed, schemes, stamps
from rlsync.torchrl_plugin.compat.distributed import Remote

_WHILE_A_ROLLOUT_RUNS = "TorchRL applies weights while a rollout runs, so no version can be named for a frame"


class RemoteEndpoint(ForeignEndpoint):
    """A DistributedCollector, RPCCollector or RayCollector that sends by TorchRL's own scheme. Frames are
    stamped where TorchRL applies weights between rollouts only: an actor of Ray that collects one rollout
    after the other stamps by itself; with ``sync=True`` the learner stamps.
    """

    collector: Remote
    needs_every_leaf = True  # a worker receives one tensor for each leaf that it has

    def __init__(self, collector: Remote, destinations: list[str]) -> None:
        super().__init__(collector, destinations)
        self.unknown = _why_unknown(collector)

    @property
    def stamped(self) -> bool:
        return not self.unknown

    @property
    def unkept(self) -> str:
        return f"keeps none of rlsync's promises: reads may be torn, and {self.unknown}"

    @property
    def notes(self) -> tuple[str, ...]:
        if self.unknown:
            return super().notes
        return (
            "TorchRL carries the weights, and applies them between rollouts: stamps are exact, a publish "
            "waits for the workers, and what they act with cannot be verified",
        )

    def connect(self, publish_default: Callable[[], object]) -> None:
        """Number every update of the collector, and stamp its frames, where that is exact."""
        if self.unknown:
            return
        schemes.around_partial_updates(self.collector, self._numbered)
        distributed.around_batches(self.collector, self._stamp)

    @contextmanager
    def _numbered(self, worker_ids: object) -> Iterator[None]:
        """An update of the collector: a publish of ours, or one that somebody else makes."""
        ours, ledger = self.transport.underway, self.publisher.ledger
        stamp = ledger.next if ours is None else ours
        if isinstance(self.collector, RayCollector):
            distributed.number_next_update(self.collector, stamp.version)
        elif worker_ids is not None:
            raise PublishError(
                "the learner stamps the frames of all workers with one version",
                f"{type(self.collector).__name__}.update_policy_weights_(worker_ids={worker_ids!r})",
                "leave worker_ids out",
            )
        yield
        if ours is None:
            ledger.record(stamp)

    def _stamp(self, batch: TensorDictBase) -> TensorDictBase:
        if isinstance(self.collector, RayCollector):
            # TorchRL wrote the root of a batch's first frame in the rollout before.
            return batch.set(stamps.STAMP, batch.get(("next", stamps.STAMP)).clone())
        for key in (stamps.STAMP, ("next", stamps.STAMP)):
            batch.set(key, torch.full(batch.shape, self.publisher.version, dtype=torch.int64))
        return batch


def _why_unknown(collector: Remote) -> str:
    """Why the version that made a frame cannot be known; empty if it can."""
    if not distributed.single_collectors(collector):
        return f"a {collector.collector_class.__name__} in a node passes weights on without their version"
    if isinstance(collector, RayCollector):
        return _why_unknown_on_ray(collector)
    if not distributed.waits_for_learner(collector):
        return f"{_WHILE_A_ROLLOUT_RUNS} (sync=True avoids that)"
    if distributed.sends_to_some_workers(collector):
        return (
            "the collector sends weights by itself (leave update_interval and max_weight_update_interval out)"
        )
    return ""


def _why_unknown_on_ray(collector: RayCollector) -> str:
    if not distributed.applies_between_rollouts(collector):
        return "only a RayWeightSyncScheme sends a number with the weights"
    if collector.replay_buffer is not None:
        return "workers write to the replay buffer what the learner has not seen (leave replay_buffer out)"
    if not distributed.actors_are_stamped(collector):
        return "frames carry no policy_version (pass collector_kwargs={'track_policy_version': True})"
    return ""

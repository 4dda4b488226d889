"""TorchRL's collectors whose workers may be on other hosts: torch.distributed, RPC and Ray."""

from __future__ import annotations

import copy
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

from tensordict import TensorDictBase
from torch import distributed, nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)
from torchrl.weight_update import RayWeightSyncScheme

__all__ = ["DistributedCollector", "DistributedSyncCollector", "RPCCollector", "RayCollector"]

#: The collectors of this file that take weights from a learner.
REMOTE = (DistributedCollector, RPCCollector, RayCollector)

#: DistributedCollector gives its workers their ranks as numbers, and rank 0 is the learner.
FIRST_RANK = 1


class DistributedWorkers:
    """The workers of a DistributedCollector on this host, as those of a process collector are seen.

    Args:
        collector: may be under construction.
    """

    def __init__(self, collector: DistributedCollector) -> None:
        self._collector = weakref.ref(collector)
        self.num_workers: int = collector.num_workers

    @property
    def collector(self) -> DistributedCollector:
        """The collector itself."""
        collector = self._collector()
        if collector is None:
            raise ReferenceError("the collector is gone")
        return collector

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes; an ``AttributeError`` before they are started."""
        return list(self.collector.jobs)

    @property
    def closed(self) -> bool:
        """Whether the workers were ended."""
        return bool(getattr(self.collector, "_shutdown", False))

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's policy.

        Raises:
            ValueError: the learner has none, or it is asked for something else.
        """
        policy = self.collector.policy
        if model_id != "policy" or not isinstance(policy, nn.Module):
            raise ValueError(f"the learner holds no {model_id!r}")
        return policy

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """Ask the workers to leave, wait, kill those that stay.

        ``DistributedCollector.shutdown`` waits 10 s for each worker that is dead, and then raises.

        Args:
            timeout: seconds for all of them together; ``None`` is TorchRL's own 10 s.
            raise_on_error: not used: nothing is raised.
        """
        collector = self.collector
        if self.closed:
            return
        collector._shutdown = True
        deadline = time.monotonic() + (10.0 if timeout is None else timeout)
        store = getattr(collector, "_store", None)
        if store is not None:
            for number in range(self.num_workers):
                store.set(f"NODE_{number + FIRST_RANK}_in", b"shutdown")
        for job in collector.jobs:
            job.join(max(0.0, deadline - time.monotonic()))
            if job.is_alive():
                job.kill()
                job.join()
        if distributed.is_initialized():
            distributed.destroy_process_group()


_workers: weakref.WeakKeyDictionary[DistributedCollector, DistributedWorkers] = weakref.WeakKeyDictionary()


def distributed_workers(collector: DistributedCollector) -> DistributedWorkers:
    """The workers of ``collector``: always the same object, which lives as long as the collector."""
    return _workers.setdefault(collector, DistributedWorkers(collector))


class PolicyByValue:
    """A policy_factory that makes copies of one policy, each with memory of its own.

    TorchRL gives the policy itself to a worker process. To send it, multiprocessing would move the learner's
    parameters into shared memory, and all workers would act with this memory.

    Args:
        policy: is neither moved nor changed.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self._policy)

    def __reduce__(self) -> tuple[Callable[[bytes], PolicyByValue], tuple[bytes]]:
        return _unpickled, (pickle.dumps(self._policy),)


def _unpickled(policy: bytes) -> PolicyByValue:
    return PolicyByValue(pickle.loads(policy))


def own_policy(collector: DistributedCollector) -> nn.Module | None:
    """The policy that the workers get from the learner; ``None`` if a policy_factory makes it there."""
    own_factory = any(not isinstance(f, PolicyByValue) for f in collector.policy_factory if f is not None)
    return collector.policy if isinstance(collector.policy, nn.Module) and not own_factory else None


def send_policy_by_value(collector: DistributedCollector, policy: nn.Module) -> None:
    """Make the workers of ``collector`` begin with copies of ``policy``; call it before they start."""
    collector.policy_factory = [PolicyByValue(policy)] * collector.num_workers
    collector._policy_to_send = None


def stamp_nodes(collector: DistributedCollector) -> None:
    """Make the workers write ``policy_version`` on every frame; call it before they start.

    The buffers into which the learner receives batches are laid out by the same arguments.
    """
    for arguments in collector.collector_kwargs:
        if not arguments.get("track_policy_version"):
            arguments["track_policy_version"] = True


def updates_by_itself(collector: DistributedCollector) -> str:
    """The argument by which the collector sends weights to one worker at a time; empty if there is none."""
    if collector.max_weight_update_interval > -1:
        return f"max_weight_update_interval={collector.max_weight_update_interval}"
    if not collector._sync and collector.update_after_each_batch:
        return "update_after_each_batch=True"
    if not collector._sync and collector.update_interval is not None:
        return f"update_interval={collector.update_interval}"
    return ""


def sends_to_some_workers(collector: DistributedCollector | RPCCollector) -> bool:
    """Whether the collector sends weights by itself, past ``update_policy_weights_`` or to some workers."""
    past = isinstance(collector, DistributedCollector) and collector.update_interval is not None
    return past or collector.max_weight_update_interval > -1


def single_collectors(collector: DistributedCollector | RPCCollector | RayCollector) -> bool:
    """Whether each node acts by itself, and starts no processes that would act."""
    return isinstance(collector.collector_class, type) and issubclass(collector.collector_class, Collector)


def applies_between_rollouts(collector: RayCollector) -> bool:
    """Whether actors receive weights and collect one after the other, each batch with one version.

    An actor of Ray runs one task at a time, unless ``remote_configs`` says otherwise.
    """
    schemes = (collector._weight_sync_schemes or {}).values()
    return bool(schemes) and all(type(scheme) is RayWeightSyncScheme for scheme in schemes)


def number_next_update(collector: RayCollector, version: int) -> None:
    """Send ``version`` with the next update; the workers stamp frames with it once they have applied it."""
    for scheme in collector._weight_sync_schemes.values():
        scheme._set_model_version(version)


def around_batches(collector: BaseCollector, change: Callable[[TensorDictBase], TensorDictBase]) -> None:
    """Run ``change`` on every batch that ``collector`` yields."""
    ref = weakref.ref(collector)

    def iterator() -> Iterator[TensorDictBase | None]:
        self = ref()
        if self is None:
            raise ReferenceError("the collector is gone")
        for batch in type(self).iterator(self):
            yield None if batch is None else change(batch)

    collector.iterator = iterator


def waits_for_learner(collector: DistributedCollector | RPCCollector | RayCollector) -> bool:
    """Whether the workers begin a rollout only when the learner asks for the next batch."""
    return bool(collector._sync)

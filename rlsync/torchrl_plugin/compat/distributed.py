"""TorchRL's collectors whose workers may be on other hosts: torch.distributed, RPC and Ray."""

from __future__ import annotations

import copy
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeAlias, TypeVar

from tensordict import TensorDictBase
from torch import distributed, nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from torchrl.weight_update import RayWeightSyncScheme

from rlsync.torchrl_plugin.compat import in_place_of, present

#: DistributedCollector gives its workers their ranks as numbers, and rank 0 is the learner
FIRST_RANK = 1

_LEAVE_WITHIN_S = 10.0  #: how long the workers of a DistributedCollector have by default, seconds

#: A collector whose workers may be on other hosts, with whatever scheme.
Remote: TypeAlias = DistributedCollector | RPCCollector | RayCollector

C = TypeVar("C", bound=BaseCollector)
W = TypeVar("W")


class _WorkersOf(Generic[C]):
    """The workers of a collector, which may be under construction, as a process collector's are seen."""

    def __init__(self, collector: C, num_workers: int) -> None:
        self._collector = weakref.ref(collector)
        self.num_workers = num_workers

    @property
    def collector(self) -> C:
        return present(self._collector)

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's policy; ValueError if it has none, or is asked for something else."""
        policy = policy_of_learner(self.collector)
        if model_id != "policy" or policy is None:
            raise ValueError(f"the learner holds no {model_id!r}")
        return policy


class DistributedWorkers(_WorkersOf[DistributedCollector]):
    """The workers of a DistributedCollector on this host."""

    def __init__(self, collector: DistributedCollector) -> None:
        super().__init__(collector, collector.num_workers)

    @property
    def procs(self) -> list[BaseProcess]:
        """The worker processes; an ``AttributeError`` before they are started."""
        return list(self.collector.jobs)

    @property
    def closed(self) -> bool:
        return bool(getattr(self.collector, "_shutdown", False))

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """Wait for all workers together, then kill the rest; nothing is raised."""
        collector = self.collector
        if self.closed:
            return
        collector._shutdown = True
        if timeout is None:
            timeout = _LEAVE_WITHIN_S
        deadline = time.monotonic() + timeout
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


class ActorWorkers(_WorkersOf[RayCollector]):
    """The actors of a RayCollector."""

    def __init__(self, collector: RayCollector) -> None:
        kind = collector.collector_class
        several = issubclass(kind, MultiCollector)
        if several:
            self._workers_of_an_actor = int(collector.map_fn("num_workers")[0])
        else:
            self._workers_of_an_actor = 1
        super().__init__(collector, int(collector.num_collectors) * self._workers_of_an_actor)
        self.in_flight = not waits_for_learner(collector) or issubclass(kind, MultiAsyncCollector)

    @property
    def actors(self) -> dict[int, Any]:
        """The actor of each worker, by the worker's number."""
        actors: dict[int, Any] = {}
        for actor in self.collector.remote_collectors:
            for _ in range(self._workers_of_an_actor):
                actors[len(actors)] = actor
        return actors

    @property
    def procs(self) -> list[BaseProcess]:
        """None: Ray starts the processes, on any node."""
        return []

    @property
    def closed(self) -> bool:
        collector = self._collector()
        return collector is None or not collector.remote_collectors

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """End the actors: Ray kills them at once, and nothing is raised."""
        if not self.closed:
            self.collector.shutdown()


#: Of each collector its workers: always the same object, which lives as long as the collector.
_workers: weakref.WeakKeyDictionary[BaseCollector, Any] = weakref.WeakKeyDictionary()


def workers_of(collector: C, kind: Callable[[C], W]) -> W:
    """The workers of ``collector``, seen as this kind of them: always the same object."""
    workers: W = _workers.setdefault(collector, kind(collector))
    return workers


def policy_of_learner(collector: DistributedCollector | RayCollector) -> nn.Module | None:
    """The policy that the workers get from the learner; ``None`` if a policy_factory makes it there."""
    if isinstance(collector.policy, nn.Module):
        return collector.policy
    return None


class PolicyByValue:
    """A policy_factory that copies a policy, whose own parameters would be moved into shared memory."""

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self._policy)

    def __getstate__(self) -> bytes:
        return pickle.dumps(self._policy)

    def __setstate__(self, policy: bytes) -> None:
        self._policy = pickle.loads(policy)


def own_policy(collector: DistributedCollector) -> nn.Module | None:
    """The policy that the workers get from the learner; ``None`` if a policy_factory of the user makes it."""
    for factory in collector.policy_factory:
        if factory is not None and not isinstance(factory, PolicyByValue):
            return None
    return policy_of_learner(collector)


def send_policy_by_value(collector: DistributedCollector, policy: nn.Module) -> None:
    """Make the workers of ``collector`` begin with copies of ``policy``; call it before they start."""
    collector.policy_factory = [PolicyByValue(policy)] * collector.num_workers
    collector._policy_to_send = None


def stamp_nodes(collector: DistributedCollector) -> None:
    """Make the workers write ``policy_version`` on every frame; call it before they start."""
    # The buffers into which the learner receives batches are laid out by the same arguments.
    for arguments in collector.collector_kwargs:
        if not arguments.get("track_policy_version"):
            arguments["track_policy_version"] = True


def sends_to_one_worker(collector: DistributedCollector | RayCollector) -> str:
    """The argument by which the collector sends weights to one worker at a time; empty if there is none."""
    if collector.max_weight_update_interval > -1:
        return f"max_weight_update_interval={collector.max_weight_update_interval}"
    nodes = isinstance(collector, DistributedCollector)
    if collector.update_after_each_batch and not (nodes and collector._sync):
        return "update_after_each_batch=True"
    if nodes and not collector._sync and collector.update_interval is not None:
        return f"update_interval={collector.update_interval}"
    return ""


def sends_to_some_workers(collector: DistributedCollector | RPCCollector) -> bool:
    """Whether the collector sends weights by itself, past ``update_policy_weights_`` or to some workers."""
    past = isinstance(collector, DistributedCollector) and collector.update_interval is not None
    return past or collector.max_weight_update_interval > -1


def single_collectors(collector: Remote) -> bool:
    """Whether each node acts by itself, and starts no processes that would act."""
    return isinstance(collector.collector_class, type) and issubclass(
        collector.collector_class, Collector
    )


def applies_between_rollouts(collector: RayCollector) -> bool:
    """Whether actors receive weights and collect one after the other, so that a batch has one version."""
    schemes = (collector._weight_sync_schemes or {}).values()
    return bool(schemes) and all(type(scheme) is RayWeightSyncScheme for scheme in schemes)


def number_next_update(collector: RayCollector, version: int) -> None:
    """Send ``version`` with the next update; the workers stamp frames with it once they have applied it."""
    for scheme in collector._weight_sync_schemes.values():
        scheme._set_model_version(version)


def waits_for_learner(collector: Remote) -> bool:
    """Whether the workers begin a rollout only when the learner asks for the next batch."""
    return bool(collector._sync)


def actors_are_stamped(collector: RayCollector) -> bool:
    """Whether every actor writes ``policy_version`` on its frames."""
    return all(arguments.get("track_policy_version") for arguments in collector.collector_kwargs)


def calls_a_policy_service(collector: RayCollector) -> bool:
    """Whether the actors ask an inference server for their actions."""
    return collector._policy_service is not None


def needs_no_connection(collector: RayCollector, before_batch: Callable[[], None]) -> None:
    """Let no update wait for a connection to actors. Until a scheme can say that its receivers are ready."""

    @in_place_of(collector, "_lazy_initialize_weight_sync")
    def lazily(self: RayCollector) -> None:
        self._weight_sync_initialized = True

    @in_place_of(collector, "iterator")
    def iterator(self: RayCollector) -> Iterator[TensorDictBase | None]:
        lazily(self)
        before_batch()
        for batch in type(self).iterator(self):
            yield batch
            before_batch()

"""TorchRL's RayCollector as a board on each node serves it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.collectors.distributed import RayCollector

from rlsync.torchrl_plugin.compat.distributed import waits_for_learner


class ActorWorkers:
    """The actors of a RayCollector, as the workers of a process collector are seen.

    Args:
        collector: may be under construction.
    """

    def __init__(self, collector: RayCollector) -> None:
        self._collector = weakref.ref(collector)
        self._workers_of_an_actor = _workers_of_an_actor(collector)
        self.num_workers = int(collector.num_collectors) * self._workers_of_an_actor
        self.in_flight = not waits_for_learner(collector) or issubclass(
            collector.collector_class, MultiAsyncCollector
        )

    @property
    def collector(self) -> RayCollector:
        """The collector itself."""
        collector = self._collector()
        if collector is None:
            raise ReferenceError("the collector is gone")
        return collector

    @property
    def actors(self) -> dict[int, Any]:
        """The actor of each worker, by the worker's number."""
        each, actors = self._workers_of_an_actor, self.collector.remote_collectors
        return {worker: actors[worker // each] for worker in range(len(actors) * each)}

    @property
    def procs(self) -> list[BaseProcess]:
        """None: Ray starts the processes, on any node."""
        return []

    @property
    def closed(self) -> bool:
        """Whether the actors were ended."""
        collector = self._collector()
        return collector is None or not collector.remote_collectors

    def get_model(self, model_id: str) -> nn.Module:
        """The learner's policy.

        Raises:
            ValueError: the learner has none, or it is asked for something else.
        """
        policy = policy_of_actors(self.collector)
        if model_id != "policy" or policy is None:
            raise ValueError(f"the learner holds no {model_id!r}")
        return policy

    def shutdown(self, timeout: float | None = None, *, raise_on_error: bool = True) -> None:
        """End the actors.

        Args:
            timeout: not used: Ray kills them.
            raise_on_error: not used: nothing is raised.
        """
        if not self.closed:
            self.collector.shutdown()


_workers: weakref.WeakKeyDictionary[RayCollector, ActorWorkers] = weakref.WeakKeyDictionary()


def actor_workers(collector: RayCollector) -> ActorWorkers:
    """The workers of ``collector``: always the same object, which lives as long as the collector."""
    return _workers.setdefault(collector, ActorWorkers(collector))


def policy_of_actors(collector: RayCollector) -> nn.Module | None:
    """The policy that the actors get from the learner; ``None`` if a policy_factory makes it there."""
    policy = collector.policy
    return policy if isinstance(policy, nn.Module) else None


def schemes_in_actors(collector: RayCollector) -> list[dict[str, object]]:
    """The schemes that each actor's own collector was given, by destination."""
    return [dict(arguments.get("weight_sync_schemes") or {}) for arguments in collector.collector_kwargs]


def _workers_of_an_actor(collector: RayCollector) -> int:
    """How many processes act in each actor: its own, or those of the collector that it holds."""
    if not issubclass(collector.collector_class, MultiCollector):
        return 1
    return int(collector.map_fn("num_workers")[0])


def actors_are_stamped(collector: RayCollector) -> bool:
    """Whether every actor writes ``policy_version`` on its frames."""
    return all(arguments.get("track_policy_version") for arguments in collector.collector_kwargs)


def calls_a_policy_service(collector: RayCollector) -> bool:
    """Whether the actors ask an inference server for their actions."""
    return collector._policy_service is not None


def sends_to_one_actor(collector: RayCollector) -> str:
    """The argument by which the collector sends weights to one worker at a time; empty if there is none."""
    if collector.max_weight_update_interval > -1:
        return f"max_weight_update_interval={collector.max_weight_update_interval}"
    return "update_after_each_batch=True" if collector.update_after_each_batch else ""


def needs_no_connection(collector: RayCollector, before_batch: Callable[[], None]) -> None:
    """Do not connect to the actors at the first update: it would wait for their rollouts.

    The collector also warns when it is iterated over before that. Both go when a scheme can say that its
    receivers are ready once they are registered.

    Args:
        collector: may be under construction.
        before_batch: called before the actors are asked for the next batch.
    """
    ref = weakref.ref(collector)

    def present() -> RayCollector:
        self = ref()
        if self is None:
            raise ReferenceError("the collector is gone")
        self._weight_sync_initialized = True
        return self

    def iterator() -> Iterator[TensorDictBase | None]:
        self = present()
        batches = type(self).iterator(self)
        while True:
            before_batch()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def lazily() -> None:
        present()

    collector.iterator = iterator
    collector._lazy_initialize_weight_sync = lazily

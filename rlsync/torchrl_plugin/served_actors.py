"""Which RayCollectors a RayBoardScheme serves, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchrl.collectors.distributed import RayCollector

from rlsync.core.errors import ConfigError
from rlsync.torchrl_plugin.compat import distributed
from rlsync.torchrl_plugin.compat.schemes import weights_of

if TYPE_CHECKING:
    from rlsync.transport.ray.learner import RayTransport

#: How long a version may take to all actors of a collector that waits for them, seconds.
ARRIVES_WITHIN_S = 120.0


class ServedActors:
    """A RayCollector.

    Args:
        collector: under construction; :func:`check_actors` has looked at it.
    """

    def __init__(self, collector: RayCollector) -> None:
        self._collector = collector
        self.workers = distributed.actor_workers(collector)

    def policy(self) -> object:
        """See :class:`Served`."""
        policy = distributed.policy_of_learner(self._collector)
        return None if policy is None else weights_of(policy)

    def ask_before_batches(self, transport: RayTransport) -> None:
        """Where actors wait for the learner, let the newest version come to them before they go on."""
        workers = self.workers

        def await_arrival() -> None:
            if not workers.in_flight:
                transport.await_arrival(ARRIVES_WITHIN_S, range(workers.num_workers))

        distributed.needs_no_connection(self._collector, await_arrival)


def check_actors(
    collector: object,
    destination: str,
    schemes: Mapping[str, object],
    kind: type[object],
    inner: type[object],
) -> None:
    """Refuse a collector whose actors boards cannot supply with exact stamps.

    Args:
        collector: under construction.
        destination: of the scheme that asks, for errors.
        schemes: all schemes of the collector.
        kind: what all of them must be.
        inner: what the schemes of the actors' own collectors must be, if these start worker processes.

    Raises:
        ConfigError: it is no RayCollector, or one whose frames would not say which weights acted.
    """
    where = f"weight_sync_schemes[{destination!r}] of {type(collector).__name__}"
    if not isinstance(collector, RayCollector):
        raise ConfigError(
            f"RayBoardScheme serves RayCollector, not {type(collector).__name__}",
            where,
            "use BoardScheme for collectors whose workers are processes of this host",
        )
    others = [name for name, scheme in schemes.items() if not isinstance(scheme, kind)]
    if others:
        raise ConfigError(
            f"the destinations of this collector do not share one version: {', '.join(others)}",
            where,
            "give every destination a RayBoardScheme",
        )
    if distributed.calls_a_policy_service(collector):
        raise ConfigError(
            "these actors ask an inference server for their actions, and hold no weights",
            where,
            "leave the scheme out, or give the collector the policy itself",
        )
    if not distributed.single_collectors(collector):
        _check_inner(collector, schemes, inner, where)
    if not distributed.actors_are_stamped(collector):
        raise ConfigError(
            "the frames of these actors would not say which weights acted",
            where,
            "pass collector_kwargs={'track_policy_version': True} to the RayCollector",
        )
    if argument := distributed.sends_to_one_actor(collector):
        raise ConfigError(
            "a board publishes to all workers at once, and this collector would send to one at a time",
            f"{where}, with {argument}",
            "leave it out: SyncWeights, or collector.update_policy_weights_(), publishes between batches",
        )


def _check_inner(
    collector: RayCollector, schemes: Mapping[str, object], inner: type[object], where: str
) -> None:
    name = collector.collector_class.__name__
    for given in distributed.schemes_in_actors(collector):
        if list(given) != ["policy"] or not isinstance(given["policy"], inner):
            raise ConfigError(
                f"a board does not reach the workers of a {name} in each actor",
                where,
                f"pass collector_kwargs={{'weight_sync_schemes': {{'policy': {inner.__name__}()}}, ...}}, or "
                "leave collector_class out, and give each environment an actor of its own",
            )
    if list(schemes) != ["policy"]:
        raise ConfigError(
            f"the workers of a {name} in each actor have one destination, not {', '.join(schemes)}",
            where,
            "leave collector_class out, and give each environment an actor of its own",
        )

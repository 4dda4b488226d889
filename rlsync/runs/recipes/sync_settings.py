"""The settings of publishing: the sync map, and when to publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_

from rlsync import ConfigError, Every, RlsyncError, Source, StepsAhead
from rlsync.runs.recipes.bounds import above_zero, caught, refuse
from rlsync.seams import Trigger, parse, user_input

WIRE_DTYPES = ("float32", "bfloat16", "float16")  #: what weights may be cast to on their way


@dataclass
class RouteConfig:
    """One entry of the sync map.

    With a ``dtype`` weights travel in it, and workers compute in it. Leaves whose name matches a pattern of
    ``exclude`` are not sent, those that match one of ``idle`` need not act; see :class:`rlsync.Source`.
    """

    destination: str = ""
    source: str = ""
    dtype: str | None = None
    exclude: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)


@dataclass
class WhenConfig:
    """When to publish: every so many units, when the learner is ahead, or whichever comes first."""

    #: Publish every so many units; null: do not count. Default: after every batch, so that workers act with
    #: the newest weights.
    every: int | float | None = 1
    #: Unit of "every": batches, frames, optim_steps or seconds. Default: batches, because synchronous workers
    #: adopt between batches.
    unit: str = "batches"
    #: Publish also when the learner has done more than so many optimizer steps since the last publish; null:
    #: do not count steps.
    steps_ahead: int | None = None


@dataclass
class SyncConfig:
    """The sync map, and when to publish; ``history`` is the number of receipts kept in memory."""

    #: The sync map, as a list. destination: a path on the collector. source: a path on the trainer. dtype:
    #: bfloat16 or float16 makes workers receive weights, and act, in half precision; null, the default, keeps
    #: the dtype. On the command line, name an entry by its number, from 0:
    #:
    #:   sync.map.0.dtype=bfloat16
    #:
    #: Overrides cannot change the length of the list; to have more or fewer entries give them all (quoted,
    #: for the shell):
    #:
    #:   'sync.map=[{destination:"policy.module[0]",source:loss_module.value_network},{destination:...}]'
    map: list[RouteConfig] = field(
        default_factory=lambda: [RouteConfig("policy", "loss_module.actor_network")]
    )
    when: WhenConfig = field(default_factory=WhenConfig)
    #: Number of receipts kept in memory; receipts.jsonl keeps all.
    history: int = above_zero(1000)
    #: Every so many seconds, compare the weights that act in the workers, and what their policies compute,
    #: with what the learner published; a difference ends the run. null: never compare.
    verify_every_s: float | None = 60.0
    #: Every how many versions schedule.bin has a digest of each leaf, by which rlsync rerun compares. So has
    #: the last version. null: no schedule is written, and the run cannot be made again.
    digest_every: int | None = above_zero(100)


def trigger(when: WhenConfig) -> Trigger:
    """The trigger that a config describes, or the ConfigError that it describes none."""
    refuse(trigger_errors(when))
    triggers = [make() for make in _makers(when)]
    return reduce(or_, triggers)


def verify_trigger(sync: SyncConfig) -> Trigger | None:
    """When a run compares what acts with what was published; None if it never does."""
    if sync.verify_every_s is None:
        return None
    return Every(sync.verify_every_s, "seconds")


def trigger_errors(when: WhenConfig) -> Iterator[RlsyncError]:
    for make in _makers(when):
        yield from caught(make, "sync.when")
    if when.every is None and when.steps_ahead is None:
        problem = "nothing says when to publish"
        cure = "give one of them, for example sync.when.every=1"
        yield ConfigError(problem, "sync.when: every and steps_ahead are both null", cure)


def _makers(when: WhenConfig) -> Iterator[Callable[[], Trigger]]:
    """What makes the triggers of which any one is enough."""
    if when.every is not None:
        yield partial(Every, when.every, when.unit)  # type: ignore[arg-type]
    if when.steps_ahead is not None:
        yield partial(StepsAhead, when.steps_ahead)


def sync_map(sync: SyncConfig) -> dict[str, str | Source]:
    """The map ``{destination: source}`` that a config lists, or the first of :func:`map_errors`."""
    refuse(map_errors(sync))
    routes: dict[str, str | Source] = {}
    for route in sync.map:
        routes[route.destination] = route.source
        if route.dtype or route.exclude or route.idle:
            routes[route.destination] = Source(
                route.source, route.dtype, tuple(route.exclude), tuple(route.idle)
            )
    return routes


def map_errors(sync: SyncConfig) -> Iterator[RlsyncError]:
    """All that is wrong with a map, without looking at a trainer or at workers."""
    if not sync.map:
        cure = "write sync.map=[{destination:policy,source:loss_module.actor_network}]"
        yield ConfigError("the sync map is empty", "sync.map", cure)
    destinations: set[str] = set()
    for entry, route in enumerate(sync.map):
        key = f"sync.map.{entry}"
        for side, path in (("destination", route.destination), ("source", route.source)):
            if path:
                yield from caught(lambda path=path: parse(path), f"{key}.{side}")  # type: ignore[misc]
            else:
                cure = "write {destination: policy, source: loss_module.actor_network}"
                yield ConfigError(f"an entry of the sync map has no {side}", key, cure)
        if (dtype := route.dtype) is not None:
            yield from caught(
                partial(user_input.check_choice, "dtype", dtype, WIRE_DTYPES, f"{key}.dtype")
            )
        if route.destination and route.destination in destinations:
            yield ConfigError(
                f"two entries of the sync map go to {route.destination!r}", key, "drop one"
            )
        destinations.add(route.destination)

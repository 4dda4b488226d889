"""Whether the weights of a trainer arrive: one publish of marked weights, looked for in every worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import parse, walk
from rlsync.tensors.compare import named_like
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.examine_sync import FoundSync, sync_of, untrained
from rlsync.torchrl_plugin.examine_workers import Held, NoAnswer, workers_of

Named = dict[str, Tensor]


class Outcome(Enum):
    """What became of the marked weights in one worker."""

    ARRIVED = "arrived"
    SHARED = "shared"
    LOST = "lost"
    PARTLY = "partly"
    ABSENT = "absent"
    DEAD = "dead"
    SILENT = "silent"
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One destination in one worker.

    Args:
        worker: which, with its pid.
        destination: the path on the worker's collector.
        outcome: what became of the marked weights; *shared* means that they were there before the publish.
        detail: more, in words.
    """

    worker: str
    destination: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """What :func:`examine` found.

    Args:
        trainer: its type.
        collector: its collector, in words.
        processes: whether it acts in processes of its own.
        sync: the hook that publishes, in words; empty when there is none.
        by_rlsync: whether it is one of rlsync's.
        routes: ``(destination, source)`` of what it sends.
        untrained: sources of which no optimizer of the trainer holds a leaf.
        problems: what went wrong with the publish and with the rollout after it.
        arrivals: one for each destination in each worker.
    """

    trainer: str
    collector: str
    processes: bool
    sync: str
    by_rlsync: bool
    routes: tuple[tuple[str, str], ...]
    untrained: tuple[str, ...]
    problems: tuple[str, ...]
    arrivals: tuple[Arrival, ...]


def examine(trainer: compat.Trainer, timeout_s: float = 60.0) -> Examination:
    """Change the learner's weights, publish once through the trainer's own hook, and look in every worker.

    What a worker holds is read through TorchRL's ``state_dict`` of collectors, in which no transport of
    weights has a part: before the publish, and after the rollout that follows it. Everything has a
    deadline. The learner's weights are afterwards what they were, bit by bit; the workers keep the marked
    ones until the next publish, and a batch of frames is used up.

    Args:
        trainer: with its collector, not training.
        timeout_s: how long a publish, a rollout, and the answers of the workers may take, each, in seconds.

    Returns:
        What was found; weights that do not arrive raise nothing.

    Raises:
        SourceNotFound: the trainer's map names a source that is not there.

    Example:
        >>> found = examine(trainer, timeout_s=30)  # doctest: +SKIP
        >>> [arrival.outcome for arrival in found.arrivals]  # doctest: +SKIP
        [<Outcome.LOST: 'lost'>]
    """
    sync, workers = sync_of(trainer), workers_of(trainer.collector)
    plain = {source.destination: source.read() for source in sync.sources}
    with marked(_weights(trainer, sync)):
        wanted = {s.destination: _changed(plain[s.destination], s.read()) for s in sync.sources}
        before = workers.ask(timeout_s)
        problems = (
            _within(timeout_s, "the publish", sync.publish),
            _within(timeout_s, "the rollout after the publish", workers.roll_out),
        )
        after = workers.ask(timeout_s)
    arrivals = [
        Arrival(name, destination, *_outcome(trainer.collector, destination, leaves, *held))
        for name, *held in zip(workers.names, before, after, strict=True)
        for destination, leaves in wanted.items()
    ]
    return Examination(
        trainer=type(trainer).__name__,
        collector=workers.description,
        processes=workers.processes,
        sync=sync.description,
        by_rlsync=sync.by_rlsync,
        routes=tuple((source.destination, source.description) for source in sync.sources),
        untrained=tuple(untrained(trainer, sync)),
        problems=tuple(filter(None, problems)),
        arrivals=tuple(arrivals),
    )


@contextmanager
def marked(weights: Iterable[Tensor]) -> Iterator[None]:
    """Change every floating-point number of ``weights`` inside, and put it back exactly.

    Example:
        >>> weight = torch.zeros(2)
        >>> with marked([weight]):
        ...     print(weight)
        tensor([0.1250, 0.1250])
        >>> weight
        tensor([0., 0.])
    """
    own = {memory_key(weight): weight.data for weight in weights if weight.is_floating_point()}
    kept = [weight.clone() for weight in own.values()]
    try:
        for weight in own.values():
            # Upwards, so that no number stays as it is; enough to survive a cast to half precision.
            weight.add_((weight.abs() + 1) / 8)
        yield
    finally:
        for weight, before in zip(own.values(), kept, strict=True):
            weight.copy_(before)


def _weights(trainer: compat.Trainer, sync: FoundSync) -> Iterator[Tensor]:
    """The parameters of the loss, and of the sources where these are others."""
    if isinstance(trainer.loss_module, nn.Module):
        yield from trainer.loss_module.parameters()
    for source in sync.sources:
        yield from (leaf.read() for leaf in source.leaves().leaves if leaf.kind == "parameter")


def _changed(before: Named, now: Named) -> Named:
    return {name: tensor for name, tensor in now.items() if not _same(tensor, before[name])}


def _within(timeout_s: float, what: str, call: Callable[[], object]) -> str:
    """Call, in a thread that is left behind when it takes too long; what went wrong, or an empty string."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the user wants to know
            raised.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        return f"{what} did not return within {timeout_s:g} s"
    return f"{what} raised {type(raised[0]).__name__}: {raised[0]}" if raised else ""


def _outcome(
    collector: object, destination: str, wanted: Named, before: Held | NoAnswer, after: Held | NoAnswer
) -> tuple[Outcome, str]:
    if isinstance(before, NoAnswer) or isinstance(after, NoAnswer):
        silence = before if isinstance(before, NoAnswer) else after
        assert isinstance(silence, NoAnswer)
        return (Outcome.DEAD if silence.dead else Outcome.SILENT), silence.why
    stood, stands = before.at(destination), after.at(destination)
    if not stands:
        return _nothing_there(collector, destination)
    if not wanted:
        return Outcome.UNREAD, "its source holds no weights that could be marked"
    there = _fitting(wanted, stands)
    if len(_fitting(wanted, stood)) == len(wanted):
        return Outcome.SHARED, "the change was there before the publish"
    if len(there) == len(wanted):
        return Outcome.ARRIVED, f"{len(wanted)} of {len(wanted)} tensors"
    if not there and all(_same(stands[name], stood[name]) for name in stood):
        return Outcome.LOST, f"none of {len(wanted)} tensors changed"
    missing = next(name for name in wanted if name not in there)
    return Outcome.PARTLY, f"{len(there)} of {len(wanted)} tensors; not, for one, {missing}"


def _fitting(wanted: Named, stands: Named) -> set[str]:
    """The names at the source of what a worker holds as it is wanted."""
    specs = Leaves(stands, "the worker").specs()
    there = named_like(list(wanted), specs)
    return {
        name
        for (name, tensor), at in zip(wanted.items(), there, strict=True)
        if at in stands and _same(tensor.cpu().to(stands[at].dtype), stands[at])
    }


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=one.is_floating_point())


def _nothing_there(collector: object, destination: str) -> tuple[Outcome, str]:
    if isinstance(collector, compat.Collector):
        try:
            walk(collector, parse(destination), error=DestinationNotFound, root_name="the collector")
        except DestinationNotFound as error:
            return Outcome.ABSENT, f"{error.what}; {error.cure}"
    return Outcome.UNREAD, "TorchRL's state_dict of the collector does not show it"

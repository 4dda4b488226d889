"""Do a trainer's weights reach its workers? Change them, publish once, and look into every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.trainers import Trainer

from rlsync.core.crossing import Crossing, crossings
from rlsync.core.errors import ConfigError, DestinationNotFound
from rlsync.core.path import parse, walk
from rlsync.sync.processes import tried
from rlsync.sync.sample import Judgement
from rlsync.sync.verification import Verification
from rlsync.tensors.compare import named_like
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.parts import memory_of
from rlsync.torchrl_plugin.collectors.choose import training_of
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.compat.schemes import schemes_of
from rlsync.torchrl_plugin.examine.sync import (
    Coverage,
    FoundSource,
    FoundSync,
    coverage_of,
    sync_of,
)
from rlsync.torchrl_plugin.examine.workers import ExaminedWorkers, Held, NoAnswer
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights
from rlsync.torchrl_plugin.worker_scheme import WorkerScheme

Named = dict[str, Tensor]

#: An average may be updated every so many steps only.
_STEPS = 100


class Outcome(Enum):
    """What happened to the changed weights in one worker."""

    ARRIVED = "arrived"  #: the worker holds all of them
    SHARED = "shared"  #: the worker held them before the publish: it shares the learner's memory
    LOST = "lost"  #: the worker holds none of them
    PARTLY = "partly"  #: the worker holds some of them
    ABSENT = "absent"  #: the worker's collector has no such destination
    DEAD = "dead"  #: the worker's process has ended
    SILENT = "silent"  #: the worker does not answer
    UNREAD = "unread"  #: the worker's weights cannot be read, or its source has none to change


@dataclass(frozen=True, slots=True)
class Arrival:
    """What happened to one destination in one worker, which is named by its number and pid."""

    worker: str
    destination: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """What :func:`examine` found."""

    trainer: str
    collector: str
    processes: bool  #: whether the collector has worker processes
    on_board: bool  #: whether these read a board or another transport of rlsync
    sync: str  #: the hook that publishes, in words; empty when there is none
    by_rlsync: bool  #: whether this hook is one of rlsync's
    routes: tuple[tuple[str, str], ...]  #: destination and source of each part that the hook sends
    coverage: Coverage
    crossings: tuple[Crossing, ...]  #: what a publish moves between which devices
    problems: tuple[str, ...]  #: errors of the publish, and of the rollout after it
    arrivals: tuple[Arrival, ...]  #: one for each destination in each worker
    #: of each worker that could be asked: whether what arrived also acts
    outputs: tuple[Judgement, ...]


def examine(trainer: Trainer, timeout_s: float = 60.0) -> Examination:
    """Change the learner's weights, publish, let workers collect, and compare what they hold.

    The trainer's own hook publishes. What workers hold is read through ``state_dict``, which uses no
    transport of weights. Each step may take ``timeout_s``. Afterwards the learner has its old weights;
    workers have them after the next publish.
    """
    sync = sync_of(trainer)
    workers = ExaminedWorkers.of(trainer.collector)
    plain = {source.destination: source.read() for source in sync.sources}
    moved = crossings_of(trainer, sync)
    with marked(_weights(trainer, sync)):
        wanted = {s.destination: _changed(plain[s.destination], s.read()) for s in sync.sources}
        before = workers.ask(timeout_s)
        asked = _watching(sync.hook)
        judge = None if sync.hook is None else sync.hook.bound.judge
        # One in this process is examined at its next publish; workers may be in a rollout with an older one.
        if asked is not None and not workers.processes:
            asked.ask(judge)
        problems = [_within(timeout_s, "the publish", sync.publish)]
        if asked is not None and workers.processes and not any(problems):
            asked.ask(judge)
        problems.append(_within(timeout_s, "the rollout after the publish", workers.roll_out))
        after = workers.ask(timeout_s)
    # Outside: where no transport keeps the version before, the weights of now stand for it.
    outputs = () if asked is None or any(problems) else asked.hear().behaviour
    coverage = coverage_of(trainer, sync)
    untrained = (s for s in sync.sources if s.description in coverage.untrained)
    coverage = replace(
        coverage,
        untrained=tuple(s.description for s in untrained if not _follows(trainer, s, timeout_s)),
    )
    arrivals = [
        Arrival(name, destination, *_outcome(trainer.collector, destination, leaves, *held))
        for name, *held in zip(workers.names, before, after, strict=True)
        for destination, leaves in wanted.items()
    ]
    return Examination(
        trainer=type(trainer).__name__,
        collector=workers.description,
        processes=workers.processes,
        on_board=any(isinstance(it, WorkerScheme) for it in schemes_of(trainer.collector).values()),
        sync=sync.description,
        by_rlsync=sync.by_rlsync,
        routes=tuple((source.destination, source.description) for source in sync.sources),
        coverage=coverage,
        crossings=moved,
        problems=tuple(filter(None, problems)),
        arrivals=tuple(arrivals),
        outputs=outputs,
    )


def _watching(sync: SyncWeights | None) -> Verification | None:
    """What asks the workers what their policies compute; None if they cannot be asked."""
    if sync is None:
        return None
    try:
        verification = sync.bound.endpoint.verification()
    except ConfigError:  # of this collector, or a VerifySync asks them
        return None
    verification.watch()
    return verification


@contextmanager
def marked(weights: Iterable[Tensor]) -> Iterator[None]:
    """Inside, every floating-point number of ``weights`` is changed; afterwards it has its old value."""
    parts = (part for weight in weights for part in memory_of(weight) if part.is_floating_point())
    own = {memory_key(part): part.data for part in parts}
    kept = [weight.clone() for weight in own.values()]
    try:
        for weight in own.values():
            # Every number grows, by enough to differ after a cast to half precision, too.
            weight.add_((weight.abs() + 1) / 8)
        yield
    finally:
        for weight, before in zip(own.values(), kept, strict=True):
            weight.copy_(before)


def _weights(trainer: Trainer, sync: FoundSync) -> Iterator[Tensor]:
    """The parameters of the loss, and of the sources if these are other modules."""
    if isinstance(trainer.loss_module, nn.Module):
        yield from trainer.loss_module.parameters()
    for source in sync.sources:
        yield from (leaf.read() for leaf in source.leaves().leaves if leaf.kind == "parameter")


def _follows(trainer: Trainer, source: FoundSource, timeout_s: float) -> bool:
    """Whether a source that no optimizer holds follows the trained weights in some steps, as averages do."""
    training = training_of(trainer)
    held = [leaf.read() for leaf in source.leaves().leaves]
    modules = [*training.losses().values()]
    if (
        source.has_path
        and (network := training.network_of(trainer, parse(source.description))) is not None
    ):
        modules.append(network[1])
    for module in modules:
        held += [part for t in (*module.parameters(), *module.buffers()) for part in memory_of(t)]
    kept = [tensor.detach().clone() for tensor in held]
    before = source.read()

    def follow() -> None:
        for _ in range(_STEPS):
            trainers.call_after_a_step(trainer)
            if _changed(before, source.read()):
                return

    try:
        with marked(training.parameters()):
            _within(timeout_s, "what follows an optimizer's step", follow)
            return bool(_changed(before, source.read()))
    finally:
        for tensor, old in zip(held, kept, strict=True):
            tensor.data.copy_(old)


def _changed(before: Named, now: Named) -> Named:
    return {name: tensor for name, tensor in now.items() if not _same(tensor, before[name])}


def _within(timeout_s: float, what: str, call: Callable[[], object]) -> str:
    """Call it; returns the problem, or an empty string."""
    called = tried(call, timeout_s, what)
    if not called.done():
        return f"{what} did not return within {timeout_s:g} s"
    error = called.exception()
    if error is None:
        return ""
    return f"{what} raised {type(error).__name__}: {error}"


def _outcome(
    collector: object,
    destination: str,
    wanted: Named,
    before: Held | NoAnswer,
    after: Held | NoAnswer,
) -> tuple[Outcome, str]:
    if isinstance(before, NoAnswer) or isinstance(after, NoAnswer):
        silence = before if isinstance(before, NoAnswer) else after
        assert isinstance(silence, NoAnswer)
        return (Outcome.DEAD if silence.dead else Outcome.SILENT), silence.why
    old = before.at(destination)
    new = after.at(destination)
    if not new:
        return _nothing_there(collector, destination)
    if not wanted:
        return Outcome.UNREAD, "its source has no weights that can be changed"
    there = _fitting(wanted, new)
    if len(_fitting(wanted, old)) == len(wanted):
        return Outcome.SHARED, "it had the change before the publish"
    if len(there) == len(wanted):
        return Outcome.ARRIVED, f"{len(wanted)} of {len(wanted)} tensors"
    if not there and all(_same(new[name], old[name]) for name in old):
        return Outcome.LOST, f"none of {len(wanted)} tensors changed"
    missing = next(name for name in wanted if name not in there)
    return Outcome.PARTLY, f"{len(there)} of {len(wanted)} tensors; not, for one, {missing}"


def _fitting(wanted: Named, held: Named) -> set[str]:
    """The source names of the tensors that have the wanted values in the worker."""
    specs = Leaves(held, "the worker").specs()
    there = named_like(list(wanted), specs)
    return {
        name
        for (name, tensor), at in zip(wanted.items(), there, strict=True)
        if at in held and _same(tensor.cpu().to(held[at].dtype), held[at])
    }


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=one.is_floating_point())


def _nothing_there(collector: object, destination: str) -> tuple[Outcome, str]:
    if isinstance(collector, Collector):
        try:
            _module_at(collector, destination)
        except DestinationNotFound as error:
            return Outcome.ABSENT, f"{error.what}; {error.cure}"
    return Outcome.UNREAD, "TorchRL's state_dict of the collector does not show it"


def crossings_of(trainer: Trainer, sync: FoundSync) -> tuple[Crossing, ...]:
    """What one publish moves from which device to which. Without rlsync's hook only the CPU is seen."""
    if sync.hook is not None:
        return sync.hook.plan.crossings
    return crossings(
        leaf for source in sync.sources for leaf in _leaf_by_leaf(trainer.collector, source)
    )


def _leaf_by_leaf(collector: object, source: FoundSource) -> Iterator[Crossing]:
    sent = source.sent()
    names = [leaf.name for leaf in sent]
    live: dict[str, Tensor] = {}
    if isinstance(collector, Collector):
        with suppress(DestinationNotFound):
            there = Leaves(
                _module_at(collector, source.destination), f"collector.{source.destination}"
            )
            names = named_like(names, there.specs())
            live = dict(zip(there.names, there.tensors(), strict=True))
    for leaf, name in zip(sent, names, strict=True):
        tensor = leaf.read()
        held = live.get(name)
        aliased = held is not None and memory_key(held) == memory_key(tensor)
        device = "" if held is None else str(held.device)
        copied_bytes = 0 if aliased else tensor.nbytes
        yield Crossing(str(tensor.device), device, False, int(aliased), copied_bytes)


def _module_at(collector: Collector, destination: str) -> object:
    return walk(collector, parse(destination), error=DestinationNotFound, root_name="the collector")

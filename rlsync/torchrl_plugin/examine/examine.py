"""Do a trainer's weights reach its workers? Change them, publish once, and look into every worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    # With other weights than before, publish, and look into the workers before and after.
    with marked(_weights(trainer, sync)):
        wanted: dict[str, Named] = {}
        for source in sync.sources:
            wanted[source.destination] = _changed(plain[source.destination], source.read())
        before = workers.ask(timeout_s)
        verification = _watching(sync.hook)
        judge = None
        if sync.hook is not None:
            judge = sync.hook.bound.judge
        # One in this process is examined at its next publish; workers may be in a rollout with an older one.
        if verification is not None and not workers.processes:
            verification.ask(judge)
        problems = [_within(timeout_s, "the publish", sync.publish)]
        if verification is not None and workers.processes and not any(problems):
            verification.ask(judge)
        problems.append(_within(timeout_s, "the rollout after the publish", workers.roll_out))
        after = workers.ask(timeout_s)

    # Outside: where no transport keeps the version before, the weights of now stand for it.
    outputs: tuple[Judgement, ...] = ()
    if verification is not None and not any(problems):
        outputs = verification.hear().behaviour
    coverage = _without_followers(coverage_of(trainer, sync), trainer, sync, timeout_s)
    schemes = schemes_of(trainer.collector).values()
    return Examination(
        trainer=type(trainer).__name__,
        collector=workers.description,
        processes=workers.processes,
        on_board=any(isinstance(scheme, WorkerScheme) for scheme in schemes),
        sync=sync.description,
        by_rlsync=sync.by_rlsync,
        routes=tuple((source.destination, source.description) for source in sync.sources),
        coverage=coverage,
        crossings=moved,
        problems=tuple(filter(None, problems)),
        arrivals=tuple(_arrivals(workers, wanted, before, after)),
        outputs=outputs,
    )


def _arrivals(
    workers: ExaminedWorkers,
    wanted: Mapping[str, Named],
    before: Sequence[Held | NoAnswer],
    after: Sequence[Held | NoAnswer],
) -> Iterator[Arrival]:
    for worker, old, new in zip(workers.names, before, after, strict=True):
        for destination, changed in wanted.items():
            outcome, detail = _outcome(workers.collector, destination, changed, old, new)
            yield Arrival(worker, destination, outcome, detail)


def _without_followers(
    coverage: Coverage, trainer: Trainer, sync: FoundSync, timeout_s: float
) -> Coverage:
    """Call no source untrained that follows the trained weights."""
    untrained = []
    for source in sync.sources:
        name = source.description
        if name in coverage.untrained and not _follows(trainer, source, timeout_s):
            untrained.append(name)
    return replace(coverage, untrained=tuple(untrained))


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
    # Weights may share memory, which must change once.
    memory: dict[object, Tensor] = {}
    for weight in weights:
        for part in memory_of(weight):
            if part.is_floating_point():
                memory[memory_key(part)] = part.data
    originals = [part.clone() for part in memory.values()]
    try:
        for part in memory.values():
            # Every number grows, by enough to differ after a cast to half precision, too.
            part.add_((part.abs() + 1) / 8)
        yield
    finally:
        for part, original in zip(memory.values(), originals, strict=True):
            part.copy_(original)


def _weights(trainer: Trainer, sync: FoundSync) -> Iterator[Tensor]:
    """The parameters of the loss, and of the sources if these are other modules."""
    if isinstance(trainer.loss_module, nn.Module):
        yield from trainer.loss_module.parameters()
    for source in sync.sources:
        for leaf in source.leaves().leaves:
            if leaf.kind == "parameter":
                yield leaf.read()


def _follows(trainer: Trainer, source: FoundSource, timeout_s: float) -> bool:
    """Whether a source that no optimizer holds follows the trained weights in some steps, as averages do."""
    # All that such steps may write to, which gets its old values back.
    training = training_of(trainer)
    tensors = [leaf.read() for leaf in source.leaves().leaves]
    modules = list(training.losses().values())
    if source.has_path:
        network = training.network_of(trainer, parse(source.description))
        if network is not None:
            modules.append(network[1])
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            tensors += memory_of(tensor)
    originals = [tensor.detach().clone() for tensor in tensors]
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
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data.copy_(original)


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
    if isinstance(before, NoAnswer):
        return _silence(before)
    if isinstance(after, NoAnswer):
        return _silence(after)
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


def _silence(no_answer: NoAnswer) -> tuple[Outcome, str]:
    if no_answer.dead:
        return Outcome.DEAD, no_answer.why
    return Outcome.SILENT, no_answer.why


def _fitting(wanted: Named, in_worker: Named) -> set[str]:
    """The source names of the tensors that have the wanted values in the worker."""
    specs = Leaves(in_worker, "the worker").specs()
    there = named_like(list(wanted), specs)
    fitting: set[str] = set()
    for (name, tensor), at in zip(wanted.items(), there, strict=True):
        live = in_worker.get(at)
        if live is not None and _same(tensor.cpu().to(live.dtype), live):
            fitting.add(name)
    return fitting


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
    leaves: list[Crossing] = []
    for source in sync.sources:
        leaves += _leaf_by_leaf(trainer.collector, source)
    return crossings(leaves)


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
        device = ""
        aliased = False
        if name in live:
            device = str(live[name].device)
            aliased = memory_key(live[name]) == memory_key(tensor)
        copied_bytes = tensor.nbytes
        if aliased:
            copied_bytes = 0
        yield Crossing(
            str(tensor.device),
            device,
            through_host=False,
            aliased_leaves=int(aliased),
            copied_bytes=copied_bytes,
        )


def _module_at(collector: Collector, destination: str) -> object:
    return walk(collector, parse(destination), error=DestinationNotFound, root_name="the collector")

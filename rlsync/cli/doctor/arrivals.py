"""Turn the examination of a trainer into findings: verdicts and cures."""

from __future__ import annotations

from collections.abc import Iterator

from rlsync.cli.doctor.finding import Finding, Grade
from rlsync.core.plan import listed
from rlsync.torchrl_plugin.examine.examine import Arrival, Examination, Outcome

_NAMES = 3


def findings_of(found: Examination) -> list[Finding]:
    """The findings of an examination, one for each line of the report."""
    return [
        Finding("ok", "trainer", f"{found.trainer}; {found.collector}"),
        _sync(found),
        *_sources(found),
        *(Finding("ok", "devices", str(crossing)) for crossing in found.crossings),
        *(Finding("fail", "publish", problem, _cure_of_lost(found)) for problem in found.problems),
        *(_arrival(found, arrival) for arrival in found.arrivals),
    ]


def _sync(found: Examination) -> Finding:
    routes = ", ".join(f"{destination} from {source}" for destination, source in found.routes)
    if found.sync:
        return Finding("ok", "sync", f"{found.sync}: {routes or 'it is not known what it sends'}")
    return Finding("warn", "sync", f"no hook publishes weights; checked {routes or 'nothing'}", _adopt(found))


def _sources(found: Examination) -> Iterator[Finding]:
    covered = found.coverage
    for source in covered.untrained:
        cure = "name the module that the optimizer trains"
        if not source.endswith("_params"):
            cure += f"; TorchRL's losses keep it under {source}_params"
        yield Finding("warn", "source", f"no optimizer of the trainer holds a tensor of {source}", cure)
    if covered.frozen:
        cure = "give them to the optimizer, unless they are frozen on purpose"
        said = f"sent, and in no optimizer: {listed(covered.frozen, _NAMES)}"
        yield Finding("warn", "frozen", said, cure)
    if covered.unsent:
        cure = "name a source that contains them, unless the workers do not need them"
        said = f"trained, and not sent: {listed(covered.unsent, _NAMES)}"
        yield Finding("warn", "unsent", said, cure)


def _arrival(found: Examination, arrival: Arrival) -> Finding:
    verdict, said, cure = _judge(found, arrival)
    return Finding(verdict, f"{arrival.destination} of {arrival.worker}", f"{said}: {arrival.detail}", cure)


def _judge(found: Examination, arrival: Arrival) -> tuple[Grade, str, str]:
    match arrival.outcome:
        case Outcome.ARRIVED:
            return "ok", "the weights arrive", ""
        case Outcome.SHARED if not found.processes:
            return "ok", "acts with the learner's own memory and needs no publish", ""
        case Outcome.SHARED:
            said = "acts with the learner's own memory, which changes during rollouts, without a version"
            return "warn", said, _adopt(found)
        case Outcome.LOST:
            return "fail", "the weights never arrive", _cure_of_lost(found)
        case Outcome.PARTLY:
            cure = f"{_adopt(found)} refuses a map that leaves tensors out, and names them"
            return "fail", "some weights do not arrive", cure
        case Outcome.ABSENT:
            cure = "correct the map; rlsync.SyncWeights refuses such a map before anything runs"
            return "fail", "the weights never arrive", cure
        case Outcome.DEAD:
            return "fail", "is dead", "look for the worker's own error above"
        case Outcome.SILENT:
            return (
                "fail",
                "does not answer",
                "find out where it hangs (py-spy dump), or give a longer --timeout-s",
            )
        case Outcome.UNREAD:
            cure = "rlsync.VerifySync(sync).register(trainer) compares digests during training"
            return "warn", "cannot be read", cure


def _cure_of_lost(found: Examination) -> str:
    if found.by_rlsync:
        return "rlsync explain FILE.py:FUNCTION shows what the map moves"
    if found.processes:
        return _adopt(found)
    return f"TorchRL ignores a map on a collector without schemes, without an error; {_adopt(found)}"


def _adopt(found: Examination) -> str:
    """The code that lets rlsync publish."""
    routes = ", ".join(
        f"{destination!r}: {source!r}" for destination, source in found.routes if " " not in source
    )
    sync = f"rlsync.SyncWeights({{{routes or repr('policy') + ': ...'}}}).register(trainer)"
    if not found.processes:
        return sync
    return f"weight_sync_schemes={{'policy': rlsync.BoardScheme()}} on the collector, and {sync}"

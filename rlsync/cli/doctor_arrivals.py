"""What the examination of a trainer means to its owner: verdicts and cures."""

from __future__ import annotations

from collections.abc import Iterator

from rlsync.cli.doctor_finding import Finding, Verdict
from rlsync.torchrl_plugin.examine import Arrival, Examination, Outcome


def findings_of(found: Examination) -> list[Finding]:
    """An examination, line by line."""
    return [
        Finding("ok", "trainer", f"{found.trainer}; {found.collector}"),
        _sync(found),
        *_sources(found),
        *(Finding("fail", "publish", problem, _cure_of_lost(found)) for problem in found.problems),
        *(_arrival(found, arrival) for arrival in found.arrivals),
    ]


def _sync(found: Examination) -> Finding:
    routes = ", ".join(f"{destination} from {source}" for destination, source in found.routes)
    if found.sync:
        return Finding("ok", "sync", f"{found.sync}: {routes or 'nothing known of what it sends'}")
    return Finding(
        "warn", "sync", f"no hook publishes weights; looked for {routes or 'nothing'}", _adopt(found)
    )


def _sources(found: Examination) -> Iterator[Finding]:
    for source in found.untrained:
        cure = f"name what is trained; TorchRL's losses keep it under {source}_params"
        yield Finding("warn", "source", f"no optimizer of the trainer holds a tensor of {source}", cure)


def _arrival(found: Examination, arrival: Arrival) -> Finding:
    verdict, said, cure = _judge(found, arrival)
    return Finding(verdict, f"{arrival.destination} of {arrival.worker}", f"{said}: {arrival.detail}", cure)


def _judge(found: Examination, arrival: Arrival) -> tuple[Verdict, str, str]:
    match arrival.outcome:
        case Outcome.ARRIVED:
            return "ok", "the weights arrive", ""
        case Outcome.SHARED if not found.processes:
            return "ok", "acts with the learner's own memory, needs no publish", ""
        case Outcome.SHARED:
            said = (
                "acts with the learner's own memory, which changes in the middle of its rollouts, unversioned"
            )
            return "warn", said, _adopt(found)
        case Outcome.LOST:
            return "fail", "the weights never arrive", _cure_of_lost(found)
        case Outcome.PARTLY:
            cure = f"{_adopt(found)} refuses a map that leaves tensors out, and says which"
            return "fail", "the weights arrive in part", cure
        case Outcome.ABSENT:
            cure = "correct the map; rlsync.SyncWeights refuses one that leads nowhere, before anything runs"
            return "fail", "the weights never arrive", cure
        case Outcome.DEAD:
            return "fail", "is dead", "look for the worker's own error above"
        case Outcome.SILENT:
            return (
                "fail",
                "does not answer",
                "look where it hangs (py-spy dump), or give a longer --timeout-s",
            )
        case Outcome.UNREAD:
            cure = "rlsync.VerifySync(sync).register(trainer) compares fingerprints while it trains"
            return "warn", "cannot be read", cure


def _cure_of_lost(found: Examination) -> str:
    if found.by_rlsync:
        return "rlsync explain FILE.py:FUNCTION shows what the map moves"
    if found.processes:
        return _adopt(found)
    return f"TorchRL drops a map on a collector without schemes, in silence; {_adopt(found)}"


def _adopt(found: Examination) -> str:
    """How to let rlsync do it."""
    routes = ", ".join(
        f"{destination!r}: {source!r}" for destination, source in found.routes if " " not in source
    )
    sync = f"rlsync.SyncWeights({{{routes or repr('policy') + ': ...'}}}).register(trainer)"
    if not found.processes:
        return sync
    return f"weight_sync_schemes={{'policy': rlsync.BoardScheme()}} on the collector, and {sync}"

"""What ``rlsync doctor`` says: a verdict on each thing that it looked at, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlsync.core.plan import listed
from rlsync.sync.verification import OUTPUTS_CURE
from rlsync.torchrl_plugin.examine.examine import Arrival, Examination, Outcome

Grade = Literal["ok", "warn", "fail"]

#: What to do about a process that does not answer.
HANGS = "find out where it hangs (py-spy dump), or give a longer --timeout-s"
_NAMES = 3  #: how many tensors are named


@dataclass(frozen=True, slots=True)
class Finding:
    verdict: Grade
    what: str
    found: str
    cure: str = ""


def worst(findings: list[Finding]) -> Grade:
    order: tuple[Grade, ...] = ("ok", "warn", "fail")
    return max((finding.verdict for finding in findings), key=order.index, default="ok")


def findings_of(examination: Examination) -> list[Finding]:
    """A verdict on each part of an examined trainer."""
    findings = [
        Finding("ok", "trainer", f"{examination.trainer}; {examination.collector}"),
        _sync(examination),
        *_sources(examination),
    ]
    for crossing in examination.crossings:
        findings.append(Finding("ok", "devices", str(crossing)))
    for problem in examination.problems:
        findings.append(Finding("fail", "publish", problem, _cure_of_lost(examination)))
    for arrival in examination.arrivals:
        findings.append(_arrival(examination, arrival))
    # said once if it is said of several workers
    findings += dict.fromkeys(_outputs(examination))
    return findings


def _sync(examination: Examination) -> Finding:
    routes = ", ".join(f"{destination} from {source}" for destination, source in examination.routes)
    if examination.sync:
        moved = routes or "it is not known what it sends"
        return Finding("ok", "sync", f"{examination.sync}: {moved}")
    problem = f"no hook publishes weights; checked {routes or 'nothing'}"
    return Finding("warn", "sync", problem, _adopt(examination))


def _sources(examination: Examination) -> Iterator[Finding]:
    covered = examination.coverage
    for source in covered.untrained:
        problem = f"no optimizer of the trainer holds a tensor of {source}"
        cure = "name the module that the optimizer trains, or give the optimizer the parameters of this one"
        if "." in source and not source.endswith("_params"):  # a part of a loss
            cure += f"; TorchRL's losses keep it under {source}_params"
        yield Finding("warn", "source", problem, cure)
    for stuck in covered.stuck:
        yield Finding("warn", "source", stuck.what, stuck.cure)
    if covered.unheld:
        problem = f"sent, and in no optimizer: {listed(covered.unheld, _NAMES)}"
        cure = "give them to the optimizer, unless they are frozen on purpose"
        yield Finding("warn", "unheld", problem, cure)
    if covered.unsent:
        problem = f"trained, and not sent: {listed(covered.unsent, _NAMES)}"
        cure = "name a source that contains them, unless the workers do not need them"
        yield Finding("warn", "unsent", problem, cure)
    if covered.unreached:
        problem = f"in the workers, and in no entry: {listed(covered.unreached, _NAMES)}"
        cure = "give them an entry, unless they are to stay as they are"
        yield Finding("warn", "unreached", problem, cure)


def _arrival(examination: Examination, arrival: Arrival) -> Finding:
    verdict, outcome, cure = _judge(examination, arrival)
    subject = f"{arrival.destination} of {arrival.worker}"
    return Finding(verdict, subject, f"{outcome}: {arrival.detail}", cure)


def _outputs(examination: Examination) -> Iterator[Finding]:
    """Whether what arrived also acts."""
    for judged in examination.outputs:
        for why in judged.wrong:
            yield Finding("fail", "outputs", why, OUTPUTS_CURE)
    for judged in examination.outputs:
        for why in judged.untold:
            yield Finding("ok", "outputs", f"not compared: {why}")
        if judged.held and not judged.wrong:
            same = "the policies compute what the learner's module computes"
            yield Finding("ok", "outputs", same)


def _judge(examination: Examination, arrival: Arrival) -> tuple[Grade, str, str]:
    match arrival.outcome:
        case Outcome.ARRIVED:
            return "ok", "the weights arrive", ""
        case Outcome.SHARED if not examination.processes:
            return "ok", "acts with the learner's own memory and needs no publish", ""
        case Outcome.SHARED:
            problem = "acts with the learner's own memory, which changes during rollouts, without a version"
            return "warn", problem, _adopt(examination)
        case Outcome.LOST:
            return "fail", "the weights never arrive", _cure_of_lost(examination)
        case Outcome.PARTLY:
            cure = f"{_adopt(examination)} refuses a map that leaves tensors out, and names them"
            return "fail", "some weights do not arrive", cure
        case Outcome.ABSENT:
            cure = "correct the map; rlsync.SyncWeights refuses such a map before anything runs"
            return "fail", "the weights never arrive", cure
        case Outcome.DEAD:
            return "fail", "is dead", "look for the worker's own error above"
        case Outcome.SILENT:
            return "fail", "does not answer", HANGS
        case Outcome.UNREAD:
            cure = "rlsync.VerifySync(sync).register(trainer) compares weights and outputs during training"
            return "warn", "cannot be read", cure


def _cure_of_lost(examination: Examination) -> str:
    if examination.by_rlsync:
        return "rlsync explain FILE.py:FUNCTION shows what the map moves"
    adopt = _adopt(examination)
    if examination.processes:
        return adopt
    return f"TorchRL ignores a map on a collector without schemes, without an error; {adopt}"


def _adopt(examination: Examination) -> str:
    """The code that lets rlsync publish."""
    routes = []
    for name, source in examination.routes:
        if " " not in source:
            routes.append(f"{name!r}: {source!r}")
    sync_map = ", ".join(routes) or "'policy': ..."
    sync = f"rlsync.SyncWeights({{{sync_map}}}).register(trainer)"
    if examination.on_board or not examination.processes:
        return sync
    return f"weight_sync_schemes={{'policy': rlsync.BoardScheme()}} on the collector, and {sync}"

"""``rlsync doctor``: checks this machine, whether a trainer's weights reach its workers, and environments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, astuple
from typing import Any

from rich.console import Console
from rich.text import Text

from rlsync.core.plan import listed
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.cli import users_trainer
from rlsync.runs.cli.machine import Finding, Grade, machine, packages, worst
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.cli.users_trainer import FORM, MEANING, TIMEOUT_S, NamedTrainer, Say
from rlsync.runs.config import command_line
from rlsync.runs.evaluation.try_out import overwritten
from rlsync.runs.life.job import jobs_of
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.settings import Config, EnvConfig
from rlsync.runs.recipes.spaces import played
from rlsync.sync.verification import OUTPUTS_CURE
from rlsync.torchrl_plugin.examine.examine import Arrival, Examination, Outcome, examine

_EXAMPLES = """examples:
  rlsync doctor                           can this machine run rlsync?
  rlsync doctor --trainer train.py:build  do my trainer's weights reach its workers?
  rlsync doctor --env env.id=CartPole-v1  does its seed decide what the environment does?
  rlsync doctor --markdown                a table to paste into a bug report
  rlsync doctor --json                    the same as JSON

--trainer runs the file in a process of its own, changes the learner's weights, publishes once through
the trainer's own hook (rlsync's or TorchRL's), looks into every worker, and ends every process it started.
--env uses two processes, whose global random generators differ, one seed and the same actions. It also says
whether the environment writes into an answer later, as TorchRL's GymEnv does not allow.

exit status: 0 no check fails (there may be warnings), 1 a check fails, 2 a wrong command line
"""
#: An examination has four steps: two questions to the workers, a publish and a rollout. Each has a deadline.
_STEPS = 4
_NAMES = 3
_COLOURS: dict[Grade, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def parser() -> argparse.ArgumentParser:
    about = "Check this machine, and whether a trainer's weights reach its workers."
    found = parser_of("doctor", about, _EXAMPLES)
    trainer = found.add_mutually_exclusive_group()
    trainer.add_argument("--trainer", metavar=FORM, help=MEANING)
    trainer.add_argument("target", nargs="?", metavar=FORM, help="the same without --trainer")
    env = "play an environment twice, and compare; what follows are overrides as for rlsync train"
    trainer.add_argument("--env", nargs=argparse.REMAINDER, metavar="OVERRIDE", help=env)
    steps = "running the file, building the trainer, a publish, a rollout, an answer"
    limit = f"seconds for each step: {steps} (default {TIMEOUT_S:g})"
    found.add_argument("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help=limit)
    form = found.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return found


def main(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    named = given.target if given.trainer is None else given.trainer
    target = None if named is None else users_trainer.target_of(named)
    jobs = [] if given.env is None else jobs_of(command_line.read(given.env))
    findings = [f for job in jobs for f in env_findings(job.config, given.timeout_s)]
    findings = findings or [*packages(), *machine()]
    if target is not None:
        findings += trainer_findings(target, given.timeout_s)
    if given.json:
        print_document(as_json(findings))
    elif given.markdown:
        print(as_markdown(findings))
    else:
        show(findings, Console())
    if worst(findings) == "fail":
        return 1
    return 0


def as_json(findings: list[Finding]) -> str:
    """``{"verdict": ..., "findings": [{"verdict", "what", "found", "cure"}, ...]}``."""
    return json_of({"verdict": worst(findings), "findings": [asdict(f) for f in findings]})


def as_markdown(findings: list[Finding]) -> str:
    """A Markdown table. Its cells contain no line breaks and no bars."""
    cells = [[" ".join(text.split()).replace("|", "\\|") for text in astuple(f)] for f in findings]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(["| | what | found | cure |", "|---|---|---|---|", *lines])


def show(findings: list[Finding], console: Console) -> None:
    """Print one line for each finding, with its cure below it. Nothing is cut off."""
    width = max((len(finding.what) for finding in findings), default=0)
    for finding in findings:
        verdict = (f"{finding.verdict:<6}", _COLOURS[finding.verdict])
        console.print(
            Text.assemble(verdict, f"{finding.what:<{width}}  {finding.found}"), soft_wrap=True
        )
        if finding.cure:
            console.print(Text(f"      cure  {finding.cure}", style="italic"), soft_wrap=True)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _COLOURS}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))


def env_findings(config: Config, timeout_s: float) -> list[Finding]:
    """Play an environment in two processes, and say whether its seed decides what it answers.

    And whether it writes into an answer later.
    """
    env = config.env
    seed = config.seed
    said: list[Any] = [
        users_trainer.run_apart(_play, env, seed, each, timeout_s) for each in (1, 2)
    ]
    for each in said:
        if isinstance(each, users_trainer.Failed):
            return [Finding("fail", env.id, each.why, each.cure)]
    (one, written), (other, _) = said
    return [_decided(env.id, one, other), *(_written(env.id, part) for part in written)]


def _decided(name: str, *plays: list[tuple[str, dict[str, int]]]) -> Finding:
    for (moment, one), (_, other) in zip(*plays, strict=False):
        for key in (key for key in one if one[key] != other[key]):
            problem = f"the environment is not decided by its seed: the {key} of {moment} differs"
            cure = "draw from self.np_random alone, which reset(seed=...) seeds; and let no clock decide"
            return Finding("fail", name, problem, cure)
    same = f"{len(plays[0]):,} answers in two processes are equal bit by bit"
    return Finding("ok", name, f"the environment is decided by its seed: {same}")


def _written(name: str, part: str) -> Finding:
    problem = f"the environment writes into its {part} after it has answered: recipes copy it, and frames of "
    problem += "TorchRL's GymEnv and GymWrapper would show what came later"
    return Finding("warn", name, problem, "return a new array each time, for example array.copy()")


def _play(env: EnvConfig, seed: int, elsewhere: int, timeout_s: float, say: Say) -> None:
    say(users_trainer.Stage(f"playing {env.id}", timeout_s))
    plays = [*played(env, seed, elsewhere)]
    spec = env.spec()
    say((plays, overwritten(spec, seed) if isinstance(spec, GymnasiumEnvs) else []))


def trainer_findings(target: NamedTrainer, timeout_s: float) -> list[Finding]:
    said = users_trainer.run_apart(_examine, target, timeout_s)
    if isinstance(said, users_trainer.Failed):
        return [Finding("fail", "trainer", said.why, said.cure)]
    assert isinstance(said, Examination)
    return findings_of(said)


def _examine(target: NamedTrainer, timeout_s: float, say: Say) -> None:
    trainer = users_trainer.build(target, timeout_s, say)
    say(users_trainer.Stage("examining it", (_STEPS + 1) * timeout_s))
    say(examine(trainer, timeout_s))
    trainer.shutdown()


def findings_of(found: Examination) -> list[Finding]:
    return [
        Finding("ok", "trainer", f"{found.trainer}; {found.collector}"),
        _sync(found),
        *_sources(found),
        *(Finding("ok", "devices", str(crossing)) for crossing in found.crossings),
        *(Finding("fail", "publish", problem, _cure_of_lost(found)) for problem in found.problems),
        *(_arrival(found, arrival) for arrival in found.arrivals),
        *_outputs(found),
    ]


def _sync(found: Examination) -> Finding:
    routes = ", ".join(f"{destination} from {source}" for destination, source in found.routes)
    if found.sync:
        return Finding("ok", "sync", f"{found.sync}: {routes or 'it is not known what it sends'}")
    return Finding(
        "warn", "sync", f"no hook publishes weights; checked {routes or 'nothing'}", _adopt(found)
    )


def _sources(found: Examination) -> Iterator[Finding]:
    covered = found.coverage
    for source in covered.untrained:
        cure = "name the module that the optimizer trains, or give the optimizer the parameters of this one"
        if "." in source and not source.endswith("_params"):  # a part of a loss
            cure += f"; TorchRL's losses keep it under {source}_params"
        yield Finding(
            "warn", "source", f"no optimizer of the trainer holds a tensor of {source}", cure
        )
    yield from (Finding("warn", "source", why.what, why.cure) for why in covered.stuck)
    if covered.unheld:
        cure = "give them to the optimizer, unless they are frozen on purpose"
        yield Finding(
            "warn", "unheld", f"sent, and in no optimizer: {listed(covered.unheld, _NAMES)}", cure
        )
    if covered.unsent:
        cure = "name a source that contains them, unless the workers do not need them"
        yield Finding(
            "warn", "unsent", f"trained, and not sent: {listed(covered.unsent, _NAMES)}", cure
        )
    if covered.unreached:
        told = f"in the workers, and in no entry: {listed(covered.unreached, _NAMES)}"
        yield Finding(
            "warn", "unreached", told, "give them an entry, unless they are to stay as they are"
        )


def _arrival(found: Examination, arrival: Arrival) -> Finding:
    verdict, said, cure = _judge(found, arrival)
    return Finding(
        verdict, f"{arrival.destination} of {arrival.worker}", f"{said}: {arrival.detail}", cure
    )


def _outputs(found: Examination) -> Iterator[Finding]:
    """Whether what arrived also acts; said once if it is said of several workers."""
    said = [
        Finding("fail", "outputs", why, OUTPUTS_CURE)
        for judged in found.outputs
        for why in judged.wrong
    ]
    for judged in found.outputs:
        said += [Finding("ok", "outputs", f"not compared: {why}") for why in judged.untold]
        if judged.held and not judged.wrong:
            said.append(
                Finding("ok", "outputs", "the policies compute what the learner's module computes")
            )
    yield from dict.fromkeys(said)


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
            return "fail", "does not answer", users_trainer.HANGS
        case Outcome.UNREAD:
            cure = "rlsync.VerifySync(sync).register(trainer) compares weights and outputs during training"
            return "warn", "cannot be read", cure


def _cure_of_lost(found: Examination) -> str:
    if found.by_rlsync:
        return "rlsync explain FILE.py:FUNCTION shows what the map moves"
    if found.processes:
        return _adopt(found)
    return (
        f"TorchRL ignores a map on a collector without schemes, without an error; {_adopt(found)}"
    )


def _adopt(found: Examination) -> str:
    """The code that lets rlsync publish."""
    routes = ", ".join(
        f"{name!r}: {source!r}" for name, source in found.routes if " " not in source
    )
    sync = f"rlsync.SyncWeights({{{routes or repr('policy') + ': ...'}}}).register(trainer)"
    if found.on_board or not found.processes:
        return sync
    return f"weight_sync_schemes={{'policy': rlsync.BoardScheme()}} on the collector, and {sync}"

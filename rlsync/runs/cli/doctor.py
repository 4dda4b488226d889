"""``rlsync doctor``: checks this machine, whether a trainer's weights reach its workers, and environments."""

from __future__ import annotations

import argparse
from dataclasses import asdict, astuple

from rich.console import Console
from rich.text import Text

from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.config import command_line
from rlsync.runs.life.apart import TIMEOUT_S
from rlsync.runs.life.examinations import env_findings, trainer_findings
from rlsync.runs.life.job import jobs_of
from rlsync.runs.life.users_trainer import FORM, MEANING, target_of
from rlsync.runs.plain import json_of
from rlsync.seams import machine_findings, verdicts

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
_COLOURS: dict[verdicts.Grade, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    word = options.trainer
    if word is None:
        word = options.target
    target = None
    if word is not None:
        target = target_of(word)
    findings = []
    if options.env is not None:
        for job in jobs_of(command_line.read(options.env)):
            findings += env_findings(job.config, options.timeout_s)
    if not findings:
        findings = machine_findings()
    if target is not None:
        findings += trainer_findings(target, options.timeout_s)
    if options.json:
        print_document(as_json(findings))
    elif options.markdown:
        print(as_markdown(findings))
    else:
        show(findings, Console())
    if verdicts.worst(findings) == "fail":
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    about = "Check this machine, and whether a trainer's weights reach its workers."
    parser = parser_of("doctor", about, _EXAMPLES)
    trainer = parser.add_mutually_exclusive_group()
    trainer.add_argument("--trainer", metavar=FORM, help=MEANING)
    trainer.add_argument("target", nargs="?", metavar=FORM, help="the same without --trainer")
    env = "play an environment twice, and compare; what follows are overrides as for rlsync train"
    trainer.add_argument("--env", nargs=argparse.REMAINDER, metavar="OVERRIDE", help=env)
    steps = "running the file, building the trainer, a publish, a rollout, an answer"
    limit = f"seconds for each step: {steps} (default {TIMEOUT_S:g})"
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, metavar="S", help=limit)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return parser


def as_json(findings: list[verdicts.Finding]) -> str:
    """``{"verdict": ..., "findings": [{"verdict", "what", "found", "cure"}, ...]}``."""
    return json_of({"verdict": verdicts.worst(findings), "findings": list(map(asdict, findings))})


def as_markdown(findings: list[verdicts.Finding]) -> str:
    """A Markdown table. Its cells contain no line breaks and no bars."""
    lines = ["| | what | found | cure |", "|---|---|---|---|"]
    for finding in findings:
        cells = []
        for text in astuple(finding):
            cell = " ".join(text.split()).replace("|", "\\|")
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def show(findings: list[verdicts.Finding], console: Console) -> None:
    """Print one line for each finding, with its cure below it. Nothing is cut off."""
    width = max((len(finding.what) for finding in findings), default=0)
    for finding in findings:
        verdict = (f"{finding.verdict:<6}", _COLOURS[finding.verdict])
        console.print(
            Text.assemble(verdict, f"{finding.what:<{width}}  {finding.found}"), soft_wrap=True
        )
        if finding.cure:
            console.print(Text(f"      cure  {finding.cure}", style="italic"), soft_wrap=True)
    grades = [finding.verdict for finding in findings]
    console.print(", ".join(f"{grades.count(verdict)} {verdict}" for verdict in _COLOURS))

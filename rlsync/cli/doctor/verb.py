"""``rlsync doctor``: checks this machine, and whether a trainer's weights reach its workers."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from rlsync.cli.apart import TIMEOUT_S
from rlsync.cli.doctor.finding import Finding, Grade, worst
from rlsync.cli.doctor.machine import machine
from rlsync.cli.doctor.packages import packages
from rlsync.cli.doctor.trainer import trainer_findings
from rlsync.cli.users_trainer import FORM, MEANING, target_of

_EXAMPLES = """examples:
  rlsync doctor                           can this machine run rlsync?
  rlsync doctor --trainer train.py:build  do my trainer's weights reach its workers?
  rlsync doctor --markdown                a table to paste into a bug report
  rlsync doctor --json                    the same as JSON

--trainer runs the file in a process of its own, changes the learner's weights, publishes once through
the trainer's own hook (rlsync's or TorchRL's), looks into every worker, and ends every process it started.

exit status: 0 no check fails (there may be warnings), 1 a check fails, 2 a wrong command line
"""
_COLOURS: dict[Grade, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(
        prog="rlsync doctor",
        description="Check this machine, and whether a trainer's weights reach its workers.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trainer = found.add_mutually_exclusive_group()
    trainer.add_argument("--trainer", metavar=FORM, help=MEANING)
    trainer.add_argument("target", nargs="?", metavar=FORM, help="the same without --trainer")
    found.add_argument(
        "--timeout-s",
        type=float,
        default=TIMEOUT_S,
        metavar="S",
        help="seconds for each step: running the file, building the trainer, a publish, a rollout, an answer "
        f"(default {TIMEOUT_S:g})",
    )
    form = found.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return found


def main(arguments: list[str]) -> int:
    """Run the checks, print the findings, and return 1 if a check fails.

    Raises:
        ConfigError: the argument does not name a function that returns a trainer.
        RlsyncError: rlsync refused the trainer's sync.
    """
    given = parser().parse_args(arguments)
    named = given.target if given.trainer is None else given.trainer
    target = None if named is None else target_of(named)
    findings = [*packages(), *machine()]
    if target is not None:
        findings += trainer_findings(target, given.timeout_s)
    if given.json:
        print(as_json(findings))
    elif given.markdown:
        print(as_markdown(findings))
    else:
        show(findings, Console())
    return 1 if worst(findings) == "fail" else 0


def as_json(findings: list[Finding]) -> str:
    """``{"verdict": ..., "findings": [{"verdict", "what", "found", "cure"}, ...]}``."""
    return json.dumps({"verdict": worst(findings), "findings": [asdict(f) for f in findings]}, indent=2)


def as_markdown(findings: list[Finding]) -> str:
    """A Markdown table. Its cells contain no line breaks and no bars.

    Example:
        >>> print(as_markdown([Finding("ok", "torch", "2.13.0")]))
        | | what | found | cure |
        |---|---|---|---|
        | ok | torch | 2.13.0 |  |
    """
    rows = [(f.verdict, f.what, f.found, f.cure) for f in findings]
    lines = ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    return "\n".join(["| | what | found | cure |", "|---|---|---|---|", *lines])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def show(findings: list[Finding], console: Console) -> None:
    """Print one line for each finding, with its cure below it. Nothing is cut off."""
    width = max((len(finding.what) for finding in findings), default=0)
    for finding in findings:
        verdict = (f"{finding.verdict:<6}", _COLOURS[finding.verdict])
        line = Text.assemble(verdict, f"{finding.what:<{width}}  {finding.found}")
        console.print(line, soft_wrap=True)
        if finding.cure:
            console.print(Text(f"      cure  {finding.cure}", style="italic"), soft_wrap=True)
    counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _COLOURS}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))

"""Run contenders one after the other, in rounds, so that each meets the same machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from peers.watch import Sample, watch

Measured = TypeVar("Measured")

#: Stands in a command for the number of the round, from 0.
SEED = "{round}"


def run(
    commands: Mapping[str, Sequence[str]],
    seconds: float,
    rounds: int,
    out: Path,
    measure: Callable[[Sequence[Sample]], Measured],
) -> dict[str, list[Measured]]:
    """Run all rounds. A failed run is printed, and missing in the result.

    Args:
        commands: of the contenders, by name.
        seconds: of each run.
        rounds: how often each contender runs.
        out: the output of each goes to a log next to this file.
        measure: what a run's samples say; it raises RuntimeError if they are too few.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            log = out.with_suffix(f".{name}.{number}.log")
            print(
                f"{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}: {name}, log {log}",
                flush=True,
            )
            try:
                with log.open("w") as file:
                    words = [word.replace(SEED, str(number)) for word in command]
                    measured[name].append(measure(watch(words, seconds, file)))
            except RuntimeError as error:  # go on: the other contenders' figures are still useful
                print(f"    failed: {error}", flush=True)
                continue
            print(f"    {measured[name][-1]}", flush=True)
    return measured


def compare(
    options: argparse.Namespace,
    contenders: Mapping[str, Callable[[argparse.Namespace], list[str] | None]],
    packages: Sequence[str],
    measure: Callable[[Sequence[Sample]], Any],
    table: Callable[[dict[str, list[Any]]], str],
) -> int:
    """Run the contenders that were asked for, print a table, and write what was found.

    Args:
        options: with ``only``, ``seconds``, ``rounds``, ``out`` and ``table``.
        contenders: the command of each; None, with a message, if it cannot take part.
        packages: whose versions are written down.
        measure: see :func:`run`; its results are dataclasses.
        table: of what was measured, as Markdown.

    Returns:
        The exit status: 1 if a run failed.
    """
    machine = host()
    asked = {name: contenders[name](options) for name in options.only}
    commands = {name: command for name, command in asked.items() if command is not None}
    measured = run(commands, options.seconds, options.rounds, options.out, measure)
    found = {
        "host": machine,
        "seconds": options.seconds,
        "commands": commands,
        "versions": {
            name: versions(_python_of(command), packages) for name, command in commands.items()
        },
        "rounds": {name: [asdict(one) for one in runs] for name, runs in measured.items()},
    }
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(table(measured))
    if options.table:
        options.table.write_text(table(measured) + "\n")
    return int(any(len(runs) < options.rounds for runs in measured.values()))


def alone() -> list[str]:
    """Words in front of a command that keep it, and the Ray that it starts, in a network of its own.

    None where this user may not make one.
    """
    there = shutil.which("unshare") and shutil.which("ip")
    if there and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0:
        return ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    return []


def median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def medians(runs: Iterable[Any], names: Iterable[str]) -> dict[str, float | None]:
    """The median over the runs of each figure that is named."""
    found = [asdict(one) for one in runs]
    return {name: median(one[name] for one in found) for name in names}


def beside(own: float | None, other: float | None) -> str:
    """A figure as so many times another one, for a table."""
    return shown(own / other if own and other else None, 2)


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def versions(python: str, packages: Sequence[str]) -> dict[str, str]:
    """The versions of these packages, as that interpreter sees them."""
    ask = (
        "import importlib.metadata as m, json; "
        f"print(json.dumps({{d.name: d.version for d in m.distributions() if d.name in {tuple(packages)}}}))"
    )
    found = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    return {"python": platform.python_version(), **json.loads(found.stdout)}


def _python_of(command: Sequence[str]) -> str:
    """The interpreter that runs a contender's script, which may have other words before it."""
    (place, *_) = (place for place, word in enumerate(command) if word.endswith(".py"))
    return command[place - 1]


def host() -> dict[str, object]:
    """The machine, and what it does at the moment."""
    return {"cores": os.cpu_count(), "machine": platform.machine(), "load_before": os.getloadavg()}


def shown(value: float | None, digits: int) -> str:
    """A number for a table."""
    return "-" if value is None else f"{value:.{digits}f}"

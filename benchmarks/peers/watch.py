"""Run a contender and measure it from outside: its reports, its processor time, and the other load.

A contender prints lines that begin with ``@ `` and continue with JSON: the ``steps`` so far, and ``lag_mean``
and ``lag_max`` if it knows them. This module adds the time when a line arrives, with the same clock for all
contenders. A line without ``steps`` holds final values.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

MARK = "@ "
WARM_UP_PART = 1 / 3
START_AND_END_S = 200.0  # time for start and end, besides the given seconds
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """The measured values when a report arrived.

    Args:
        at_s: the time of arrival.
        cpu_s: processor time of all processes of the contender, since their start.
        busy_s: processor time of the whole machine, all cores.
        said: the report.
    """

    at_s: float
    cpu_s: float
    busy_s: float
    said: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run, without its first third.

    Args:
        steps_per_s: agent steps per second.
        steps_per_cpu_s: agent steps per second of processor time; other load changes it least.
        cpu_per_s: processor seconds per second, of the contender's process tree.
        others_cpu_per_s: processor seconds per second of all other processes on the machine.
        lag_mean, lag_max: in versions; None if the contender does not know.
        steps: agent steps in the window.
        window_s: length of the window.
    """

    steps_per_s: float
    steps_per_cpu_s: float
    cpu_per_s: float
    others_cpu_per_s: float
    lag_mean: float | None
    lag_max: float | None
    steps: int
    window_s: float


def watch(command: Sequence[str], seconds: float, log: IO[str]) -> list[Sample]:
    """Run a contender to its end, with one torch thread a process. Its output goes to ``log``.

    The first sample is of the start of its process, the last one of its end. Both say nothing.

    Raises:
        RuntimeError: the contender failed, or did not end in time.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **threads, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # its processes can be found by their session
    )
    assert process.stdout is not None
    too_late = threading.Timer(seconds + START_AND_END_S, _end, [process.pid])
    too_late.start()
    samples = [_sample(process.pid, {})]
    try:
        for line in process.stdout:
            log.write(line)
            if line.startswith(MARK):
                with suppress(json.JSONDecodeError):  # two processes wrote into the same line
                    samples.append(_sample(process.pid, json.loads(line.removeprefix(MARK))))
        status = process.wait()
        # its processor time is gone
        samples.append(replace(samples[-1], at_s=time.monotonic(), said={}))
    finally:
        too_late.cancel()
        _end(process.pid)
    if status:
        raise RuntimeError(f"exit status {status} of: {' '.join(command)}")
    return samples


def figures(samples: Sequence[Sample]) -> Figures:
    """The figures of the steady state of one run.

    Raises:
        RuntimeError: there are too few reports.
    """
    steady = [sample for sample in samples if "steps" in sample.said]
    if len(steady) > 2:
        from_s = steady[0].at_s + (steady[-1].at_s - steady[0].at_s) * WARM_UP_PART
        steady = [sample for sample in steady if sample.at_s >= from_s]
    if len(steady) < 2:
        raise RuntimeError(f"{len(steady)} reports are too few")
    first, last = steady[0], steady[-1]
    window_s, cpu_s = last.at_s - first.at_s, last.cpu_s - first.cpu_s
    steps = int(last.said["steps"] - first.said["steps"])
    means = [sample.said["lag_mean"] for sample in steady[1:] if "lag_mean" in sample.said]
    worst = [sample.said["lag_max"] for sample in steady[1:] if "lag_max" in sample.said]
    in_the_end = {
        key: value
        for sample in samples
        if "steps" not in sample.said
        for key, value in sample.said.items()
    }
    return Figures(
        steps_per_s=steps / window_s,
        steps_per_cpu_s=steps / cpu_s,
        cpu_per_s=cpu_s / window_s,
        others_cpu_per_s=max(0.0, (last.busy_s - first.busy_s - cpu_s) / window_s),
        lag_mean=in_the_end.get("lag_mean", sum(means) / len(means) if means else None),
        lag_max=in_the_end.get("lag_max", max(worst, default=None)),
        steps=steps,
        window_s=window_s,
    )


def _sample(session: int, said: dict[str, Any]) -> Sample:
    return Sample(time.monotonic(), _cpu_s(session), _busy_s(), said)


def _cpu_s(session: int) -> float:
    """Processor time of all processes of a session, including those that ended and were waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS_PER_S


def _busy_s() -> float:
    """Processor time of all cores since the machine started: user, nice, system, irq and softirq."""
    fields = [int(field) for field in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:7])) / _TICKS_PER_S


def _end(session: int) -> None:
    """Kill the remaining processes of a session that was started here."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)

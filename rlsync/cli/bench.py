"""``rlsync bench``: measures a publish on this machine."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torchrl.collectors import MultiSyncCollector

from rlsync import BoardScheme, SyncWeights
from rlsync.cli.measure import MAP, MODELS, BulkPolicy, adoption_s, hold, make_trainer, make_workers
from rlsync.cli.train import prepare_process
from rlsync.core.errors import ConfigError
from rlsync.core.path import did_you_mean, nearest_name

USUAL = ("mlp", "resnet", "100mb")

_SIZE = re.compile(r"(\d+)x(\d+)")
_EXAMPLES = f"""models: {", ".join(f"{name} ({t:,} x {f:,} floats)" for name, (t, f) in MODELS.items())},
or TENSORSxFLOATS

examples:
  rlsync bench
  rlsync bench --models 400mb 12x5000 --workers 4
  rlsync bench --models mlp --json

columns (medians):
  publish ms          how long one publish holds the learner, with idle workers
  memcpy ms           one plain copy of the same bytes, timed alternately with the publishes
  ratio               publish / memcpy
  alias us, copy us   how long a worker takes to adopt a version that is ready, by alias and by copy
Compare ratios, not seconds: machines are shared and noisy.

exit status: 0 measured, 1 something failed, 2 wrong arguments
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures for one model, as medians."""

    model: str
    tensors: int
    payload_bytes: int
    workers: int
    trials: int
    publish_ms: float
    memcpy_ms: float
    publish_per_memcpy: float
    adopt_alias_us: float
    adopt_copy_us: float


def main(arguments: list[str]) -> int:
    """Measure each model, and print a table or JSON."""
    parser = argparse.ArgumentParser(
        prog="rlsync bench",
        description="Measure what one publish costs on this machine, with worker processes on a board.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", default=USUAL, metavar="MODEL", help=f"default: {' '.join(USUAL)}"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes; default: 2")
    parser.add_argument("--trials", type=int, default=50, help="publishes of each model; default: 50")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    for option in ("workers", "trials"):
        if vars(given)[option] < 1:
            raise ConfigError(
                f"{option} is at least 1", f"--{option} {vars(given)[option]}", "give a larger number"
            )
    sizes = {model: size_of(model) for model in given.models}
    prepare_process()
    with contextlib.redirect_stdout(sys.stderr):  # other output goes to stderr
        rows = [measure(model, size, given.workers, given.trials) for model, size in sizes.items()]
    if given.json:
        print(json.dumps({"torch": torch.__version__, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"one publish to {given.workers} worker processes")
        Console(highlight=False).print(table(rows))
    return 0


def size_of(model: str) -> tuple[int, int]:
    """The number of tensors and of floats in each, for a model's name or for ``TENSORSxFLOATS``.

    Example:
        >>> size_of("mlp"), size_of("3x10")
        ((12, 1700), (3, 10))
    """
    if model in MODELS:
        return MODELS[model]
    found = _SIZE.fullmatch(model)
    size = (int(found[1]), int(found[2])) if found else (0, 0)
    if min(size) < 1:
        hint = did_you_mean(nearest_name(model, MODELS))
        raise ConfigError(
            f"no model {model!r}",
            "--models",
            f"{hint}{', '.join(MODELS)}, or TENSORSxFLOATS like 12x5000",
        )
    return size


def table(rows: list[Measured]) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    drawn.add_column("model", no_wrap=True)
    for head in ("tensors", "MB", "publish ms", "memcpy ms", "ratio", "alias us", "copy us"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            row.model,
            f"{row.tensors:,}",
            f"{row.payload_bytes / 1e6:,.2f}",
            f"{row.publish_ms:,.3f}",
            f"{row.memcpy_ms:,.3f}",
            f"{row.publish_per_memcpy:.2f}",
            f"{row.adopt_alias_us:,.0f}",
            f"{row.adopt_copy_us:,.0f}",
        )
    return drawn


def measure(model: str, size: tuple[int, int], workers: int, trials: int) -> Measured:
    """Measure one model: publishes through the hook to real workers, then adoptions in this process."""
    policy = BulkPolicy(*size)
    collector = make_workers(MultiSyncCollector, policy, BoardScheme(), 50 * workers, workers)
    try:
        hook = SyncWeights(MAP, trainer=make_trainer(collector, deepcopy(policy)))
        publish_s, memcpy_s = hold(hook.publish, policy, trials)
    finally:
        collector.shutdown()
    adopted = adoption_s(policy, trials)
    return Measured(
        model,
        size[0],
        4 * size[0] * size[1],
        workers,
        trials,
        1e3 * publish_s,
        1e3 * memcpy_s,
        publish_s / memcpy_s,
        1e6 * adopted["alias"],
        1e6 * adopted["copy"],
    )

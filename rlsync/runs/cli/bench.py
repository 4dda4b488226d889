"""``rlsync bench``: measures a publish on this machine. ``benchmarks/`` measures with the same parts."""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.envs import GymEnv
from torchrl.trainers import Trainer
from torchrl.weight_update import WeightSyncScheme

from rlsync import BoardScheme, SyncWeights
from rlsync.core.errors import ConfigError
from rlsync.core.ledger import Stamp
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.core.whole_file import json_of
from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.life.training import prepare_process
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target
from rlsync.transport.board.reader import BoardReader
from rlsync.transport.board.writer import BoardWriter

#: name: (number of tensors, floats in each)
MODELS = {
    "mlp": (12, 1_700),
    "resnet": (34, 46_000),
    "100mb": (300, 83_333),
    "400mb": (150, 666_667),
    "many": (1_000, 1_000),
}
MAP = {"policy": "loss_module.actor_network"}
WARM_UP = 5
USUAL = ("mlp", "resnet", "100mb")

_SIZE = re.compile(r"([1-9]\d*)x([1-9]\d*)")
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
    about = "Measure what one publish costs on this machine, with worker processes on a board."
    parser = parser_of("bench", about, _EXAMPLES)
    usual = f"default: {' '.join(USUAL)}"
    parser.add_argument("--models", nargs="+", default=USUAL, metavar="MODEL", help=usual)
    parser.add_argument("--workers", type=int, default=2, help="worker processes; default: 2")
    parser.add_argument("--trials", type=int, default=50, help="publishes of each model; default: 50")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    given = parser.parse_args(arguments)
    for option, count in (("workers", given.workers), ("trials", given.trials)):
        if count < 1:
            raise ConfigError(f"{option} is at least 1", f"--{option} {count}", "give a larger number")
    sizes = {model: size_of(model) for model in given.models}
    prepare_process()
    with contextlib.redirect_stdout(sys.stderr):  # other output goes to stderr
        rows = [measure(model, size, given.workers, given.trials) for model, size in sizes.items()]
    if given.json:
        print_document(json_of({"torch": torch.__version__, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"one publish to {given.workers} worker processes")
        Console(highlight=False).print(table(rows))
    return 0


def size_of(model: str) -> tuple[int, int]:
    """The number of tensors and of floats in each, for a model's name or for ``TENSORSxFLOATS``."""
    if model in MODELS:
        return MODELS[model]
    if (found := _SIZE.fullmatch(model)) is None:
        hint = did_you_mean(nearest_name(model, MODELS))
        cure = f"{hint}{', '.join(MODELS)}, or TENSORSxFLOATS like 12x5000"
        raise ConfigError(f"no model {model!r}", "--models", cure)
    return int(found[1]), int(found[2])


def table(rows: list[Measured]) -> Table:
    drawn = Table(box=None, padding=(0, 2, 0, 0))
    drawn.add_column("model", no_wrap=True)
    for head in ("tensors", "MB", "publish ms", "memcpy ms", "ratio", "alias us", "copy us"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        sizes = f"{row.tensors:,}", f"{row.payload_bytes / 1e6:,.2f}"
        times = f"{row.publish_ms:,.3f}", f"{row.memcpy_ms:,.3f}", f"{row.publish_per_memcpy:.2f}"
        drawn.add_row(row.model, *sizes, *times, f"{row.adopt_alias_us:,.0f}", f"{row.adopt_copy_us:,.0f}")
    return drawn


def measure(model: str, size: tuple[int, int], workers: int, trials: int) -> Measured:
    """Measure one model: publishes through the hook to real workers, then adoptions in this process."""
    policy = BulkPolicy(*size)
    collector = make_workers(MultiSyncCollector, policy, BoardScheme(prove=False), 50 * workers, workers)
    try:
        hook = SyncWeights(MAP, trainer=make_trainer(collector, deepcopy(policy)))
        publish_s, memcpy_s = hold(hook.publish, policy, trials)
    finally:
        collector.shutdown()
    adopted = adoption_s(policy, trials)
    milliseconds = 1e3 * publish_s, 1e3 * memcpy_s, publish_s / memcpy_s
    microseconds = 1e6 * adopted["alias"], 1e6 * adopted["copy"]
    return Measured(model, size[0], 4 * size[0] * size[1], workers, trials, *milliseconds, *microseconds)


class BulkPolicy(TensorDictModuleBase):
    """A policy with any number of parameters. It reads one of them to choose between two actions."""

    def __init__(self, tensors: int, floats: int) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.weights = nn.ParameterList(torch.zeros(floats) for _ in range(tensors))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.batch_size, 2, dtype=torch.int64, device="cpu")
        action[..., int(self.weights[0][0] > 1e9)] = 1
        return tensordict.set("action", action)


def make_workers(
    kind: type[BaseCollector], policy: nn.Module, scheme: WeightSyncScheme, frames: int, workers: int = 2
) -> BaseCollector:
    """Worker processes that act with ``policy`` on CartPole, one thread each."""
    return kind(
        [partial(GymEnv, "CartPole-v1")] * workers,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
        num_sub_threads=1,
    )


def make_trainer(collector: BaseCollector, policy: nn.Module) -> Trainer:
    """A trainer whose ``loss_module.actor_network`` is ``policy``. It does not train."""
    return Trainer(
        collector=collector,
        total_frames=1,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=nn.ModuleDict({"actor_network": policy}),
        progress_bar=False,
    )


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def hold(publish: Callable[[], object], policy: nn.Module, trials: int) -> tuple[float, float]:
    """Median seconds of a publish, and of one contiguous copy of the same bytes, timed alternately."""
    floats = sum(p.numel() for p in policy.parameters())
    source, target = torch.ones(floats, device="cpu"), torch.zeros(floats, device="cpu")
    publishes, copies = [], []
    for _ in range(WARM_UP + trials):
        copies.append(timed(lambda: target.copy_(source)))
        publishes.append(timed(publish))
    return statistics.median(publishes[WARM_UP:]), statistics.median(copies[WARM_UP:])


def adoption_s(policy: BulkPolicy, trials: int) -> dict[str, float]:
    """Median seconds in which a worker adopts a version that is ready, by alias and by copy."""
    leaves = Leaves(policy, "policy")
    specs = leaves.specs()
    found = {}
    for mode in ("alias", "copy"):
        apply = partial(_apply, Target(deepcopy(policy), "policy", specs), mode)
        with contextlib.closing(BoardWriter()) as board:
            board.lay_out(Layout.build({"policy": specs}))
            with contextlib.closing(BoardReader(board.handle, apply)) as reader:
                samples = []
                for version in range(1, WARM_UP + trials + 1):
                    board.publish(leaves.tensors(), stamp=Stamp(1, version))
                    samples.append(timed(reader.adopt))
        found[mode] = statistics.median(samples[WARM_UP:])
    return found


def _apply(target: Target, mode: str, version: int, layout: Layout, views: Sequence[Tensor]) -> bool:
    (target.alias if mode == "alias" else target.copy)(views)
    return mode == "alias"

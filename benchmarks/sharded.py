"""What a publish of sharded weights costs: in place, sent, gathered by ``full_tensor()``, and one plain copy.

    python benchmarks/sharded.py [--ranks 2 4] [--trials 15] [--out sharded.json]

The learner is 2 or 4 processes on this machine, on gloo over loopback, with an MLP that is sharded along its
first dimension. The ways take turns within one run. The figures are medians of the rank that publishes:

- **in place**: every rank writes its part into the board.
- **sent**: the other ranks send their parts, as from another host.
- **full_tensor**: each leaf is gathered by torch, and then published.
- **copy**: one contiguous copy of the same bytes in one process.

**extra** is the greatest anonymous memory of the publishing rank during a publish, less what it had before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rlsync import SendShards
from rlsync.sync.publisher import Publisher
from rlsync.transport.board.writer import BoardWriter

#: name: (leaves, rows, columns); the weights are 4 * leaves * rows * columns bytes
MODELS = {"small": (12, 40, 40), "100mb": (6, 2048, 2048), "400mb": (6, 4096, 4096)}
WAYS = ("in place", "sent", "full_tensor", "copy")
WARM_UP = 4


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


class Peak:
    """The greatest anonymous memory inside the block, less that before it; looked at every 0.2 ms."""

    def __enter__(self) -> Peak:
        self.before, self.most, self._over = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(2e-4):
            self.most = max(self.most, anonymous_bytes() - self.before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def sharded(model: str, world: int) -> nn.ParameterList:
    """Weights that are sharded along their rows."""
    leaves, rows, columns = MODELS[model]
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.ones(rows, columns)
    return nn.ParameterList(
        nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for _ in range(leaves)
    )


def ways(net: nn.ParameterList, rank: int, size: int) -> dict[str, Callable[[], object]]:
    """How this rank takes part in each way."""
    found: dict[str, Callable[[], object]] = {}
    named = {("policy", name): tensor for name, tensor in net.named_parameters()}
    for way, in_place in (("in place", True), ("sent", False)):
        if rank:
            found[way] = SendShards({"policy": net}, in_place=in_place)
        else:
            publisher = Publisher(BoardWriter())
            found[way] = lambda publisher=publisher: publisher.publish(named)
            found[way]()  # the ranks meet in this order
        if rank:
            found[way]()
    gathered = Publisher(BoardWriter()) if rank == 0 else None

    def full() -> None:
        whole = {key: tensor.full_tensor() for key, tensor in named.items()}
        if gathered is not None:
            gathered.publish(whole)

    source, target = (
        (torch.ones(size), torch.zeros(size)) if rank == 0 else (torch.ones(1), torch.ones(1))
    )
    return found | {"full_tensor": full, "copy": lambda: target.copy_(source)}


def run(rank: int, world: int, model: str, trials: int, store: str, out: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    leaves, rows, columns = MODELS[model]
    net = sharded(model, world)
    taking_part = ways(net, rank, leaves * rows * columns)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    extra = dict.fromkeys(WAYS, 0)
    for trial in range(WARM_UP + trials):
        for way in WAYS:
            dist.barrier()
            started = time.perf_counter()
            taking_part[way]()
            if trial >= WARM_UP:
                seconds[way].append(time.perf_counter() - started)
    for way in WAYS:
        dist.barrier()
        with Peak() as peak:
            taking_part[way]()
        extra[way] = peak.most
    if rank == 0:
        row: dict[str, Any] = {
            "model": model,
            "ranks": world,
            "payload_bytes": 4 * leaves * rows * columns,
        }
        for way in WAYS:
            row[f"{way}_s"], row[f"{way}_extra_bytes"] = statistics.median(seconds[way]), extra[way]
        Path(out).write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small", "100mb"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    print(
        "| model | ranks | MB | in place, ms | sent, ms | full_tensor, ms | copy, ms | extra MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model in given.models:
        for world in given.ranks:
            with tempfile.TemporaryDirectory() as folder:
                out = f"{folder}/row"
                args = (world, model, given.trials, f"{folder}/store", out)
                multiprocessing.spawn(run, args=args, nprocs=world)
                row = json.loads(Path(out).read_text())
            rows.append(row)
            times = " | ".join(f"{row[f'{way}_s'] * 1e3:.2f}" for way in WAYS)
            extra = " / ".join(f"{row[f'{way}_extra_bytes'] / 1e6:.1f}" for way in WAYS[:3])
            print(
                f"| {model} | {world} | {row['payload_bytes'] / 1e6:.1f} | {times} | {extra} |",
                flush=True,
            )
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()

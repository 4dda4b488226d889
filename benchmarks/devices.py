"""Publishing from a GPU and adopting on one: bandwidth against the limits of this machine.

    python benchmarks/devices.py [--device cuda:0] [--mb 1 10 100 400] [--tensors 100] [--out devices.json]

For each size, in one run, it measures

- how long a publish holds the learner, and how long one with the copy put off holds it until it returns;
- how long an adoption takes into the second set of tensors, and one in place;
- for comparison one copy of the same bytes as a single tensor: device to pinned memory, pinned memory to the
  device (both are the limits of the bus), device to device (the limit of its memory), and host to host.

The figures are medians. Ratios are meant to be compared: the bus and the memory of another machine differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target
from rlsync.transport.board.reader import BoardReader
from rlsync.transport.board.writer import BoardWriter

WARM_UP, TRIALS = 5, 30


def module_of(tensors: int, floats: int, device: torch.device) -> nn.Module:
    return nn.ParameterList(torch.zeros(floats, device=device) for _ in range(tensors))


def median_s(call: Callable[[], object], ready: Callable[[], object]) -> float:
    taken = []
    for _ in range(WARM_UP + TRIALS):
        ready()
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM_UP:])


def limits_gb_s(
    size_bytes: int, device: torch.device, ready: Callable[[], object]
) -> dict[str, float]:
    there, again = (torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    locked = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here, host = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))

    def copied(into: torch.Tensor, of: torch.Tensor) -> float:
        def copy() -> None:
            into.copy_(of, non_blocking=True)
            ready()

        return size_bytes / median_s(copy, ready) / 1e9

    return {
        "device_to_pinned": copied(locked, there),
        "pinned_to_device": copied(there, locked),
        "device_to_device": copied(again, there),
        "host_to_host": copied(host, here),
    }


def measure(mb: float, tensors: int, device: torch.device) -> dict[str, object]:
    ready = torch.get_device_module(device).synchronize
    learner, acting = (module_of(tensors, int(mb * 1e6 / 4 / tensors), device) for _ in range(2))
    leaves = Leaves(learner, "policy")
    specs = leaves.specs()
    size_bytes = sum(spec.payload_bytes for spec in specs)
    board, version, everything = BoardWriter(), 0, frozenset(range(tensors))
    board.lay_out(Layout.build({"policy": specs}))

    def publish(later: frozenset[int] = frozenset()) -> None:
        nonlocal version
        version += 1
        board.publish(leaves.tensors(), later, stamp=Stamp(1, version))

    def published() -> None:
        board.join()
        ready()

    rates = {"publish": size_bytes / median_s(publish, published) / 1e9}
    held_s = median_s(lambda: publish(everything), published)
    published()
    target = Target(acting, "policy", specs)
    for name, write in (("adopt", target.alias), ("adopt_in_place", target.copy)):
        reader = BoardReader(board.handle, lambda _, layout, views, write=write: bool(write(views)))

        def again() -> None:
            publish()
            ready()

        rates[name] = size_bytes / median_s(reader.adopt, again) / 1e9
        reader.close()
    board.close()
    limits = limits_gb_s(size_bytes, device, ready)
    return {
        "bytes": size_bytes,
        "tensors": tensors,
        "gb_s": rates,
        "limits_gb_s": limits,
        "held_in_background_us": 1e6 * held_s,
        "publish_per_limit": rates["publish"] / limits["device_to_pinned"],
        "adopt_per_limit": rates["adopt"] / limits["pinned_to_device"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--mb", nargs="+", type=float, default=[1, 10, 100, 400])
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--out", default="devices.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(2, "torch sees no CUDA device on this machine\n")
    rows = []
    for mb in options.mb:
        rows.append(measure(mb, options.tensors, device))
        print(json.dumps(rows[-1]), flush=True)
    found = {"torch": torch.__version__, "device": str(device), "rows": rows}
    Path(options.out).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

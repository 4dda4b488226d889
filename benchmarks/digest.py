"""The cost of VerifySync's digest and of SyncWeights(finite=True), for 100 MB of weights.

    python benchmarks/digest.py [--threads 1] [--repeats 15]

The 100 MB are in one leaf, in 100 leaves and in 10,000. The figures are medians, compared with one memcpy of
the same bytes in the same run. Compare ratios, not milliseconds: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rlsync.sync.bound_map import all_finite
from rlsync.tensors.digest import digest

FLOATS = 25_000_000
LEAVES = (1, 100, 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"100 MB of float32, {options.threads} thread(s), torch {torch.__version__}")
    print(f"{'leaves':>8} {'what':>14} {'ms':>8} {'x memcpy':>9}")
    for leaves in LEAVES:
        flat = torch.randn(FLOATS)
        copy = torch.empty_like(flat)
        parts = list(flat.chunk(leaves))
        work = {
            "memcpy": lambda flat=flat, copy=copy: copy.copy_(flat),
            "digest": lambda parts=parts: digest(parts),
            "finite guard": lambda parts=parts: [all_finite(part, part.dtype) for part in parts],
            "isfinite().all": lambda parts=parts: [
                bool(torch.isfinite(part).all()) for part in parts
            ],
        }
        times = _medians(work, options.repeats)
        for what, took_ms in times.items():
            print(f"{leaves:>8} {what:>14} {took_ms:>8.1f} {took_ms / times['memcpy']:>9.2f}")


def _medians(work: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median milliseconds of each. They take turns, so that other load affects all of them."""
    times: dict[str, list[float]] = {what: [] for what in work}
    for _ in range(repeats + 1):
        for what, do in work.items():
            started = time.perf_counter()
            do()
            times[what].append((time.perf_counter() - started) * 1e3)
    return {what: statistics.median(took[1:]) for what, took in times.items()}


if __name__ == "__main__":
    main()

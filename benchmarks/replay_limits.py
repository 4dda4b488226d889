"""Compare how TorchRL and rlsync bound the age of replayed frames, and how many updates go with the frames.

    python benchmarks/replay_limits.py [--frames 100000] [--draws 500] [--ratio 0.29] [--prefill 1000]

The first table has the time of a draw of 256 of ``--frames`` frames of 100 versions: at random; at random, with
the age of each frame by rlsync's ledger, as BoundStaleness asks for it; with TorchRL's StalenessAwareSampler. The
second, for TorchRL 0.15, has updates after batches of 100 frames, 10,000 frames after the prefill: as many as
rlsync's Pace says, or as TorchRL's RateLimitedReplayBuffer permits, which counts frames that are drawn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torchrl.data
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler, StalenessAwareSampler

from rlsync.core.ledger import Ledger
from rlsync.runs.actors.replay.pacing import Pace
from rlsync.torchrl_plugin.hooks.ages import staleness_of

BATCH = 256
VERSIONS = 100
FRAMES_AT_ONCE = 100
FRAMES_PACED = 10_000


def made_by(versions: torch.Tensor) -> TensorDict:
    observation = torch.zeros(len(versions), 8)
    return TensorDict({"observation": observation, "policy_version": versions}, [len(versions)])


def filled(sampler: Sampler, frames: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(frames), sampler=sampler, batch_size=BATCH
    )
    buffer.extend(made_by(torch.arange(frames) * VERSIONS // frames + 1))
    return buffer


def draws(frames: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is timed, and its name."""
    ledger = Ledger()
    for _ in range(VERSIONS):
        ledger.record(ledger.next)
    at_random = filled(RandomSampler(), frames)
    sampler = StalenessAwareSampler(max_staleness=VERSIONS // 2)
    sampler.consumer_version = VERSIONS
    by_age = filled(sampler, frames)
    yield "at random", at_random.sample
    yield (
        "at random, ages by the ledger",
        lambda: staleness_of(at_random.sample(), ledger, VERSIONS, 0),
    )
    yield "StalenessAwareSampler", by_age.sample


def median_us(call: Callable[[], object], times: int) -> float:
    spent: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        call()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent) * 1e6


def paced(ratio: float, prefill: int) -> Iterator[tuple[str, list[int]]]:
    """Updates that each makes after each batch, the first one after the prefill."""
    pace = Pace(ratio, prefill=prefill)
    updates = 0
    mine: list[int] = []
    for frames in range(prefill, prefill + FRAMES_PACED + 1, FRAMES_AT_ONCE):
        mine.append(pace.due(frames, updates))
        updates += mine[-1]
    yield "Pace", mine

    kind = getattr(torchrl.data, "RateLimitedReplayBuffer", None)
    if kind is None:
        return
    buffer = kind(
        samples_per_insert=ratio * BATCH, storage=LazyTensorStorage(FRAMES_PACED), batch_size=BATCH
    )
    buffer.extend(made_by(torch.ones(prefill, dtype=torch.int64)))
    theirs: list[int] = []
    for _ in range(0, FRAMES_PACED + 1, FRAMES_AT_ONCE):
        theirs.append(0)
        while buffer.can_sample():
            buffer.sample()
            theirs[-1] += 1
        buffer.extend(made_by(torch.ones(FRAMES_AT_ONCE, dtype=torch.int64)))
    yield "RateLimitedReplayBuffer", theirs


def furthest(updates: list[int], ratio: float) -> float:
    """The largest distance from the ratio after a batch, in updates, the prefill and its updates left out."""
    distance = 0.0
    done = 0
    for batches, count in enumerate(updates[1:], start=1):
        done += count
        distance = max(distance, abs(done - ratio * FRAMES_AT_ONCE * batches))
    return distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--ratio", type=float, default=0.29)
    parser.add_argument("--prefill", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"TorchRL {torchrl.__version__}, {arguments.frames:,} frames\n\n| draw | us |\n|---|---|")
    for name, call in draws(arguments.frames):
        call()
        print(f"| {name} | {median_us(call, arguments.draws):,.0f} |")
    print(
        "\n| pace | updates at the end of the prefill | then at most from the ratio, in updates |\n|---|---|---|"
    )
    for name, updates in paced(arguments.ratio, arguments.prefill):
        print(f"| {name} | {updates[0]} | {furthest(updates, arguments.ratio):.2f} |")


if __name__ == "__main__":
    main()

"""The buffer of recipes draws what TorchRL's draws."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement

from rlsync.recipes.replay.memory import PrioritizedRows
from rlsync.torchrl_plugin.compat.replay import RowBuffer

SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "prioritised": lambda: PrioritizedRows(50, 0.6, 0.4),
}


def rows(count: int) -> TensorDict:
    after = TensorDict({"reward": torch.randn(count, 1), "done": torch.rand(count, 1) < 0.5}, [count])
    return TensorDict(
        {"observation": torch.randn(count, 3), "version": torch.arange(count), "next": after}, [count]
    )


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_rows_their_order_and_their_entries_are_those_of_torchrls_buffer(sampler: str) -> None:
    stored = [rows(20), rows(20), rows(20)]  # more than fit in
    drawn = []
    for kind in (TensorDictReplayBuffer, RowBuffer):
        torch.manual_seed(0)
        buffer = kind(storage=LazyTensorStorage(50), sampler=SAMPLERS[sampler](), batch_size=8)
        batches = []
        for batch in stored:
            buffer.extend(batch)
            batches.append(buffer.sample())
        drawn.append([*batches, *(buffer if sampler == "without replacement" else ())])
    for one, other in zip(*drawn, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert (one == other).all()
        assert (one.batch_size, one.device) == (other.batch_size, other.device)
        other["next", "reward"] += 1  # it is the caller's own


def test_a_buffer_of_a_million_rows_takes_memory_as_they_come() -> None:
    def taken_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = taken_bytes()
    buffer = RowBuffer(storage=LazyTensorStorage(1_000_000), sampler=RandomSampler(), batch_size=8)
    buffer.extend(TensorDict({"observation": torch.ones(1_000, 100)}, [1_000]))
    assert len(buffer.sample()) == 8
    assert taken_bytes() - before < 40_000_000, "of 400 MB"

"""The buffer of recipes stores what TorchRL's stores, and draws what TorchRL's draws."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler, SamplerWithoutReplacement

from rlsync.runs.compat import replay
from rlsync.runs.compat.replay import RowBuffer, by_name
from rlsync.runs.recipes.replay.memory import PrioritizedRows

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


class NewBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.count += sum(each.nbytes for each in made if _memory(each) not in before)
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("rollouts", [1, 4])
def test_a_batch_is_copied_into_its_rows_and_nowhere_else(rollouts: int) -> None:
    """Also one of several rollouts, whose memory has time first."""
    buffer = RowBuffer(storage=LazyTensorStorage(1_000), sampler=RandomSampler(), batch_size=8)
    buffer.extend(rows(8))
    batch = rows(rollouts * 25).reshape(25, rollouts).transpose(0, 1)
    with NewBytes() as new:
        buffer.store(batch)
    assert new.count == 8 * batch.numel(), "the numbers of the rows"
    assert torch.equal(
        buffer.storage[8 : 8 + batch.numel()]["observation"], batch["observation"].flatten(0, 1)
    )


def test_a_buffer_of_a_million_rows_takes_memory_as_they_come() -> None:
    def taken_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = taken_bytes()
    buffer = RowBuffer(storage=LazyTensorStorage(1_000_000), sampler=RandomSampler(), batch_size=8)
    buffer.extend(TensorDict({"observation": torch.ones(1_000, 100)}, [1_000]))
    assert len(buffer.sample()) == 8
    assert taken_bytes() - before < 40_000_000, "of 400 MB"


def steps(*shape: int, extra: bool = False, dtype: torch.dtype = torch.float32) -> TensorDict:
    """A batch of any shape, with another field or another dtype than batches have."""
    count = torch.Size(shape).numel()
    batch = rows(count).reshape(*shape)
    batch["observation"] = batch["observation"].to(dtype)
    return batch.set("extra", torch.ones(*shape)) if extra else batch


#: What a buffer of 50 rows is given, one after the other.
GIVEN: dict[str, list[TensorDict]] = {
    "small batches": [steps(4), steps(1, 4), steps(2, 4), steps(2, 1, 3)],
    "until it is full, and over its end": [steps(20), steps(30), steps(20), steps(4, 10), steps(4)],
    "all at once, again and again": [steps(50), steps(5, 10), steps(50)],
    "more than it holds": [steps(20), steps(60)],
    "steps that lie apart": [steps(4, 2), steps(4, 2).transpose(0, 1), steps(4, 4)[:, 1]],
}


@pytest.mark.parametrize("case", GIVEN)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("way", ["store", "extend"])
def test_what_is_stored_where_and_how_it_is_counted_is_as_with_torchrls_buffer(
    case: str, sampler: str, way: str
) -> None:
    stock = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=SAMPLERS[sampler](), batch_size=8)
    own = RowBuffer(storage=LazyTensorStorage(50), sampler=SAMPLERS[sampler](), batch_size=8)
    for batch in GIVEN[case]:
        before = batch.clone()
        index = stock.extend(batch.reshape(-1).clone())
        if way == "store":
            own.store(batch)
        else:
            assert torch.equal(own.extend(batch.reshape(-1)), index)
        assert set(batch.keys(True, True)) == set(before.keys(True, True)), "it is the caller's"
        assert (batch == before).all()
        assert (own.storage[:] == stock.storage[:]).all()
        counts = [(len(b), b.write_count, b.writer.state_dict(), replay.rows_given(b)) for b in (own, stock)]
        assert counts[0] == counts[1]
        assert torch.equal(own.storage._last_cursor, stock.storage._last_cursor)
        drawn = []
        for buffer in (own, stock):
            torch.manual_seed(len(stock))
            drawn.append(buffer.sample())
        assert (drawn[0] == drawn[1]).all()


def test_a_part_of_a_batch_may_have_dimensions_of_its_own() -> None:
    buffer = RowBuffer(storage=LazyTensorStorage(50), sampler=RandomSampler(), batch_size=8)
    for first in (0.0, 24.0):
        value = torch.arange(first, first + 24).reshape(2, 4, 3, 1)
        buffer.store(TensorDict({"inner": TensorDict({"value": value}, [2, 4, 3])}, [2, 4]))
    assert buffer.storage[:]["inner", "value"].flatten().tolist() == list(range(48))


@pytest.mark.parametrize("other", [{"extra": True}, {"dtype": torch.float64}], ids=["field", "dtype"])
def test_a_batch_with_another_field_or_dtype_is_left_to_torchrl(other: dict[str, Any]) -> None:
    answers = []
    for kind in (TensorDictReplayBuffer, RowBuffer):
        buffer = kind(storage=LazyTensorStorage(50), sampler=RandomSampler(), batch_size=8)
        torch.manual_seed(0)
        buffer.extend(steps(4))
        try:
            buffer.extend(steps(4, **other))
            held = buffer.storage[:]
            answers.append((sorted(map(str, held.keys(True, True))), held["observation"].tolist()))
        except RuntimeError as error:
            answers.append(str(error))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_some_fields_are_those_of_the_rows_that_all_fields_are_drawn_of(sampler: str) -> None:
    drawn = []
    for keys in (None, ["observation", ("next", "reward"), ("next", "priority"), "priority_weight"]):
        torch.manual_seed(0)
        buffer = RowBuffer(storage=LazyTensorStorage(50), sampler=SAMPLERS[sampler](), batch_size=8)
        buffer.extend(rows(40))
        buffer.fields = None if keys is None else by_name(keys)
        drawn.append([buffer.sample() for _ in range(3)])
    for all_fields, some in zip(*drawn, strict=True):
        added = {"index", "priority_weight"} & set(all_fields.keys())
        assert set(some.keys(True, True)) == {"observation", ("next", "reward"), *added}
        assert (all_fields.select(*some.keys(True, True)) == some).all()


def test_a_field_by_name_has_all_that_is_below_it() -> None:
    assert by_name([("next", "a"), ("next", "b"), "c"]) == {"next": {"a": None, "b": None}, "c": None}
    assert by_name([("next", "a"), "next"]) == by_name(["next", ("next", "a")]) == {"next": None}

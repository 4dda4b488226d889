"""Frames of pictures that a replay buffer stores once: what is drawn is what was stored, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from torch import Tensor
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.trainers import Trainer

from rlsync.runs.compat.replay import RowBuffer
from rlsync.runs.life.resume import load
from rlsync.runs.recipes.checkpoints import WholeCheckpoint
from rlsync.runs.recipes.replay.frames import Frames
from rlsync.runs.recipes.replay.memory import PrioritizedRows, StepMemory
from rlsync.runs.recipes.replay.row_segments import FRAMES, RowSegments, stored_row
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.settings import Config
from rlsync.seams import trainers
from tests.runs.recipes.test_off_policy import built, tiny
from tests.runs.recipes.test_recipes import trained
from tests.runs.recipes.test_row_segments import Written
from tests.tools.parts.space_envs import spaced

STACK, CHANNELS, SIDE = 4, 1, 3
PICTURE = (STACK * CHANNELS, SIDE, SIDE)
CPU = torch.device("cpu")


class Game:
    """An environment whose every frame is new, and whose episodes end in both ways or go on over batches."""

    def __init__(self, seed: int, *, ends: float = 0.1, stack: int = STACK, channels: int = CHANNELS) -> None:
        self._dice = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._ends = ends
        self._shape = (channels, SIDE, SIDE)
        self._count = stack
        self._stack = self._first()

    def _frame(self) -> Tensor:
        return torch.randint(256, self._shape, generator=self._generator, dtype=torch.uint8)

    def _first(self) -> list[Tensor]:
        """A stack after a reset: the first frame so many times, or with other frames, as of an Atari game."""
        if self._dice.random() < 0.5:
            return [self._frame()] * self._count
        return [self._frame() for _ in range(self._count)]

    def steps(self, count: int) -> TensorDict:
        """``[count]`` steps, as :mod:`rlsync.runs.actors.transitions` says."""
        seen, led_to, terminated, truncated = [], [], [], []
        for _ in range(count):
            seen.append(torch.cat(self._stack))
            moved = [*self._stack[1:], self._frame()]
            ends = self._dice.random()
            terminated.append(ends < self._ends / 2)
            truncated.append(self._ends / 2 <= ends < self._ends)
            self._stack = moved
            if terminated[-1] or truncated[-1]:
                self._stack = self._first()
            led_to.append(torch.cat(self._stack if terminated[-1] else moved))
        after = {
            "observation": torch.stack(led_to),
            "reward": torch.arange(float(count))[:, None],
            "terminated": torch.tensor(terminated)[:, None],
            "truncated": torch.tensor(truncated)[:, None],
            "done": (torch.tensor(terminated) | torch.tensor(truncated))[:, None],
        }
        return TensorDict({"observation": torch.stack(seen), "next": TensorDict(after, [count])}, [count])


def batches(envs: list[Game], steps: int) -> Iterator[TensorDict]:
    while True:
        yield torch.stack([env.steps(steps) for env in envs])


def memory(
    capacity: int, *, in_frames: bool, n_step: int = 1, prioritized: bool = False, stack: int = STACK,
    channels: int = CHANNELS, **settings: int,
) -> StepMemory:  # fmt: skip
    sampler = PrioritizedRows(capacity, 0.6, 0.4) if prioritized else RandomSampler()
    buffer = RowBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=16)
    frames = None
    if in_frames:
        frames = Frames(capacity, stack, (stack * channels, SIDE, SIDE), CPU)
    buffer.storage.checkpointer = RowSegments(buffer, frames, **settings)
    return StepMemory(buffer, 0.9, n_step, frames=frames)


def drawn(of: StepMemory, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    rows = of.draw(None).flatten_keys(".").exclude("first_frame")
    return dict(rows.items())


def assert_draws_alike(one: StepMemory, other: StepMemory) -> None:
    for seed in range(5):
        left = drawn(one, seed)
        right = drawn(other, seed)
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("ends", [0.0, 0.1, 1.0], ids=["no end", "ends", "every step ends"])
@pytest.mark.parametrize(("stack", "channels"), [(4, 1), (3, 3), (1, 3)], ids=["grey", "colour", "no stack"])
def test_what_is_drawn_is_what_would_be_drawn_of_whole_pictures(
    n_step: int, ends: float, stack: int, channels: int
) -> None:
    shape = {"stack": stack, "channels": channels}
    whole = memory(50, in_frames=False, n_step=n_step, **shape)
    framed = memory(50, in_frames=True, n_step=n_step, **shape)
    dice = random.Random(0)
    envs = [Game(seed, ends=ends, **shape) for seed in range(3)]
    for _ in range(60):  # the buffer is written over many times, by batches of several lengths
        batch = next(batches(envs, dice.choice([1, 2, 5, 20])))
        dice.shuffle(envs)  # workers without a lag come in any order
        kept = batch.clone()
        whole.store(batch)
        framed.store(batch)
        assert (batch == kept).all(), "a batch is not changed"
        assert_draws_alike(framed, whole)


def test_priorities_and_weights_are_those_of_whole_pictures() -> None:
    whole, framed = (memory(50, in_frames=each, prioritized=True) for each in (False, True))
    envs = [Game(seed) for seed in range(2)]
    for _ in range(8):
        batch = next(batches(envs, 10))
        for each in (whole, framed):
            each.store(batch)
        assert_draws_alike(framed, whole)
        for each in (whole, framed):
            rows = torch.arange(20)
            each.buffer.update_priority(rows, rows + 1.0)


def test_each_frame_is_stored_once_also_over_the_bounds_of_batches() -> None:
    framed = memory(1_000, in_frames=True)
    frames = framed.frames
    assert frames is not None
    envs = [Game(seed, ends=0.0) for seed in range(4)]
    counts = []
    for _ in range(50):
        before = frames.end
        framed.store(next(batches(envs, 3)))
        envs.reverse()
        counts.append(frames.end - before)
    assert counts[0] <= 4 * (STACK + 3)
    assert counts[1:] == [4 * 3] * 49, "one for each step"


def test_the_ring_has_room_for_little_more_than_a_frame_a_row_and_grows_only_if_episodes_are_short() -> None:
    for ends, grows in ((0.02, False), (1.0, True)):
        framed = memory(10_000, in_frames=True)
        frames = framed.frames
        assert frames is not None
        room = frames.max_size
        assert room < 1.11 * 10_000
        game = batches([Game(seed, ends=ends) for seed in range(2)], 500)
        for _ in range(30):
            framed.store(next(game))
        assert (frames.max_size > room) is grows


def saved(of: StepMemory, run: Path) -> Path:
    run.mkdir(exist_ok=True)
    return WholeCheckpoint(replay_buffer=of.buffer).save(run / CHECKPOINT)


@pytest.mark.parametrize("ends", [0.05, 1.0], ids=["some end", "every step ends, so that the ring has grown"])
def test_a_loaded_memory_draws_the_same_and_goes_on_alike(ends: float, tmp_path: Path) -> None:
    whole, framed = (memory(200, in_frames=each) for each in (False, True))
    game = batches([Game(seed, ends=ends) for seed in range(2)], 25)
    for _ in range(7):
        batch = next(game)
        whole.store(batch)
        framed.store(batch)
        checkpoint = saved(framed, tmp_path)
    again = memory(200, in_frames=True)
    Checkpoint(replay_buffer=again.buffer).load(checkpoint)
    assert_draws_alike(again, whole)
    for _ in range(9):
        batch = next(game)
        whole.store(batch)
        again.store(batch)
        assert_draws_alike(again, whole)


def test_a_checkpoint_writes_only_the_new_frames_and_drops_those_that_no_row_shows(tmp_path: Path) -> None:
    framed = memory(2_000, in_frames=True, segment_bytes=4_000)
    game = batches([Game(seed, ends=0.02) for seed in range(2)], 100)
    written = Written()
    sizes = []
    for _ in range(40):
        framed.store(next(game))
        written.bytes(saved(framed, tmp_path))
        (folder,) = (tmp_path / CHECKPOINT).rglob(FRAMES)
        sizes.append(sum(file.stat().st_size for file in folder.glob("*.pt")))
    full = sizes[10:]
    assert max(full) < 1.5 * min(full), "no more than the buffer shows"
    assert framed.frames is not None
    assert framed.frames.first > 0


def test_rows_of_an_earlier_run_have_whole_pictures_and_the_run_goes_on_so(tmp_path: Path) -> None:
    whole = memory(100, in_frames=False)
    game = batches([Game(0)], 30)
    whole.store(next(game))
    again = memory(100, in_frames=True)
    Checkpoint(replay_buffer=again.buffer).load(saved(whole, tmp_path))
    assert_draws_alike(again, whole)
    batch = next(game)
    whole.store(batch)
    again.store(batch)
    assert_draws_alike(again, whole)
    checkpoint = saved(again, tmp_path)
    assert not list(checkpoint.rglob(FRAMES))


def test_a_row_of_a_checkpoint_is_read_with_its_pictures(tmp_path: Path) -> None:
    framed = memory(100, in_frames=True)
    batch = next(batches([Game(0)], 30))
    framed.store(batch)
    checkpoint = saved(framed, tmp_path)
    row = stored_row(checkpoint, 17)
    assert row is not None
    assert torch.equal(row["observation"], batch["observation"][0, 17])
    assert torch.equal(row["next", "observation"], batch["next", "observation"][0, 17])
    assert stored_row(checkpoint, 30) is None


# ---------------------------------------------------------------------------------------- a real run


def of_pictures(run: Path, stack: int, frames: int = 128) -> Config:
    config = tiny("dqn", run_dir=run, buffer_frames=75, n_step=1, total_frames=frames)
    config.env = spaced(Box(0, 255, (36, 36, 1), np.uint8))
    config.env.frame_stack = stack
    config.checkpoint_every_frames = 30
    return config


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.thorough
def test_a_run_stores_what_its_workers_saw_and_a_resumed_one_has_it_too(stack: int, tmp_path: Path) -> None:
    first = built(of_pictures(tmp_path / "first", stack))
    batches_seen: list[TensorDict] = []
    trained(first, lambda batch: batches_seen.append(batch.clone()))
    seen = torch.cat([batch.reshape(-1) for batch in batches_seen])[-75:]
    of_first = memory_in(first)
    assert of_first.frames is not None
    assert of_first.frames.end < 1.5 * 128, "each frame once"
    again = built(of_pictures(tmp_path / "second", stack, frames=192))
    try:
        load(again, tmp_path / "first" / CHECKPOINT)
        for of in (of_first, memory_in(again)):
            rows = of.buffer.storage.get(torch.arange(128 - 75, 128) % 75).clone()
            assert of.frames is not None
            shown = of.frames.shown(rows)
            assert torch.equal(shown["observation"], seen["observation"])
            assert torch.equal(shown["next", "observation"], seen["next", "observation"])
    finally:
        trained(again)


def memory_in(trainer: Trainer) -> StepMemory:
    owners = {trainers.owner_of(op) for op, _ in trainer._process_optim_batch_ops}
    (stored,) = (owner for owner in owners if isinstance(owner, StepMemory))
    return stored

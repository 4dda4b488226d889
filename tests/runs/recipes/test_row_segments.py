"""Replay buffers in checkpoints: what is written, what a loaded one is, and what becomes of damaged ones."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.compat.replay import RowBuffer
from rlsync.runs.life.resume import load
from rlsync.runs.life.state import begin
from rlsync.runs.recipes.checkpoints import WholeCheckpoint, checkpoint_at
from rlsync.runs.recipes.replay.memory import PrioritizedRows, StepMemory
from rlsync.runs.recipes.replay.row_segments import INDEX, RowSegments
from rlsync.runs.recipes.run_files import CHECKPOINT, ROOM
from tests.runs.recipes.test_off_policy import built, every_recipe, tiny
from tests.runs.recipes.test_recipes import trained
from tests.tools.parts import wait_until

#: Bytes of one row, with the index that TorchRL adds.
ROW = 8 + 12 + 1 + 8
#: Bytes of a checkpoint of such rows that do not depend on their number.
FIXED = 6_000


def rows_from(first: int, count: int) -> TensorDict:
    """Rows that say which number they have, in three dtypes."""
    number = torch.arange(first, first + count)
    following = {
        "observation": number[:, None].float() + torch.arange(3) / 4,
        "done": number[:, None] % 7 == 0,
    }
    return TensorDict({"number": number, "next": following}, [count])


def make(
    capacity: int = 50, *, prioritized: bool = False, device: str = "cpu", **settings: Any
) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, device=device),
        sampler=PrioritizedRows(capacity, 0.6, 0.4) if prioritized else RandomSampler(),
        batch_size=4,
    )
    buffer.storage.checkpointer = RowSegments(buffer, **settings)
    return buffer


def give(buffer: TensorDictReplayBuffer, count: int) -> None:
    """Extend a buffer with the next rows."""
    buffer.extend(rows_from(buffer.write_count, count))


def save(buffer: TensorDictReplayBuffer, run: Path, **others: Any) -> Path:
    run.mkdir(exist_ok=True)
    return WholeCheckpoint(replay_buffer=buffer, **others).save(run / CHECKPOINT)


def loaded(checkpoint: Path, capacity: int = 50, **settings: Any) -> TensorDictReplayBuffer:
    buffer = make(capacity, **settings)
    Checkpoint(replay_buffer=buffer).load(checkpoint)
    return buffer


def stored(buffer: TensorDictReplayBuffer) -> TensorDictBase:
    return buffer.storage.get(slice(0, len(buffer)))


def assert_same(one: TensorDictReplayBuffer, other: TensorDictReplayBuffer) -> None:
    assert (len(one), one.write_count) == (len(other), other.write_count)
    assert one.writer.state_dict() == other.writer.state_dict(), "the next row goes to the same place"
    if len(one):
        assert_rows_equal(stored(one), stored(other))


def assert_rows_equal(one: TensorDictBase, other: TensorDictBase) -> None:
    left, right = (dict(rows.flatten_keys().items()) for rows in (one, other))
    assert left.keys() == right.keys()
    for name, leaf in left.items():
        assert leaf.dtype == right[name].dtype
        assert torch.equal(leaf, right[name]), name


def segments(checkpoint: Path) -> dict[str, os.stat_result]:
    (index,) = checkpoint.rglob(INDEX)
    return {file.name: file.stat() for file in index.parent.glob("*.pt")}


class Written:
    """Counts the bytes of a checkpoint's replay buffer that no checkpoint before had, priorities left out."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int, int]] = set()

    def bytes(self, checkpoint: Path) -> int:
        parts = checkpoint.glob("components/*-replay_buffer/**/*")
        files = {file.name: file.stat() for file in parts if file.is_file() and file.name != "sampler.pt"}
        found = {(name, stat.st_ino, stat.st_mtime_ns): stat.st_size for name, stat in files.items()}
        new = sum(size for file, size in found.items() if file not in self._seen)
        self._seen |= found.keys()
        return new

    def rows(self, checkpoint: Path) -> int:
        """The rows in those files."""
        before = {name for name, _, _ in self._seen}
        self.bytes(checkpoint)
        names = {name for name, _, _ in self._seen if name.endswith(".pt")} - before
        return sum(int(end) - int(first) for first, end in map(_span, names))


def _span(name: str) -> list[str]:
    """The first row of a segment, and the one after its last."""
    return name.partition(".")[0].split("-")


# ------------------------------------------------------------------------------------------- equal


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.seconds
def test_a_loaded_buffer_is_what_it_was_and_goes_on_alike(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.choice([7, 50, 64])
    settings = {
        "most_segments": draw.choice([2, 1000]),
        "segment_bytes": draw.choice([1, 10 * ROW, 2**20]),
        "prioritized": draw.random() < 0.5,
    }
    buffer = make(capacity, **settings)
    for step in range(16):
        for _ in range(draw.randrange(3)):
            give(buffer, draw.randrange(1, capacity + 4))
        if isinstance(buffer.sampler, PrioritizedRows) and len(buffer):
            buffer.update_priority(torch.randint(len(buffer), (5,)), torch.rand(5))
        checkpoint = save(buffer, tmp_path)
        again = loaded(checkpoint, capacity, **settings)
        assert_same(again, buffer)
        if isinstance(buffer.sampler, PrioritizedRows) and len(buffer):
            assert torch.equal(again.sampler.probabilities(), buffer.sampler.probabilities())
        if draw.random() < 0.3:
            buffer = again  # a resumed run
        elif draw.random() < 0.2:
            buffer = loaded(save(buffer, tmp_path / f"other{step}"), capacity, **settings)
    numbers = stored(buffer)["number"]
    assert torch.equal(numbers % capacity, torch.arange(len(buffer)))
    assert sorted(numbers.tolist()) == list(range(buffer.write_count - len(buffer), buffer.write_count))


def test_a_buffer_that_was_emptied_or_got_another_kind_of_rows_is_written_anew(tmp_path: Path) -> None:
    buffer = make()
    give(buffer, 30)
    save(buffer, tmp_path)
    buffer.empty()
    buffer.extend(rows_from(100, 20))
    assert_same(loaded(save(buffer, tmp_path)), buffer)
    buffer.extend(rows_from(200, 5).set("reward", torch.ones(5)))
    again = loaded(save(buffer, tmp_path))
    assert_same(again, buffer)
    assert stored(again)["reward"][-5:].tolist() == [1.0] * 5


def test_rows_are_whole_after_more_of_them_than_torchrl_can_count(tmp_path: Path) -> None:
    buffer = make()
    give(buffer, 60)
    save(buffer, tmp_path)
    buffer.writer.load_state_dict({"_cursor": 10, "_write_count": 2**31 + 60})
    for first in (60, 85):
        buffer.extend(rows_from(first, 25))
        assert_same(loaded(save(buffer, tmp_path)), buffer)


# --------------------------------------------------------------------------------- written only once


def test_a_checkpoint_writes_as_many_bytes_as_there_are_new_rows(tmp_path: Path) -> None:
    buffer, written = make(10_000), Written()
    sizes = []
    for count in (1, 5_000, 100, 1_000, 0, 9_000, 100):
        if count:
            give(buffer, count)
        sizes.append((count, written.bytes(save(buffer, tmp_path))))
    for count, size in sizes:
        assert count * ROW < size < count * ROW + FIXED


def test_a_segment_goes_when_its_last_row_has_left_the_buffer(tmp_path: Path) -> None:
    buffer = make(segment_bytes=10 * ROW)
    for _ in range(40):
        give(buffer, 9)
        held = segments(save(buffer, tmp_path))
        rows = [tuple(map(int, _span(name))) for name in held]
        assert min(end for _, end in rows) > buffer.write_count - len(buffer)
        assert sum(end - first for first, end in rows) < len(buffer) + 10
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    assert {stat.st_nlink for stat in held.values()} == {1}, "nobody else keeps them"


@pytest.mark.thorough
@pytest.mark.seconds
def test_many_small_segments_are_written_once_more_as_one(tmp_path: Path) -> None:
    buffer, sizes = make(1000, most_segments=10), {}
    for _ in range(120):
        give(buffer, 10)
        checkpoint = save(buffer, tmp_path)
        sizes |= {name: stat.st_size for name, stat in segments(checkpoint).items()}
        assert len(segments(checkpoint)) < 11 + 1000 / 100 + 2
    assert sum(sizes.values()) < 2 * 1200 * ROW + len(sizes) * 3_000
    assert_same(loaded(checkpoint, 1000), buffer)


@pytest.mark.thorough
@pytest.mark.seconds
def test_files_stay_few_and_rows_are_written_again_a_few_times_however_many_checkpoints_there_were(
    tmp_path: Path,
) -> None:
    buffer, written, rows, files = make(10_000, most_segments=4), Written(), [], []
    for _ in range(300):
        give(buffer, 1)
        checkpoint = save(buffer, tmp_path)
        rows.append(written.rows(checkpoint))
        files.append(len(segments(checkpoint)))
    ranks = math.ceil(math.log(300, 4))
    assert max(files) <= 4 * ranks
    assert sum(rows) <= 300 * (1 + ranks)
    assert_same(loaded(checkpoint, 10_000), buffer)


def test_no_checkpoint_writes_more_than_one_segment_again(tmp_path: Path) -> None:
    """However many rows wait for it: here a run begins that merges, with a checkpoint of one that did not."""
    buffer = make(10_000, most_segments=1000)
    for _ in range(60):
        give(buffer, 10)
        before = save(buffer, tmp_path)
    assert len(segments(before)) == 60
    limit = 5_000
    again, written = loaded(before, 10_000, most_segments=4, segment_bytes=limit), Written()
    written.rows(before)
    for _ in range(40):
        give(again, 10)
        assert written.rows(save(again, tmp_path)) * ROW < limit + 10 * ROW
    assert_same(loaded(tmp_path / CHECKPOINT, 10_000), again)


def test_a_load_has_one_segment_in_memory_beside_the_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = make(1_000, segment_bytes=50 * ROW)
    give(buffer, 1_000)
    checkpoint = save(buffer, tmp_path)
    assert len(segments(checkpoint)) == 20
    mapped = []
    put = LazyTensorStorage.set

    def counted(storage: LazyTensorStorage, *arguments: Any, **options: Any) -> None:
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped.append(sum(str(checkpoint) in line for line in lines))
        put(storage, *arguments, **options)

    monkeypatch.setattr(LazyTensorStorage, "set", counted)
    assert_same(loaded(checkpoint, 1_000), buffer)
    assert mapped == [1] * 20


class Fails:
    """A part of a checkpoint that cannot be written."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("no")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def test_after_a_checkpoint_that_failed_only_what_it_lost_is_written_again(tmp_path: Path) -> None:
    buffer, written = make(10_000), Written()
    give(buffer, 5_000)
    written.bytes(save(buffer, tmp_path))
    for count in (100, 200):
        give(buffer, count)
        with pytest.raises(OSError, match="no"):
            save(buffer, tmp_path, zz_fails=Fails())
        assert len(loaded(tmp_path / CHECKPOINT, 10_000)) == 5_000, "the one before is whole"
    give(buffer, 50)
    checkpoint = save(buffer, tmp_path)
    assert written.bytes(checkpoint) < 350 * ROW + FIXED
    assert_same(loaded(checkpoint, 10_000), buffer)


# ------------------------------------------------------------------------------ other runs, other places


def test_two_runs_that_resume_from_one_checkpoint_share_its_files_and_disturb_neither(tmp_path: Path) -> None:
    source = make()
    give(source, 60)
    checkpoint = save(source, tmp_path / "source")
    before = segments(checkpoint)
    first, second = loaded(checkpoint), loaded(checkpoint)
    first.extend(rows_from(1_000, 10))
    second.extend(rows_from(2_000, 10))
    places = [save(first, tmp_path / "first"), save(second, tmp_path / "second")]
    inodes = [{stat.st_ino for stat in segments(place).values()} for place in (checkpoint, *places)]
    assert len(inodes[0] & inodes[1] & inodes[2]) >= 1
    assert segments(checkpoint).keys() == before.keys()
    assert_same(loaded(checkpoint), source)
    shutil.rmtree(tmp_path / "source")
    for buffer, place in zip((first, second), places, strict=True):
        assert_same(loaded(place), buffer)
        give(buffer, 30)
        assert_same(loaded(save(buffer, place.parent)), buffer)


def test_a_checkpoint_that_is_copied_moved_or_on_another_file_system_is_complete(tmp_path: Path) -> None:
    source = make()
    for _ in range(4):
        give(source, 20)
        save(source, tmp_path / "source")
    copied = shutil.copytree(tmp_path / "source" / CHECKPOINT, tmp_path / "copied")
    shutil.rmtree(tmp_path / "source")
    assert_same(loaded(copied), source)
    with TemporaryDirectory(dir="/dev/shm") as memory:
        assert Path(memory).stat().st_dev != tmp_path.stat().st_dev
        again = loaded(Path(shutil.copytree(copied, Path(memory) / "there")))
        written = Written()
        give(again, 5)
        checkpoint = save(again, tmp_path / "elsewhere")
        assert written.bytes(checkpoint) > 50 * ROW, "files cannot be linked from there"
    give(again, 5)
    checkpoint = save(again, tmp_path / "elsewhere")
    assert written.bytes(checkpoint) < 5 * ROW + FIXED, "and from then on they are"
    assert_same(loaded(checkpoint), again)


def test_where_files_cannot_be_linked_checkpoints_are_whole_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    buffer, written, told = make(), Written(), []
    for _ in range(4):
        give(buffer, 20)
        with warnings.catch_warnings(record=True, action="always", category=RlsyncWarning) as caught:
            checkpoint = save(buffer, tmp_path)
        told += [str(warning.message) for warning in caught if isinstance(warning.message, RlsyncWarning)]
        assert written.bytes(checkpoint) > len(buffer) * ROW
    assert len(told) == 1
    assert "cannot be linked (Operation not permitted)" in told[0]
    assert_same(loaded(checkpoint), buffer)


def test_a_checkpoint_of_torchrls_own_checkpointer_still_loads(tmp_path: Path) -> None:
    old = TensorDictReplayBuffer(storage=LazyTensorStorage(50), batch_size=4)
    for _ in range(4):
        give(old, 20)
    buffer, written = loaded(save(old, tmp_path)), Written()
    assert_same(buffer, old)
    give(buffer, 3)
    assert written.bytes(save(buffer, tmp_path)) > 50 * ROW, "the rows are written, once"
    give(buffer, 3)
    checkpoint = save(buffer, tmp_path)
    assert written.bytes(checkpoint) < 3 * ROW + FIXED
    assert_same(loaded(checkpoint), buffer)


# ------------------------------------------------------------------------- damaged, full disk, killed


def test_rows_of_an_earlier_rlsync_keep_the_fields_that_new_ones_have_in_later_checkpoints_too(
    tmp_path: Path,
) -> None:
    """It stored what no update read, and a segment is never written again: a checkpoint has rows of both."""
    earlier, old = make(20), rows_from(0, 8)
    old["reward_sum"], old["next", "state_value"] = torch.zeros(8, 1), torch.zeros(8, 1)
    earlier.extend(old)
    buffer = RowBuffer(storage=LazyTensorStorage(20), sampler=RandomSampler(), batch_size=4)
    buffer.storage.checkpointer = RowSegments(buffer)
    Checkpoint(replay_buffer=buffer).load(save(earlier, tmp_path / "earlier"))
    memory = StepMemory(buffer, gamma=0.9)
    for first in range(8, 24, 4):
        memory.store(rows_from(first, 4).set("is_init", torch.zeros(4, 1)))
    rows = stored(buffer)
    assert set(rows.keys(True, True)) == {"number", ("next", "observation"), ("next", "done"), "index"}
    assert sorted(rows["number"].tolist()) == [*range(4, 24)]
    checkpoint = save(buffer, tmp_path / "now")
    assert segments(checkpoint).keys() >= segments(tmp_path / "earlier" / CHECKPOINT).keys()
    assert_rows_equal(stored(loaded(checkpoint, 20)), rows)
    assert set(buffer.sample().keys(True, True)) == set(rows.keys(True, True))


def assert_three_lines(error: BaseException | None, what: str, file: str) -> None:
    assert isinstance(error, ConfigError)
    assert what in error.what
    assert file in error.where
    assert "resume" in error.cure


def test_a_missing_or_damaged_segment_is_named_with_what_to_do(tmp_path: Path) -> None:
    buffer = make()
    give(buffer, 20)
    whole = save(buffer, tmp_path)
    (name,) = segments(whole)
    damage = {
        "is missing": lambda file: file.unlink(),
        "is damaged: it has": lambda file: os.truncate(file, 700),
        "is damaged: its checksum": lambda file: _flip(file, file.read_bytes().find(bytes([0, 0, 128, 64]))),
    }
    for number, (what, harm) in enumerate(damage.items()):
        copy = shutil.copytree(whole, tmp_path / str(number))
        (file,) = copy.rglob(name)
        harm(file)
        with pytest.raises(RuntimeError) as refused:
            loaded(copy)
        assert_three_lines(refused.value.__cause__, what, str(file))
    copy = shutil.copytree(whole, tmp_path / "index")
    (file,) = copy.rglob(INDEX)
    file.write_text(file.read_text().replace('"end": 20', '"end": 25', 1))
    with pytest.raises(RuntimeError) as refused:
        loaded(copy)
    assert_three_lines(refused.value.__cause__, "some rows are in no segment", INDEX)
    with pytest.raises(RuntimeError, match=r"recipe\.buffer_frames=50"):
        loaded(whole, 60)


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 0x10
    file.write_bytes(content)


def test_no_flipped_bit_of_a_segment_brings_other_rows(tmp_path: Path) -> None:
    buffer = make()
    give(buffer, 3)
    whole = save(buffer, tmp_path)
    (name,) = segments(whole)
    (file,) = whole.rglob(name)
    content, refused = file.read_bytes(), 0
    for place in range(0, len(content), 19):
        file.write_bytes(content)
        _flip(file, place)
        again = make()
        try:
            Checkpoint(replay_buffer=again).load(whole)
        except RuntimeError as error:
            refused += isinstance(error.__cause__, ConfigError)
        else:
            assert_same(again, buffer)
    assert refused > 25


def in_a_child(act: Any) -> int:
    """The exit code of a forked process that runs ``act``."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


@pytest.mark.processes
def test_a_full_disk_is_an_error_that_says_so_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    buffer = make(100_000)
    give(buffer, 1_000)
    save(buffer, tmp_path)

    def fill() -> None:
        give(buffer, 50_000)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY)
        )  # the kernel refuses more
        with pytest.raises(RlsyncError, match=r"not be written: \[Errno 27\] File too large") as refused:
            save(buffer, tmp_path)
        assert "ulimit -f unlimited" in refused.value.cure
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
        assert len(loaded(tmp_path / CHECKPOINT, 100_000)) == 1_000
        assert_same(loaded(save(buffer, tmp_path), 100_000), buffer)  # there is room again
        os._exit(7)

    assert in_a_child(fill) == 7


def end_of(run: Path) -> int:
    """How many rows the newest checkpoint of a run knows."""
    try:
        (index,) = (run / CHECKPOINT).glob(f"components/*/storage/{INDEX}")
        return int(json.loads(index.read_text())["end"])
    except (ValueError, OSError):  # none yet, or it is being replaced
        return 0


@pytest.mark.processes
def test_a_learner_that_is_killed_at_any_moment_leaves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    draw, known = random.Random(1), 0

    def learn() -> None:
        torch.set_num_threads(1)
        begin(tmp_path)
        buffer = make(prioritized=True, segment_bytes=10 * ROW)
        at = checkpoint_at(tmp_path)
        if at is not None:
            Checkpoint(replay_buffer=buffer).load(at)
        while True:
            give(buffer, 8)
            save(buffer, tmp_path)

    context = multiprocessing.get_context("fork")
    for _ in range(12):
        child = context.Process(target=learn)
        child.start()
        goal = known + 16
        assert wait_until(lambda goal=goal: end_of(tmp_path) >= goal, 60.0), "it goes on from the one before"
        time.sleep(draw.uniform(0, 0.1))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(20)
        assert child.exitcode == -signal.SIGKILL
        at = checkpoint_at(tmp_path)
        assert at is not None
        buffer = loaded(at, prioritized=True)
        first = buffer.write_count - len(buffer)
        expected = rows_from(first, len(buffer))
        expected["index"] = expected["number"] % 50
        order = expected["index"].argsort()
        assert_rows_equal(stored(buffer), expected[order])
        assert buffer.write_count >= goal
        known = buffer.write_count
    save(buffer, tmp_path)
    begin(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {CHECKPOINT, ROOM}, (
        "no leftovers of those that were killed"
    )


def test_a_replaced_checkpoint_that_was_left_goes_only_if_there_is_a_newer_one(tmp_path: Path) -> None:
    buffer = make()
    give(buffer, 5)
    replaced = save(buffer, tmp_path).rename(tmp_path / f".{CHECKPOINT}.backup-1f")
    begin(tmp_path)
    assert checkpoint_at(tmp_path) == replaced, "it is the only one"
    checkpoint = save(buffer, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint.name, ROOM}


# --------------------------------------------------------------------------------------- real runs


@pytest.fixture
def shut() -> Iterator[list[Trainer]]:
    trainers: list[Trainer] = []
    yield trainers
    for trainer in trainers:
        trainer.shutdown()


@every_recipe
@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_resumed_run_has_the_rows_places_and_priorities_of_the_run_before(
    name: str, prioritized: bool, tmp_path: Path, shut: list[Trainer]
) -> None:
    settings = {"buffer_frames": 75, "prioritized": prioritized}  # full in the third of four batches
    config = tiny(name, run_dir=tmp_path / "first", **settings)
    config.checkpoint_every_frames = 30
    first, written, counts = built(config), Written(), []
    checkpoint = tmp_path / "first" / CHECKPOINT
    first.register_op("pre_steps_log", lambda _: counts.append(written.rows(checkpoint)))
    trained(first)
    buffer = first.replay_buffer
    counts.append(written.rows(checkpoint))
    assert counts == [0, 32, 32, 32, 32], "the rows of each batch, in the checkpoint after it"

    again = built(tiny(name, run_dir=tmp_path / "second", total_frames=192, **settings))
    shut.append(again)
    load(again, checkpoint)
    assert_same(again.replay_buffer, buffer)
    assert (len(buffer), buffer.write_count) == (75, 128)
    if prioritized:
        assert torch.equal(again.replay_buffer.sampler.probabilities(), buffer.sampler.probabilities())
    kept = stored(again.replay_buffer).clone()
    again.save_trainer(force_save=True)
    assert written.rows(tmp_path / "second" / CHECKPOINT) == 0, "its files are those of the run before"
    trained(again)
    held = stored(again.replay_buffer)
    turn = torch.arange(128, 192) % 75
    untouched = torch.ones(75, dtype=torch.bool).index_fill(0, turn, value=False)
    assert_rows_equal(held[untouched], kept[untouched])
    assert not torch.equal(held["observation"][~untouched], kept["observation"][~untouched])


@pytest.mark.usefixtures("fork_workers")
def test_a_run_cannot_go_on_from_a_checkpoint_without_a_segment_and_says_which(
    tmp_path: Path, shut: list[Trainer]
) -> None:
    config = tiny("sac", run_dir=tmp_path)
    config.checkpoint_every_frames = 30
    trained(built(config))
    again = built(tiny("sac", total_frames=192))
    shut.append(again)
    lost = next((tmp_path / CHECKPOINT).rglob("0-32.*.pt"))
    lost.unlink()
    with pytest.raises(ConfigError, match="replay buffer is missing") as refused:
        load(again, tmp_path / CHECKPOINT)
    assert refused.value.where == str(lost)

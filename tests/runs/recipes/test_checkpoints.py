"""Checkpoints: damage is refused and named, nothing is written by reading, and a stop leaves a whole one."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn, optim
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlsync.core import machine, whole_file
from rlsync.core.errors import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.life.state import begin
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes import trainer as recipe_trainer
from rlsync.runs.recipes.checkpoints import WholeCheckpoint, require_whole, taken
from rlsync.runs.recipes.ppo import PPOConfig
from rlsync.runs.recipes.replay.row_segments import RowSegments
from rlsync.runs.recipes.run_files import CHECKPOINT, DIGESTS, ROOM
from rlsync.runs.recipes.settings import CollectorConfig, Config
from rlsync.runs.recipes.trainer import RandomState
from tests.runs.recipes.test_row_segments import in_a_child
from tests.tools.parts.power_cut import Disk, Image, put


class Count:
    """A component that says which save wrote a checkpoint."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "counts": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["counts"].tolist() == [state["count"]] * 3
        self.count = state["count"]


def make() -> WholeCheckpoint:
    """Weights, an optimizer, random numbers and a replay buffer, as a run has them."""
    policy = nn.Linear(3, 2)
    optimizer = optim.Adam(policy.parameters())
    policy(torch.ones(3)).sum().backward()
    optimizer.step()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=2)
    buffer.storage.checkpointer = RowSegments(buffer)
    buffer.extend(TensorDict({"row": torch.arange(4.0)}, [4]))
    return WholeCheckpoint(policy=policy, optimizer=optimizer, rng=RandomState(), replay_buffer=buffer)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return make().save(tmp_path / CHECKPOINT)


def facts(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """What shows that nothing was written."""
    return {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "emptied": lambda file: file.write_bytes(b""),
    "with one bit flipped": flip,
    "removed": Path.unlink,
}


@pytest.mark.seconds
@pytest.mark.parametrize("damage", DAMAGE)
def test_whatever_file_is_damaged_is_named_and_nothing_is_written(saved: Path, damage: str) -> None:
    names = sorted(str(f.relative_to(saved)) for f in saved.rglob("*") if f.is_file() and f.name != DIGESTS)
    for part in ("policy", "optimizer", "rng", "replay_buffer/storage", "manifest.json"):
        assert any(part in name for name in names), part
    for name in names:
        file, whole = saved / name, (saved / name).read_bytes()
        DAMAGE[damage](file)
        before = facts(saved)
        with pytest.raises(ConfigError, match="the checkpoint is damaged: it") as refused:
            taken(saved.parent, trusted=True)
        assert refused.value.where == str(file)
        assert facts(saved) == before
        file.write_bytes(whole)
    assert taken(saved.parent, trusted=False) is not None, "it is whole again"


@pytest.mark.parametrize("damage", ["truncated", "emptied", "with one bit flipped"])
def test_a_damaged_manifest_is_refused_even_with_trust(saved: Path, damage: str) -> None:
    DAMAGE[damage](saved / DIGESTS)
    with pytest.raises(ConfigError, match="the checkpoint is damaged"):
        require_whole(saved, trusted=True)


def test_a_file_that_the_manifest_does_not_name_is_refused(saved: Path) -> None:
    (added,) = (folder / "other.memmap" for folder in saved.glob("components/*-policy"))
    added.touch()
    with pytest.raises(ConfigError, match="does not name it") as refused:
        require_whole(saved, trusted=True, components=["policy"])
    assert refused.value.where == str(added)


def test_a_checkpoint_does_not_make_a_removed_folder_anew(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        WholeCheckpoint(count=Count()).save(tmp_path / "removed" / CHECKPOINT)
    assert not (tmp_path / "removed").exists()


def test_a_manifest_of_a_newer_rlsync_is_refused(saved: Path) -> None:
    held = json.loads((saved / DIGESTS).read_text())
    (saved / DIGESTS).write_text(json.dumps(held | {"format": 2}))
    with pytest.raises(ConfigError, match="its format is 2, and this rlsync reads 1"):
        require_whole(saved, trusted=True)


def test_only_what_will_be_loaded_is_checked(saved: Path) -> None:
    (weights,) = saved.glob("components/*-policy/state/tensor_00000000.memmap")
    (moments,) = saved.glob("components/*-optimizer/state/tensor_00000001.memmap")
    flip(moments)
    assert require_whole(saved, trusted=False, components=["policy", "not there"])
    flip(weights)
    with pytest.raises(ConfigError) as refused:
        require_whole(saved, trusted=False, components=["policy"])
    assert refused.value.where == str(weights)


def test_a_checkpoint_without_a_manifest_needs_trust_and_is_called_unchecked(saved: Path) -> None:
    (saved / DIGESTS).unlink()
    with pytest.raises(ConfigError, match=f"it has no {DIGESTS}") as refused:
        taken(saved.parent, trusted=False)
    assert "--trust" in refused.value.cure
    assert str(taken(saved.parent, trusted=True)) == f"{saved}, unchecked: it has no {DIGESTS}"


@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed"])
def test_a_short_tensor_is_refused_without_a_manifest_too_and_is_not_grown(saved: Path, damage: str) -> None:
    (saved / DIGESTS).unlink()
    (file,) = saved.glob("components/*-policy/state/tensor_00000000.memmap")
    DAMAGE[damage](file)
    before = facts(saved)
    with pytest.raises(ConfigError, match="of 24 bytes") as refused:
        require_whole(saved, trusted=True, components=["policy"])
    assert refused.value.where == str(file)
    assert facts(saved) == before


def test_a_replay_segment_is_hashed_once_and_its_digest_is_carried_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    digest_of = whole_file.digest_of

    def counted(file: Path) -> str:
        hashed.append(file.name)
        return digest_of(file)

    monkeypatch.setattr(whole_file, "digest_of", counted)
    checkpoint = make()
    buffer = checkpoint.components["replay_buffer"]
    for run in ("first", "first", "second"):
        buffer.extend(TensorDict({"row": torch.arange(2.0)}, [2]))
        (tmp_path / run).mkdir(exist_ok=True)
        at = checkpoint.save(tmp_path / run / CHECKPOINT)
    segments = [name for name in hashed if name.endswith(".pt")]
    assert len(segments) == len(set(segments)) == 3
    assert require_whole(at, trusted=False)


# --------------------------------------------------------------------------------- which of the two


def test_resume_takes_the_one_before_where_the_newer_one_is_damaged_and_says_why(saved: Path) -> None:
    before = shutil.copytree(saved, saved.with_name(f".{CHECKPOINT}.backup-1f"))
    (file,) = saved.glob("components/*-policy/state/tensor_00000000.memmap")
    flip(file)
    begin(saved.parent)  # what a run that goes on in this folder does first
    assert str(taken(saved.parent, trusted=False)) == (
        f"{before}, the one before, because the checkpoint is damaged: its bytes are not those that were "
        f"written ({file})"
    )
    make().save(saved)
    assert {path.name for path in saved.parent.iterdir()} == {CHECKPOINT, ROOM}, "a new one replaces both"


def test_resume_says_which_of_two_whole_ones_it_takes(saved: Path) -> None:
    run = saved.parent
    assert str(taken(run, trusted=False)) == str(saved)
    left = run / f".{CHECKPOINT}.backup-1f"
    shutil.copytree(saved, left)
    assert "the newer one of two" in str(taken(run, trusted=False))
    saved.rename(run / f".{CHECKPOINT}.backup-2e")
    shutil.rmtree(left)
    assert "the one before: a newer one was not in its place yet" in str(taken(run, trusted=False))
    (run / f".{CHECKPOINT}.backup-2e").rename(saved)
    (run / f".{CHECKPOINT}.stage-1f").mkdir()
    assert "the newest whole one: another was not written whole" in str(taken(run, trusted=False))


@pytest.fixture
def disk() -> Iterator[Disk]:
    with closing(Disk()) as disk:
        yield disk


def refusing(call: Callable[..., Any], number: int, name: str = "") -> Callable[..., Any]:
    """The same call, refused with this error for every folder, or for those of one name; links always."""

    @wraps(call)
    def tried(path: Any, *args: Any, **kwargs: Any) -> Any:
        at = Path(f"/proc/self/fd/{path}" if isinstance(path, int) else path)
        if call is os_link or (at.is_dir() and name in ("", at.name)):
            raise OSError(number, os.strerror(number), str(path))
        return call(path, *args, **kwargs)

    return tried


os_link = os.link
NOBODY = 65534

#: What a file system may lack, with the error that it gives; perhaps for one folder alone.
LACKS: dict[str, list[tuple[str, int, str]]] = {
    "nothing": [],
    "renaming folders": [("rename", errno.ENOSYS, "")],
    "renaming a folder of a container's image": [("rename", errno.EXDEV, CHECKPOINT)],
    "renaming folders and linking files": [("rename", errno.EPERM, ""), ("link", errno.EPERM, "")],
}


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("lacks", "saves"),
    [*((lack, 2) for lack in LACKS), pytest.param("nothing", 3, marks=pytest.mark.thorough)],
)
def test_a_machine_that_stops_at_any_moment_leaves_the_checkpoint_before_or_the_new_one(
    lacks: str, saves: int, tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings.simplefilter("ignore", RlsyncWarning)  # that files cannot be linked
    for call, number, name in LACKS[lacks]:
        monkeypatch.setattr(os, call, refusing(getattr(os, call), number, name))
    run, count = tmp_path / "run", Count()
    buffer = make().components["replay_buffer"]
    checkpoint = WholeCheckpoint(count=count, replay_buffer=buffer)
    run.mkdir()
    left: dict[str, tuple[Image, int, int]] = {}

    def note(oldest: int) -> None:
        for image in disk.left(run):
            left[repr((sorted(image.items()), oldest))] = (image, oldest, count.count)

    for number in range(1, saves + 1):
        count.count = number
        buffer.extend(TensorDict({"row": torch.arange(2.0)}, [2]))
        with disk.watching(lambda number=number: note(number - 1)):
            checkpoint.save(run / CHECKPOINT)
        note(number)
    assert len(left) > 50
    newer = set()
    for at, (image, oldest, newest) in enumerate(left.values()):
        put(image, tmp_path / str(at))
        choice, read = taken(tmp_path / str(at), trusted=False), Count()
        if choice is not None:
            Checkpoint(count=read, replay_buffer=make().components["replay_buffer"]).load(choice.checkpoint)
        assert oldest <= read.count <= newest, sorted(image)
        newer.add((oldest, read.count))
    kept, replaced = [{(n, n + more) for n in range(saves + 1 - more)} for more in (0, 1)]
    assert newer == kept | replaced


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_no_error_unless_the_disk_failed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = make().save(tmp_path / CHECKPOINT)
    monkeypatch.setattr(os, "fsync", refusing(os.fsync, number))
    if number != errno.EIO:
        assert make().save(tmp_path / CHECKPOINT) == saved
    else:
        with pytest.raises(RlsyncError, match="could not be written: Input/output error") as refused:
            make().save(tmp_path / CHECKPOINT)
        assert "dmesg" in refused.value.cure
        assert f"resume={tmp_path} goes on from it" in refused.value.cure
    assert str(taken(tmp_path, trusted=False)) == str(saved)


def test_what_a_folder_cannot_do_is_told_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.require_checkpoints(tmp_path / "run", "run_dir") == []
    for call in ("rename", "link", "fsync"):
        monkeypatch.setattr(os, call, refusing(getattr(os, call), errno.EINVAL))
    lacks = ["link files", "rename folders", "sync folders"]
    assert machine.require_checkpoints(tmp_path / "run", "run_dir") == lacks
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConfigError, match="checkpoints cannot be written there: Function not") as refused:
        machine.require_checkpoints(tmp_path / "run", "run_dir")
    assert "another one, with run_dir=FOLDER" in refused.value.cure


@pytest.mark.skipif(os.getuid() != 0, reason="needs the right to become another user")
@pytest.mark.processes
def test_a_user_who_may_start_no_thread_has_checkpoints_too(tmp_path: Path) -> None:
    def save() -> None:
        with TemporaryDirectory(dir="/tmp") as folder:
            os.chown(folder, NOBODY, NOBODY)
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))  # root has no limit
            os.setuid(NOBODY)
            with pytest.raises(RuntimeError, match="new thread"):
                threading.Thread(target=print).start()
            make().save(Path(folder) / CHECKPOINT)
            found = taken(Path(folder), trusted=False)
            os._exit(7 if found is not None else 1)

    assert in_a_child(save) == 7


@pytest.mark.one_case
@pytest.mark.seconds
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize(
    ("rest_s", "every", "saved_at"),
    [(0.0, None, [16, 32, 48, 64, 80]), (30.0, None, [80]), (30.0, 40, [48, 80])],
)
def test_a_run_that_says_nothing_of_checkpoints_writes_them_half_a_minute_apart(
    rest_s: float, every: int | None, saved_at: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_trainer, "CHECKPOINT_REST_S", rest_s)
    assert frames_of_checkpoints(1, every, tmp_path, monkeypatch) == saved_at


@pytest.mark.one_case
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("least", "every", "saved_at"),
    [(10, None, [16, 32, 48, 64, 80]), (33, None, [48, 80]), (80, 40, [48, 80])],
)
def test_a_run_with_a_lag_writes_them_at_the_ends_of_its_lives(
    least: int, every: int | None, saved_at: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsync.runs.recipes.settings.LEAST_STEPS_OF_A_LIFE", least)
    assert frames_of_checkpoints(0, every, tmp_path, monkeypatch) == saved_at


def frames_of_checkpoints(
    workers: int, every: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """After how many frames a run of five batches writes its checkpoints; with a worker, without a lag."""
    config = Config(
        recipe=PPOConfig(total_frames=80, target_return=None),
        collector=CollectorConfig(num_workers=workers, frames_per_batch=16, lag=None),
        checkpoint_every_frames=every,
        run_dir=str(folder),
    )
    trainer = ppo.RECIPE.build(config)
    written: list[int] = []
    monkeypatch.setattr(trainer, "_save_trainer", lambda: written.append(trainer.collected_frames))
    trainer.train()
    return written

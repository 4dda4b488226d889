"""Checkpoints of a run: on disk before they replace the one before, and checked before anything is read.

Whoever reads one asks :func:`require_whole` or :func:`taken` first: TorchRL maps tensors for writing, so a
file that is too short is grown with zeros.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from torchrl.checkpoint import Checkpoint

from rlsync import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.compat.checkpoints import StagedCheckpoint
from rlsync.runs.recipes.replay.row_segments import INDEX, digests_in
from rlsync.runs.recipes.run_files import (
    ABOUT_RUN,
    CHECKPOINT,
    DIGESTS,
    ENVIRONMENTS,
    EVALUATIONS,
    LIFE_END,
    METRICS,
    RECEIPTS,
)
from rlsync.seams import first_line, machine, warn, whole_file

_FORMAT = 1  #: changes when an older rlsync cannot read the manifest any more
#: A file system puts what many threads wait for on disk at once: 130 files in 50 ms, one by one in 800 ms.
_SYNCS = 32
#: What TorchRL writes into a checkpoint, and tensordict into each folder of memory-mapped tensors.
_TORCHRLS = "manifest.json"
_TENSORS = "meta.json"


class WholeCheckpoint(StagedCheckpoint):
    """A checkpoint, on disk with its manifest before it replaces the one before: one is always left.

    Room for the next one is kept, as far as there is some, and given up when the disk is full.
    """

    #: Whether the run is between the ends of two lives: then the checkpoint of the last end is kept, too.
    within_a_life = False
    #: Returns what the episodes of each worker go on from, pickled; by default nothing.
    saved_envs: Callable[[], Sequence[bytes]] = list
    #: When it was written last; when it was made, before that. In seconds of ``time.monotonic``.
    written: float

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written = time.monotonic()
        self._room: IO[bytes] | None = None
        self._room_bytes = 0

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write it; RlsyncError if there is no room, or the machine refuses something else."""
        at = Path(path).absolute()
        if not at.parent.is_dir():  # the folder of the run was removed: nobody makes it anew
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(at.parent))
        try:
            self._save(at, options)
        except (OSError, RuntimeError) as error:  # torch turns the first into the second
            refused = _refused(error, at)
            if refused is None:
                raise
            raise refused from error
        self.written = time.monotonic()
        self._keep_room(at.parent)
        return at

    def put(self, stage: Path, at: Path) -> None:
        about = AboutRun(self.within_a_life, appended_to(at.parent))
        (stage / ABOUT_RUN).write_text(json.dumps(asdict(about)))
        for worker, saved in enumerate(self.saved_envs()):
            file = _envs_of(stage, worker)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(saved)
        _write_manifest(stage)
        # The blocks of what was written, and one for each name. Links to older files take none.
        room_bytes = 0
        for path in stage.rglob("*"):
            facts = path.stat()
            is_link = stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1
            if not is_link:
                room_bytes += 4096 + 512 * facts.st_blocks
        self._room_bytes = room_bytes
        end = at.with_name(LIFE_END)
        if self.within_a_life and at.exists() and not AboutRun.of(at).within_a_life:
            _remove(end)
            _renamed(at, end)  # where folders cannot be renamed, it is lost
        _replace(at, stage)
        if not self.within_a_life:
            _remove(end)

    def _save(self, at: Path, options: dict[str, Any]) -> None:
        try:
            super().save(at, **options)
        except (OSError, RuntimeError, RlsyncError) as error:
            refusal = machine.machines(error)
            if (
                self._room is None
                or refusal is None
                or refusal.errno not in (errno.ENOSPC, errno.EDQUOT)
            ):
                raise
            self._give_room_up()
            super().save(at, **options)
            problem = "the disk is full: a checkpoint took the room that was kept for the last one of the run"
            warn(
                RlsyncWarning(
                    problem, str(at), "free some space there, or the next one may end the run"
                )
            )

    def _keep_room(self, folder: Path) -> None:
        """Keep room for a checkpoint as large as this one, in a file that goes with this process."""
        try:
            if self._room is None:
                self._room = TemporaryFile(dir=folder)  # noqa: SIM115  # it stays open
                weakref.finalize(self, self._room.close)
            if os.fstat(self._room.fileno()).st_size < self._room_bytes:
                whole_file.reserve(self._room.fileno(), self._room_bytes)
        except OSError:
            self._give_room_up()

    def _give_room_up(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None


@dataclass(frozen=True, slots=True)
class AboutRun:
    """What a checkpoint says of its run; of one by an earlier rlsync nothing is known."""

    within_a_life: bool = False
    #: Of the run's files that grow line by line.
    bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Path) -> AboutRun:
        file = checkpoint / ABOUT_RUN
        if not file.is_file():
            return cls()
        return cls(**json.loads(file.read_text()))


def envs_in(checkpoint: Path) -> list[bytes]:
    """What the episodes of each worker go on from; empty if new ones begin there."""
    workers = len(list((checkpoint / ENVIRONMENTS).glob("*")))
    return [_envs_of(checkpoint, worker).read_bytes() for worker in range(workers)]


def _envs_of(checkpoint: Path, worker: int) -> Path:
    # By the name of a pickle it is looked at before one of another user's is loaded: see trust.check_checkpoint.
    return checkpoint / ENVIRONMENTS / f"{worker}.pickle"


def appended_to(run: Path) -> dict[str, int]:
    """The files of a run's folder that grow line by line, and their bytes now."""
    files = [run / RECEIPTS, run / EVALUATIONS, *(run / METRICS).rglob("*.csv")]
    return {str(file.relative_to(run)): file.stat().st_size for file in files if file.is_file()}


def _refused(error: Exception, at: Path) -> RlsyncError | None:
    """The error of a checkpoint that the machine has refused, in three lines; None if it is a program's."""
    refusal = machine.machines(error)
    if refusal is None:
        return None
    cure = machine.cure_of(refusal, at.parent)
    if cure is None:
        return None
    problem = f"the checkpoint could not be written: {refusal.strerror}"
    if at.exists():
        left = f"; the checkpoint before is whole: resume={at.parent} goes on from it"
    else:
        left = ""
    return RlsyncError(problem, str(refusal.filename or at.parent), cure + left)


def _write_manifest(checkpoint: Path) -> None:
    """Put a checkpoint on disk, and then its manifest; replay segments keep the digest of their writing."""
    inside = sorted(checkpoint.rglob("*"))
    carried: dict[Path, str] = {}
    for index in checkpoint.rglob(INDEX):
        for segment, digest in digests_in(index).items():
            carried[index.parent / segment] = digest
    files = {}
    for file in inside:
        if file.is_file():
            name = file.relative_to(checkpoint).as_posix()
            digest = carried.get(file) or whole_file.digest_of(file)
            files[name] = {"bytes": file.stat().st_size, "blake2b": digest}
    _flush_all([path for path in inside if path not in carried])
    text = json.dumps({"format": _FORMAT, "files": files}, indent=1)
    whole_file.write_whole(
        checkpoint / DIGESTS, lambda beside: beside.write_text(text), durable=True
    )


def _flush_all(paths: Sequence[Path]) -> None:
    """Have the disk keep all of them; in threads, as far as there are some."""
    with ThreadPoolExecutor(_SYNCS) as pool:
        try:
            flushed = [pool.submit(whole_file.flush, path) for path in paths]
        except RuntimeError:  # this user may have no more threads
            flushed = []
    for each in flushed:
        each.result()
    if not flushed:
        for path in paths:
            whole_file.flush(path)


def _replace(at: Path, new: Path) -> None:
    """Put a whole checkpoint into its place, and then remove those that it replaces.

    Where folders cannot be renamed, as those of a container's image, it is found beside its place until its
    files are there.
    """
    before = at.with_name(f".{at.name}.backup-{uuid.uuid4().hex}")
    if at.exists() and not _renamed(at, before):
        whole_file.flush(at.parent)  # a reader finds the new one from now on
        _remove(at)
    try:
        if not _renamed(new, at):
            whole_file.flush(at.parent)
            _copy_to(new, at)
    except OSError:
        if before.exists():
            before.rename(at)
            raise
        # The new one stays beside its place: it is the only one. If this raised, TorchRL would remove it.
    whole_file.flush(at.parent)
    for replaced in (
        *at.parent.glob(f".{at.name}.backup-*"),
        *at.parent.glob(f".{at.name}.stage-*"),
    ):
        if at.exists() or replaced != new:
            _remove(replaced)


def _renamed(folder: Path, to: Path) -> bool:
    """Rename a folder. False where the file system cannot do that."""
    try:
        folder.rename(to)
    except OSError as error:
        if error.errno not in whole_file.CANNOT:
            raise
        return False
    return True


def _copy_to(new: Path, at: Path) -> None:
    """Give the files of a checkpoint names in its place, the manifest last. OSError if there is no room."""
    try:
        shutil.copytree(
            new,
            at,
            copy_function=machine.link_or_copy,
            ignore=lambda _, names: {DIGESTS} & {*names},
        )
        _flush_all([at, *at.rglob("*")])
        machine.link_or_copy(new / DIGESTS, at / DIGESTS)
        whole_file.flush(at / DIGESTS)
        whole_file.flush(at)
        whole_file.flush(at.parent)
    except BaseException:
        _remove(at)
        raise


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. If that is not finished, nobody takes what is left for one."""
    with suppress(OSError):
        for name in (_TORCHRLS, DIGESTS):
            (checkpoint / name).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def places(folder: Path) -> list[Path]:
    """The checkpoints that a folder is, or has, newest first.

    Of one that was not put into its place yet, or was replaced, the name begins with a dot.
    """

    def newest_first(kind: str) -> list[Path]:
        beside = folder.glob(f".{CHECKPOINT}.{kind}-*")
        return sorted(beside, key=lambda at: at.stat().st_mtime, reverse=True)

    def has_digests(at: Path) -> bool:
        return (at / DIGESTS).is_file()

    stages = filter(has_digests, newest_first("stage"))  # the last file that is written
    in_place = (folder, folder / CHECKPOINT)
    candidates = (*in_place, *stages, *newest_first("backup"), folder / LIFE_END)
    return [at for at in candidates if Checkpoint.is_checkpoint(at) or has_digests(at)]


def checkpoint_at(folder: Path) -> Path | None:
    """The first of :func:`places`, whether it is whole or not; None if there is none."""
    return next(iter(places(folder)), None)


@dataclass(frozen=True, slots=True)
class Taken:
    """The newest whole checkpoint of a folder, and what a user should know of the choice."""

    checkpoint: Path
    why: str

    def __str__(self) -> str:
        return f"{self.checkpoint}{self.why}"


def taken(
    folder: Path, *, trusted: bool, components: Collection[str] | None = None
) -> Taken | None:
    """The newest whole checkpoint in a folder; None if there is none, a ConfigError if none is whole."""
    candidates = places(folder)
    errors = list[RlsyncError]()
    for at in candidates:
        why = ""
        try:
            if not require_whole(at, trusted=trusted, components=components):
                why = f", unchecked: it has no {DIGESTS}"
        except RlsyncError as error:
            errors.append(error)
            continue
        if errors:
            why += f", the one before, because {errors[0].what} ({errors[0].where})"
        else:
            why += _which(at, folder, len(candidates))
        return Taken(at, why)
    if errors:
        raise errors[0]
    return None


def _which(at: Path, folder: Path, candidates: int) -> str:
    """What a user would not expect of the choice: it is not the checkpoint in its place."""
    if at.name.startswith(f".{CHECKPOINT}.stage"):
        return ", the newest one, which was not in its place yet"
    if at.name.startswith(f".{CHECKPOINT}"):
        return ", the one before: a newer one was not in its place yet"
    if any(folder.glob(f".{CHECKPOINT}.stage-*")):
        return ", the newest whole one: another was not written whole"
    if AboutRun.of(at).within_a_life:
        return (
            ", where the run was stopped: another life begins there, which resume=auto does not do"
        )
    if candidates > 1:
        return ", the newer one of two: the other was not removed yet"
    return ""


def require_whole(
    checkpoint: Path, *, trusted: bool, components: Collection[str] | None = None
) -> bool:
    """Refuse a checkpoint with a damaged file, of ``components`` or all. False: no manifest, but trusted."""
    manifest = checkpoint / DIGESTS
    if not manifest.is_file():
        if not trusted:
            cure = "if it is whole, as one of an older rlsync may be, add --trust (in Python trust=True)"
            raise ConfigError(
                f"the checkpoint cannot be checked: it has no {DIGESTS}", str(checkpoint), cure
            )
        for folder in _folders(checkpoint, components):
            _require_sizes(folder)
        return False
    files = _files_in(manifest)

    # TorchRL's list of components comes first: it says which folders are read.
    components_file = checkpoint / _TORCHRLS
    _require_same(components_file, *files.get(components_file, (0, "")))
    folders = _folders(checkpoint, components)
    for file, (size, digest) in files.items():
        if any(map(file.is_relative_to, folders)):
            _require_same(file, size, digest)
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file() and file not in files and file != manifest:
                raise _damaged(file, f"{DIGESTS} does not name it")
    return True


def _files_in(manifest: Path) -> dict[Path, tuple[int, str]]:
    """Size and digest of each file that a manifest names; ConfigError if it is damaged."""
    files = {}
    try:
        written = json.loads(manifest.read_text())
        if written["format"] != _FORMAT:
            raise ValueError(f"its format is {written['format']}, and this rlsync reads {_FORMAT}")
        for name, facts in written["files"].items():
            files[manifest.parent / name] = (int(facts["bytes"]), str(facts["blake2b"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(manifest, first_line(error)) from error
    return files


def _folders(checkpoint: Path, components: Collection[str] | None) -> list[Path]:
    """The folders in which some components lie, or all of the checkpoint."""
    if components is None:
        return [checkpoint]
    records = Checkpoint.manifest(checkpoint)["components"]
    return [checkpoint / records[name]["path"] for name in components if name in records]


def _require_same(file: Path, size: int, digest: str) -> None:
    if not file.is_file():
        raise _damaged(file, "it is missing")
    if file.stat().st_size != size:
        raise _damaged(file, f"it has {file.stat().st_size:,} of {size:,} bytes")
    if whole_file.digest_of(file) != digest:
        raise _damaged(file, "its bytes are not those that were written")


def _require_sizes(folder: Path) -> None:
    """Refuse memory-mapped tensors of another size than tensordict has noted beside them."""
    for record in folder.rglob(_TENSORS):
        try:
            sizes = _sizes_in(record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(record, first_line(error)) from error
        for name, size in sizes.items():
            file = record.parent / f"{name}.memmap"
            bytes_there = 0
            if file.is_file():
                bytes_there = file.stat().st_size
            if bytes_there != size:
                raise _damaged(file, f"it has {bytes_there:,} of {size:,} bytes")


def _sizes_in(record: Path) -> dict[str, int]:
    """The bytes of each tensor in a folder, as tensordict has noted them."""
    sizes = {}
    for name, about in json.loads(record.read_text()).items():
        if isinstance(about, dict) and "dtype" in about and not about.get("is_nested"):
            dtype = getattr(torch, about["dtype"][6:])
            sizes[name] = torch.Size(about["shape"]).numel() * dtype.itemsize
    return sizes


def _damaged(file: Path, how: str) -> ConfigError:
    problem = f"the checkpoint is damaged: {how}"
    return ConfigError(problem, str(file), "use another checkpoint, or a whole copy of this one")

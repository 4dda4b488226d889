"""Checkpoints of a run: on disk before they replace the one before, and checked before anything is read.

Whoever reads one asks :func:`require_whole` or :func:`taken` first: TorchRL maps tensors for writing, so a
file that is too short is grown with zeros.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint

from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.core.whole_file import digest_of, flush
from rlsync.recipes.replay.row_segments import INDEX, digests_in
from rlsync.recipes.run_files import CHECKPOINT, DIGESTS

_FORMAT = 1  #: changes when an older rlsync cannot read the manifest any more
#: A file system puts what many threads wait for on disk at once: 130 files in 50 ms, one by one in 800 ms.
_SYNCS = 32
#: What TorchRL writes into a checkpoint, and tensordict into each folder of memory-mapped tensors.
_TORCHRLS, _TENSORS = "manifest.json", "meta.json"


class WholeCheckpoint(Checkpoint):
    """A checkpoint, on disk with its manifest before it replaces the one before: one is always left."""

    #: When it was written last; when it was made, before that. In seconds of ``time.monotonic``.
    written: float

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.written = time.monotonic()

    def save(self, path: str | Path, **options: Any) -> Path:
        at = Path(path).absolute()
        stage = at.with_name(f".{at.name}.stage-{uuid.uuid4().hex}")
        stage.mkdir()  # FileNotFoundError if the folder of the run was removed: nobody makes it anew
        try:
            new = super().save(stage / at.name, **options)
            _write_manifest(new)
            _replace(at, new)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
        self.written = time.monotonic()
        return at


def _write_manifest(checkpoint: Path) -> None:
    """Put a checkpoint on disk, and then its manifest; replay segments keep the digest of their writing."""
    inside = sorted(checkpoint.rglob("*"))
    carried = {
        index.parent / name: digest
        for index in checkpoint.rglob(INDEX)
        for name, digest in digests_in(index).items()
    }
    files = {}
    for file in inside:
        if file.is_file():
            digest = carried.get(file) or digest_of(file)
            files[file.relative_to(checkpoint).as_posix()] = {"bytes": file.stat().st_size, "blake2b": digest}
    with ThreadPoolExecutor(_SYNCS) as pool:
        for _ in pool.map(flush, (path for path in inside if path not in carried)):
            pass  # it raises what a call has raised
    (checkpoint / DIGESTS).write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1))
    flush(checkpoint / DIGESTS)
    flush(checkpoint)


def _replace(at: Path, new: Path) -> None:
    """Put a whole checkpoint into its place, and then remove those that it replaces."""
    if at.exists():
        before = at.with_name(f".{at.name}.backup-{uuid.uuid4().hex}")
        at.rename(before)
        try:
            new.rename(at)
        except BaseException:
            before.rename(at)
            raise
    else:
        new.rename(at)
    flush(at.parent)
    for replaced in at.parent.glob(f".{at.name}.backup-*"):
        shutil.rmtree(replaced, ignore_errors=True)


def places(folder: Path) -> list[Path]:
    """The checkpoints that a folder is, or has, newest first; a replaced one's name may begin with a dot."""
    replaced = folder.glob(f".{CHECKPOINT}.backup-*")
    found = (folder, folder / CHECKPOINT, *sorted(replaced, key=lambda at: at.stat().st_mtime, reverse=True))
    return [at for at in found if Checkpoint.is_checkpoint(at) or (at / DIGESTS).is_file()]


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


def taken(folder: Path, *, trusted: bool, components: Collection[str] | None = None) -> Taken | None:
    """The newest whole checkpoint in a folder; None if there is none, a ConfigError if none is whole."""
    found, errors = places(folder), list[RlsyncError]()
    for at in found:
        try:
            checked = require_whole(at, trusted=trusted, components=components)
        except RlsyncError as error:
            errors.append(error)
            continue
        why = "" if checked else f", unchecked: it has no {DIGESTS}"
        if errors:
            why += f", the one before, because {errors[0].what} ({errors[0].where})"
        elif at.name.startswith(f".{CHECKPOINT}"):
            why += ", the one before: a newer one was not in its place yet"
        elif any(folder.glob(f".{CHECKPOINT}.stage-*")):
            why += ", the newest whole one: another was not written whole"
        elif len(found) > 1:
            why += ", the newer one of two: the other was not removed yet"
        return Taken(at, why)
    if errors:
        raise errors[0]
    return None


def require_whole(checkpoint: Path, *, trusted: bool, components: Collection[str] | None = None) -> bool:
    """Refuse a checkpoint with a damaged file, of ``components`` or all. False: no manifest, but trusted."""
    record = checkpoint / DIGESTS
    if not record.is_file():
        if not trusted:
            cure = "if it is whole, as one of an older rlsync may be, add --trust (in Python trust=True)"
            raise ConfigError(f"the checkpoint cannot be checked: it has no {DIGESTS}", str(checkpoint), cure)
        for folder in _folders(checkpoint, components):
            _require_sizes(folder)
        return False
    try:
        held = json.loads(record.read_text())
        if held["format"] != _FORMAT:
            raise ValueError(f"its format is {held['format']}, and this rlsync reads {_FORMAT}")
        files = {checkpoint / name: (int(f["bytes"]), str(f["blake2b"])) for name, f in held["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(record, first_line(error)) from error
    own = checkpoint / _TORCHRLS
    _require_same(own, *files.get(own, (0, "")))
    read = _folders(checkpoint, components)
    for file, (size, digest) in files.items():
        if any(file.is_relative_to(folder) for folder in read):
            _require_same(file, size, digest)
    for file in (file for folder in read for file in folder.rglob("*") if file.is_file()):
        if file not in files and file != record:
            raise _damaged(file, f"{DIGESTS} does not name it")
    return True


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
    if digest_of(file) != digest:
        raise _damaged(file, "its bytes are not those that were written")


def _require_sizes(folder: Path) -> None:
    """Refuse memory-mapped tensors of another size than tensordict has noted beside them."""
    for record in folder.rglob(_TENSORS):
        try:
            sizes = {
                name: torch.Size(about["shape"]).numel() * getattr(torch, about["dtype"][6:]).itemsize
                for name, about in json.loads(record.read_text()).items()
                if isinstance(about, dict) and "dtype" in about and not about.get("is_nested")
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(record, first_line(error)) from error
        for name, size in sizes.items():
            file = record.parent / f"{name}.memmap"
            found = file.stat().st_size if file.is_file() else 0
            if found != size:
                raise _damaged(file, f"it has {found:,} of {size:,} bytes")


def _damaged(file: Path, how: str) -> ConfigError:
    what = f"the checkpoint is damaged: {how}"
    return ConfigError(what, str(file), "use another checkpoint, or a whole copy of this one")

"""Replace a file so that no reader ever sees a half one; read a record that was written so; digest a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

from rlsync.core.errors import ConfigError

T = TypeVar("T")


def write_whole(file: Path, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Let ``write`` write a file beside its place, then move it there in one step. If it raises or is killed,
    the file of before stays. A ``durable`` one is on the disk when this returns.
    """
    beside = file.with_name(f".{os.getpid()}.{file.name}")  # the suffix may say how it is written
    try:
        write(beside)
        if durable:
            flush(beside)
        beside.replace(file)
        if durable:
            flush(file.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def check_folder(file: Path, where: str | None = None) -> None:
    """ConfigError if ``file`` could not be written: because of its folder, or because it is one."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", where or str(file), "name a file")
    require_writable(file.parent, where or str(file), "name a file in another folder")


def require_writable(folder: Path, where: str, cure: str) -> None:
    """ConfigError with the machine's own reason if it does not let us write a file in ``folder``."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if folder.exists():
            raise ConfigError(f"cannot write into {folder}: {error.strerror}", where, cure) from error
        raise ConfigError(f"there is no folder {folder}", where, cure) from error


def require_place(folder: Path, where: str, cure: str) -> None:
    """The same for a folder that may have to be made, with those above it."""
    place = next(each for each in (folder / "it").absolute().parents if each.exists())
    require_writable(place, where, cure)


def flush(path: Path) -> None:
    """Have the disk keep a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_in(file: Path, kind: type[T], what: str, cure: str = "remove the file") -> T | None:
    """The dataclass that a file holds as JSON; None without a file, a ConfigError if it cannot be read."""
    try:
        return kind(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"cannot read {what}: {error}", str(file), cure) from error


def digest_of(file: Path) -> str:
    """The BLAKE2b digest of a file's bytes, 40 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=20)
    with file.open("rb") as opened:
        while piece := opened.read(2**20):
            digest.update(piece)
    return digest.hexdigest()

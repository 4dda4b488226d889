"""Replace a file so that no reader ever sees a half one; read a record that was written so; digest a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rlsync.core.errors import ConfigError

T = TypeVar("T")


def write_whole(file: Path, write: Callable[[Path], object], *, durable: bool = False) -> None:
    """Write a file beside its place, then move it there in one step.

    ``write`` is given the path beside, and writes it. If it raises, the file of before stays, and nothing is
    left beside it. A process that is killed meanwhile leaves the file of before, and maybe its own, which
    begins with a dot. What is ``durable`` is on the disk when this returns, also if the machine then fails.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     file = Path(folder) / "note.txt"
        ...     write_whole(file, lambda beside: beside.write_text("whole"))
        ...     file.read_text()
        'whole'
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


def flush(path: Path) -> None:
    """Have the disk keep a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_in(file: Path, kind: type[T], what: str, cure: str = "remove the file") -> T | None:
    """The dataclass whose fields a file holds as JSON; None if there is no such file yet.

    Raises:
        ConfigError: the file cannot be read; ``what`` says in words what it holds, ``cure`` what to do.
    """
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

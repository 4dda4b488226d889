"""What a machine that stops leaves on disk: a file system that drops whatever was not synced."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: The calls before and after which the machine may stop.
CALLS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink")
#: The names that are left: of how many levels of folders the newest, and of those below the synced ones.
LEVELS = (0, 1, 2, 99)

#: The files of a folder, by path, with their bytes.
Image = dict[str, bytes]


class Disk:
    """Knows which names of folders and which bytes of files were synced, by inode."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, dict[str, int]] = {}
        self._bytes: dict[int, bytes] = {}
        self._kept: list[int] = []  # open, so that no inode is used again

    @contextmanager
    def watching(self, at_each: Callable[[], None]) -> Iterator[None]:
        """Inside, ``at_each`` is called whenever the machine may stop."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._watched(getattr(os, name), at_each))
            yield

    def close(self) -> None:
        for descriptor in self._kept:
            os.close(descriptor)

    def _watched(self, call: Callable[..., Any], at_each: Callable[[], None]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                at_each()
                result = call(*args, **kwargs)
                if call.__name__ == "fsync":
                    self._sync(args[0])
                at_each()
                return result

        return watched

    def _sync(self, descriptor: int) -> None:
        facts = os.fstat(descriptor)
        self._kept.append(os.dup(descriptor))
        if stat.S_ISDIR(facts.st_mode):
            self._names[facts.st_ino] = _names(Path(f"/proc/self/fd/{descriptor}"))
        else:
            self._bytes[facts.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def left(self, root: Path) -> list[Image]:
        """What may be left of a folder if the machine stops now, and, last, if only the process does."""
        return [*({} | self._below(root, levels) for levels in LEVELS), _whole(root)]

    def _below(self, root: Path, levels: int) -> Image:
        newest = {folder.stat().st_ino: _names(folder) for folder in [root, *_folders(root)]}
        image: Image = {}

        def walk(inode: int, prefix: str, depth: int) -> None:
            now = newest.get(inode, {})
            names = now if depth < levels else self._names.get(inode, {})
            for name, inside in names.items():
                if inside in newest or inside in self._names:
                    walk(inside, f"{prefix}{name}/", depth + 1)
                else:
                    image[prefix + name] = self._bytes.get(inside, b"")

        walk(root.stat().st_ino, "", 0)
        return image


def _folders(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_dir()]


def _names(folder: Path) -> dict[str, int]:
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _whole(root: Path) -> Image:
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def put(image: Image, folder: Path) -> None:
    """Write the files of an image below a folder."""
    for name, content in image.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

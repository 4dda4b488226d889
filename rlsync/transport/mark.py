"""The first words of a shared file: what it is, in which format, and which one it is."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from rlsync.core.errors import BoardClosed
from rlsync.transport.shared_file import FileAddress, SharedFile


class Mark(NamedTuple):
    """Tells a file from any other that may come to stand at the same address.

    Args:
        magic: what it is.
        format: how its bytes are laid out.
        number: which one it is.
    """

    magic: int
    format: int
    number: int

    @classmethod
    def write(cls, words: memoryview, magic: int, format_: int) -> Mark:
        """Mark a new file; never changed afterwards."""
        mark = cls(magic, format_, secrets.randbits(64))
        for i, word in enumerate(mark):
            words[i] = word
        return mark

    def open(self, address: FileAddress, control_bytes: int, what: str) -> tuple[SharedFile, memoryview]:
        """Open the file with this mark, with a descriptor and locks of one's own, and map its control words.

        Raises:
            BoardClosed: its owner has closed it or died.
        """
        file = SharedFile.open(address)
        if file.size_bytes() >= control_bytes:  # reading past the end would be SIGBUS
            words = file.words(control_bytes, 0)
            if tuple(words[: len(self)]) == self:
                return file, words
        file.close()
        raise BoardClosed(
            f"the {what} of process {address.pid} is gone",
            f"another file is at {address.path}",
            "the learner must live while workers attach",
        )

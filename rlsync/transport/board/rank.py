"""RankEnd: how another rank of a learner writes into the slot that the owner of the board has locked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlsync.transport.board import format as fmt
from rlsync.transport.board.handle import BoardHandle


class RankEnd:
    """Writes into slots of another process's board.

    The owner holds the slot's lock during the whole publish, which keeps workers out. This process holds a
    lock of its own on the slot while it writes. So if the owner gives a version up while this process is
    stopped in the middle of a write, the owner leaves the slot alone until the write is over, or this process
    is dead.

    Args:
        handle: of the board.

    Raises:
        BoardClosed: the board is closed, on another host, or of another user.
    """

    def __init__(self, handle: BoardHandle) -> None:
        self._file, _ = handle.open()
        self._images: dict[tuple[int, int], torch.Tensor] = {}

    @contextmanager
    def writing(self, slot: int, at: int, size_bytes: int) -> Iterator[torch.Tensor]:
        """Hold a slot, and map it. Ask after that whether the owner still wants it to be written to.

        Args:
            slot: its number.
            at: where its image begins in the file.
            size_bytes: how long the image is.

        Yields:
            The image, as bytes.
        """
        lock = fmt.RANK_LOCK + slot
        self._file.try_lock(lock, exclusive=False)  # nobody takes this lock exclusively
        try:
            if (at, size_bytes) not in self._images:
                self._images[at, size_bytes] = self._file.map(size_bytes, at, writable=True)
            yield self._images[at, size_bytes]
        finally:
            self._file.unlock(lock)

    def forget(self) -> None:
        """Let go of the mappings: slots of another layout follow."""
        self._images.clear()

    def close(self) -> None:
        """Close the board."""
        self._images.clear()
        self._file.close()

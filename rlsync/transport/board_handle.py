"""How another process finds a board and opens it."""

from __future__ import annotations

from dataclasses import dataclass

from rlsync.transport import board_format as fmt
from rlsync.transport.mark import Mark
from rlsync.transport.shared_file import FileAddress, SharedFile


@dataclass(frozen=True, slots=True)
class BoardHandle:
    """How a worker finds a board: small, picklable, valid while the learner lives."""

    address: FileAddress
    board_id: int

    def open(self) -> tuple[SharedFile, memoryview]:
        """Open the board, with a descriptor and locks of one's own, and map its control words.

        Raises:
            BoardClosed: the learner has closed the board or died.
        """
        mark = Mark(fmt.MAGIC, fmt.FORMAT, self.board_id)
        return mark.open(self.address, fmt.CONTROL_BYTES, "board")

"""How another process finds a board and opens it."""

from __future__ import annotations

from dataclasses import dataclass

from rlsync.core.errors import BoardClosed
from rlsync.transport import board_format as fmt
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
        file = SharedFile.open(self.address)
        if file.size_bytes() >= fmt.CONTROL_BYTES:  # reading past the end would be SIGBUS
            words = file.words(fmt.CONTROL_BYTES, 0)
            header = words[fmt.HEADER_MAGIC], words[fmt.HEADER_FORMAT], words[fmt.HEADER_ID]
            if header == (fmt.MAGIC, fmt.FORMAT, self.board_id):
                return file, words
        file.close()
        raise BoardClosed(
            f"the board of process {self.address.pid} is gone",
            f"another file stands at {self.address.path}",
            "the learner must live while workers attach",
        )

"""How another process finds a board and opens it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlsync.core.errors import BoardClosed
from rlsync.transport.board import format as fmt
from rlsync.transport.contract import Apply
from rlsync.transport.mark import Mark
from rlsync.transport.shared_file import FileAddress, SharedFile

if TYPE_CHECKING:
    from rlsync.transport.board.reader import BoardReader


@dataclass(frozen=True, slots=True)
class BoardHandle:
    """How a worker finds a board: small, picklable, valid while the learner lives.

    Args:
        address: where the file is.
        board_id: which board it must be.
        generation: the learner's generation when this handle was made; an older board is refused.
    """

    address: FileAddress
    board_id: int
    generation: int = 0

    def open(self) -> tuple[SharedFile, memoryview]:
        """Open the board with a descriptor and locks of this process's own, and map its control words.

        Raises:
            BoardClosed: the learner has closed the board or died, or the board is of an older generation.
        """
        mark = Mark(fmt.MAGIC, fmt.FORMAT, self.board_id)
        file, words = mark.open(self.address, fmt.CONTROL_BYTES, "board")
        if words[fmt.GENERATION] < self.generation:
            file.close()
            raise BoardClosed(
                f"the board is of generation {words[fmt.GENERATION]}, older than {self.generation}",
                f"opening {self.address.path}",
                "attach to the board of the learner that runs now",
            )
        return file, words

    def subscribe(self, apply: Apply, reader: int | None = None) -> BoardReader:
        """Attach as a reader; see :meth:`rlsync.transport.contract.Handle.subscribe`.

        Args:
            apply: writes a version into what acts.
            reader: this worker's number; ``None`` takes the first free one.

        Raises:
            BoardClosed: the learner has closed the board or died.
            PublishError: a living worker has this number.
        """
        from rlsync.transport.board.reader import BoardReader  # which imports this file

        return BoardReader(self, apply, reader)

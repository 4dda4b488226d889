"""TorchRL's storages and writers of replay buffers."""

from __future__ import annotations

from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers import Storage


def rows_given(buffer: ReplayBuffer) -> int | None:
    """How many rows a round-robin buffer was given: row r, from 0, lies at place ``r % capacity``.

    None where the two counts of TorchRL's writer contradict each other. It keeps them in 32 bits, so this
    happens after 2**31 rows. Remove this function when the cursor has a public name.
    """
    given, capacity = int(buffer.write_count), buffer.storage.max_size
    holds = given >= len(buffer) and given % capacity == buffer.writer._cursor
    return given if holds else None


def forget_rows(storage: Storage) -> None:
    """Let a storage hold no row. Remove this function when a storage can be emptied without its buffer."""
    storage._empty()

"""What the workers of a lag have done in their lives, for the process that takes the place of one that died.

An environment that its seed decides is brought to where it was by the same actions, without a player. What
the player knows by then is noted after each rollout: its state, and its random numbers. Notes of the newest
two rollouts are kept, since a process may die between its note and the end of its rollout.

Where environments can be saved, a worker also leaves what the next life goes on from, before it gives away the
last rollout of a life. The learner puts that into its checkpoint.

The file, which the learner makes, has room for two notes of each worker, for what two lives go on from, and then
one entry for each rollout of a life: its actions, and three sums by which a repetition is compared with it.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlsync import RlsyncError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.player import State
from rlsync.seams import dtype_named, shared_file

_MAGIC = 0x4C49_4152_544C52  # "RLTRAIL"
_FORMAT = 1
_HEAD_BYTES = shared_file.PAGE_BYTES
_NOTE_BYTES = 1 << 24  # pages that nobody writes to cost nothing
_SAVED_BYTES = 1 << 28
#: A note: the number of its rollout, its bytes, and their CRC-32. What a life goes on from: the frames before it.
_ABOUT = struct.Struct("<QII")


class Sums(NamedTuple):
    """What the environments answered in a rollout, in 32 bits each."""

    observation: int  #: the last one of each environment
    reward: int
    end: int

    def other_than(self, recorded: Sums) -> list[str]:
        """The names of those that differ."""
        return [name for name in self._fields if getattr(self, name) != getattr(recorded, name)]


_SUMS = struct.Struct("<3I")


class Slot:
    """The bytes of a slot that a trail has to do with, as views that a rollout need not cut."""

    def __init__(self, views: Mapping[str, Tensor]) -> None:
        self.actions = _bytes(views[keys.ACTION])
        self._last_observation = _bytes(views[keys.OBSERVATION][-1])
        self._rewards = _bytes(views[keys.REWARD])
        self._terminated = _bytes(views[keys.TERMINATED])
        self._truncated = _bytes(views[keys.TRUNCATED])

    def sums(self) -> Sums:
        """Those of the rollout that is there now."""
        ends = zlib.crc32(self._truncated, zlib.crc32(self._terminated))
        return Sums(zlib.crc32(self._last_observation), zlib.crc32(self._rewards), ends)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.flatten().view(torch.uint8).numpy().data


class Standing(NamedTuple):
    """What a worker's next rollout begins with, beside its environments."""

    states: Sequence[State]  #: of the player, of each group of environments
    randomness: Tensor  #: the state of its random numbers


@dataclass(frozen=True, slots=True)
class TrailHandle:
    """How a worker finds the file; ``action_bytes`` are those of the actions of a rollout."""

    address: shared_file.FileAddress
    mark: shared_file.Mark
    workers: int
    action_bytes: int

    @property
    def saved_at(self) -> int:
        """Where in the file what lives go on from begins: behind the notes."""
        return _HEAD_BYTES + 2 * self.workers * _NOTE_BYTES

    @property
    def entries_at(self) -> int:
        """Where the entries of rollouts begin."""
        return self.saved_at + 2 * self.workers * _SAVED_BYTES

    def open(self, worker: int) -> Trail:
        """The trail of a worker; BoardClosed: the learner is gone."""
        file, _ = self.mark.open(self.address, _HEAD_BYTES, "trail")
        return Trail(file, self, worker)


class Trails:
    """The learner's end: the memory of all trails, until it is closed."""

    def __init__(self, workers: int, action_bytes: int) -> None:
        self._file = shared_file.SharedFile.create("rlsync-trails")
        self._file.allocate(0, _HEAD_BYTES)
        mark = shared_file.Mark.write(self._file.words(_HEAD_BYTES, 0), _MAGIC, _FORMAT)
        self.handle = TrailHandle(self._file.address, mark, workers, action_bytes)
        self._file.resize(self.handle.entries_at)  # what nobody has written reads as zeros

    def of(self, worker: int) -> Trail:
        """The trail of a worker, as long as this end is open."""
        return Trail(self._file, self.handle, worker)

    @property
    def closed(self) -> bool:
        return self._file.fd < 0

    def close(self) -> None:
        self._file.close()


class Trail:
    """A worker's end. ``number`` counts its rollouts over all its lives, ``place`` those of a life."""

    def __init__(self, file: shared_file.SharedFile, handle: TrailHandle, worker: int) -> None:
        self._file = file
        self._handle = handle
        self._worker = worker
        self._entry_bytes = handle.action_bytes + _SUMS.size
        self._slots: dict[int, Slot] = {}

    def slot(self, number: int, views: Mapping[str, Tensor]) -> Slot:
        """The slot of this number, whose arrays stay where they are."""
        if number not in self._slots:
            self._slots[number] = Slot(views)
        return self._slots[number]

    def note(self, number: int, place: int, slot: Slot, standing: Standing) -> None:
        """Note a rollout, and how its worker stands after it; before anybody can take it."""
        sums = _SUMS.pack(*slot.sums())
        self._file.write(b"".join((slot.actions, sums)), self._entry_at(place))
        states = [{name: packed(t) for name, t in state.items()} for state in standing.states]
        note = pickle.dumps((states, packed(standing.randomness)), pickle.HIGHEST_PROTOCOL)
        if len(note) > _NOTE_BYTES - _ABOUT.size:
            cure = "give fewer environments to a worker, or collector.lag=null"
            raise self._no_room("the player's state has", len(note), _NOTE_BYTES, cure)
        self._write(self._note_at(number), number, note)

    def entry(self, place: int, slot: Slot) -> Sums:
        """Read the actions of a rollout into a slot; returns its sums."""
        entry = self._file.read(self._entry_bytes, self._entry_at(place))
        count = self._handle.action_bytes
        slot.actions[:] = entry[:count]
        return Sums(*_SUMS.unpack(entry[count:]))

    def standing_after(self, number: int) -> Standing:
        """How the worker stood after a rollout; RlsyncError: that was not noted."""
        note = self._read(self._note_at(number), number)
        if note is None:
            problem = f"how the worker stood after rollout {number} was not noted"
            cure = "start the run again from its checkpoint: resume=RUN run_dir=RUN"
            raise RlsyncError(problem, f"worker {self._worker}", cure)
        states, randomness = pickle.loads(note)
        tensors = [{name: unpacked(t) for name, t in state.items()} for state in states]
        return Standing(tensors, unpacked(randomness))

    def save(self, life: int, frames: int, saved: bytes) -> None:
        """Keep what a life goes on from, beside that of the life before, which a process that dies begins again.

        Args:
            life: its number.
            frames: those of the run before it.
            saved: its bytes.

        Raises:
            RlsyncError: there is no room for so many.
        """
        self.require_room(saved)
        self._write(self._saved_in(life), frames, saved)

    def require_room(self, saved: bytes) -> None:
        """Raise RlsyncError if there is no room for what a life goes on from."""
        if len(saved) > _SAVED_BYTES - _ABOUT.size:
            cure = "let state() return less, or give fewer environments to a worker"
            raise self._no_room("the environments' states have", len(saved), _SAVED_BYTES, cure)

    def saved(self, frames: int) -> bytes | None:
        """What the life after so many frames of the run goes on from; None: it begins with new episodes."""
        for life in range(2):
            saved = self._read(self._saved_in(life), frames)
            if saved is not None:
                return saved
        return None

    def close(self) -> None:
        self._file.close()

    def _note_at(self, number: int) -> int:
        return _HEAD_BYTES + (2 * self._worker + number % 2) * _NOTE_BYTES

    def _saved_in(self, life: int) -> int:
        return self._handle.saved_at + (2 * self._worker + life % 2) * _SAVED_BYTES

    def _write(self, at: int, number: int, data: bytes) -> None:
        self._file.write(_ABOUT.pack(number, len(data), zlib.crc32(data)) + data, at)

    def _read(self, at: int, number: int) -> bytes | None:
        """What was written there with this number; None if it was not, or not to its end."""
        of_number, size, check = _ABOUT.unpack(self._file.read(_ABOUT.size, at))
        data = self._file.read(size, at + _ABOUT.size)
        if not data or of_number != number or zlib.crc32(data) != check:
            return None
        return data

    def _no_room(self, problem: str, size: int, room: int, cure: str) -> RlsyncError:
        problem = f"{problem} {size:,} bytes, and a trail has room for {room:,}"
        return RlsyncError(problem, f"worker {self._worker}", cure)

    def _entry_at(self, place: int) -> int:
        return (
            self._handle.entries_at
            + (place * self._handle.workers + self._worker) * self._entry_bytes
        )


#: Of a tensor: its bytes, the name of its dtype, and its shape: plain data, which pickles without a class.
Packed = tuple[bytes, str, tuple[int, ...]]


def packed(tensor: Tensor) -> Packed:
    name = str(tensor.dtype).removeprefix("torch.")
    return bytes(_bytes(tensor.cpu().contiguous())), name, tuple(tensor.shape)


def unpacked(data: Packed) -> Tensor:
    content, name, shape = data
    dtype = dtype_named(name)
    if not content:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)

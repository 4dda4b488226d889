"""What the workers of a lag have done in their lives, for the process that takes the place of one that died.

An environment that its seed decides is brought to where it was by the same actions, without a player. What
the player knows by then is noted after each rollout: its state, and its random numbers. Notes of the newest
two rollouts are kept, since a process may die between its note and the end of its rollout.

The file, which the learner makes, has room for two notes of each worker, and then one entry for each rollout
of a life: its actions, and three sums by which a repetition is compared with it.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlsync import RlsyncError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.player import State
from rlsync.seams import shared_file

_MAGIC = 0x4C49_4152_544C52  # "RLTRAIL"
_FORMAT = 1
_HEAD_BYTES = shared_file.PAGE_BYTES
_NOTE_BYTES = 1 << 24  # pages that nobody writes to cost nothing
_ABOUT = struct.Struct("<QII")  # a note: the number of its rollout, its bytes, and their CRC-32


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

    def close(self) -> None:
        self._file.close()


class Trail:
    """A worker's end. ``number`` counts its rollouts over all its lives, ``place`` those of a life."""

    def __init__(self, file: shared_file.SharedFile, handle: TrailHandle, worker: int) -> None:
        self._file = file
        self._handle = handle
        self._worker = worker
        self._entries_at = _HEAD_BYTES + 2 * handle.workers * _NOTE_BYTES
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
        states = [{name: _packed(t) for name, t in state.items()} for state in standing.states]
        note = pickle.dumps((states, _packed(standing.randomness)), pickle.HIGHEST_PROTOCOL)
        if len(note) > _NOTE_BYTES - _ABOUT.size:
            problem = f"the player's state has {len(note):,} bytes, and a trail has room for {_NOTE_BYTES:,}"
            cure = "give fewer environments to a worker, or collector.lag=null"
            raise RlsyncError(problem, f"worker {self._worker}", cure)
        about = _ABOUT.pack(number, len(note), zlib.crc32(note))
        self._file.write(about + note, self._note_at(number))

    def entry(self, place: int, slot: Slot) -> Sums:
        """Read the actions of a rollout into a slot; returns its sums."""
        entry = self._file.read(self._entry_bytes, self._entry_at(place))
        count = self._handle.action_bytes
        slot.actions[:] = entry[:count]
        return Sums(*_SUMS.unpack(entry[count:]))

    def standing_after(self, number: int) -> Standing:
        """How the worker stood after a rollout; RlsyncError: that was not noted."""
        at = self._note_at(number)
        of_number, size, check = _ABOUT.unpack(self._file.read(_ABOUT.size, at))
        note = self._file.read(size, at + _ABOUT.size)
        if of_number != number or zlib.crc32(note) != check:
            problem = f"how the worker stood after rollout {number} was not noted"
            cure = "start the run again from its checkpoint: resume=RUN run_dir=RUN"
            raise RlsyncError(problem, f"worker {self._worker}", cure)
        states, randomness = pickle.loads(note)
        unpacked = [{name: _unpacked(t) for name, t in state.items()} for state in states]
        return Standing(unpacked, _unpacked(randomness))

    def close(self) -> None:
        self._file.close()

    def _note_at(self, number: int) -> int:
        return _HEAD_BYTES + (2 * self._worker + number % 2) * _NOTE_BYTES

    def _entry_at(self, place: int) -> int:
        return self._entries_at + (place * self._handle.workers + self._worker) * self._entry_bytes


#: Of a tensor: its bytes, its dtype and its shape.
_Packed = tuple[bytes, torch.dtype, tuple[int, ...]]


def _packed(tensor: Tensor) -> _Packed:
    return bytes(_bytes(tensor.cpu().contiguous())), tensor.dtype, tuple(tensor.shape)


def _unpacked(packed: Any) -> Tensor:
    data, dtype, shape = packed
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

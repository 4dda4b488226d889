"""A completed rollout as one flat array of bytes, on its way from a node to the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.tensors.layout import ALIGN_BYTES, Entry, Layout
from rlsync.transport.ring.reader import RingCounters, TakenRollout
from rlsync.workers import frames as keys
from rlsync.workers.frames import FINAL_COUNT

#: What travels: Ray copies an array of bytes once, and pickles nothing of it.
Flat = NDArray[np.uint8]

_MAGIC = 0x4C4F_5259_4152  # "RAYROL"
_HEAD_BYTES = 2 * ALIGN_BYTES
_HEAD_WORDS = _HEAD_BYTES // 8


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rollout in the learner's hands."""

    writer: int  # which worker of its node filled it
    number: int  # which of that worker's rollouts it is, from 0
    counters: RingCounters  # of its node's ring when it left
    views: Mapping[str, Tensor]  # by name; final observations are cut to those that there are


def pack(rollout: TakenRollout, layout: Layout, counters: RingCounters) -> Flat:
    """Copy a rollout into one array. The room for final observations that nobody used stays behind."""
    count = int(rollout.views[FINAL_COUNT])
    used = _used_bytes(layout, count)
    flat = np.empty(_HEAD_BYTES + used, dtype=np.uint8)
    head: NDArray[Any] = flat[:_HEAD_BYTES].view(np.int64)
    words = [_MAGIC, count, used, rollout.writer, rollout.number, *_in_words(counters)]
    head[:] = 0
    head[: len(words)] = words
    torch.from_numpy(flat[_HEAD_BYTES:]).copy_(rollout.image[:used])
    return flat


def unpack(flat: Flat, layout: Layout, into: Tensor) -> Arrived:
    """Copy a rollout out of the array that :func:`pack` made, which is not kept, into flat ``uint8`` memory
    of ``layout.image_bytes``, which the views lie in afterwards.

    PublishError: the array is none that :func:`pack` made with this layout.
    """
    head = flat[:_HEAD_BYTES].view(np.int64).tolist() if flat.nbytes >= _HEAD_BYTES else [0] * _HEAD_WORDS
    magic, count, used, writer, number, *counted = head
    if magic != _MAGIC or used != flat.nbytes - _HEAD_BYTES or used != _used_bytes(layout, count):
        raise PublishError(
            "what came from a node is not a rollout of this run",
            f"{flat.nbytes:,} bytes",
            "run the same version of rlsync, with the same environment, on all nodes",
        )
    np.copyto(into.numpy()[:used], flat[_HEAD_BYTES:])
    names = [entry.leaf.name for entry in layout.entries]
    views = dict(zip(names, layout.views(into), strict=True))
    for name in keys.FINAL:
        views[name] = views[name][:count]
    return Arrived(writer, number, _from_words(counted), views)


def _in_words(counters: RingCounters) -> list[int]:
    c = counters
    waits = [int(c.worker_wait_s * 1e9), int(c.learner_wait_s * 1e9)]
    return [c.free, c.writing, c.full, c.reading, c.written, c.taken, *waits]


def _from_words(words: Sequence[int]) -> RingCounters:
    free, writing, full, reading, written, taken, worker_ns, learner_ns, *_ = words
    return RingCounters(free, writing, full, reading, written, taken, worker_ns / 1e9, learner_ns / 1e9)


def _used_bytes(layout: Layout, finals: int) -> int:
    last = _last(layout)
    rows = last.leaf.shape[0]
    return last.offset + (last.leaf.payload_bytes // rows) * finals


def _last(layout: Layout) -> Entry:
    last = layout.entries[-1]
    assert last.leaf.name == keys.FINAL_OBSERVATION, "RolloutShape lays them out last"
    return last

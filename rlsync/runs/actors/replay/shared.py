"""One replay of rollouts for learners in processes of their own: all of them fill it, and all draw from it.

Its memory is one shared file of blocks, each laid out as a slot of the rollout ring: the unrolls that one
worker has made in its environments. The protocol, and why no row is torn, evicted or held by the dead::

    extend    b = the block with the lowest number whose byte can be write-locked without waiting
              number[b] = 0; copy a rollout; agent[b], worker[b] = who acted; number[b] = the time now; unlock
    draw      b = a block that had a number, at random; if its byte cannot be read-locked, draw again
              unless number[b] is still what it was, unlock, and draw again
              copy one unroll of it out; unlock

A block changes only under the exclusive lock on its byte, and is copied only under the shared lock. The locks
belong to open files: a process that dies, however it dies, holds nothing, and the block that it was writing
has no number, so nobody draws it, and it is written next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.player import Player, Record
from rlsync.runs.actors.replay.unrolls import Drawn
from rlsync.seams import Layout, bell, shared_file

_MAGIC = 0x504C5952_4C52  # "RLRYLP"
_FORMAT = 1
_LINE_BYTES = 3 * 8  # of a block: number, agent, worker. All lines lie before the first block
_BLOCK_LOCK = 1 << 44  # far behind the data: these locks need no bytes under them


@dataclass(frozen=True, slots=True)
class SharedReplayHandle:
    """How an agent finds the replay: small, picklable, valid while the process lives that has made it."""

    address: shared_file.FileAddress
    mark: shared_file.Mark
    layout: bytes  #: of one block, as JSON
    blocks: int
    agent: int = 0  #: the number of the agent that opens it


def made_replay(
    player: Player, shape: keys.RolloutShape, capacity_steps: int, max_bytes: int, agents: int
) -> tuple[shared_file.SharedFile, SharedReplayHandle]:
    """The memory of a replay for so many agents that act with such players, and how they find it.

    Each of them may leave one block without a number when it is killed, so there is at least one more.
    ConfigError if that does not fit, or ``capacity_steps`` take more than ``max_bytes``.
    """
    layout = shape.layout(player)
    in_block = shape.steps * shape.num_envs
    blocks = capacity_steps // in_block
    if blocks <= agents:
        problem = f"{agents} agents cannot share a replay of {capacity_steps} steps"
        cure = f"give room for {agents + 1} rollouts of {in_block} steps or more"
        raise ConfigError(problem, "recipe.replay.capacity_steps", cure)
    size = (
        shared_file.PAGE_BYTES
        + shared_file.whole_pages(blocks * _LINE_BYTES)
        + blocks * layout.image_bytes
    )
    if size > max_bytes:
        problem = (
            f"a replay of {capacity_steps} steps takes {size:,} bytes, and may take {max_bytes:,}"
        )
        raise ConfigError(
            problem, "recipe.replay.max_bytes", f"give {size}, or fewer capacity_steps"
        )
    file = shared_file.SharedFile.create("rlsync-replay")
    file.allocate(0, size)
    mark = shared_file.Mark.write(file.words(shared_file.PAGE_BYTES, 0), _MAGIC, _FORMAT)
    return file, SharedReplayHandle(file.address, mark, layout.to_json(), blocks)


class SharedReplay:
    """An agent's end, to be used in one thread as an :class:`UnrollReplay` is: out comes what went in.

    For each batch it asks ``workers`` which worker made each of its rollouts. ``records`` are the player's.
    """

    def __init__(
        self,
        handle: SharedReplayHandle,
        records: Sequence[Record],
        workers: Callable[[], Sequence[int]],
        seed: int = 0,
    ) -> None:
        self.records = tuple(records)
        self.generator = torch.Generator().manual_seed(seed)
        self._workers = workers
        self._file, _ = handle.mark.open(handle.address, shared_file.PAGE_BYTES, "shared replay")
        layout = Layout.from_json(handle.layout)
        blocks = handle.blocks
        images_at = shared_file.whole_pages(blocks * _LINE_BYTES)
        memory = self._file.map(
            images_at + blocks * layout.image_bytes, shared_file.PAGE_BYTES, writable=True
        )
        lines = memory[: blocks * _LINE_BYTES].view(torch.int64).view(blocks, 3).numpy()
        self._numbers, self._agents, self._makers = lines.T
        images = memory[images_at:].view(blocks, layout.image_bytes)
        self._columns: dict[str, Tensor] = {}  # each leaf of all blocks, in their memory
        for entry in layout.entries:
            leaf = entry.leaf
            column = images[:, entry.offset : entry.offset + leaf.payload_bytes]
            self._columns[leaf.name] = column.view(leaf.dtype).view(blocks, *leaf.shape)
        self._finals = {name: self._columns.pop(name) for name in (*keys.FINAL, keys.FINAL_COUNT)}
        del self._columns[keys.EPISODE_RETURN]
        del self._columns[keys.EPISODE_LENGTH]
        for record in records:
            if record.beside:
                del self._columns[record.name]
        self._envs = self._columns[keys.REWARD].shape[2]
        self._in_block = self._columns[keys.REWARD][0].numel()
        self.capacity_steps = blocks * self._in_block

    @property
    def steps(self) -> int:
        return int((self._numbers > 0).sum()) * self._in_block

    @property
    def full(self) -> bool:
        return bool(self._numbers.all())

    def extend(self, batch: TensorDictBase, agent: int = 0) -> None:
        """Put the rollouts of a batch in the place of the oldest ones."""
        for number, worker in enumerate(self._workers()):
            block = self._claim()
            try:
                self._numbers[block] = 0
                self._write(block, batch, number)
                self._agents[block] = agent
                self._makers[block] = worker
                self._numbers[block] = time.monotonic_ns()
            finally:
                self._file.unlock(_BLOCK_LOCK + block)

    def draw(self, unrolls: int) -> Drawn:
        """Draw this many unrolls, each uniformly from all that are held; ConfigError if none is."""
        if unrolls < 1 or not self.steps:
            problem = f"{unrolls} unrolls cannot be drawn from {self.steps} steps"
            raise ConfigError(
                problem, "SharedReplay.draw", "extend the replay first, and ask for one or more"
            )
        rollouts: list[dict[str, Tensor]] = []
        makers: list[tuple[int, int]] = []
        while len(rollouts) < unrolls:
            numbers = self._numbers.copy()
            filled = numbers.nonzero()[0]
            rows = max(1, len(filled) * self._envs)
            row = int(torch.randint(rows, (), generator=self.generator, device="cpu"))
            block = 0
            if len(filled):
                block = int(filled[row // self._envs])
            if not self._file.try_lock(_BLOCK_LOCK + block, exclusive=False):
                continue
            try:
                if self._numbers[block] == numbers[block] != 0:
                    rollouts.append(self._read(block, row % self._envs))
                    makers.append((int(self._agents[block]), int(self._makers[block])))
            finally:
                self._file.unlock(_BLOCK_LOCK + block)
        batch = keys.batch_of(rollouts, self.records).exclude(keys.COLLECTOR)
        batch[keys.REPLAYED] = torch.ones(unrolls, dtype=torch.bool, device="cpu")
        return Drawn(batch, *torch.tensor(makers, device="cpu").unbind(1))

    def state_dict(self, contents: bool = False) -> dict[str, Any]:
        """The state of the random draws; a resumed population begins with an empty replay."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])

    def _claim(self) -> int:
        """Lock the oldest block; where somebody reads or writes it, the next one."""
        for pause_s in bell.pauses():
            numbers = self._numbers.copy()
            for block in map(int, numbers.argsort(kind="stable")):
                if self._file.try_lock(_BLOCK_LOCK + block, exclusive=True):
                    if self._numbers[block] == numbers[block]:
                        return block
                    self._file.unlock(_BLOCK_LOCK + block)  # another agent has just filled it
            time.sleep(pause_s)
        raise AssertionError("pauses do not end")

    def _write(self, block: int, batch: TensorDictBase, number: int) -> None:
        timed = keys.timed_keys(self.records)
        first = number * self._envs
        for name, column in self._columns.items():
            column[block] = batch.get(name).narrow(int(name in timed), first, self._envs)
        self._finals[keys.FINAL_COUNT][block] = 0
        if keys.FINAL_INDEX in batch:
            index = batch.get(keys.FINAL_INDEX)
            observations = batch.get(keys.FINAL_OBSERVATION)
            mine = index[:, 1] // self._envs == number
            count = int(mine.sum())
            shifted = index[mine] - index.new_tensor([0, first])
            self._finals[keys.FINAL_INDEX][block, :count] = shifted
            self._finals[keys.FINAL_OBSERVATION][block, :count] = observations[mine]
            self._finals[keys.FINAL_COUNT][block] = count

    def _read(self, block: int, row: int) -> dict[str, Tensor]:
        """A copy of one unroll, as a rollout of one environment."""
        timed = keys.timed_keys(self.records)
        out = {
            name: column[block].narrow(int(name in timed), row, 1).clone()
            for name, column in self._columns.items()
        }
        count = int(self._finals[keys.FINAL_COUNT][block])
        index = self._finals[keys.FINAL_INDEX][block, :count]
        observations = self._finals[keys.FINAL_OBSERVATION][block, :count]
        mine = index[:, 1] == row
        out[keys.FINAL_INDEX] = index[mine] * torch.tensor([1, 0], device="cpu")
        out[keys.FINAL_OBSERVATION] = observations[mine]
        out[keys.FINAL_COUNT] = mine.sum()
        return out

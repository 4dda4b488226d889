"""One replay of unrolls for learners in processes of their own: all of them fill it, and all draw from it.

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

from rlsync.core.errors import ConfigError
from rlsync.tensors.layout import Layout
from rlsync.transport.rules import pauses
from rlsync.transport.shared_file import PAGE_BYTES, FileAddress, Mark, SharedFile, whole_pages
from rlsync.workers import frames as keys
from rlsync.workers.frames import RolloutShape
from rlsync.workers.player import Player, Record
from rlsync.workers.replay.unrolls import Drawn

_MAGIC = 0x504C5952_4C52  # "RLRYLP"
_FORMAT = 1
_NUMBER, _AGENT, _WORKER, _LINE_WORDS = range(4)  # the words of a block's line; their lines begin at a page
_BLOCK_LOCK = 1 << 44  # far behind the data: these locks need no bytes under them


@dataclass(frozen=True, slots=True)
class SharedReplayHandle:
    """How an agent finds the replay: small, picklable, valid while the process lives that has made it."""

    address: FileAddress
    mark: Mark
    layout: bytes  #: of one block, as JSON
    blocks: int
    agent: int = 0  #: the number of the agent that opens it


class SharedReplayFile:
    """The memory of a shared replay. Agents keep what they have opened.

    Args:
        player: of the agents, which must all record the same.
        shape: of one rollout of a worker.
        capacity_steps: how many steps are held at most; only whole rollouts are held.
        max_bytes: how much memory it may take.
        agents: how many agents there are. Each may leave a block without a number when it is killed.

    Raises:
        ConfigError: there is no room for a block for each agent and one more, or it takes more memory.
    """

    def __init__(
        self, player: Player, shape: RolloutShape, capacity_steps: int, max_bytes: int, agents: int
    ) -> None:
        layout = shape.layout(player)
        in_block = shape.steps * shape.num_envs
        blocks = capacity_steps // in_block
        if blocks <= agents:
            what = f"{agents} agents cannot share a replay of {capacity_steps} steps"
            cure = f"give room for {agents + 1} rollouts of {in_block} steps or more"
            raise ConfigError(what, "recipe.replay.capacity_steps", cure)
        lines_bytes = whole_pages(blocks * _LINE_WORDS * 8)
        size = PAGE_BYTES + lines_bytes + blocks * layout.image_bytes
        if size > max_bytes:
            what = f"a replay of {capacity_steps} steps takes {size:,} bytes, and may take {max_bytes:,}"
            cure = f"give {size} or more, or fewer recipe.replay.capacity_steps"
            raise ConfigError(what, "recipe.replay.max_bytes", cure)
        self._file = SharedFile.create("rlsync-replay")
        self._file.resize(size)
        mark = Mark.write(self._file.words(PAGE_BYTES, 0), _MAGIC, _FORMAT)
        self.handle = SharedReplayHandle(self._file.address, mark, layout.to_json(), blocks)

    def close(self) -> None:
        """Let no other process open it."""
        self._file.close()


class SharedReplay:
    """An agent's end of a shared replay, to be used as an :class:`UnrollReplay` is.

    It draws uniformly from the newest rollouts of all agents, with replacement. What comes out is what went
    in, bit by bit, but for what lies under ``"collector"``. Use it in one thread.

    Args:
        handle: of the replay, with the agent's number.
        records: what the player records: ``player.records``.
        workers: called for each batch; returns which worker made each of its rollouts.
        seed: of the draws.

    Raises:
        BoardClosed: the process that has made the replay is gone.
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
        self._full = False
        self._file, _ = handle.mark.open(handle.address, PAGE_BYTES, "shared replay")
        layout, blocks = Layout.from_json(handle.layout), handle.blocks
        lines_bytes = whole_pages(blocks * _LINE_WORDS * 8)
        size = lines_bytes + blocks * layout.image_bytes
        memory = self._file.map(size, PAGE_BYTES, writable=True)
        lines = memory[: blocks * _LINE_WORDS * 8].view(torch.int64).view(blocks, _LINE_WORDS).numpy()
        self._numbers, self._agents, self._makers = lines[:, _NUMBER], lines[:, _AGENT], lines[:, _WORKER]
        images = memory[lines_bytes:].view(blocks, layout.image_bytes)
        columns = {entry.leaf.name: _column(images, entry.offset, entry.leaf) for entry in layout.entries}
        self._steps, self._envs = columns[keys.REWARD].shape[1:]
        self._finals = {name: columns.pop(name) for name in (*keys.FINAL, keys.FINAL_COUNT)}
        beside = {record.name for record in records if record.beside}
        self._columns = {
            name: column
            for name, column in columns.items()
            if name not in (keys.EPISODE_RETURN, keys.EPISODE_LENGTH, *beside)
        }
        self.capacity_steps = blocks * self._envs * self._steps

    def __len__(self) -> int:
        """How many unrolls are held."""
        return int((self._numbers > 0).sum()) * self._envs

    @property
    def steps(self) -> int:
        """How many steps are held."""
        return len(self) * self._steps

    @property
    def full(self) -> bool:
        """Whether every block was written already."""
        self._full = self._full or bool(self._numbers.all())
        return self._full

    def extend(self, batch: TensorDictBase, agent: int = 0) -> None:
        """Put the rollouts of a batch in the place of the oldest ones.

        Raises:
            ConfigError: keys or shapes are not those of the replay.
        """
        workers = self._workers()
        for number, worker in enumerate(workers):
            block = self._claim()
            try:
                self._numbers[block] = 0
                self._write(block, batch, number * self._envs)
                self._agents[block], self._makers[block] = agent, worker
                self._numbers[block] = time.monotonic_ns()
            finally:
                self._file.unlock(_BLOCK_LOCK + block)

    def draw(self, unrolls: int) -> Drawn:
        """Draw this many unrolls, each uniformly from all that are held; ConfigError if none is."""
        if unrolls < 1 or not len(self):
            what = f"{unrolls} unrolls cannot be drawn from {len(self)}"
            raise ConfigError(what, "SharedReplay.draw", "extend the replay first, and ask for one or more")
        rollouts: list[dict[str, Tensor]] = []
        makers: list[tuple[int, int]] = []
        while len(rollouts) < unrolls:
            numbers = self._numbers.copy()
            held = numbers.nonzero()[0]
            row = int(torch.randint(max(1, len(held) * self._envs), (), generator=self.generator))
            block = int(held[row // self._envs]) if len(held) else 0
            if not self._file.try_lock(_BLOCK_LOCK + block, exclusive=False):
                continue
            try:
                if self._numbers[block] == numbers[block] != 0:
                    rollouts.append(self._read(block, row % self._envs))
                    makers.append((int(self._agents[block]), int(self._makers[block])))
            finally:
                self._file.unlock(_BLOCK_LOCK + block)
        batch = keys.batch_of(rollouts, self.records).exclude(keys.COLLECTOR)
        batch[keys.REPLAYED] = torch.ones(unrolls, dtype=torch.bool)
        return Drawn(batch, *torch.tensor(makers).unbind(1))

    def state_dict(self, contents: bool = False) -> dict[str, Any]:
        """The state of the random draws; a resumed population begins with an empty replay."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.set_state(state_dict["generator"])

    def _claim(self) -> int:
        """Lock the oldest block; where somebody reads or writes it, the next one."""
        for pause_s in pauses():
            numbers = self._numbers.copy()
            for block in numbers.argsort(kind="stable").tolist():
                if self._file.try_lock(_BLOCK_LOCK + block, exclusive=True):
                    if self._numbers[block] == numbers[block]:
                        return int(block)
                    self._file.unlock(_BLOCK_LOCK + block)  # another agent has just filled it
            time.sleep(pause_s)
        raise AssertionError("pauses do not end")

    def _write(self, block: int, batch: TensorDictBase, first: int) -> None:
        """Copy one rollout of a batch: its unrolls from the ``first`` on."""
        timed, rows = keys.timed_keys(self.records), slice(first, first + self._envs)
        for name, column in self._columns.items():
            tensor, into = batch.get(name), column[block]
            part = tensor[:, rows] if name in timed else tensor[rows]
            if part.shape != into.shape or part.dtype != into.dtype:
                has, wants = (f"{list(one.shape)} of {one.dtype}" for one in (part, into))
                what = f"{name!r} of a rollout is {has}; the replay holds {wants}"
                raise keys.bad_batch(what, batch, "let all agents record the same")
            into.copy_(part)
        self._finals[keys.FINAL_COUNT][block] = 0
        if keys.FINAL_INDEX in batch:
            index = batch.get(keys.FINAL_INDEX).cpu()
            mine = (index[:, 1] >= first) & (index[:, 1] < first + self._envs)
            count = int(mine.sum())
            self._finals[keys.FINAL_INDEX][block, :count] = index[mine] - torch.tensor([0, first])
            observations = batch.get(keys.FINAL_OBSERVATION)
            self._finals[keys.FINAL_OBSERVATION][block, :count] = observations[mine.to(observations.device)]
            self._finals[keys.FINAL_COUNT][block] = count

    def _read(self, block: int, row: int) -> dict[str, Tensor]:
        """A copy of one unroll, as a rollout of one environment."""
        timed, out = keys.timed_keys(self.records), {}
        for name, column in self._columns.items():
            own = column[block]
            out[name] = (own[:, row : row + 1] if name in timed else own[row : row + 1]).clone()
        count = int(self._finals[keys.FINAL_COUNT][block])
        index = self._finals[keys.FINAL_INDEX][block, :count]
        mine = index[:, 1] == row
        out[keys.FINAL_INDEX] = index[mine] * torch.tensor([1, 0])
        out[keys.FINAL_OBSERVATION] = self._finals[keys.FINAL_OBSERVATION][block, :count][mine]
        out[keys.FINAL_COUNT] = mine.sum()
        return out


def _column(images: Tensor, offset: int, leaf: Any) -> Tensor:
    """One leaf of all blocks, [blocks, *shape], in their memory."""
    flat = images[:, offset : offset + leaf.payload_bytes].view(leaf.dtype)
    return flat.view(len(images), *leaf.shape)

"""SendShards: how the ranks of a sharded learner that do not publish take part in a publish."""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlsync.core.errors import BoardClosed, ConfigError, LayoutMismatch, PublishError
from rlsync.sync.sharded import meeting
from rlsync.tensors.digest import all_finite
from rlsync.tensors.layout import dtype_named
from rlsync.tensors.leaves import Leaf, Leaves
from rlsync.tensors.sharded import Block, Sharding, block_of, is_sharded, own_part, write_blocks
from rlsync.transport.board import format as fmt
from rlsync.transport.board.reader import BoardHandle
from rlsync.transport.shared_file import FileAddress, kind


@dataclass(frozen=True, slots=True)
class Wanted:
    """A leaf of which the owner wants this rank's parts."""

    name: str  #: under which all ranks know it
    leaf: Leaf
    tensor: Tensor  #: what it was when it was asked for
    offset: int  #: where it begins in the image of a slot
    dtype: torch.dtype
    blocks: list[Block]

    def view(self, image: Tensor) -> Tensor:
        size_bytes = self.tensor.numel() * self.dtype.itemsize
        return (
            image[self.offset : self.offset + size_bytes].view(self.dtype).view(self.tensor.shape)
        )


class RankEnd:
    """Writes into slots of another process's board; BoardClosed if it is closed or on another host.

    A lock of its own on the slot makes an owner that gives the version up leave the slot alone until this
    process, which may be stopped in the middle of a write, has written or is dead.
    """

    def __init__(self, handle: BoardHandle) -> None:
        self._file, _ = handle.open()
        self._images: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def writing(self, slot: int, at: int, size_bytes: int) -> Iterator[Tensor]:
        """Hold a slot, and map its image. Ask after that whether the owner still wants it written to."""
        lock = fmt.RANK_LOCK + slot
        while not self._file.try_lock(lock, exclusive=False):  # the owner looks at it just now
            time.sleep(0)
        try:
            if (at, size_bytes) not in self._images:
                self._images[at, size_bytes] = self._file.map(size_bytes, at, writable=True)
            yield self._images[at, size_bytes]
        finally:
            self._file.unlock(lock)

    def close(self) -> None:
        self._images.clear()
        self._file.close()


class SendShards:
    """On a rank that does not publish: brings this rank's parts of the weights to each publish.

    A learner whose weights are sharded (FSDP 2, tensor parallelism) runs as several processes, its ranks. One
    of them has the collector and publishes, with :class:`rlsync.SyncWeights` or
    ``collector.update_policy_weights_(policy)``. Each of the others makes a SendShards, and calls it where
    that one publishes: once before the first frame, and then whenever the hook is called. The publishing rank
    alone decides whether a version is published.

    On the host of the board, this rank writes its parts into the board itself. From another host, it sends
    them.

    Args:
        sources: by destination, as in the sync map: the sharded module of this rank. A tensordict, or a
            mapping of names to tensors, will do, too.
        timeout_s: how long a call waits for the publishing rank, and that one for this rank, seconds.
        in_place: whether this rank writes into the board if it can. If not, it sends its parts.

    Raises:
        ConfigError: this process is no rank of a process group, or ``timeout_s`` is not positive.
        LayoutMismatch: no leaf is sharded, or one cannot be put together from shards.

    Example:
        >>> from rlsync import SendShards
        >>> from torch import nn
        >>> SendShards({"policy": nn.Linear(2, 1)})
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: this process is no rank: torch.distributed has no process group
          where  weights that are sharded over ranks
          cure   start the learner with torchrun, and call torch.distributed.init_process_group first
    """

    def __init__(
        self,
        sources: Mapping[str, object],
        *,
        timeout_s: float = meeting.TIMEOUT_S,
        in_place: bool = True,
    ) -> None:
        meeting.process_group()
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            problem = f"a timeout is a positive number of seconds, got {timeout_s!r}"
            cure = f"for example {meeting.TIMEOUT_S:g}"
            raise ConfigError(problem, f"SendShards(timeout_s={timeout_s!r})", cure)
        self.timeout_s = timeout_s
        self._in_place = in_place

        self._leaves: dict[str, Leaf] = {}
        shardings: dict[str, Sharding] = {}
        for destination, root in sources.items():
            shardings |= self._describe(destination, root)
        if not self._leaves:
            where = (
                f"SendShards({{{', '.join(map(repr, sources))}: ...}}) of rank {meeting.own_rank()}"
            )
            cure = "give it the module that FSDP or tensor parallelism has sharded; if none is sharded, the "
            cure += "publishing rank needs no other"
            raise LayoutMismatch("no leaf is sharded, so there is nothing to send", where, cure)

        # The owner connects to this rank, when it first wants something, and proves by the token that it
        # has read the note.
        self._listener = meeting.listen()
        address, port, *_ = self._listener.getsockname()
        self._note = meeting.RankNote(
            rank=meeting.own_rank(),
            pid=os.getpid(),
            host=kind().host(),
            address=(address, port),
            token=secrets.token_hex(16),
            timeout_s=timeout_s,
            leaves=shardings,
        )
        self._wire: meeting.Wire | None = None
        self._owner = -1
        self._board: RankEnd | None = None
        self._roster: list[Wanted] = []
        meeting.leave_note(self._note)

    def __call__(self) -> int | None:
        """Take part in what the publishing rank decides next.

        Returns:
            The version that was published, or ``None`` if the publishing rank did not publish.

        Raises:
            PublishError: the version was given up, or the publishing rank is gone or does not come in time.
        """
        deadline = time.monotonic() + self.timeout_s
        # what the owner has said while this rank brought its parts
        early: dict[str, Any] | None = None
        while True:
            message = early or self._next(deadline)
            early = None
            match message:
                case {"say": "done", "version": version}:
                    return version  # type: ignore[no-any-return]
                case {"say": "failed"}:
                    raise PublishError(message["what"], message["where"], message["cure"])
                case {"say": "roster", "leaves": rows}:
                    self._roster = [self._wanted(*row) for row in rows]
                case {"say": "publish"}:
                    early = self._bring(message)
                    # the owner may wait for other ranks
                    deadline = time.monotonic() + 2 * self.timeout_s

    def close(self) -> None:
        """Take part in nothing any more."""
        self._listener.close()
        if self._wire is not None:
            self._wire.close()
        if self._board is not None:
            self._board.close()

    def _describe(self, destination: str, root: object) -> dict[str, Sharding]:
        where = f"SendShards, {destination!r}"
        shardings: dict[str, Sharding] = {}
        for leaf in Leaves(root, where, shards=True).leaves:
            if is_sharded(leaf.read()):
                name = meeting.full_name((destination, leaf.name))
                self._leaves[name] = leaf
                shardings[name] = Sharding.of(leaf.read(), leaf.name, where)
        return shardings

    # ---------------------------------------------------------------------------- what the owner says

    def _next(self, deadline: float) -> dict[str, Any]:
        """The next message of the owner; PublishError if it is gone, or says nothing in time."""
        try:
            if self._wire is None:
                self._wire = self._accept(deadline)
            message = self._wire.receive(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            message = None
        except EOFError as gone:
            cure = "look for the error of that rank; restart the learner"
            raise PublishError(
                f"rank {self._owner}, which publishes, is gone", self._where(), cure
            ) from gone
        if message is None:
            problem = f"the rank that publishes did not come within {self.timeout_s:g} s"
            cure = "call this wherever that rank calls its hook or publishes, and nowhere else; or give a "
            raise PublishError(problem, self._where(), cure + "longer timeout_s")
        return message

    def _accept(self, deadline: float) -> meeting.Wire:
        while True:
            self._listener.settimeout(max(1e-3, deadline - time.monotonic()))
            wire = meeting.Wire(self._listener.accept()[0])
            hello = wire.receive(max(0.0, deadline - time.monotonic()))
            if hello is not None and hello.get("token") == self._note.token:
                break
            wire.close()  # somebody else's connection
        self._owner = hello["owner"]
        if self._in_place:
            board = hello["board"]
            address = FileAddress(**board["address"])
            handle = BoardHandle(address, board["board_id"], board["generation"])
            with suppress(BoardClosed):  # on another host: the parts are sent
                self._board = RankEnd(handle)
        wire.send({"in_place": self._board is not None}, self.timeout_s)
        return wire

    def _where(self) -> str:
        return f"SendShards of rank {self._note.rank} (pid {self._note.pid})"

    # ---------------------------------------------------------------------------- this rank's parts

    def _wanted(self, name: str, offset: int, dtype: str) -> Wanted:
        leaf = self._leaves[name]
        tensor = leaf.read()
        sharding = Sharding.of(tensor, leaf.name, self._where())
        blocks = sharding.blocks(self._note.rank, self._owner)
        return Wanted(name, leaf, tensor, offset, dtype_named(dtype), blocks)

    def _bring(self, call: dict[str, Any]) -> dict[str, Any] | None:
        """Bring this rank's parts, or say why not; returns what the owner has said meanwhile."""
        assert self._wire is not None
        answer = {"say": "done", "number": call["number"]}
        try:
            self._check(call)
            if self._board is None:
                self._send_parts(answer | {"say": "sends"})
                return None
            with self._board.writing(call["slot"], call["at"], call["size_bytes"]) as image:
                # if the version was given up, it is known under the lock
                early = self._wire.receive(0.0)
                if early is not None:
                    return early
                for wanted in self._roster:
                    write_blocks(wanted.view(image), wanted.tensor, wanted.blocks)
        except PublishError as error:
            answer |= {
                "say": "failed",
                "what": error.what,
                "where": error.where,
                "cure": error.cure,
            }
        except EOFError:
            return None  # the next look at the connection raises it
        with suppress(EOFError, TimeoutError):
            self._wire.send(answer, self.timeout_s)
        return None

    def _send_parts(self, announced: dict[str, Any]) -> None:
        assert self._wire is not None
        self._wire.send(announced, self.timeout_s)
        for wanted in self._roster:
            part = own_part(wanted.tensor)
            for block in wanted.blocks:
                sent = block_of(part, block).detach().to("cpu", wanted.dtype).contiguous()
                self._wire.send_bytes(meeting.raw(sent), self.timeout_s)

    def _check(self, call: dict[str, Any]) -> None:
        for wanted in self._roster:
            if wanted.leaf.read() is not wanted.tensor:
                raise PublishError(
                    f"{wanted.name} is not the tensor that was registered",
                    self._where(),
                    "make the hook and SendShards after the module was sharded; if FSDP has gathered it for "
                    "a forward pass, call module.reshard() before the publish",
                )
            if call["finite"] and not all_finite(wanted.tensor, wanted.dtype):
                problem = (
                    f"{wanted.name} is not finite on rank {self._note.rank}; nothing was published"
                )
                cure = (
                    "look at the loss and the gradients of the last steps; resume from a checkpoint"
                )
                raise PublishError(problem, f"version {call['version']}, {self._where()}", cure)

"""The pictures of a replay buffer: each is stored once, and rows have the numbers of those they show.

An observation of ``frame_stack=4`` shows four frames, three of which the observation before showed, too, and
``("next", "observation")`` is the next row's observation: stored whole, each frame lies there eight times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data.replay_buffers import TensorStorage

from rlsync import ConfigError

#: Of each row: no batch from its own on shows a frame with a lower number.
FIRST_FRAME = "first_frame"

#: The entries of a row that have numbers in place of pictures: before the step, and after it.
PICTURES: tuple[NestedKey, NestedKey] = ("observation", ("next", "observation"))
FRAME = "frame"  #: the only entry of a frame in a checkpoint
_COPIED = 4096  #: frames that are moved at once

_Numbers = list[int]  # of the frames of one observation, the oldest first


def places_for(rows: int) -> int:
    """How many frames the ring of so many rows has room for: one for each row, and one or two for each reset."""
    return rows + rows // 16 + _back(rows)


def _back(rows: int) -> int:
    """How far a batch may look back for frames that it shows again."""
    return rows // 32 + 64


class Frames:
    """Frames in a ring, numbered in the order in which they came, for the rows of a round-robin buffer.

    What is drawn is byte for byte what was stored: frames are shared where their bytes are equal, so a stack
    that begins anew after a reset shares none. The ring grows if the frames of all rows do not fit, as with
    episodes of few steps: the buffer holds its rows in any case.

    Args:
        rows: that the buffer holds.
        stack: how many frames an observation shows.
        picture: (channels, height, width) of an observation; the frames follow each other in its channels.
        device: where the frames are.

    Example:
        >>> frames = Frames(100, 2, (2, 1, 1), torch.device("cpu"))
        >>> seen = torch.tensor([5, 5, 6, 7], dtype=torch.uint8)
        >>> stacks = torch.stack([seen[:-1], seen[1:]], 1).view(1, 3, 2, 1, 1)
        >>> batch = TensorDict({"observation": stacks[:, :-1], "next": {"observation": stacks[:, 1:]}}, [1, 2])
        >>> rows = frames.stored(batch, 0)
        >>> rows["observation"].tolist(), rows["next", "observation"].tolist(), frames.end
        ([[[0, 0], [0, 1]]], [[[0, 1], [1, 2]]], 3)
        >>> torch.equal(frames.shown(rows)["next", "observation"], stacks[:, 1:])
        True
    """

    def __init__(
        self, rows: int, stack: int, picture: tuple[int, int, int], device: torch.device
    ) -> None:
        self._stack = stack
        self._picture = picture
        self.device = device
        self._back = _back(rows)
        self.max_size = places_for(rows)  #: places in the ring
        self.first = 0  #: the lowest number that a row may have
        self.end = 0  #: the number of the next frame
        self._memory: Tensor | None = None
        # The newest observation of each environment, by a hash of its bytes: the next batch begins with it.
        self._newest: dict[int, _Numbers] = {}

    def stored(self, batch: TensorDictBase, first: int) -> TensorDictBase:
        """The batch ``[B, T]`` with numbers ``[B, T, stack]`` in place of pictures; it stores what is new.

        Args:
            batch: steps of each of B environments, one after the other.
            first: the lowest number that the rows have which stay beside the batch.
        """
        before, after = [self._split(batch.get(key)) for key in PICTURES]
        # Whether each step moves the stack by one frame, and whether the next step begins where it led to.
        moves = (after[:, :, :-1] == before[:, :, 1:]).flatten(2).all(-1).tolist()
        follows = (before[:, 1:] == after[:, :-1]).flatten(2).all(-1).tolist()

        lowest = max(0, self.end - self._back)
        self.first = min(first, lowest)
        new = _New(self.end)
        numbers_before: list[list[_Numbers]] = []
        numbers_after: list[list[_Numbers]] = []
        for env, env_moves in enumerate(moves):
            shown = self._known(before[env, 0], lowest)
            numbers_before.append([])
            numbers_after.append([])
            for step, step_moves in enumerate(env_moves):
                if step and not follows[env][step - 1]:
                    shown = None
                if shown is None:
                    shown = new.stack(0, (env, step), _repeats(before[env, step]))
                numbers_before[env].append(shown)
                if step_moves:
                    shown = [*shown[1:], new.frame(1, (env, step, self._stack - 1))]
                else:
                    shown = new.stack(1, (env, step), _repeats(after[env, step]))
                numbers_after[env].append(shown)

        self._write(new, (before, after))
        self._newest = {key: one for key, one in self._newest.items() if min(one) >= lowest}
        for last, numbers in zip(after[:, -1], numbers_after, strict=True):
            self._newest[_hash_of(last)] = numbers[-1]

        rows = batch.copy()
        for key, of_steps in zip(PICTURES, (numbers_before, numbers_after), strict=True):
            rows.set(key, torch.tensor(of_steps, device=self.device))
        rows.set(FIRST_FRAME, torch.full(batch.shape, lowest, device=self.device))
        return rows

    def shown(self, rows: TensorDictBase) -> TensorDictBase:
        """The same rows, with pictures in place of the numbers that they have."""
        for key in PICTURES:
            numbers = rows.get(key, None)
            if numbers is not None:
                rows.set(key, self._pictures(numbers))
        return rows

    def are_read_by(self, storage: TensorStorage) -> bool:
        """Whether the rows of a storage have numbers of frames; those of an earlier rlsync have pictures."""
        return len(storage) > 0 and FIRST_FRAME in storage.get(slice(0, 1))

    # ---------------------------------------------------------------------------- as a ring, in checkpoints

    def get(self, places: slice) -> TensorDict:
        """The frames at some places, as they lie in memory."""
        frames = self._room()[places]
        return TensorDict({FRAME: frames}, [len(frames)])

    def set(self, places: slice, rows: TensorDictBase) -> None:
        """Put frames at some places; ConfigError if they are of another shape."""
        memory = self._room()
        frames = rows.get(FRAME)
        if frames.shape[1:] != memory.shape[1:]:
            problem = (
                f"the checkpoint has frames of {list(frames.shape[1:])}, and this run stores "
                f"{list(memory.shape[1:])}"
            )
            cure = "give the env that the run had: the same pictures, and as many at once"
            raise ConfigError(problem, "env.frame_stack, or env.stack_num", cure)
        memory[places] = frames

    def expect(self, first: int, end: int) -> None:
        """Hold the frames with these numbers, which :meth:`set` is about to bring, and no others."""
        self.first = first
        self.end = first
        self._newest = {}
        self._make_room(end)
        self.end = end

    # -------------------------------------------------------------------------------------------------------

    def _split(self, pictures: Tensor) -> Tensor:
        """The frames ``[B, T, stack, bytes]`` of observations ``[B, T, C, H, W]``, mostly as a view."""
        return pictures.unflatten(2, (self._stack, -1)).flatten(3)

    def _pictures(self, numbers: Tensor) -> Tensor:
        """Observations ``[*N, C, H, W]``, by their numbers ``[*N, stack]``."""
        frames = self._room().index_select(0, numbers.reshape(-1) % self.max_size)
        return frames.view(*numbers.shape[:-1], *self._picture)

    def _known(self, stack: Tensor, lowest: int) -> _Numbers | None:
        """The numbers of an observation ``[stack, bytes]`` that the batch before ended with, if one is equal."""
        numbers = self._newest.pop(_hash_of(stack), None)
        if numbers is None or min(numbers) < lowest:
            return None
        if not torch.equal(
            self._pictures(torch.tensor(numbers, device=self.device)).view_as(stack), stack
        ):
            return None
        return numbers

    def _write(self, new: _New, sources: Sequence[Tensor]) -> None:
        """Put new frames at their places, and count them."""
        self._make_room(new.end)
        memory = self._room().flatten(1)
        for source, numbers, places in zip(sources, new.numbers, new.places, strict=True):
            if numbers:
                at = torch.tensor(numbers, device=self.device) % self.max_size
                env, step, frame = torch.tensor(places, device=self.device).unbind(1)
                memory[at] = source[env, step, frame]
        self.end = new.end

    def _make_room(self, end: int) -> None:
        """Let the ring hold all frames up to before this number, as it holds them now."""
        needed = end - self.first
        if needed <= self.max_size:
            return
        old = self._memory
        old_size = self.max_size
        self.max_size = max(needed, 3 * old_size // 2)
        if old is None:
            return
        self._memory = None
        memory = self._room()
        for number in range(self.first, self.end, _COPIED):
            some = torch.arange(number, min(number + _COPIED, self.end), device=self.device)
            memory[some % self.max_size] = old[some % old_size]

    def _room(self) -> Tensor:
        """The memory of the ring; on a CPU its pages are taken when they are written."""
        if self._memory is None:
            channels, height, width = self._picture
            shape = (self.max_size, channels // self._stack, height, width)
            self._memory = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self._memory


class _New:
    """The frames of a batch that are stored: their numbers, and where they lie in it, before and after steps."""

    def __init__(self, first: int) -> None:
        self.end = first
        self.numbers: tuple[_Numbers, _Numbers] = ([], [])
        self.places: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])

    def frame(self, source: int, place: tuple[int, int, int]) -> int:
        """The number of one more frame."""
        self.numbers[source].append(self.end)
        self.places[source].append(place)
        self.end += 1
        return self.end - 1

    def stack(self, source: int, place: tuple[int, int], repeats: Sequence[bool]) -> _Numbers:
        """The numbers of a stack that begins anew; a frame that repeats the one before has its number."""
        numbers = [self.frame(source, (*place, 0))]
        for frame, is_repeated in enumerate(repeats, 1):
            if is_repeated:
                numbers.append(numbers[-1])
            else:
                numbers.append(self.frame(source, (*place, frame)))
        return numbers


def _repeats(stack: Tensor) -> list[bool]:
    """Whether each frame but the first equals the one before it."""
    repeats: list[bool] = (stack[1:] == stack[:-1]).all(-1).tolist()
    return repeats


def _hash_of(stack: Tensor) -> int:
    return hash(stack.cpu().numpy().tobytes())

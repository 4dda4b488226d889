"""What a copy that goes on in a thread relies on: nobody writes to what it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.tensors.digest import writes


@dataclass(frozen=True, slots=True)
class Untouched:
    """Tensors that nobody is to write to for a while.

    Example:
        >>> import torch
        >>> weights = Untouched.now([torch.zeros(2)], version=1)
        >>> weights.check()
        >>> _ = weights.tensors[0].add_(1)
        >>> weights.check()
        Traceback (most recent call last):
        rlsync.core.errors.PublishError: weights were written to while version 1 was copied from them...
    """

    tensors: Sequence[Tensor]
    writes: Sequence[int]  # autograd's write counter of each, when the copy began
    version: int  # which version they are copied for

    @classmethod
    def now(cls, tensors: Sequence[Tensor], version: int) -> Untouched:
        """Snapshot the write counters; :meth:`check` compares against them."""
        return cls(tensors, list(map(writes, tensors)), version)

    def check(self) -> None:
        """Raise PublishError if a tensor was written to since then."""
        if list(map(writes, self.tensors)) != self.writes:
            raise PublishError(
                f"weights were written to while version {self.version} was copied from them",
                "a publish in the background",
                "write to them at a stage before the publish, or publish with background=False",
            )

"""TorchRL's checkpoints: how one that was written gets into its place, and room for what it maps."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torchrl.checkpoint import Checkpoint

from rlsync.seams import whole_file


class StagedCheckpoint(Checkpoint):
    """A checkpoint that its subclass puts into its place.

    Until TorchRL syncs it to disk and can do so where folders cannot be renamed.
    """

    @abstractmethod
    def put(self, stage: Path, at: Path) -> None:
        """Put what was written to ``stage``, a folder beside ``at``, there. If this raises, it is removed."""

    def save(self, path: str | Path, **options: Any) -> Path:
        with _MapsWithRoom():
            return super().save(path, **options)

    def _publish_path(self, source: Path, destination: Path) -> None:  # type: ignore[override]  # static there
        self.put(source, destination)


class _MapsWithRoom(TorchFunctionMode):
    """Inside, a file has its room on the disk before it is mapped: OSError if there is none.

    To write to a map of it would end the process (SIGBUS). Until tensordict writes files by writes.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        options = dict(kwargs or {})
        if func is torch.from_file and options.get("shared"):
            dtype = options.get("dtype") or torch.get_default_dtype()
            file = os.open(args[0], os.O_RDWR | os.O_CREAT, 0o666)
            try:
                whole_file.reserve(file, options["size"] * dtype.itemsize)
            finally:
                os.close(file)
        return func(*args, **options)

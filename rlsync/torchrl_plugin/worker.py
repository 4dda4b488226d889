"""The worker's side of a board under TorchRL: adopt at the batch boundary, and stamp."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import Path, parse, walk
from rlsync.sync.adopter import Adopt, Adopter, Place
from rlsync.tensors.target import materialise
from rlsync.torchrl_plugin import compat
from rlsync.transport.contract import Handle

__all__ = ["Adopt", "WorkerSync"]


class WorkerSync:
    """Brings what acts in a worker of a TorchRL collector up to date, between rollouts.

    Args:
        handle: what the worker reads.
        worker_idx: this worker's number.
    """

    def __init__(self, handle: Handle, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self._adopt_by: dict[str, Adopt] = {}
        self._paths: dict[str, Path] = {}
        self._places: dict[str, Place] = {}
        self._collector: weakref.ref[compat.Collector] | None = None
        self._adopter = Adopter(handle, worker_idx)

    def declare(self, destination: str, adopt: Adopt) -> None:
        """Say that this worker takes weights for ``destination``."""
        self._adopt_by[destination] = adopt
        self._paths[destination] = parse(destination)

    def prepare(self, destination: str, module: nn.Module) -> None:
        """Give a module that came without its memory the newest weights, before its collector exists."""
        materialise(module)
        self._places[destination] = Place(lambda: module, "copy")
        self._adopter.place(self._places)
        self._adopter.adopt()

    def attach(self, collector: compat.Collector) -> None:
        """Adopt before each of ``collector``'s rollouts, and tell the learner which leaves it has.

        Raises:
            DestinationNotFound: a destination is not on this collector.
        """
        if self._collector is None:
            self._collector = weakref.ref(collector)
            compat.drop_first_weights(collector)
            compat.around_rollouts(collector, self._boundary)
            self._adopter.end_with_the_learner()
        compiled = compat.runs_compiled(collector)
        for destination, adopt in self._adopt_by.items():
            find = partial(self._module, destination)
            self._places[destination] = Place(find, "copy" if compiled else adopt)
        self._adopter.place(self._places)
        self._adopter.tell()

    def leave(self, destination: str | None) -> bool:
        """Take no more weights for ``destination``.

        Returns:
            Whether it was the last one, and this worker has left the board.
        """
        self._adopt_by.pop(str(destination), None)
        self._places.pop(str(destination), None)
        self._adopter.place(self._places)
        if not self._adopt_by:
            self._adopter.close()
        return not self._adopt_by

    @property
    def version(self) -> int:
        """The version that acts in this worker."""
        return self._adopter.version

    @contextmanager
    def _boundary(self, collector: compat.Collector) -> Iterator[None]:
        with self._adopter.acting() as version:
            compat.stamp(collector, version)
            yield

    def _module(self, destination: str) -> object:
        return walk(
            self._collector and self._collector(),
            self._paths[destination],
            error=DestinationNotFound,
            root_name="the worker's collector",
            where=f"weight_sync_schemes[{destination!r}] in worker {self.worker_idx}",
        )

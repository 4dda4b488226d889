"""The worker's side of a board under TorchRL: adopt at the batch boundary, stamp, answer questions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from torch import Tensor, nn

from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import parse, walk
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target, materialise
from rlsync.torchrl_plugin import compat
from rlsync.transport.board import BoardHandle, BoardReader

Adopt = Literal["alias", "copy"]


class WorkerSync:
    """Brings what acts in this process up to date, in the thread that acts, between rollouts.

    Args:
        handle: the board.
        worker_idx: this worker's number.
    """

    def __init__(self, handle: BoardHandle, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self._adopt_by: dict[str, Adopt] = {}
        self._collector: weakref.ref[compat.Collector] | None = None
        self._early: dict[str, nn.Module] = {}
        self._targets: dict[str, tuple[Target, tuple[LeafSpec, ...]]] = {}
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._reader = BoardReader(handle, self._apply, worker_idx)

    def declare(self, destination: str, adopt: Adopt) -> None:
        """Say that this worker takes weights for ``destination``."""
        self._adopt_by[destination] = adopt

    def prepare(self, destination: str, module: nn.Module) -> None:
        """Give a module that came without its memory the newest weights, before its collector exists."""
        materialise(module)
        self._early[destination] = module
        self._reader.adopt()

    def attach(self, collector: compat.Collector) -> None:
        """Adopt before each of ``collector``'s rollouts, and tell the learner what stands here.

        Raises:
            DestinationNotFound: a destination is not on this collector.
        """
        if self._collector is None:
            self._collector = weakref.ref(collector)
            self._early.clear()
            self._targets.clear()
            self._reader.forget()
            compat.around_rollouts(collector, self._boundary)
        stands = {d: Leaves(self._module(d), d).specs() for d in self._adopt_by}
        self._reader.leave_note(Layout.build(stands).to_json())

    @property
    def version(self) -> int:
        """The version that acts in this worker."""
        return self._reader.version

    @contextmanager
    def _boundary(self, collector: compat.Collector) -> Iterator[None]:
        if any(self._replaced(d, target) for d, (target, _) in self._targets.items()):
            self._let_go()
        compat.stamp(collector, self._reader.adopt())
        yield

    def _replaced(self, destination: str, target: Target) -> bool:
        return target.module is not self._module(destination) or not target.leaves.unchanged()

    def _module(self, destination: str) -> object:
        if destination in self._early:
            return self._early[destination]
        return walk(
            self._collector and self._collector(),
            parse(destination),
            error=DestinationNotFound,
            root_name="the worker's collector",
            where=f"weight_sync_schemes[{destination!r}] in worker {self.worker_idx}",
        )

    def _apply(self, version: int, layout: Layout, views: Sequence[Tensor]) -> bool:
        keep, at = False, 0
        for destination, leaves in layout.destinations.items():
            mine, at = views[at : at + len(leaves)], at + len(leaves)
            if destination not in self._early and self._collector is None:
                continue  # its collector does not exist yet: taken up when it does
            target = self._target(destination, tuple(leaves))
            if self._aliases(destination, target):
                target.alias(mine)
                keep = True
            else:
                target.copy(mine)
        return keep

    def _aliases(self, destination: str, target: Target) -> bool:
        wanted = self._adopt_by[destination] == "alias" and self._collector is not None
        return wanted and target.may_alias()

    def _target(self, destination: str, leaves: tuple[LeafSpec, ...]) -> Target:
        if destination in self._targets and self._targets[destination][1] == leaves:
            return self._targets[destination][0]
        module = self._module(destination)
        target = Target(module, f"{destination} of worker {self.worker_idx}", leaves)
        self._targets[destination] = (target, leaves)
        if isinstance(module, nn.Module) and module not in self._guarded:
            self._guard(module)
        return target

    def _guard(self, module: nn.Module) -> None:
        # collector.load_state_dict() writes into the parameters in place; aliased ones are read-only.
        ref = weakref.ref(self)

        def let_go(*_: object) -> None:
            worker = ref()
            if worker is not None:
                worker._let_go()

        module.register_load_state_dict_pre_hook(let_go)
        self._guarded.add(module)

    def _let_go(self) -> None:
        """Take what acts off the board, until the next adoption puts it there again."""
        for target, _ in self._targets.values():
            target.own()
        self._targets.clear()
        self._reader.forget()

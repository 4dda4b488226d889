"""The worker's side of a board under TorchRL: adopt at the batch boundary, stamp, answer questions."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import Path, parse, walk
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.memory import return_freed_memory
from rlsync.tensors.target import Target, materialise
from rlsync.torchrl_plugin import compat
from rlsync.torchrl_plugin.check import Answer
from rlsync.transport.board import BoardHandle, BoardReader
from rlsync.transport.board_format import Note

Adopt = Literal["alias", "copy"]

#: How often a worker looks whether its learner lives.
LEARNER_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class Binding:
    """A destination of the present layout, and what adopts there.

    Args:
        destination: its name.
        target: the module that acts.
        names: the leaves that arrive.
        views: which of a version's views they are.
        alias: whether the parameters are pointed at the board.
        once: whether this worker takes them this one time, and keeps its own from then on.
    """

    destination: str
    target: Target
    names: tuple[str, ...]
    views: tuple[int, ...]
    alias: bool
    once: bool


class WorkerSync:
    """Brings what acts in this process up to date, in the thread that acts, between rollouts.

    Args:
        handle: the board.
        worker_idx: this worker's number.
    """

    def __init__(self, handle: BoardHandle, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self._adopt_by: dict[str, Adopt] = {}
        self._paths: dict[str, Path] = {}
        self._collector: weakref.ref[compat.Collector] | None = None
        self._early: dict[str, nn.Module] = {}
        self._layout: Layout | None = None
        self._bindings: list[Binding] = []
        self._had: set[tuple[str, str]] = set()
        self._answered = 0
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._reader = BoardReader(handle, self._apply, worker_idx)

    def declare(self, destination: str, adopt: Adopt) -> None:
        """Say that this worker takes weights for ``destination``."""
        self._adopt_by[destination] = adopt
        self._paths[destination] = parse(destination)

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
            self._let_go()
            compat.around_rollouts(collector, self._boundary)
            threading.Thread(target=_end_with_the_learner, args=(self._reader,), daemon=True).start()
        stands = {d: Leaves(self._module(d), d).specs() for d in self._adopt_by}
        self._reader.leave_note(Layout.build(stands).to_json())

    @property
    def version(self) -> int:
        """The version that acts in this worker."""
        return self._reader.version

    @contextmanager
    def _boundary(self, collector: compat.Collector) -> Iterator[None]:
        if not all(self._current(binding) for binding in self._bindings):
            self._let_go()
        acted = self._reader.version
        version = self._reader.adopt()
        compat.stamp(collector, version)
        asked = self._reader.asked
        if asked == self._answered or not asked:
            yield
            return
        # Buffers are as published until forward() changes them; parameters must still be so afterwards.
        arrived = {} if version == acted else self._digests(parameters=False)
        yield
        answer = Answer(asked, version, self._digests(parameters=True), arrived)
        self._reader.leave_note(answer.to_json(), Note.ANSWER)
        self._answered = asked

    def _digests(self, *, parameters: bool) -> dict[str, int]:
        """Of what acts now, as the live modules hold it, by destination."""
        found = {}
        for binding in self._bindings:
            leaves = Leaves(self._module(binding.destination), binding.destination).leaves
            live = {leaf.name: leaf for leaf in leaves if (leaf.kind == "parameter") is parameters}
            found[binding.destination] = digest(live[name].read() for name in binding.names if name in live)
        return found

    def _current(self, binding: Binding) -> bool:
        return binding.target.module is self._module(binding.destination) and binding.target.current()

    def _module(self, destination: str) -> object:
        if destination in self._early:
            return self._early[destination]
        return walk(
            self._collector and self._collector(),
            self._paths[destination],
            error=DestinationNotFound,
            root_name="the worker's collector",
            where=f"weight_sync_schemes[{destination!r}] in worker {self.worker_idx}",
        )

    def _apply(self, version: int, layout: Layout, views: Sequence[Tensor]) -> bool:
        bound_anew = layout is not self._layout
        if bound_anew:
            self._bind(layout)
        for binding in self._bindings:
            write = binding.target.alias if binding.alias else binding.target.copy
            write([views[i] for i in binding.views])
        self._had |= {(b.destination, name) for b in self._bindings for name in b.names}
        self._bindings = [binding for binding in self._bindings if not binding.once]
        aliased = any(binding.alias for binding in self._bindings)
        if aliased and bound_anew:
            self._return_own_memory()
        return aliased

    def _return_own_memory(self) -> None:
        """What acts lies on the board now: the memory that it had before is of no use to anybody."""
        collector = self._collector and self._collector()
        if collector is not None:
            compat.drop_first_weights(collector)
        return_freed_memory()

    def _bind(self, layout: Layout) -> None:
        self._own()
        self._layout, self._bindings = layout, []
        groups: dict[tuple[str, bool], list[int]] = {}
        for i, entry in enumerate(layout.entries):
            known = entry.destination in self._early or self._collector is not None
            kept = entry.leaf.once and (entry.destination, entry.leaf.name) in self._had
            if known and not kept:  # what is not known yet is taken up when its collector exists
                groups.setdefault((entry.destination, entry.leaf.once), []).append(i)
        for (destination, once), views in groups.items():
            leaves = [layout.entries[i].leaf for i in views]
            module = self._module(destination)
            target = Target(module, f"{destination} of worker {self.worker_idx}", leaves)
            alias = not once and self._aliases(destination, target)
            names = tuple(leaf.name for leaf in leaves)
            self._bindings.append(Binding(destination, target, names, tuple(views), alias, once))
            if isinstance(module, nn.Module) and module not in self._guarded:
                self._guard(module)

    def _aliases(self, destination: str, target: Target) -> bool:
        collector = self._collector and self._collector()
        if collector is None or self._adopt_by[destination] == "copy":
            return False
        return target.may_alias() and not compat.runs_compiled(collector)

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
        self._own()
        self._layout, self._bindings = None, []
        self._reader.forget()

    def _own(self) -> None:
        for binding in self._bindings:
            if binding.alias:
                binding.target.own()


def _end_with_the_learner(reader: BoardReader) -> None:
    """End this process when the learner was killed; touches nothing that acts."""
    while not reader.closed:
        if reader.learner_died:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(LEARNER_WATCH_S)

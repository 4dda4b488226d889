"""Adopter: brings what acts in a worker up to date, between its rollouts."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from torch import Tensor, nn

from rlsync.core import trace
from rlsync.sync.acts import Acting
from rlsync.sync.families import end_at_once
from rlsync.sync.held import settings_of
from rlsync.sync.verification import Answers, digests_of
from rlsync.tensors.derived import KeepsDerived, keepers, outdate
from rlsync.tensors.device import return_freed_memory
from rlsync.tensors.layout import Layout, specs_to_json
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target, is_compiled
from rlsync.transport.contract import Handle, Note, Subscriber

Adopt = Literal["alias", "copy"]

LEARNER_WATCH_S = 1.0  #: how often a worker looks whether its learner lives


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the weights of a destination go."""

    find: Callable[[], object]  #: returns the module that acts; asked before every adoption
    #: Whether its parameters are pointed at the new version, where that reaches the code that acts, or it is
    #: copied into their own memory.
    adopt: Adopt = "alias"


@dataclass(frozen=True, slots=True)
class Binding:
    """A destination of the present layout, and what adopts there."""

    destination: str
    target: Target
    names: tuple[str, ...]  #: the leaves that arrive
    views: tuple[int, ...]  #: which of a version's views they are
    alias: bool  #: whether the parameters are pointed at each version
    #: whether the worker takes them at its first adoption only, and keeps its own after that
    excluded: bool


class Adopter:
    """Adopts versions in the thread that acts, and answers the learner's questions about them.

    Parameters are pointed at the transport's memory and leased until the next adoption. Those on an
    accelerator are pointed at a second set of tensors there, into which the version was copied. What
    forward() may change is copied. A module that was replaced, or into which a state dict is loaded, owns
    its memory until the next adoption.

    ``handle`` leads to what worker number ``worker`` reads; BoardClosed if the learner has closed it or died.
    """

    def __init__(self, handle: Handle, worker: int) -> None:
        self._worker = worker
        self._destinations: dict[str, Destination] = {}
        self._within: Callable[[], object] = lambda: None
        self._keepers: tuple[KeepsDerived, ...] = ()
        self._layout: Layout | None = None
        self._bindings: list[Binding] = []
        self._had: set[tuple[str, str]] = set()
        self._guarded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.reader: Subscriber = handle.subscribe(self._apply, worker)
        self.answers = Answers(self.reader, self._digests, self._arriving)

    def place(
        self, destinations: Mapping[str, Destination], within: Callable[[], object] = lambda: None
    ) -> None:
        """Say where the weights of each destination go; those of other destinations are not taken.

        ``within`` returns the policy of which destinations are parts, if there is one.
        """
        self._let_go()
        self._destinations = dict(destinations)
        self._within = within

    def note_acting(self, acting: Acting) -> None:
        """Tell the learner which leaves act here; before :meth:`tell`, after which it is asked for."""
        settings = {}
        for name, each in self._destinations.items():
            settings[name] = settings_of(each.find(), name)
        self.reader.leave_note(replace(acting, settings=settings).to_json(), Note.ACTING)

    def tell(self) -> None:
        """Tell the learner which leaves each destination has here, so that it can check its map."""
        leaves = {}
        for name, each in self._destinations.items():
            leaves[name] = Leaves(each.find(), name).specs()
        self.reader.leave_note(specs_to_json(leaves), Note.LEAVES)

    def adopt(self) -> int:
        """Adopt the newest version; between rollouts, in the thread that acts."""
        self._look()
        return self.reader.adopt()

    def _look(self) -> None:
        if not all(map(self._current, self._bindings)):
            self._let_go()

    def settled(self) -> bool:
        """Whether :meth:`acting` would do nothing.

        Asking is a sign of life, and costs about 2 us: for workers that act in short pieces, such as the
        batches of an inference server.
        """
        reader = self.reader
        if reader.newest != reader.version or reader.asked not in (0, self.answers.answered):
            return False
        return reader.version == reader.adopt()

    @contextmanager
    def acting(self) -> Iterator[int]:
        """Adopt the newest version for the rollout in the block; answer the learner's question after it."""
        self._look()
        version = self.reader.begin()
        if trace.ON:
            trace.write(trace.worker(self._worker), "begin", version)
        with self.answers.around(version):
            yield version

    def _arriving(self, destination: str) -> tuple[str, ...]:
        names: tuple[str, ...] = ()
        for binding in self._bindings:
            if binding.destination == destination:
                names = binding.names
        return names

    def memory(self) -> set[int]:
        """The addresses of the memory that holds what acts: adoptions change it, or give it back."""
        addresses = set()
        for binding in self._bindings:
            for tensor in binding.target.live:
                addresses.add(tensor.untyped_storage().data_ptr())
        return addresses

    def end_with_the_learner(self) -> None:
        """End this process soon after the learner was killed, whatever it is doing then."""
        threading.Thread(target=_end_with_the_learner, args=(self.reader,), daemon=True).start()

    def close(self) -> None:
        self.reader.close()

    def _digests(self, parameters: bool) -> dict[str, int]:
        """Digests of what acts now, as the live modules hold it, by destination."""
        digests = {}
        for binding in self._bindings:
            acts = self._destinations[binding.destination].find()
            leaves = Leaves(acts, binding.destination).leaves
            digests[binding.destination] = digests_of(leaves, binding.names, parameters=parameters)
        return digests

    def _apply(self, version: int, layout: Layout, views: Sequence[Tensor]) -> bool:
        bound_anew = layout is not self._layout
        if bound_anew:
            self._bind(layout)
        aliased = False
        for binding in self._bindings:
            mine = [views[i] for i in binding.views]
            if binding.alias:
                aliased |= binding.target.alias(mine)
            else:
                binding.target.copy(mine)
        outdate(self._keepers)
        self.answers.fresh = True
        for binding in self._bindings:
            self._had.update(product((binding.destination,), binding.names))
        self._bindings = [binding for binding in self._bindings if not binding.excluded]
        if trace.ON:
            trace.write(trace.worker(self._worker), "adopt", version)
        if aliased and bound_anew:
            return_freed_memory()  # what acted before was in memory of this process
        return aliased

    def _bind(self, layout: Layout) -> None:
        """Build the targets of a layout, all of them, and only then act by it."""
        groups: dict[tuple[str, bool], list[int]] = {}
        for i, entry in enumerate(layout.entries):
            stays = entry.leaf.excluded and (entry.destination, entry.leaf.name) in self._had
            if entry.destination in self._destinations and not stays:
                groups.setdefault((entry.destination, entry.leaf.excluded), []).append(i)
        bindings = []
        for (destination, excluded), views in groups.items():
            bindings.append(self._binding(layout, destination, views, excluded=excluded))
        self._own()
        self._layout = layout
        self._bindings = bindings
        acts = [self._within()]
        for place in self._destinations.values():
            acts.append(place.find())
        self._keepers = keepers(acts)

    def _binding(
        self, layout: Layout, destination: str, views: Sequence[int], *, excluded: bool
    ) -> Binding:
        leaves = [layout.entries[i].leaf for i in views]
        module = self._destinations[destination].find()
        target = Target(module, f"{destination} of worker {self._worker}", leaves)
        adopt = self._destinations[destination].adopt
        alias = adopt == "alias" and not excluded and not is_compiled(module)
        if isinstance(target.module, nn.Module) and target.module not in self._guarded:
            # load_state_dict() writes into the parameters in place; aliased ones are read-only.
            ref = weakref.WeakMethod(self._let_go)

            def let_go(*_: object) -> None:
                release = ref()
                if release is not None:
                    release()

            target.module.register_load_state_dict_pre_hook(let_go)
            self._guarded.add(target.module)
        names = tuple(leaf.name for leaf in leaves)
        return Binding(destination, target, names, tuple(views), alias, excluded)

    def _current(self, binding: Binding) -> bool:
        acts = self._destinations[binding.destination].find()
        return binding.target.module is acts and binding.target.current()

    def _let_go(self) -> None:
        """Take what acts off the board, until the next adoption puts it there again."""
        self._own()
        self._layout = None
        self._bindings = []
        self.reader.forget()

    def _own(self) -> None:
        for binding in self._bindings:
            if binding.alias:
                binding.target.own()


def _end_with_the_learner(reader: Subscriber) -> None:
    # Not by SIGTERM: a worker that was forked may have inherited a handler for it.
    with suppress(OSError, ValueError):  # closed between two looks: this process is leaving
        while not reader.closed:
            if reader.learner_died and not reader.closed:
                end_at_once()
            time.sleep(LEARNER_WATCH_S)

"""Does what older weights computed act on?

A policy may keep it: a packed weight, the keys and values of an attention, a view of memory that its weights
have left.

A policy acts with other weights, gets new ones in the middle of the episode, and acts on. Its outputs must be
those that it gives if it has the new ones from the start. A collector has called it before: what such a call
made is dropped first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rlsync.core.plan import POLICY
from rlsync.sync.held import OF_EVERY_MODULE, settings_of, tensors_of
from rlsync.sync.numbers import Numbers
from rlsync.sync.undisturbed import random_states, set_random_states, undisturbed
from rlsync.tensors.derived import KeepsDerived, keepers, outdate
from rlsync.tensors.digest import digest
from rlsync.tensors.target import Target

#: ``call(plain)``: what acts is called on one fixed input, without exploration; returns its outputs. The
#: input is the first of an episode, or if not ``plain`` one in its middle, without zeros in floating-point
#: numbers.
Call = Callable[[bool], Sequence[Tensor]]


@contextmanager
def own_values(target: Target, *, alias: bool) -> Iterator[None]:
    """Give the target's parameters the memory back that they had before, with what was in it.

    Unless the block only adopts by alias.
    """
    memories = [tensor.data for tensor in target.live]
    values: list[Tensor] = []
    if not alias:
        values += [memory.clone() for memory in memories]
    try:
        yield
    finally:
        for tensor, memory in zip(target.live, memories, strict=True):
            tensor.data = memory
        if not alias:
            for memory, value in zip(memories, values, strict=True):
                memory.copy_(value)
        increment_version([tensor for tensor in target.live if not tensor.is_inference()])


class Episode:
    """How a policy acts in one episode in which weights arrive for a target that is a part of it."""

    def __init__(self, policy: nn.Module, target: Target, call: Call, *, alias: bool) -> None:
        self.policy = policy
        self.target = target
        self.call = call
        self.alias = alias
        self._numbers = random_states()
        self._drops = list(_drops_of_what_calls_make(policy, call))

    def outliving(self, olders: Iterable[Numbers], newer: Numbers) -> tuple[tuple[str, ...], str]:
        """What acts with ``newer`` weights although older ones computed it, or why nobody can tell."""
        outputs = self._outputs(newer, newer, one_slot=False)
        if self._outputs(newer, newer, one_slot=False) != outputs:
            why = "two episodes with the same weights and the same inputs give different outputs"
            return (), why
        # A version may come where the one before was, or elsewhere.
        places = (False, True) if self.alias else (False,)
        for older, one_slot in product(olders, places):
            if self._outputs(older, newer, one_slot=one_slot) == outputs:
                continue
            # What the policy holds besides if it has the new ones from the start, and what now?
            holds = self._holds(newer, newer, one_slot=False)
            stale = self._holds(older, newer, one_slot=one_slot)
            names = set()
            for name, text in stale.items():
                if holds.get(name) != text:
                    names.add(name.partition("[")[0])
            if not names:
                return (f"something in {POLICY}",), ""
            unsaid = [name for name in sorted(names) if not self._is_kept_on_purpose(name)]
            if unsaid:
                return tuple(f"{POLICY}.{name}" for name in unsaid), ""
        return (), ""

    def _outputs(self, first: Numbers, last: Numbers, *, one_slot: bool) -> list[int]:
        """Digests of what the policy gives with the last weights: in this episode, and in another."""
        with self._acted(first, last, one_slot=one_slot):
            return [digest(self.call(False)), digest(self.call(True))]

    def _holds(self, first: Numbers, last: Numbers, *, one_slot: bool) -> dict[str, str]:
        """What the policy holds besides its leaves when the last weights have arrived."""
        with self._acted(first, last, one_slot=one_slot):
            return settings_of(self.policy, POLICY)

    @contextmanager
    def _acted(self, first: Numbers, last: Numbers, *, one_slot: bool) -> Iterator[None]:
        """The policy has acted with the first weights, and the last ones have just arrived."""
        adopt = self.target.alias if self.alias else self.target.copy
        parts = keepers([self.policy])
        from_the_start = first is last
        untouched = self.alias and not from_the_start
        with undisturbed(self.policy), own_values(self.target, alias=untouched), torch.no_grad():
            for drop in self._drops:
                drop()
            set_random_states(self._numbers)
            if from_the_start:
                # for what looks at the memory of the weights before they arrive
                self.target.copy(last.views)
            buffers = list(_buffers(self.policy))

            # The policy acts with the first weights.
            if one_slot:
                first = first.elsewhere()
            adopt(first.views)
            outdate(parts)
            self.call(True)
            self.call(False)

            # The last ones arrive, in the memory where the first ones were or in their own.
            if one_slot:
                first.refill(last)
                last = first
            adopt(last.views)
            # Buffers arrive with every version: statistics and states in them are no alarm.
            for part, name, values in buffers:
                _refill(part, name, values)
            outdate(parts)
            yield

    def _is_kept_on_purpose(self, name: str) -> bool:
        """Whether a part that holds it is told of new weights, and has not dropped it."""
        parts = dict(self.policy.named_modules())
        path = name.split(".")
        for depth in range(len(path)):
            above = parts.get(".".join(path[:depth]))
            if isinstance(above, KeepsDerived):
                return True
        return False


def _drops_of_what_calls_make(policy: nn.Module, call: Call) -> Iterator[Callable[[], object]]:
    """What drops each attribute with tensors that the next call makes again."""
    for part in policy.modules():
        attributes = vars(part)
        for name in attributes.keys() - OF_EVERY_MODULE:
            for drop in _drops(attributes, name):
                if _is_made_again(attributes, name, drop, policy, call):
                    yield drop
                    break


def _drops(attributes: dict[str, object], name: str) -> Iterator[Callable[[], object]]:
    """The ways in which an attribute may be as it was before the first call."""
    match attributes[name]:
        case nn.Parameter():
            return
        case Tensor():
            yield partial(attributes.__setitem__, name, None)
            yield partial(attributes.pop, name)
        case dict() | list() | deque() as held if any(tensors_of(held, "")):
            yield held.clear


def _is_made_again(
    attributes: dict[str, object],
    name: str,
    drop: Callable[[], object],
    policy: nn.Module,
    call: Call,
) -> bool:
    with undisturbed(policy), torch.no_grad():
        drop()
        try:
            call(True)
        except Exception:  # noqa: BLE001 - it was no call that made this
            return False
        return any(tensors_of(attributes.get(name), ""))


def _buffers(policy: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Copies of all buffers, by the part that has them and by name."""
    for part in policy.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part, name, buffer.clone()


def _refill(part: nn.Module, name: str, values: Tensor) -> None:
    buffer = part._buffers[name]
    if buffer is not None and buffer.shape == values.shape:
        buffer.data.copy_(values)
    else:
        setattr(part, name, values)

"""Which devices the weights of a trainer and of its workers are on, and what crosses between them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torchrl.collectors import Collector
from torchrl.trainers import Trainer

from rlsync.core.crossing import Crossing, crossings
from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import parse, walk
from rlsync.tensors.compare import named_like
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.torchrl_plugin.examine.sync import FoundSource, FoundSync


def crossings_of(trainer: Trainer, sync: FoundSync) -> tuple[Crossing, ...]:
    """What one publish moves from which device to which.

    With rlsync's hook it is what the plan says. Otherwise the devices of workers in other processes are not
    known: TorchRL's ``state_dict`` of collectors brings all weights to the CPU.
    """
    if sync.plan is not None:
        return sync.plan.crossings
    return crossings(leaf for source in sync.sources for leaf in _leaf_by_leaf(trainer.collector, source))


def _leaf_by_leaf(collector: object, source: FoundSource) -> Iterator[Crossing]:
    there = _held_here(collector, source.destination)
    leaves = source.sent()
    names = named_like([leaf.name for leaf in leaves], there.specs()) if there else []
    live = dict(zip(there.names, there.tensors(), strict=True)) if there else {}
    for leaf, name in zip(leaves, names or [leaf.name for leaf in leaves], strict=True):
        yield _crossing(leaf.read(), live.get(name))


def _crossing(tensor: Tensor, held: Tensor | None) -> Crossing:
    aliased = held is not None and memory_key(held) == memory_key(tensor)
    return Crossing(
        str(tensor.device),
        "" if held is None else str(held.device),
        False,
        aliased_leaves=int(aliased),
        copied_bytes=0 if aliased else tensor.numel() * tensor.element_size(),
    )


def _held_here(collector: object, destination: str) -> Leaves | None:
    if not isinstance(collector, Collector):
        return None
    try:
        module = walk(collector, parse(destination), error=DestinationNotFound, root_name="the collector")
    except DestinationNotFound:
        return None
    return Leaves(module, f"collector.{destination}")

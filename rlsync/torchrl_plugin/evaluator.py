"""Evaluations by TorchRL's Evaluator, each with one published version."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Evaluator

from rlsync.core.errors import ConfigError, DestinationNotFound
from rlsync.core.path import nearest_name, parse, walk
from rlsync.core.plan import no_destination
from rlsync.sync.bound_map import BoundMap, VersionCopies, VersionCopy
from rlsync.tensors.compare import check_same_leaves
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.target import write
from rlsync.torchrl_plugin.compat import evaluators

_WHERE = "SyncWeights.pin"


def pin(
    evaluator: Evaluator,
    bound_map: BoundMap,
    settle: Callable[[], object],
    publish: Callable[[], object],
) -> VersionCopies:
    """Let every evaluation act with one version of a map, and say which.

    ``settle`` makes the publish that is owed, before the first frame or after a resume. What is returned is
    to be told of each publish. Raises ConfigError for an Evaluator that has evaluated already, or with a
    backend other than ``"thread"`` and ``"process"``; DestinationNotFound if its worker has no scheme for a
    destination; LayoutMismatch if its policy has other leaves.
    """
    _check(evaluator, bound_map)
    copies = VersionCopies(bound_map)

    def newest() -> tuple[int, VersionCopy]:
        settle()
        while (weights := copies.newest()) is None:
            publish()
        return weights.version, weights

    load = _send if evaluators.acts_in_a_worker(evaluator) else _write
    evaluators.around_evaluations(evaluator, newest, partial(_own, bound_map), load, _refused)
    return copies


def _check(evaluator: Evaluator, bound_map: BoundMap) -> None:
    if not evaluators.evaluates_here(evaluator):
        raise ConfigError(
            "the version that acts in an Evaluator on Ray cannot be known",
            _WHERE,
            "use Evaluator(backend='process') or backend='thread'",
        )
    if evaluators.has_evaluated(evaluator):
        raise ConfigError(
            "this Evaluator has evaluated already", _WHERE, "pin it before its first evaluation"
        )
    destinations = sorted({destination for destination, _ in bound_map.brought()})
    offered = evaluators.schemes_of_evaluator(evaluator)
    for destination in destinations if evaluators.acts_in_a_worker(evaluator) else ():
        if destination not in offered:
            near = nearest_name(destination, offered)
            raise no_destination(destination, f"{_WHERE}, an Evaluator in a process", offered, near)
    policy, expected = evaluators.evaluated_policy(evaluator), bound_map.endpoint.specs("policy")
    if isinstance(policy, nn.Module) and "policy" in destinations and expected is not None:
        check_same_leaves(
            Leaves(policy, "the Evaluator's policy").specs(), expected, _WHERE, "of the collector's policy"
        )


def _own(bound_map: BoundMap, policy: nn.Module) -> nn.Module:
    """A policy that nobody else writes to, and whose weights nobody else acts with."""
    written = bound_map.memory()
    shares = any(memory_key(tensor) in written for tensor in Leaves(policy, "policy").tensors())
    return copy.deepcopy(policy) if shares else policy


def _write(collector: Any, weights: VersionCopy) -> None:
    for destination in {destination for destination, _ in weights.leaves}:
        path = parse(destination)
        module = walk(
            collector, path, error=DestinationNotFound, root_name="the Evaluator's collector", where=_WHERE
        )
        write(Leaves(module, f"the Evaluator's {destination}"), weights.of(destination))


def _send(collector: Any, weights: VersionCopy) -> None:
    trees: dict[str, TensorDict] = {}
    for (destination, name), tensor in weights.leaves.items():
        trees.setdefault(destination, TensorDict()).set(tuple(name.split(".")), tensor)
    collector.update_policy_weights_(weights_dict=trees)


def _refused() -> ConfigError:
    return ConfigError(
        "weights that are given by hand have no version",
        "evaluate(weights) of an Evaluator that is pinned by SyncWeights.pin",
        "leave the weights out: the newest published version acts",
    )

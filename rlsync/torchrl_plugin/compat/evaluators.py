"""Evaluations by TorchRL's Evaluator, each with one published version.

An Evaluator of 0.14 takes weights, but no version. In a worker process it does not begin new episodes for an
evaluation, so that the first ones began with the weights of the evaluation before. Until an Evaluator stamps
its results and resets its workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, Evaluator
from torchrl.collectors._evaluator import _ThreadEvalBackend
from torchrl.collectors._multi_base import MultiCollector

from rlsync.core.errors import ConfigError, DestinationNotFound
from rlsync.core.path import parse, walk
from rlsync.core.plan import no_destination
from rlsync.sync.bound_map import BoundMap, VersionCopies, VersionCopy
from rlsync.sync.resolve import refuse_parts
from rlsync.tensors.compare import check_same_leaves
from rlsync.tensors.derived import keepers, outdate
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.sendable import copied
from rlsync.tensors.target import write
from rlsync.torchrl_plugin.compat import in_place_of
from rlsync.torchrl_plugin.compat.collectors import policy_of

_WHERE = "SyncWeights.pin"


def pin(
    evaluator: Evaluator,
    bound_map: BoundMap,
    settle: Callable[[], object],
    publish: Callable[[], object],
) -> VersionCopies:
    """Let every evaluation act with one version of a map, and say which.

    ``settle`` makes the publish that is owed. Returns what is to be told of each publish. ConfigError for an
    Evaluator that has evaluated, or of a backend but ``"thread"`` and ``"process"``; DestinationNotFound,
    LayoutMismatch: its worker does not fit.
    """
    # Refuse an Evaluator whose evaluations could act with something else.
    backend = evaluator._backend
    if not isinstance(backend, _ThreadEvalBackend):
        problem = "the version that acts in an Evaluator on Ray cannot be known"
        raise ConfigError(problem, _WHERE, "use Evaluator(backend='process') or backend='thread'")
    if backend._collector is not None or backend.pending:
        problem = "this Evaluator has evaluated already"
        raise ConfigError(problem, _WHERE, "pin it before its first evaluation")
    _check_destinations(backend, bound_map)
    copies = VersionCopies(bound_map)

    # A request chooses the version: what TorchRL passes on as weights is a copy of the newest one.
    def prepare(weights: object, weights_dict: object) -> VersionCopy:
        """Called in the thread that requests an evaluation."""
        if weights is not None or weights_dict is not None:
            problem = "weights that are given by hand have no version"
            where = "evaluate(weights) of an Evaluator that is pinned by SyncWeights.pin"
            raise ConfigError(
                problem, where, "leave the weights out: the newest published version acts"
            )
        settle()
        while (newest := copies.newest()) is None:
            publish()
        return newest

    # An evaluation begins when the copy stands in what acts, and its result says which version that was.
    @in_place_of(backend, "_run_eval")
    def run(self: _ThreadEvalBackend, weights: VersionCopy) -> dict[str, Any]:
        """Called in the thread that evaluates."""
        if self._use_multi_collector:
            self._enable_process_weight_sync()
            began = self._collector is not None
            self._ensure_collector()
            if began:
                self._collector.reset()
            _send(self._collector, weights)
        else:
            self._ensure_env_and_policy()
            if isinstance(self._policy, nn.Module) and self._collector is None:
                self._policy = _own(bound_map, self._policy)
            self._ensure_collector()
            _write(self._collector, weights)
        metrics: dict[str, Any] = type(self)._run_eval(self, None)
        return metrics | {"custom/policy_version": weights.version}

    evaluator._prepare_weights_dict = prepare
    return copies


def _check_destinations(backend: _ThreadEvalBackend, bound_map: BoundMap) -> None:
    destinations = sorted({destination for destination, _ in bound_map.brought()})
    if backend._use_multi_collector:
        offered = list(backend._weight_sync_schemes or ("policy",))  # by default its policy only
        for destination in destinations:
            if destination not in offered:
                raise no_destination(destination, f"{_WHERE}, an Evaluator in a process", offered)
    policy = backend._policy
    expected = bound_map.endpoint.specs("policy")
    if isinstance(policy, nn.Module) and "policy" in destinations and expected is not None:
        leaves = Leaves(policy, "the Evaluator's policy")
        if backend._use_multi_collector:
            refuse_parts(leaves, f"{_WHERE}, an Evaluator in a process")
        check_same_leaves(leaves.specs(), expected, _WHERE, "of the collector's policy")


def _own(bound_map: BoundMap, policy: nn.Module) -> nn.Module:
    """A policy that nobody else writes to, and whose weights nobody else acts with."""
    acts_with = map(memory_key, Leaves(policy, "policy").tensors())
    if bound_map.memory().isdisjoint(acts_with):
        return policy
    return copied(policy, "the policy", {"policy": policy}, _WHERE)


def _write(collector: Collector, weights: VersionCopy) -> None:
    acts: list[object] = [policy_of(collector)]
    for destination in {destination for destination, _ in weights.leaves}:
        path = parse(destination)
        name = "the Evaluator's collector"
        module = walk(collector, path, error=DestinationNotFound, root_name=name, where=_WHERE)
        write(Leaves(module, f"the Evaluator's {destination}"), weights.of(destination))
        acts.append(module)
    outdate(keepers(acts))


def _send(collector: MultiCollector, weights: VersionCopy) -> None:
    trees: dict[str, TensorDict] = {}
    for (destination, name), tensor in weights.leaves.items():
        trees.setdefault(destination, TensorDict()).set(tuple(name.split(".")), tensor)
    collector.update_policy_weights_(weights_dict=trees)

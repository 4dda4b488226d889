"""Evaluations by TorchRL's Evaluator, each with one published version.

An Evaluator of 0.14 takes weights, but no version. In a worker process it does not begin new episodes for an
evaluation, so that the first ones began with the weights of the evaluation before. Until an Evaluator stamps
its results and resets its workers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl import trainers
from torchrl.collectors import Evaluator
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
from rlsync.torchrl_plugin.compat.stamps import STAMP

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
    @in_place_of(evaluator, "_prepare_weights_dict")
    def prepare(self: Evaluator, weights: object, weights_dict: object) -> VersionCopy:
        """Called in the thread that requests an evaluation."""
        by_hand = weights is not None or weights_dict is not None
        if by_hand and not _is_asked_by_a_hook(self):
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
            _let_act(self, bound_map, weights, rolls_out=getattr(self, "_per_env", False))
        metrics: dict[str, Any] = type(self)._run_eval(self, None)
        return metrics | {"custom/policy_version": weights.version}

    if hasattr(backend, "run_episodes"):
        _pin_episodes(backend, bound_map)
    return copies


def _pin_episodes(backend: _ThreadEvalBackend, bound_map: BoundMap) -> None:
    """The same for episodes one by one, which TorchRL has from 0.15 on: each has an entry that says it."""

    @in_place_of(backend, "run_episodes")
    def run_episodes(
        self: _ThreadEvalBackend, weights: VersionCopy, seed: int | None
    ) -> TensorDictBase:
        if not self._use_multi_collector:  # else TorchRL refuses
            _let_act(self, bound_map, weights, rolls_out=True)
        episodes: TensorDictBase = type(self).run_episodes(self, None, seed)
        version = torch.full(episodes.shape, weights.version, device=episodes.device)
        return episodes.set(STAMP, version)


#: TorchRL's hook that requests evaluations, from 0.15 on.
_HOOKS: tuple[type, ...] = tuple(
    kind for kind in [getattr(trainers, "EvaluatorHook", None)] if kind is not None
)


def _is_asked_by_a_hook(evaluator: Evaluator) -> bool:
    """Whether TorchRL's hook asks, which always brings the learner's weights. Until it may leave them out."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_locals.get("self") in (None, evaluator):
        frame = frame.f_back
    return frame is not None and isinstance(frame.f_locals["self"], _HOOKS)


def _let_act(
    backend: _ThreadEvalBackend, bound_map: BoundMap, weights: VersionCopy, *, rolls_out: bool
) -> None:
    """Write a version into what acts in this process: a collector, or what ``rolls_out`` without one."""
    backend._ensure_env_and_policy()
    if isinstance(backend._policy, nn.Module) and backend._collector is None:
        backend._policy = _own(bound_map, backend._policy)
    if rolls_out:
        _write(_Owner(backend._env, backend._policy), backend._policy, weights)
    else:
        backend._ensure_collector()
        _write(backend._collector, policy_of(backend._collector), weights)


@dataclass(frozen=True, slots=True)
class _Owner:
    """What destinations are parts of where there is no collector."""

    env: object
    policy: object


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


def _write(owner: object, policy: object, weights: VersionCopy) -> None:
    acts = [policy]
    for destination in {destination for destination, _ in weights.leaves}:
        path = parse(destination)
        name = "the Evaluator's collector"
        module = walk(owner, path, error=DestinationNotFound, root_name=name, where=_WHERE)
        write(Leaves(module, f"the Evaluator's {destination}"), weights.of(destination))
        acts.append(module)
    outdate(keepers(acts))


def _send(collector: MultiCollector, weights: VersionCopy) -> None:
    trees: dict[str, TensorDict] = {}
    for (destination, name), tensor in weights.leaves.items():
        trees.setdefault(destination, TensorDict()).set(tuple(name.split(".")), tensor)
    collector.update_policy_weights_(weights_dict=trees)

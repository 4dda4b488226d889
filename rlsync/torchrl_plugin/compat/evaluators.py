"""TorchRL's Evaluator: how an evaluation begins, and what acts in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torchrl.collectors import Evaluator
from torchrl.collectors._evaluator import _ThreadEvalBackend

#: ``load(collector, weights)`` gives what acts in an evaluation its weights.
Load = Callable[[Any, Any], None]


def evaluates_here(evaluator: Evaluator) -> bool:
    """Whether this process drives the evaluations: with the backends ``"thread"`` and ``"process"``."""
    return isinstance(evaluator._backend, _ThreadEvalBackend)


def has_evaluated(evaluator: Evaluator) -> bool:
    """Whether an evaluation has begun, or its collector was made."""
    backend = evaluator._backend
    return backend._collector is not None or backend.pending


def acts_in_a_worker(evaluator: Evaluator) -> bool:
    """Whether what is evaluated acts in a process of its own."""
    return bool(evaluator._backend._use_multi_collector)


def schemes_of_evaluator(evaluator: Evaluator) -> list[str]:
    """The destinations that the worker of an Evaluator has: by default its policy only."""
    return list(evaluator._backend._weight_sync_schemes or ("policy",))


def evaluated_policy(evaluator: Evaluator) -> object:
    """The policy that was given to an Evaluator; None while a factory has not made it."""
    return evaluator._backend._policy


def around_evaluations(
    evaluator: Evaluator,
    newest: Callable[[], tuple[int, Any]],
    own: Callable[[nn.Module], nn.Module],
    load: Load,
    refuse: Callable[[], Exception],
) -> None:
    """Give every evaluation the weights of one version, and its result the number.

    ``newest`` is asked when an evaluation is requested, in that thread: a version and its weights. ``load``
    gives what acts the weights, in the thread that evaluates. ``own`` returns the module that acts in place
    of a policy of this process. ``refuse`` makes the error for weights that are given by hand.

    An Evaluator of 0.14 takes weights, but no version. In a worker process it does not begin new episodes for
    an evaluation, so that the first ones began with the weights of the evaluation before. Remove this
    function when an Evaluator stamps its results and resets its workers. It must not have evaluated yet.
    """
    backend = evaluator._backend
    ref = weakref.ref(backend)

    def prepare(weights: Any, weights_dict: Any) -> Any:
        if weights is not None or weights_dict is not None:
            raise refuse()
        return newest()

    def run(request: tuple[int, Any]) -> dict[str, Any]:
        self = ref()
        assert self is not None  # it calls this
        version, weights = request
        if self._use_multi_collector:
            self._enable_process_weight_sync()
            began = self._collector is not None
            self._ensure_collector()
            if began:
                self._collector.reset()
        else:
            self._ensure_env_and_policy()
            if isinstance(self._policy, nn.Module) and self._collector is None:
                self._policy = own(self._policy)
            self._ensure_collector()
        load(self._collector, weights)
        metrics = type(self)._run_eval(self, None)
        return metrics | {"custom/policy_version": version}

    evaluator._prepare_weights_dict = prepare
    backend._run_eval = run

"""What has to end with a collector whose environments, or the threads that step them, are in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeAlias
from weakref import ref

from torchrl.collectors import AsyncBatchedCollector, Collector
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv
from torchrl.envs.async_envs import ProcessorAsyncEnvPool, ThreadingAsyncEnvPool

from rlsync.torchrl_plugin.compat import present
from rlsync.torchrl_plugin.compat.servers import process_of, server_of

#: A collector that lives in the learner's process, its environments perhaps not.
LocalCollector: TypeAlias = "Collector | AsyncBatchedCollector"


def processes_behind(collector: LocalCollector) -> list[BaseProcess]:
    """The processes that were started for a collector: of its environments, and of its inference server."""
    if isinstance(collector, Collector):
        return _of_env(getattr(collector, "env", None))
    processes = [worker for worker in collector._workers if isinstance(worker, BaseProcess)]
    processes += _of_env(collector._env_pool)
    server = process_of(server_of(collector))
    return processes if server is None else [*processes, server]


def _of_env(env: object) -> list[BaseProcess]:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    match env:
        case ParallelEnv():
            return [] if env.is_closed else list(env._workers)
        case ProcessorAsyncEnvPool():
            return list(env.threads)  # TorchRL calls them so
    return []


def threads_behind(collector: LocalCollector) -> list[Thread]:
    """The threads that step a collector's environments in this process, without the one that iterates."""
    if isinstance(collector, Collector):
        thread = getattr(collector, "_thread", None)
        return [thread] if isinstance(thread, Thread) else []
    pool = collector._env_pool
    return list(pool._pool._threads) if isinstance(pool, ThreadingAsyncEnvPool) else []


def waiting_in(collector: LocalCollector, enter: Callable[[], AbstractContextManager[object]]) -> None:
    """Wait for each batch of ``collector`` inside ``enter()``, in the thread that iterates."""
    weak, inner = ref(collector), vars(collector).get("iterator")

    def iterator() -> Iterator[Any]:
        self = present(weak)
        batches = type(self).iterator(self) if inner is None else inner()
        del self  # a generator that waits must not keep the collector alive
        try:
            while True:
                with enter():
                    try:
                        batch = next(batches)
                    except StopIteration:
                        return
                yield batch
        finally:
            batches.close()

    collector.iterator = iterator


def shut_down_within(
    collector: LocalCollector,
    timeout_s: float,
    around: Callable[[float], AbstractContextManager[object]],
) -> None:
    """Let ``collector.shutdown()`` wait ``timeout_s`` at most where its caller says nothing.

    ``around(seconds)`` kills processes that take longer. TorchRL joins threads that may hang in an
    environment without a limit. Remove this when it has one.
    """
    weak = ref(collector)

    def shutdown(timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        present = weak()
        if present is None:
            return
        limit_s = timeout_s if timeout is None else timeout
        with around(limit_s):
            if isinstance(present, AsyncBatchedCollector):
                limit_s /= max(1, len(present._workers))  # it is given to each thread, one after the other
                _leave_threads(present._env_pool, limit_s)
            type(present).shutdown(present, limit_s, close_env, raise_on_error)

    collector.shutdown = shutdown


def _leave_threads(pool: EnvBase | None, timeout_s: float) -> None:
    """Let a pool of threads be closed although one hangs in its environment."""
    if not isinstance(pool, ThreadingAsyncEnvPool):
        return
    executor = pool._pool

    def shutdown() -> None:
        executor.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + timeout_s
        for thread in executor._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    pool.shutdown = shutdown


def fail_frames(collector: LocalCollector, error: Exception) -> None:
    """Raise ``error`` where the learner next looks for frames that others bring.

    Frames that the learner's own thread makes are not among them: it does not look.
    """

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    if collector.replay_buffer is not None:
        with suppress(AttributeError):
            collector.getattr_rb = fail
    if isinstance(collector, AsyncBatchedCollector) and collector._result_queue is not None:
        collector._result_queue.get = fail

"""The weights in the workers of a collector, read through TorchRL's own ``state_dict`` of collectors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchrl.collectors import Collector

from rlsync.core.path import Attr, parse
from rlsync.sync.processes import LOOK_EVERY_S, has_ended
from rlsync.tensors.leaves import Leaves, uncompiled
from rlsync.torchrl_plugin.compat.collectors import MultiCollector
from rlsync.torchrl_plugin.ending.waits import worker_ends

_ASKED = "state_dict"


@dataclass(frozen=True, slots=True)
class Held:
    """The weights of one worker: the state dicts of its policy and of its environment's transforms."""

    policy: dict[str, Tensor]
    transform: dict[str, Tensor]

    @classmethod
    def of(cls, state_dict: Mapping[str, Any]) -> Held:
        """A copy of the weights in a collector's state dict."""
        return cls(
            *(_copied(state_dict.get(key)) for key in ("policy_state_dict", "env_state_dict"))
        )

    def at(self, destination: str) -> dict[str, Tensor]:
        """The leaves of a destination by name; none if the state dict does not contain it."""
        match parse(destination).segments:
            case [Attr("policy"), *_]:
                return _below(self.policy, parse(destination).below(parse("policy")).leaf_prefix())
            case [Attr("env"), Attr("transform"), *_]:
                prefix = parse(destination).below(parse("env.transform")).leaf_prefix()
                # A Compose names its first transform transforms.0
                return _below(self.transform, f"transforms.{prefix}") or _below(
                    self.transform, prefix
                )
        return {}


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why a worker did not answer, in words, and whether its process has ended."""

    why: str
    dead: bool = False


class ExaminedWorkers:
    """The workers of a collector. Of one that is of no known kind, the weights cannot be read."""

    def __init__(
        self, collector: Any, place: str = "", names: Sequence[str] = ("its workers",)
    ) -> None:
        self.collector = collector
        self.description = f"{type(collector).__name__}{place}"  #: the collector, in words
        self.names = names  #: one for each worker, with its pid

    @staticmethod
    def of(collector: object) -> ExaminedWorkers:
        if isinstance(collector, MultiCollector):
            return ProcessWorkers(collector)
        if isinstance(collector, Collector):
            return ExaminedWorkers(collector, ", in this process", ["the collector"])
        return ExaminedWorkers(collector)

    @property
    def processes(self) -> bool:
        return not isinstance(self.collector, Collector)

    def ask(self, timeout_s: float) -> list[Held | NoAnswer]:
        """The present weights of each worker."""
        return [Held.of({} if self.processes else self.collector.state_dict())]

    def roll_out(self) -> object:
        """Collect until each worker has begun and ended a rollout after this call, if any can be read."""
        # Each worker finds the message that begins a rollout in its pipe before the next question. So it
        # answers after a rollout, even if an asynchronous collector has no batch of it yet.
        known = isinstance(self.collector, (Collector, MultiCollector))
        if known:
            return next(iter(self.collector))
        return None


class ProcessWorkers(ExaminedWorkers):
    """The workers of a process collector, all asked at once and with a deadline, unlike by TorchRL."""

    collector: MultiCollector

    def __init__(self, collector: MultiCollector) -> None:
        count = collector.num_workers
        names = [f"worker {i} (pid {process.pid})" for i, process in enumerate(collector.procs)]
        super().__init__(collector, f", {count} worker process{'es' * (count > 1)}", names)
        self._silent: dict[int, NoAnswer] = {}

    def ask(self, timeout_s: float) -> list[Held | NoAnswer]:
        """A worker that did not answer once is not asked again."""
        asked = [i for i in range(self.collector.num_workers) if i not in self._silent]
        for worker in asked:
            self._send(worker)
        deadline = time.monotonic() + timeout_s
        said: dict[int, Held | NoAnswer] = {}
        for worker in asked:
            said[worker] = answer = self._silent.get(worker) or self._answer(
                worker, deadline, timeout_s
            )
            if isinstance(answer, NoAnswer):
                self._silent[worker] = answer
        return [said.get(i) or self._silent[i] for i in range(self.collector.num_workers)]

    def _send(self, worker: int) -> None:
        pipe: Any = self.collector.pipes[worker]
        try:
            type(pipe).send(pipe, (None, _ASKED))
        except OSError:
            self._silent[worker] = self._ended(worker)

    def _answer(self, worker: int, deadline: float, timeout_s: float) -> Held | NoAnswer:
        pipe: Any = self.collector.pipes[worker]
        process = self.collector.procs[worker]
        while True:
            try:
                # Call the class's poll: WatchWorkers replaces the instance's, which raises for lost workers.
                while type(pipe).poll(pipe, LOOK_EVERY_S):
                    said, about = pipe.recv()
                    if about == _ASKED:  # before it may be an answer to a publish that timed out
                        return Held.of(said)
            except (EOFError, OSError):
                return self._ended(worker)
            if process.exitcode is not None:
                return self._ended(worker)
            if time.monotonic() >= deadline:
                if has_ended(process):
                    return self._ended(worker)
                return NoAnswer(f"no answer within {timeout_s:g} s")

    def _ended(self, worker: int) -> NoAnswer:
        how = worker_ends(self.collector, [worker]).get(worker) or "its pipe is closed"
        # TorchRL then ends the others as well.
        if any(s.dead for s in self._silent.values()):
            after = ", after another worker had died"
        else:
            after = ""
        return NoAnswer(how + after, dead=True)


def _copied(state_dict: Any) -> dict[str, Tensor]:
    held = {name: value for name, value in (state_dict or {}).items() if isinstance(value, Tensor)}
    leaves = Leaves(held, "the worker's state dict")
    named = zip(leaves.names, leaves.tensors(), strict=True)
    return {uncompiled(name): tensor.detach().cpu().clone() for name, tensor in named}


def _below(state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if not prefix:
        return state_dict
    return {
        k.removeprefix(prefix + "."): v for k, v in state_dict.items() if k.startswith(prefix + ".")
    }

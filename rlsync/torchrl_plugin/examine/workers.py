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
        policy = _copied(state_dict.get("policy_state_dict"))
        transform = _copied(state_dict.get("env_state_dict"))
        return cls(policy, transform)

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
        self, collector: object, place: str = "", names: Sequence[str] = ("its workers",)
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
        if isinstance(self.collector, Collector):
            return [Held.of(self.collector.state_dict())]
        return [Held.of({})]

    def roll_out(self) -> object:
        """Collect until each worker has begun and ended a rollout after this call, if any can be read."""
        # Each worker finds the message that begins a rollout in its pipe before the next question. So it
        # answers after a rollout, even if an asynchronous collector has no batch of it yet.
        if isinstance(self.collector, (Collector, MultiCollector)):
            return next(iter(self.collector))
        return None


class ProcessWorkers(ExaminedWorkers):
    """The workers of a process collector, all asked at once and with a deadline, unlike by TorchRL."""

    collector: MultiCollector

    def __init__(self, collector: MultiCollector) -> None:
        place = f", {collector.num_workers} worker process"
        if collector.num_workers > 1:
            place += "es"
        names = []
        for worker, process in enumerate(collector.procs):
            names.append(f"worker {worker} (pid {process.pid})")
        super().__init__(collector, place, names)
        self._silent: dict[int, NoAnswer] = {}

    def ask(self, timeout_s: float) -> list[Held | NoAnswer]:
        """A worker that did not answer once is not asked again."""
        workers = range(self.collector.num_workers)
        asked = [worker for worker in workers if worker not in self._silent]
        for worker in asked:
            self._send(worker)
        deadline = time.monotonic() + timeout_s
        answers: dict[int, Held] = {}
        for worker in asked:
            answer = self._silent.get(worker) or self._answer(worker, deadline, timeout_s)
            if isinstance(answer, NoAnswer):
                self._silent[worker] = answer
            else:
                answers[worker] = answer
        return [answers.get(worker) or self._silent[worker] for worker in workers]

    def _send(self, worker: int) -> None:
        pipe = self.collector.pipes[worker]
        try:
            type(pipe).send(pipe, (None, _ASKED))
        except OSError:
            self._silent[worker] = self._ended(worker)

    def _answer(self, worker: int, deadline: float, timeout_s: float) -> Held | NoAnswer:
        pipe = self.collector.pipes[worker]
        process = self.collector.procs[worker]
        while True:
            try:
                # Call the class's poll: WatchWorkers replaces the instance's, which raises for lost workers.
                while type(pipe).poll(pipe, LOOK_EVERY_S):
                    answer, question = pipe.recv()
                    if question == _ASKED:  # before it may be an answer to a publish that timed out
                        return Held.of(answer)
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
        if any(no_answer.dead for no_answer in self._silent.values()):
            after = ", after another worker had died"
        else:
            after = ""
        return NoAnswer(how + after, dead=True)


def _copied(state_dict: Mapping[str, object] | None) -> dict[str, Tensor]:
    live: dict[str, Tensor] = {}
    for name, value in (state_dict or {}).items():
        if isinstance(value, Tensor):
            live[name] = value
    leaves = Leaves(live, "the worker's state dict")
    copies: dict[str, Tensor] = {}
    for name, tensor in zip(leaves.names, leaves.tensors(), strict=True):
        copies[uncompiled(name)] = tensor.detach().cpu().clone()
    return copies


def _below(state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    if not prefix:
        return state_dict
    below: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if name.startswith(prefix + "."):
            below[name.removeprefix(prefix + ".")] = tensor
    return below

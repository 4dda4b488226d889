"""What adopts under TorchRL: a worker before a rollout or a policy call, a server between two batches."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal, NoReturn

from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.modules.inference_server import InferenceServer

from rlsync.core import trace
from rlsync.core.errors import DestinationNotFound, PublishError
from rlsync.core.path import Path, parse, walk
from rlsync.sync.acts import Acting, examined, in_mid_episode
from rlsync.sync.adopter import Adopt, Adopter, Destination
from rlsync.sync.held import own_shared_memory
from rlsync.sync.sample import Shadow
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.sendable import copied
from rlsync.tensors.target import materialise
from rlsync.torchrl_plugin.compat import collectors, schemes, servers, stamps
from rlsync.torchrl_plugin.compat.collectors import PolicyCall
from rlsync.transport.contract import Handle

AdoptAt = Literal["rollout", "policy_call"]

_NO_MODULE = "the policy is no module"


class WorkerSync:
    """Brings what acts in a worker up to date: before rollouts, a ``state_dict()``, or each policy call."""

    def __init__(self, handle: Handle, worker_idx: int) -> None:
        self.worker_idx = worker_idx
        self._adopt_by: dict[str, Adopt] = {}
        self._paths: dict[str, Path] = {}
        self._places: dict[str, Destination] = {}
        self._at_policy_calls = False
        self._prove = False
        self._collector: weakref.ref[Collector] | None = None
        self._owned: tuple[str, ...] = ()  #: tensors that shared memory with the learner
        self._call: PolicyCall | str = "there is no collector yet"
        #: what ends the use of the version that acts, in a rollout
        self._acting: ExitStack | None = None
        self._called = False  #: whether the policy was called in this rollout
        self._memory: set[int] = set()
        self._adopter = Adopter(handle, worker_idx)

    def declare(self, destination: str, adopt: Adopt, adopt_at: AdoptAt, *, prove: bool) -> None:
        """Say that this worker takes weights for ``destination``; with ``prove`` it finds out if they act."""
        self._at_policy_calls = adopt_at == "policy_call"
        self._prove = prove
        self._adopt_by[destination] = adopt
        self._paths[destination] = parse(destination)

    def prepare(self, destination: str, module: nn.Module) -> None:
        """Give a module that came without its memory the newest weights, before its collector exists."""
        materialise(module)
        self._places[destination] = Destination(lambda: module, "copy")
        self._adopter.place(self._places)
        self._adopter.adopt()

    def attach(self, collector: Collector) -> None:
        """Adopt whenever ``collector`` is about to act, and tell the learner which leaves it has."""
        if self._collector is None:
            self._collector = weakref.ref(collector)
            # the first memory of the policy, which nobody reads here
            collector.policy_weights = TensorDict()
            collectors.around_rollouts(collector, self._rollout)
            collectors.before_state_dict(collector, self._between_rollouts)
            self._owned = tuple(own_shared_memory(collectors.policy_of(collector), "policy"))
            self._call = collectors.policy_call(collector)
            if self._at_policy_calls:
                collectors.around_policy_calls(collector, self._before_policy, self._after_policy)
            self._adopter.end_with_the_learner()
        compiled = collectors.runs_compiled(collector)
        for destination, adopt in self._adopt_by.items():
            mode: Adopt = adopt
            if compiled:
                mode = "copy"
            self._places[destination] = Destination(partial(self.module, destination), mode)
        self._adopter.place(self._places, self._policy)
        self._adopter.note_acting(self._examined(collector))
        self._adopter.tell()

    def _attached(self) -> Collector | None:
        if self._collector is None:
            return None
        return self._collector()

    def _shadow(self) -> Shadow:
        collector = self._attached()
        assert collector is not None, "it is in the middle of a rollout"
        return shadow_of(collector, self._call, self._modules())

    def _policy(self) -> nn.Module | None:
        return collectors.policy_of(self._attached())

    def _modules(self) -> dict[str, object]:
        return {name: place.find() for name, place in self._places.items()}

    def _examined(self, collector: Collector) -> Acting:
        if not self._prove:
            return Acting(owned=self._owned)
        self._adopter.answers.shadow = self._shadow
        alias = {name for name, place in self._places.items() if place.adopt == "alias"}
        return replace(acting_in(collector, self._call, self._modules(), alias), owned=self._owned)

    def leave(self, destination: str | None) -> bool:
        """Take no more weights for ``destination``; whether it was the last one, and the board was left."""
        self._adopt_by.pop(str(destination), None)
        self._places.pop(str(destination), None)
        self._adopter.place(self._places, self._policy)
        if not self._adopt_by:
            self._adopter.close()
        return not self._adopt_by

    @contextmanager
    def _rollout(self, collector: Collector) -> Iterator[None]:
        with ExitStack() as acting:
            self._acting = acting
            self._called = False
            try:
                if self._at_policy_calls:
                    # What acts is decided by the calls: a version that no call used must not answer for them.
                    self._stamp(collector, self._adopter.adopt())
                else:
                    self._act(collector, acting)
                yield
                if self._at_policy_calls and not self._called:  # random frames alone
                    acting.enter_context(self._adopter.acting())
            finally:
                self._acting = None

    def _act(self, collector: Collector, acting: ExitStack) -> None:
        """Adopt the newest version, and act with it until ``acting`` is closed."""
        self._stamp(collector, acting.enter_context(self._adopter.acting()))
        if self._at_policy_calls:
            self._memory = self._adopter.memory()

    def _stamp(self, collector: Collector, version: int) -> None:
        stamps.stamp(collector, version)
        if trace.ON:
            trace.write(trace.worker(self.worker_idx), "stamp", version)

    def _between_rollouts(self, collector: Collector) -> None:
        if self._acting is None:  # a rollout keeps its version
            self._stamp(collector, self._adopter.adopt())

    def _before_policy(self, collector: Collector) -> None:
        reader = self._adopter.reader
        if self._acting is None or (self._called and reader.newest == reader.version):
            return
        self._acting.close()
        self._act(collector, self._acting)
        self._called = True

    def _after_policy(self, output: TensorDictBase) -> TensorDictBase:
        """Copy what the policy wrote of its own weights: frames outlive the version that acted in them."""
        for key, value in list(output.items(True, True)):
            if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._memory:
                output.set(key, value.clone())
        return output

    def module(self, destination: str) -> object:
        """What acts for ``destination`` in this worker now, or DestinationNotFound."""
        policy = walk(
            self._attached(),
            self._paths[destination],
            error=DestinationNotFound,
            root_name="the worker's collector",
            where=f"weight_sync_schemes[{destination!r}] in worker {self.worker_idx}",
        )
        return schemes.weights_of(policy)


def acting_in(
    collector: Collector,
    call: PolicyCall | str,
    places: Mapping[str, object],
    alias: Collection[str],
) -> Acting:
    """Which leaves of the modules at some places of a collector act; those in ``alias`` adopt by alias."""
    policy = collectors.policy_of(collector)
    modules = {name: module for name, module in places.items() if isinstance(module, nn.Module)}
    if isinstance(call, str):
        return Acting(unknown=dict.fromkeys(modules, call))
    if policy is None:
        return Acting(unknown=dict.fromkeys(modules, _NO_MODULE))
    if collectors.freezes_weights(collector):
        # Calls cannot show it: those that look have code of their own, compiled with the weights of then.
        return Acting(idle={name: _parameters(module, name) for name, module in modules.items()})

    outputs = partial(_outputs, call)
    acting = examined(modules, outputs, alias=alias, within=policy)
    if not acting.idle:
        return acting

    # Weights that act in exploration alone, such as the sigmas of a NoisyLinear.
    doubted = {name: modules[name] for name in acting.idle}
    exploring = examined(doubted, partial(outputs, explores=True), alias=alias, within=policy)
    idle: dict[str, Sequence[str]] = {}
    for name, leaves in acting.idle.items():
        if name not in exploring.unknown:
            leaves = [leaf for leaf in leaves if exploring.is_idle(name, leaf)]
        if leaves:
            idle[name] = leaves
    return replace(acting, idle=idle)


def _outputs(call: PolicyCall, plain: bool, *, explores: bool = False) -> list[Tensor]:
    """What the policy writes at the next input as it is, or as in the middle of an episode."""
    if plain:
        policy_input, output = call(_unchanged, explores=explores)
    else:
        policy_input, output = call(in_mid_episode, explores=explores)
    before = dict(policy_input.items(True, True))
    written = []
    for key, value in output.items(True, True):
        if isinstance(value, Tensor) and value is not before.get(key):
            written.append(value)
    return written


def _unchanged(policy_input: TensorDictBase) -> TensorDictBase:
    return policy_input


def _parameters(module: nn.Module, where: str) -> list[str]:
    return [spec.name for spec in Leaves(module, where).specs() if spec.kind == "parameter"]


def shadow_of(collector: Collector, call: PolicyCall | str, places: Mapping[str, object]) -> Shadow:
    """How to call the policy of a collector once more, for what stands at some places in it."""
    policy = collectors.policy_of(collector)
    if isinstance(call, str):
        return _no_shadow(call)
    if policy is None:
        return _no_shadow(_NO_MODULE)
    parts = set(policy.modules())
    modules: dict[str, nn.Module] = {}
    for name, module in places.items():
        if isinstance(module, nn.Module) and module in parts:
            modules[name] = module
    before = partial(collectors.before_policy_calls, collector)
    compiled = collectors.runs_compiled(collector)
    return Shadow(policy, modules, partial(call, _unchanged), before, compiled=compiled)


def _no_shadow(why_not: str) -> Shadow:
    return Shadow(nn.Module(), {}, lambda: None, lambda _: nullcontext(), why_not)


class ServerSync:
    """Brings an inference server's policy up to date between two batches, as reader 0, under its lock."""

    def __init__(
        self,
        handle: Handle,
        destination: str,
        adopt: Adopt,
        server: InferenceServer,
        *,
        beside_learner: bool,
    ) -> None:
        if beside_learner and isinstance(server.model, nn.Module):
            # The learner may train the one that it has.
            server.model = copied(
                server.model,
                destination,
                {destination: server.model},
                "BoardScheme, InferenceServer",
            )
        self._server = weakref.ref(server)
        self._acting = ExitStack()  #: what ends the use of the version that acts
        self._began = False
        self._adopter = Adopter(handle, 0)
        if not beside_learner:
            self._adopter.end_with_the_learner()
        mode: Adopt = adopt
        if server.static_batch_size is not None:
            mode = "copy"  # a CUDA graph does not see a parameter's new memory
        self._adopter.place({destination: Destination(self._policy, mode)})
        self._adopter.tell()
        server.update_model = _refuse_update
        server.update_policy_weights_ = _refuse_update

    def between_batches(self) -> None:
        """Answer the learner's question about the batches before, adopt the newest version, and stamp."""
        server = self._server()
        if server is None or (self._began and self._adopter.settled()):
            return
        self._acting.close()
        self._began = True
        servers.serve_version(server, self._acting.enter_context(self._adopter.acting()))

    def _policy(self) -> object:
        server = self._server()
        if server is None:
            return None
        return server.model


def _refuse_update(*_: object, **__: object) -> NoReturn:
    raise PublishError(
        "the weights of this inference server come from a board",
        "the server's update_model, or update_policy_weights_ of a collector that was not told of its board",
        "call scheme.init_on_sender(model_id='policy', context=server_or_collector) once, then scheme.send()",
    )

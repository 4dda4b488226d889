"""Write a policy for programs without rlsync, after it was compared with the original. Greedy, on the CPU.

A ``.safetensors`` has the weights, a ``.pt2`` (torch.export) and an ``.onnx`` the computation, too.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.core.whole_file import write_whole
from rlsync.evaluation.policy import Policy
from rlsync.workers.envs.vectors import Envs
from rlsync.workers.player import State, check_fits

#: How many observations a file is compared on.
OBSERVATIONS = 1000

#: Largest difference between numbers of the file and of the original, relative and absolute.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5

#: The name of the metadata in a .pt2; the other formats have a place of their own for them.
PT2_METADATA = "rlsync.json"

#: What :meth:`Policy.step` takes: observation, is_init, reward, state.
Given = tuple[Tensor, Tensor, Tensor, State]

#: What :meth:`Policy.step` is, whoever computes it.
Step = Callable[..., tuple[Tensor, State]]


@dataclass(frozen=True, slots=True)
class Exported:
    """A file, what it says of itself, and how far its outputs were from the original's at most."""

    file: Path
    metadata: Mapping[str, str]
    observations: int
    largest_difference: float

    def __str__(self) -> str:
        apart = self.largest_difference
        return f"compared on {self.observations:,} observations: outputs differ by {apart:.2g} at most"


def check_file(file: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before anything is loaded."""
    if file.suffix not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise ConfigError(f"a policy cannot be written as {file.suffix!r}", str(file), f"name one of {known}")
    missing = [name for name in _FORMATS[file.suffix].modules if find_spec(name) is None]
    if missing:
        what = f"{missing[0]} is not installed, which {file.suffix} needs"
        raise ConfigError(what, str(file), "pip install 'rlsync[export]'")
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent}", str(file), "make it, or name another")


def export(policy: Policy, envs: Envs, file: Path, seed: int = 0) -> Exported:
    """Write a greedy policy to a file that :func:`check_file` accepts, if it acts as the original does.

    Args:
        policy: on the CPU.
        envs: environments of the run, which give the observations; their number divides 1,000.
        file: is replaced as a whole, or not at all.
        seed: of the environments.

    Raises:
        ConfigError: the format cannot hold this player, or the environments are of another kind.
        RlsyncError: the file would act in another way.
    """
    where, metadata = str(file), policy.metadata()
    check_fits(policy.player, envs, str(policy.env))
    if file.suffix == ".onnx" and _draws(policy, envs):
        raise ConfigError(
            "this player draws random numbers even if it takes the likeliest actions, and ONNX draws others",
            where,
            "write a .pt2, which draws those of torch, or a .safetensors",
        )
    try:
        with warnings.catch_warnings(), _silent("torch.onnx"):
            warnings.simplefilter("ignore")
            data, step = _FORMATS[file.suffix].write(policy, metadata)
    except Exception as error:  # torch.export and torch.onnx run the player, which may be anybody's
        raise ConfigError(
            f"this player cannot be written so: {first_line(error)}",
            where,
            "write a .safetensors, which has its weights alone, or an act() that torch.export can follow",
        ) from error
    apart = _compared(policy, step, envs, seed, where)
    write_whole(file, lambda beside: beside.write_bytes(data))
    return Exported(file, metadata, OBSERVATIONS, apart)


class _Graph(nn.Module):
    """What is exported: a policy's step, with the inputs that it needs. See :func:`_inputs`."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(
        self,
        observation: Tensor,
        is_init: Tensor | None = None,
        reward: Tensor | None = None,
        state: State | None = None,
    ) -> Tensor | tuple[Tensor, State]:
        rows = observation.shape[:1]
        is_init = observation.new_ones(rows, dtype=torch.bool) if is_init is None else is_init
        reward = observation.new_zeros(rows, dtype=torch.float32) if reward is None else reward
        action, after = self.policy.step(observation, is_init, reward, state or {})
        return (action, after) if self.policy.has_state else action


def _inputs(policy: Policy, given: Given) -> dict[str, Any]:
    """The inputs of a :class:`_Graph` by name: an observation, and what a memory needs."""
    inputs = dict(zip(("observation", "is_init", "reward", "state"), given, strict=True))
    if not policy.takes_reward:
        del inputs["reward"]
    if not policy.memory:
        del inputs["state"]
    if not policy.has_state:
        del inputs["is_init"]
    return inputs


def _outputs(policy: Policy, out: Any) -> tuple[Tensor, State]:
    return out if policy.has_state else (out, {})


def _program(policy: Policy) -> torch.export.ExportedProgram:
    rows, player = 2, policy.player  # torch.export takes a single row for a constant
    observation = torch.zeros(rows, *player.observation_shape, dtype=player.observation_dtype)
    given = observation, torch.zeros(rows, dtype=torch.bool), torch.zeros(rows), policy.begin(rows)
    inputs, any_number = _inputs(policy, given), {0: torch.export.Dim("batch")}
    shapes: dict[str, Any] = dict.fromkeys(inputs, any_number)
    if policy.memory:
        shapes["state"] = dict.fromkeys(policy.memory, any_number)
    with torch.no_grad():
        first = (inputs.pop("observation"),)
        return torch.export.export(_Graph(policy), first, inputs, dynamic_shapes=shapes, strict=False)


def _safetensors(policy: Policy, metadata: dict[str, str]) -> tuple[bytes, Step]:
    from safetensors import torch as safetensors

    data = safetensors.save(policy.weights(), metadata)
    other = copy.deepcopy(policy)
    for leaf in (*other.network.parameters(), *other.network.buffers()):
        leaf.zero_()
    other.network.load_state_dict(safetensors.load(data))
    return data, other.step


def _pt2(policy: Policy, metadata: dict[str, str]) -> tuple[bytes, Step]:
    held = io.BytesIO()
    torch.export.save(_program(policy), held, extra_files={PT2_METADATA: json.dumps(metadata)})
    data = held.getvalue()
    module = torch.export.load(io.BytesIO(data)).module()

    def step(*given: Any) -> tuple[Tensor, State]:
        inputs = _inputs(policy, given)
        return _outputs(policy, module(inputs.pop("observation"), **inputs))

    return data, step


def _onnx(policy: Policy, metadata: dict[str, str]) -> tuple[bytes, Step]:
    import onnxruntime

    given = torch.zeros(()), torch.zeros(()), torch.zeros(()), policy.memory
    inputs = list(_flat(_inputs(policy, given)))
    outputs = ["action", *(f"next.{name}" for name in policy.memory)]
    program: Any = torch.onnx.export(
        _program(policy), input_names=inputs, output_names=outputs, dynamo=True, verbose=False
    )
    program.model.metadata_props.update(metadata)
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def step(*given: Any) -> tuple[Tensor, State]:
        feed = {name: value.numpy() for name, value in _flat(_inputs(policy, given)).items()}
        action, *after = map(torch.from_numpy, session.run(outputs, feed))
        return action, dict(zip(policy.memory, after, strict=True))

    return data, step


def _flat(inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state under the names that an .onnx gives them: ``state.belief``."""
    state = {f"state.{name}": value for name, value in inputs.get("state", {}).items()}
    return {name: value for name, value in inputs.items() if name != "state"} | state


@dataclass(frozen=True, slots=True)
class _Format:
    """One kind of file: what writes it and reads it again, and the modules of ``rlsync[export]`` for that."""

    write: Callable[[Policy, dict[str, str]], tuple[bytes, Step]]
    modules: tuple[str, ...] = ()


_FORMATS = {
    ".safetensors": _Format(_safetensors, ("safetensors",)),
    ".pt2": _Format(_pt2),
    ".onnx": _Format(_onnx, ("onnx", "onnxscript", "onnxruntime")),
}


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """While entered, a logger of a library says nothing below an error."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _with_seed(seed: int, step: Step, given: Given) -> tuple[Tensor, State]:
    """What a step gives where torch's random numbers begin with a seed. Its state is a copy."""
    *seen, state = given
    with torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return step(*seen, {name: value.clone() for name, value in state.items()})


def _first(policy: Policy, envs: Envs, seed: int) -> Given:
    count = envs.num_envs
    begins = torch.ones(count, dtype=torch.bool)
    return envs.reset(seed), begins, torch.zeros(count), policy.begin(count)


def _draws(policy: Policy, envs: Envs) -> bool:
    """Whether what a policy does depends on random numbers."""
    given = _first(policy, envs, 0)
    one, other = (_with_seed(seed, policy.step, given) for seed in (0, 1))
    return any(not torch.equal(a, b) for a, b in _pairs(one, other))


def _pairs(one: tuple[Tensor, State], other: tuple[Tensor, State]) -> list[tuple[Tensor, Tensor]]:
    return [(one[0], other[0]), *((value, other[1][name]) for name, value in one[1].items())]


def _compared(policy: Policy, step: Step, envs: Envs, seed: int, where: str) -> float:
    """The largest difference between outputs on the observations of a policy's own episodes."""
    given, apart, wrong = _first(policy, envs, seed), 0.0, 0
    for at in range(OBSERVATIONS // envs.num_envs):
        want, got = (_with_seed(at, each, given) for each in (policy.step, step))
        same = torch.ones(envs.num_envs, dtype=torch.bool)
        for one, other in _pairs(want, got):
            one, other = (value.double().reshape(len(same), -1) for value in (one, other))
            apart = max(apart, float((one - other).abs().max())) if one.numel() else apart
            same &= torch.isclose(one, other, _RELATIVE, _ABSOLUTE).all(1)
        wrong += int((~same).sum())
        envs.send(want[0])
        answer = envs.recv()
        ends = answer.terminated | answer.truncated
        given = answer.observation, ends, answer.reward.to(torch.float32, copy=True), want[1]
    if wrong:
        raise RlsyncError(
            f"the file acts in another way in {wrong:,} of {OBSERVATIONS:,} observations, by {apart:.2g}",
            where,
            "nothing was written; name a .safetensors, which has the weights alone",
        )
    return apart

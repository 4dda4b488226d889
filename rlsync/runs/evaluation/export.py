"""Write a policy for programs without rlsync, after it was compared with the original. Greedy, on the CPU.

A ``.safetensors`` has the weights, a ``.pt2`` (torch.export) and an ``.onnx`` the computation, too.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.envs.vectors import Envs
from rlsync.runs.actors.player import State, check_fits
from rlsync.runs.evaluation.policy import Policy
from rlsync.seams import first_line, machine, whole_file

OBSERVATIONS = 1000  #: how many observations a file is compared on

#: Largest difference between numbers of the file and of the original, relative and absolute.
_RELATIVE = 1e-4
_ABSOLUTE = 1e-5

#: The name of the metadata in a .pt2; the other formats have a place of their own for them.
PT2_METADATA = "rlsync.json"

Act = Callable[..., Any]  # as Policy.forward


def check_file(file: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before anything is loaded."""
    if file.suffix not in FORMATS:
        problem = f"a policy cannot be written as {file.suffix!r}"
        known = ", ".join(FORMATS)
        raise ConfigError(problem, str(file), f"name one of {known}")
    for name in FORMATS[file.suffix][1]:
        if not machine.has_package(name):
            problem = f"{name} is not installed, which {file.suffix} needs"
            raise ConfigError(problem, str(file), "pip install 'rlsync[export]'")
    whole_file.check_folder(file)


def export(policy: Policy, envs: Envs, file: Path) -> float:
    """Write a policy, for which :func:`check_file` was asked, if it acts as the original does in ``envs``.

    Returns the largest difference of outputs. ConfigError if the format cannot hold this player.
    """
    check_fits(policy.player, envs, str(policy.env))
    if file.suffix == ".onnx" and _draws(policy, envs):
        problem = (
            "this player draws random numbers even for the likeliest actions, and ONNX draws others"
        )
        raise ConfigError(
            problem, str(file), "write a .pt2, which draws those of torch, or a .safetensors"
        )
    logging.disable(logging.WARNING)  # torch.onnx tells of packages that are not needed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data, act = FORMATS[file.suffix][0](policy)
    except Exception as error:  # torch.export and torch.onnx run the player, which may be anybody's
        cure = "write a .safetensors, which has its weights alone, or an act() that torch.export can follow"
        problem = f"this player cannot be written so: {first_line(error)}"
        raise ConfigError(problem, str(file), cure) from error
    finally:
        logging.disable(logging.NOTSET)
    apart, wrong = _compared(policy, act, envs)
    if wrong:
        problem = f"the file acts in another way in {wrong:,} of {OBSERVATIONS:,} observations, by {apart:.2g}"
        raise RlsyncError(
            problem, str(file), "nothing was written; a .safetensors has the weights alone"
        )
    whole_file.write_whole(file, lambda beside: beside.write_bytes(data))
    return apart


def _safetensors(policy: Policy) -> tuple[bytes, Act]:
    from safetensors import torch as safetensors

    data = safetensors.save(policy.weights(), policy.metadata())
    other = copy.deepcopy(policy)
    for leaf in (*other.network.parameters(), *other.network.buffers()):
        leaf.zero_()
    other.network.load_state_dict(safetensors.load(data))
    if policy.takes_parts:
        return data, _OfParts(other)
    return data, other


def _pt2(policy: Policy) -> tuple[bytes, Act]:
    extra = {PT2_METADATA: json.dumps(policy.metadata())}
    content = io.BytesIO()
    torch.export.save(_program(policy), content, extra_files=extra)
    return content.getvalue(), torch.export.load(io.BytesIO(content.getvalue())).module()


class _OfParts(nn.Module):
    """A policy that takes the parts of observations by name: what a file of it holds."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, parts: dict[str, Tensor], state: State | None = None) -> Any:
        observations = self.policy.player.observations
        count = next(iter(parts.values())).shape[0]
        if observations.pictures:  # a file cannot join bytes and numbers; encoders take them apart
            action, after = self.policy.act(parts, count, state)
        else:
            action, after = self.policy.act(observations.join(parts), count, state)
        if not self.policy.memory:
            return action
        return action, after


def _taken(policy: Policy, rows: Tensor) -> Any:
    """What a file of the policy takes, of rows of observations."""
    if not policy.takes_parts:
        return rows
    parts = policy.player.observations.split(rows)
    return {name: part.clone() for name, part in parts.items()}


def _program(policy: Policy) -> torch.export.ExportedProgram:
    player = policy.player
    any_number = {0: torch.export.Dim("batch")}
    count = 2  # torch.export takes a single row for a constant
    rows = torch.zeros(
        (count, *player.observation_shape), dtype=player.observation_dtype, device="cpu"
    )
    inputs: tuple[Any, ...] = (_taken(policy, rows),)
    shapes: tuple[Any, ...] = (any_number,)
    module: nn.Module = policy
    if policy.takes_parts:
        module = _OfParts(policy)
        shapes = (dict.fromkeys(inputs[0], any_number),)
    if policy.memory:
        inputs = (*inputs, policy.begin(count))
        shapes = (*shapes, dict.fromkeys(policy.memory, any_number))
    return torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)


def _onnx(policy: Policy) -> tuple[bytes, Act]:
    import onnxruntime

    outputs = ["action", *map("next.{}".format, policy.memory)]
    seen_as = ["observation"]
    if policy.takes_parts:
        seen_as = [f"observation.{part.name}" for part in policy.player.observations.parts]
    program: Any = torch.onnx.export(
        _program(policy),
        input_names=[*seen_as, *policy.memory],
        output_names=outputs,
        dynamo=True,
        verbose=False,
    )
    program.model.metadata_props.update(policy.metadata())
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def act(observation: Any, state: State | None = None) -> Any:
        arrays = [observation]
        if policy.takes_parts:
            arrays = list(observation.values())
        feed = {name: array.numpy() for name, array in zip(seen_as, arrays, strict=True)}
        for name, value in (state or {}).items():
            feed[name] = value.numpy()
        action, *after = map(torch.from_numpy, session.run(outputs, feed))
        if after:
            return (action, dict(zip(policy.memory, after, strict=True)))
        return action

    return data, act


#: suffix -> what writes the file and reads it again, and the modules of ``rlsync[export]`` for that.
FORMATS: dict[str, tuple[Callable[[Policy], tuple[bytes, Act]], tuple[str, ...]]] = {
    ".safetensors": (_safetensors, ("safetensors",)),
    ".pt2": (_pt2, ()),
    ".onnx": (_onnx, ("onnx", "onnxscript", "onnxruntime")),
}


def _outputs(act: Act, seed: int, observation: Any, state: State) -> dict[str, Tensor]:
    """What comes of an act where torch's random numbers begin with a seed: the action, and a state."""
    with torch.no_grad(), torch.random.fork_rng([]):
        torch.manual_seed(seed)
        if not state:
            return {"action": act(observation)}
        copies = {name: value.clone() for name, value in state.items()}
        action, after = act(observation, copies)
    return {"action": action, **after}


def _draws(policy: Policy, envs: Envs) -> bool:
    """Whether what a greedy policy does depends on random numbers."""
    observation = envs.reset(0)
    state = policy.begin(envs.num_envs)
    one = _outputs(policy, 0, observation, state)
    other = _outputs(policy, 1, observation, state)
    return any(not torch.equal(one[name], other[name]) for name in one)


def _compared(policy: Policy, act: Act, envs: Envs) -> tuple[float, int]:
    """The largest difference of outputs in the policy's own episodes, and how many observations differ."""
    apart = 0.0
    wrong = 0
    # which the file's metadata name; environments may have another
    dtype = policy.player.observation_dtype
    observation = envs.reset(0).to(dtype)
    state = policy.begin(envs.num_envs)
    for at in range(OBSERVATIONS // envs.num_envs):
        want = _outputs(policy, at, observation, state)
        got = _outputs(act, at, _taken(policy, observation), state)
        same = torch.ones(envs.num_envs, dtype=torch.bool, device="cpu")
        for name in want:
            one = want[name].double().reshape(len(same), -1)
            other = got[name].double().reshape(len(same), -1)
            apart = max(apart, float((one - other).abs().max()))
            same &= torch.isclose(one, other, _RELATIVE, _ABSOLUTE).all(1)
        wrong += int((~same).sum())
        envs.send(policy.actions.chosen(want["action"]))
        answer = envs.recv()
        after = want | {
            keys.IS_INIT: answer.terminated | answer.truncated,
            keys.REWARD: answer.reward.float().clone(),
        }
        observation = answer.observation.to(dtype)
        state = {name: after[name] for name in state}
    return apart, wrong

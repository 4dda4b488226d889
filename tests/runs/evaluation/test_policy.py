"""A policy as a module, and as a file that is read with the libraries of other programs. All recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space
from torch import Tensor, nn

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.runs.actors.envs.specs import GymnasiumEnvs, make_venv
from rlsync.runs.actors.envs.vectors import Envs
from rlsync.runs.actors.player import without_memory
from rlsync.runs.evaluation import export as exporting
from rlsync.runs.evaluation.checkpoint import CheckpointPlayer, Trained
from rlsync.runs.evaluation.export import PT2_METADATA, check_file, export
from rlsync.runs.evaluation.play import play
from rlsync.runs.evaluation.policy import Policy
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.evaluating import acting_of
from rlsync.runs.recipes.settings import Config
from tests.tools.parts.configs import configs_of
from tests.tools.parts.space_envs import SENT, TOLD, hinted, spaced

_DREAMER = ("recipe.cells=8", "recipe.belief=8")
CASES = {
    "ppo": ("recipe=ppo", "recipe.hidden=[8]"),
    "ppo-several": ("recipe=ppo", f"env.id={TOLD}", "recipe.hidden=[8]"),
    "ppo-lstm": (
        "recipe=ppo",
        *hinted("mask"),
        "recipe.hidden=[8]",
        "recipe.model.lstm=8",
        "collector.frames_per_batch=256",
    ),
    # what normalises observations is a part of the policy
    "ppo-numbers": (
        "recipe=ppo",
        "env.id=Pendulum-v1",
        "recipe.hidden=[8]",
        "recipe.normalize.observations=true",
    ),
    "ppo-parts": (
        "recipe=ppo",
        *hinted("picture and numbers"),
        "recipe.hidden=[8]",
        "recipe.model.hidden=[8]",
    ),
    "dqn": ("recipe=dqn", "recipe.hidden=[8]"),
    "dqn-mask": ("recipe=dqn", *hinted("mask"), "recipe.hidden=[8]"),
    "sac-pixels": (
        "recipe=sac",
        "env=rendered",
        "env.id=Pendulum-v1",
        "recipe.hidden=[8]",
        "recipe.model.hidden=[8]",
    ),
    "sac": ("recipe=sac", "env=pendulum", "recipe.hidden=[8]"),
    "td3": ("recipe=td3", "env=pendulum", "recipe.hidden=[8]", "recipe.normalize.observations=true"),
    "crossq": ("recipe=crossq", "env=pendulum", "recipe.hidden=[8]"),
    "sac-mujoco": ("recipe=sac", "env=halfcheetah", "recipe.hidden=[8]"),  # which observes float64
    "impala": ("recipe=impala", "env.id=Pendulum-v1"),
    "impala-lstm": (
        "recipe=impala",
        "recipe.model.lstm=8",
        "recipe.model.last_action=true",
        "recipe.model.last_reward=true",
    ),
    "impala-several": (
        "recipe=impala",
        f"env.id={TOLD}",
        "recipe.model.lstm=8",
        "recipe.model.last_action=true",
    ),
    "impala-pixels": ("recipe=impala", "env=rendered_cartpole"),
    "impala-parts": (
        "recipe=impala",
        *hinted("picture and mask"),
        "recipe.model.lstm=8",
        "recipe.model.hidden=[8]",
    ),
    "laser": ("recipe=laser",),
    "dreamer_v1": ("recipe=dreamer_v1", "env=pendulum", *_DREAMER),
    "dreamer_v3": ("recipe=dreamer_v3", "recipe.categoricals=2", "recipe.classes=4", *_DREAMER),
    "dreamer_v3-several": (
        "recipe=dreamer_v3",
        f"env.id={TOLD}",
        "recipe.categoricals=2",
        "recipe.classes=4",
        *_DREAMER,
    ),
}
DRAWS = ("dreamer_v1", "dreamer_v3", "dreamer_v3-several")
FORMATS = (".safetensors", ".pt2", ".onnx")


@cache
def config_of(case: str) -> Config:
    return configs_of(*CASES[case])[0]


def acting(case: str, *, greedy: bool = True, env: EnvConfig | None = None) -> CheckpointPlayer:
    """A player whose weights are random, buffers of statistics included."""
    config = config_of(case)
    made = acting_of(config if env is None else replace(config, env=env), deterministic=greedy)
    dice = torch.Generator().manual_seed(0)
    for name, leaf in made.weights.state_dict().items():
        if leaf.is_floating_point():
            noise = torch.rand(leaf.shape, generator=dice)
            leaf.copy_(0.5 + noise if name.endswith(("std", "scale")) else noise - 0.5)
    return made


def policy_of(case: str, *, greedy: bool = True, env: EnvConfig | None = None) -> tuple[Policy, Envs]:
    made = acting(case, greedy=greedy, env=env)
    envs = make_venv(made.env, 2)
    return Policy(made, Trained(7, 2, 640), envs.actions, greedy=greedy, origin={"env": case}), envs


@pytest.fixture(autouse=True)
def one_call_is_enough_of_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of 1,000 observations takes a second; its law does not depend on their number."""
    monkeypatch.setattr(exporting, "OBSERVATIONS", 20)


# ---------------------------------------------------------------------------------- the module


@pytest.mark.parametrize("case", ["ppo", "ppo-several", "impala-several", "impala-lstm", "dreamer_v3"])
@pytest.mark.one_case
def test_a_policy_that_steps_an_environment_plays_the_episodes_that_eval_plays(case: str) -> None:
    policy, envs = policy_of(case)
    with torch.random.fork_rng():
        played = [e.total for ended in play(policy.player, envs, 4, seed=5) for e in ended]
        torch.manual_seed(5)
        observation, state, totals, left = envs.reset(5), policy.begin(2), torch.zeros(2).double(), [2, 2]
        found = []
        while any(left):
            out = policy(observation, state)
            action, state = out if policy.memory else (out, {})
            envs.send(policy.actions.chosen(action))
            answer = envs.recv()
            observation, ends = answer.observation, answer.over.clone()
            totals += answer.reward
            told = {"is_init": ends, "reward": answer.reward.clone()}
            state |= {name: value for name, value in told.items() if name in state}
            for env in ends.nonzero().flatten().tolist():
                found += [float(totals[env])] if left[env] else []
                left[env] -= bool(left[env])
                totals[env] = 0
    envs.close()
    assert found == played


@pytest.mark.parametrize("case", ["ppo", "impala-lstm"])
def test_one_observation_alone_is_a_row_of_a_batch(case: str) -> None:
    policy, envs = policy_of(case)
    rows = envs.reset(0).clone()
    envs.close()

    def act(observation: Any) -> tuple[Tensor, dict[str, Tensor]]:
        out = policy(observation)
        return out if policy.memory else (out, {})

    together, states = act(rows)
    for row in range(len(rows)):
        action, state = act(rows[row].numpy().astype("float64"))  # as gymnasium's reset gives it
        assert torch.equal(action, together[row])
        assert all(torch.allclose(state[name][0], states[name][row]) for name in states)


@pytest.mark.seconds
def test_actions_are_within_the_bounds_of_the_environment() -> None:
    policy, envs = policy_of("impala")
    with torch.no_grad():
        policy.network.policy.bias.fill_(100.0)
    assert policy(envs.reset(0)).tolist() == [[2.0], [2.0]]
    envs.close()


@pytest.mark.parametrize("case", ["ppo", "impala", "dreamer_v3"])
def test_what_is_drawn_comes_from_torchs_random_numbers(case: str) -> None:
    policy, envs = policy_of(case, greedy=False)
    rows = envs.reset(0).clone().repeat(16, *[1] * (envs.reset(0).ndim - 1))
    envs.close()

    def drawn(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return [out[0] if policy.memory else out for out in (policy(rows), policy(rows))]

    first, again = drawn(1), drawn(1)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first), "an episode that begins does not begin with the same numbers"


@pytest.mark.seconds
def test_a_policy_with_a_memory_says_so_and_others_return_an_action_alone() -> None:
    memory = {case: [*policy_of(case)[0].memory] for case in ("ppo", "laser", "impala-lstm", "dreamer_v1")}
    assert memory == {
        "ppo": [],
        "laser": [],
        "impala-lstm": ["recurrent_state", "last_action", "reward", "is_init"],
        "dreamer_v1": ["state", "belief", "previous_action", "is_init"],
    }


# ---------------------------------------------------------------------------------- the files


class Read:
    """A file, read with its own library alone."""

    def __init__(self, file: Path, policy: Policy) -> None:
        self.metadata: dict[str, str]
        self._policy = policy
        match file.suffix:
            case ".safetensors":
                safetensors = pytest.importorskip("safetensors")
                with safetensors.safe_open(file, "pt") as opened:
                    self.metadata = opened.metadata()
                    self._network = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            case ".pt2":
                extra = {PT2_METADATA: ""}
                self._module = torch.export.load(file, extra_files=extra).module()
                self.metadata = json.loads(extra[PT2_METADATA])
            case _:
                session = pytest.importorskip("onnxruntime").InferenceSession(str(file))
                self._session = session
                self.metadata = session.get_modelmeta().custom_metadata_map
        self._suffix = file.suffix

    def __call__(self, observation: Tensor) -> Tensor:
        """The first actions of episodes, where observations have the dtype that the metadata name."""
        count, policy = len(observation), self._policy
        if self._suffix == ".safetensors":
            policy.network.load_state_dict(self._network)
            out = policy(observation)
            return out[0] if policy.memory else out
        state = policy.begin(count)
        inputs = json.loads(self.metadata["observation"])
        if isinstance(inputs, dict):
            taken: Any = policy.player.observations.split(observation)
            assert inputs == {name: [str(part.dtype), *part.shape[1:]] for name, part in taken.items()}
            named = {f"observation.{name}": part for name, part in taken.items()}
        else:
            taken = observation.to(getattr(torch, inputs[0].removeprefix("torch.")))
            named = {"observation": taken}
        if self._suffix == ".pt2":
            return self._module(taken, state)[0] if state else self._module(taken)
        arrays = {name: value.numpy() for name, value in {**named, **state}.items()}
        return torch.from_numpy(self._session.run(["action"], arrays)[0])


@pytest.mark.seconds
@pytest.mark.each_value
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_a_file_acts_as_the_policy_and_says_what_it_is(case: str, suffix: str, tmp_path: Path) -> None:
    policy, envs = policy_of(case)
    file = tmp_path / f"policy{suffix}"
    try:
        check_file(file)
    except ConfigError as error:
        pytest.skip(error.what)
    if suffix == ".onnx" and case in DRAWS:
        with pytest.raises(ConfigError, match="draws random numbers"):
            export(policy, envs, file)
        assert not file.exists()
        envs.close()
        return
    export(policy, envs, file)
    observation = torch.cat([envs.reset(seed).clone() for seed in range(3)])  # not the number of the export
    envs.close()
    torch.manual_seed(3)
    out = policy(observation)
    want = out[0] if policy.memory else out
    read = Read(file, policy_of(case)[0])
    torch.manual_seed(3)
    assert torch.allclose(read(observation), want, atol=1e-5)
    said = read.metadata
    assert (said["version"], said["unpublished_steps"], said["frames"], said["env"]) == (
        "7",
        "2",
        "640",
        case,
    )
    assert said["digest"] == policy.digest()
    inputs = json.loads(said["observation"])
    if not policy.takes_parts:
        assert inputs == [str(observation.dtype), *observation.shape[1:]]


@pytest.mark.parametrize("case", ["ppo-parts", "dqn-mask"])
def test_a_policy_takes_what_an_environment_gives_by_its_keys(case: str) -> None:
    policy, envs = policy_of(case)
    rows = envs.reset(3).clone()
    envs.close()
    config = config_of(case)
    several = [gymnasium.make(config.env.id, **config.env.kwargs).reset(seed=3 + n)[0] for n in range(2)]
    together = {name: np.stack([one[name] for one in several]) for name in several[0]}
    assert torch.equal(policy(together), policy(rows))
    assert torch.equal(policy(several[1]), policy(rows[1]))
    with pytest.raises(ConfigError, match="'gear' is missing"):
        policy({name: value for name, value in several[0].items() if name != "gear"})


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", ["float64", "float16", "uint8", "bool"])
@pytest.mark.each_value
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_file_takes_float32_of_an_environment_with_numbers_of_another_dtype(
    dtype: str, suffix: str, tmp_path: Path
) -> None:
    policy, envs = policy_of("ppo", env=spaced(Box(0, 1, (3,), np.dtype(dtype).type)))
    file = tmp_path / f"policy{suffix}"
    assert export(policy, envs, file) < 1e-5
    read, observation = Read(file, policy), envs.reset(3).clone()
    envs.close()
    assert json.loads(read.metadata["observation"]) == ["torch.float32", 3]
    assert torch.equal(read(observation), policy(observation))


@pytest.mark.seconds
@pytest.mark.each_value
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", ["ppo", "dqn", "impala"])
def test_a_policy_and_its_file_choose_the_numbers_that_the_environment_calls_its_choices(
    case: str, suffix: str, tmp_path: Path
) -> None:
    space = Discrete(3, start=-7, dtype=np.int8)
    policy, envs = policy_of(case, env=spaced(Box(-9, 9, (2,)), space))
    file = tmp_path / f"policy{suffix}"
    SENT.clear()
    export(policy, envs, file)
    assert all(map(space.contains, SENT)), "the file is compared in the policy's own episodes"
    observation = torch.cat([envs.reset(seed).clone() for seed in range(20)])
    envs.close()
    chosen = policy(observation)
    assert len(chosen.unique()) > 1
    assert all(map(space.contains, chosen.numpy()))
    read = Read(file, policy)
    assert torch.equal(read(observation), chosen)
    assert json.loads(read.metadata["actions"]) == {
        "kind": "DiscreteActions",
        "n": 3,
        "start": -7,
        "sent_as": "int8",
    }


@pytest.mark.seconds
@pytest.mark.each_value
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("case", ["ppo", "impala"])
@pytest.mark.parametrize(
    "space",
    [MultiDiscrete([[3, 2], [2, 4]], start=[[-7, 0], [0, 5]], dtype=np.int8), MultiBinary(3)],
)
def test_a_policy_and_its_file_make_several_choices_in_the_form_of_the_environment(
    space: Space[Any], case: str, suffix: str, tmp_path: Path
) -> None:
    policy, envs = policy_of(case, env=spaced(Box(-9, 9, (2,)), space))
    file = tmp_path / f"policy{suffix}"
    export(policy, envs, file)
    observation = torch.cat([envs.reset(seed).clone() for seed in range(20)])
    envs.close()
    chosen = policy(observation)
    assert len(chosen.flatten(1).unique(dim=0)) > 1
    assert all(map(space.contains, chosen.numpy()))
    assert {each.dtype for each in chosen.numpy()} == {space.dtype}
    read = Read(file, policy)
    assert torch.equal(read(observation), chosen)
    actions = json.loads(read.metadata["actions"])
    assert (actions["kind"], actions["sent_as"]) == ("MultiDiscreteActions", "int8")
    if isinstance(space, MultiDiscrete):
        assert (actions["nvec"], actions["start"]) == ([3, 2, 2, 4], [-7, 0, 0, 5])
        assert actions["sent_shape"] == [2, 2]


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.each_value
@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_a_policy_and_its_file_choose_numbers_of_the_environments_dtype(
    dtype: str, suffix: str, tmp_path: Path
) -> None:
    space = Box(-0.1, 0.1, (2,), np.dtype(dtype).type)
    policy, envs = policy_of("impala", env=spaced(action=space))
    file = tmp_path / f"policy{suffix}"
    export(policy, envs, file)
    observation = torch.cat([envs.reset(seed).clone() for seed in range(20)])
    envs.close()
    chosen, read = policy(observation), Read(file, policy)(observation)
    assert all(map(space.contains, (*chosen.numpy(), *read.numpy())))
    assert (chosen.numpy() == space.high).any(), "0.1 as float32 is more than 0.1 as float64"
    assert torch.allclose(read, chosen, atol=1e-5)


def test_a_number_without_a_bound_has_none_in_the_metadata_too() -> None:
    policy, envs = policy_of(
        "impala", env=spaced(action=Box(np.float32([-np.inf, -2]), np.float32([1, np.inf])))
    )
    envs.close()
    actions = json.loads(policy.metadata()["actions"])
    assert (actions["low"], actions["high"]) == ([None, -2.0], [1.0, None])


@pytest.fixture
def of_ppo() -> Iterator[tuple[Policy, Envs]]:
    policy, envs = policy_of("ppo")
    yield policy, envs
    envs.close()


@pytest.mark.seconds
def test_a_file_that_would_act_in_another_way_is_not_written(
    of_ppo: tuple[Policy, Envs], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, envs = of_ppo
    file = tmp_path / "policy.pt2"
    file.write_text("of before")
    whole = exporting.FORMATS[".pt2"][0]

    def spoiled(policy: Policy) -> Any:
        data, act = whole(policy)
        return data, lambda observation: 1 - act(observation)

    monkeypatch.setitem(exporting.FORMATS, ".pt2", (spoiled, ()))
    with pytest.raises(RlsyncError, match="acts in another way in 20 of 20 observations"):
        export(policy, envs, file)
    assert file.read_text() == "of before"
    assert [*tmp_path.iterdir()] == [file]


def test_a_player_that_cannot_be_traced_is_told_in_three_lines(
    of_ppo: tuple[Policy, Envs], tmp_path: Path
) -> None:
    policy, envs = of_ppo
    act = policy.player.act

    def branches(observation: Tensor, *rest: Any) -> Any:
        assert float(observation.sum()) < 1e9
        return act(observation, *rest)

    policy.player.act = branches  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=r"cannot be written so: .*\n  where .*\n  cure .*safetensors"):
        export(policy, envs, tmp_path / "policy.pt2")


@pytest.mark.parametrize("shape", [(3,), (1, 3), (4, 1), (2, 1, 4), ()])
def test_an_observation_of_another_shape_is_told_with_the_one_that_fits(
    of_ppo: tuple[Policy, Envs], shape: tuple[int, ...]
) -> None:
    policy, _ = of_ppo
    with pytest.raises(ConfigError, match=r"of shape \[4\], or \[N\] and these; got"):
        policy(torch.zeros(shape))


def test_a_digest_is_of_the_weights_and_their_names(of_ppo: tuple[Policy, Envs]) -> None:
    policy, _ = of_ppo
    before = policy.digest()
    bias = next(leaf for leaf in policy.parameters() if leaf.ndim == 1)
    bias[0] += 1
    changed = policy.digest()
    bias[0] -= 1
    assert before == policy.digest() != changed


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("policy.pth", "cannot be written as '.pth'"),
        ("nowhere/policy.pt2", r"there is no folder .*nowhere"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_loaded(
    name: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what):
        check_file(tmp_path / name)


def test_a_player_of_several_modules_moves_as_one() -> None:
    made = acting("ppo")
    player = without_memory(made.player)
    other = nn.Linear(2, 2)
    player.modules = {**player.modules, "other": other}
    policy = Policy(
        CheckpointPlayer(made.weights, player, GymnasiumEnvs("CartPole-v1")), Trained(1, 0, 0), player.actions
    )
    assert other in set(policy.modules())

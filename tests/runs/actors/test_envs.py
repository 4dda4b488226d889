"""The one face over vectors of environments, against the same environments stepped by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector import AutoresetMode
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase, GymEnv

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.actions import ActionSpec, BoxActions, DiscreteActions, MultiDiscreteActions
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.envs.vectors import Envs, StepArrays
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.evaluation import play as playing
from rlsync.runs.recipes.impala import (
    AtariEnvs,
    EnvSpec,
    GymnasiumEnvs,
    TorchRLEnvs,
)
from rlsync.runs.recipes.impala.heads import head_for
from tests.tools.parts.envs import CountingEnv

STEPS = 40


class Ladder(gymnasium.Env[Any, Any]):
    """Observes its seed, the episode, the step in it and the last action; ends as it is told.

    Args:
        horizon: steps of an episode.
        ends: what is true at its end: "terminated", "truncated", or "both".
        space: of actions.
        fails_at: the step, over all episodes, that raises.
    """

    def __init__(
        self, horizon: int = 5, ends: str = "truncated", space: Any = None, fails_at: int = -1
    ) -> None:
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = Discrete(3) if space is None else space
        self.horizon, self.ends, self.fails_at = horizon, ends, fails_at
        self.tag = self.episode = self.step_in_it = self.steps = 0
        self.last = 0.0

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.array([self.tag, self.episode, self.step_in_it, self.last], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.tag, self.episode = seed, -1
        self.episode, self.step_in_it, self.last = self.episode + 1, 0, 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise ValueError(f"the ladder broke at step {self.steps}")
        self.step_in_it += 1
        self.last = float(np.sum(action))
        over = self.step_in_it == self.horizon
        terminated, truncated = self.ends in ("terminated", "both"), self.ends in ("truncated", "both")
        return self._observe(), 0.5 * self.step_in_it, over and terminated, over and truncated, {}


class Screen(gymnasium.Env[Any, Any]):
    """Pixels [H, W, C]; each channel and row can be told from the others."""

    observation_space = Box(0, 255, (6, 5, 3), np.uint8)
    action_space = Discrete(2)

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.arange(90, dtype=np.uint8).reshape(6, 5, 3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._observe(), 0.0, False, True, {}


class Odd(Ladder):
    """Observations that are no array."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Dict(a=Discrete(2), mission=Text(5))


class Moody(Ladder):
    """Each one that is made has other bounds than the one before."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Moody.made += 1
        self.observation_space = Box(-Moody.made, Moody.made, (4,), np.float32)


class Huge(Ladder):
    """Observes and earns numbers that float32 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = Box(-np.inf, np.inf, (4,), np.float64)

    def _observe(self) -> np.ndarray[Any, Any]:
        return np.array([self.tag, self.episode, self.step_in_it, 1e300])


LADDER = "rlsync-tests/Ladder-v0"
MOODY = "rlsync-tests/Moody-v0"
HUGE = "rlsync-tests/Huge-v0"
SCREEN = "rlsync-tests/Screen-v0"
ODD = "rlsync-tests/Odd-v0"
for name, kind in ((LADDER, Ladder), (SCREEN, Screen), (ODD, Odd), (MOODY, Moody), (HUGE, Huge)):
    gymnasium.register(name, kind, disable_env_checker=True, order_enforce=False)


def actions_of(envs: Envs, steps: int, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    head = head_for(envs.actions)
    blank = torch.zeros(envs.num_envs, head.width)
    return [head.act(blank, generator)[0] for _ in range(steps)]


def play(spec: EnvSpec, num_envs: int, seed: int, steps: int = STEPS) -> list[dict[str, Any]]:
    """Everything that the face shows, copied."""
    envs = make_venv(spec, num_envs)
    shown: list[dict[str, Any]] = [{"observation": envs.reset(seed).clone()}]
    for action in actions_of(envs, steps):
        envs.send(action)
        answer = envs.recv()
        finals = {env: observation.clone() for env, observation in answer.finals}
        arrays = {n: getattr(answer, n).clone() for n in ("observation", "reward", "terminated", "truncated")}
        shown.append({**arrays, "finals": finals, "action": action})
    envs.close()
    return shown


def by_hand(env: gymnasium.Env[Any, Any], index: int, seed: int, shown: list[dict[str, Any]]) -> None:
    """One copy of the environment, stepped alone, with the same actions."""
    observation, _ = env.reset(seed=seed + index)
    assert np.array_equal(shown[0]["observation"][index].numpy(), observation)
    for step in shown[1:]:
        observation, reward, terminated, truncated, _ = env.step(step["action"][index].numpy())
        assert float(step["reward"][index]) == pytest.approx(float(reward))
        assert bool(step["terminated"][index]) is bool(terminated)
        assert bool(step["truncated"][index]) is bool(truncated)
        assert (index in step["finals"]) is bool(truncated and not terminated)
        if index in step["finals"]:
            assert np.array_equal(step["finals"][index].numpy(), observation)
        if terminated or truncated:
            observation, _ = env.reset()
        assert np.array_equal(step["observation"][index].numpy(), observation)


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_gymnasium_environments_show_what_they_show_alone(ends: str) -> None:
    shown = play(GymnasiumEnvs(LADDER, {"ends": ends, "horizon": 4}), 3, seed=5)
    for index in range(3):
        by_hand(Ladder(4, ends), index, 5, shown)
    assert any(step["finals"] for step in shown[1:]) is (ends == "truncated")


def test_a_time_limit_of_gymnasium_is_a_truncation_whose_last_observation_is_kept() -> None:
    spec = GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 12})
    shown = play(spec, 3, seed=5)
    for index in range(3):
        by_hand(gymnasium.make("CartPole-v1", max_episode_steps=12), index, 5, shown)
    assert any(step["finals"] for step in shown[1:])
    assert any(bool(step["terminated"].any()) for step in shown[1:])


@pytest.mark.parametrize(
    "actions",
    [
        DiscreteActions(3),
        DiscreteActions(3, start=-5),
        DiscreteActions(3, start=2, sent_as="int32"),
        MultiDiscreteActions((3, 4)),
        MultiDiscreteActions((3, 4), (-5, 0), "int16"),
        MultiDiscreteActions((3, 3), (0, 7), sent_shape=(2, 1)),
        MultiDiscreteActions((2, 3), sent_as="int8", sent_shape=(1, 2)),
        BoxActions(2),
        BoxActions(2, sent_as="float64"),
        BoxActions(2, (-1.0, 0.1), (1.0, np.inf)),
        BoxActions(2, (-1.0, 0.1), (1.0, 0.3), "float64"),
        BoxActions(2, (-1.0, 0.1), (1.0, 0.3), "float16"),
    ],
)
def test_actions_are_translated_in_arrays_as_in_tensors(actions: ActionSpec) -> None:
    chosen = torch.arange(3)
    if isinstance(actions, MultiDiscreteActions):
        chosen = torch.tensor([[0, 0], [1, 2], [0, 1]])
    if isinstance(actions, BoxActions):
        chosen = torch.tensor([[0.0, 0.2], [3.0, -7.0], [np.nan, np.inf], [-0.3, 0.1]])
    before, sent = chosen.clone(), actions.sent(chosen).numpy()
    translated = actions.translation()(chosen.numpy())
    assert translated.dtype == sent.dtype
    assert np.array_equal(translated, sent, equal_nan=isinstance(actions, BoxActions))
    assert torch.equal(chosen.nan_to_num(9), before.nan_to_num(9)), "what was drawn is what the loss must see"
    if not isinstance(actions, BoxActions):
        assert torch.equal(actions.chosen(actions.sent(chosen)), chosen)
        assert torch.equal(actions.chosen(actions.sent(chosen[0])), chosen[0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "spec",
    [
        GymnasiumEnvs(LADDER, {"horizon": 3}),
        GymnasiumEnvs(LADDER, {"horizon": 3, "ends": "both"}),
        GymnasiumEnvs(HUGE),
        GymnasiumEnvs(SCREEN),
        TorchRLEnvs(partial(CountingEnv, 3)),
    ],
)
def test_what_environments_write_into_memory_is_what_they_answer(spec: EnvSpec) -> None:
    answering, writing = make_venv(spec, 2), make_venv(spec, 2)
    assert torch.equal(answering.reset(7), writing.reset(7))
    shape, dtype = (2, *writing.observation_shape), writing.observation_dtype
    for action in actions_of(answering, 7):
        for envs in (answering, writing):
            envs.send(action)
        answer = answering.recv()
        arrays = StepArrays(
            observation=torch.full(shape, 99, dtype=dtype),
            reward=np.full(2, np.nan),
            terminated=np.full(2, fill_value=True),
            truncated=np.full(2, fill_value=True),
        )
        finals, _ = writing.recv_into(arrays)
        assert torch.equal(arrays.observation, answer.observation)
        assert arrays.reward.tolist() == answer.reward.tolist()
        assert arrays.terminated.tolist() == answer.terminated.tolist()
        assert arrays.truncated.tolist() == answer.truncated.tolist()
        assert [env for env, _ in finals] == [env for env, _ in answer.finals]
        for (_, one), (_, other) in zip(finals, answer.finals, strict=True):
            assert torch.equal(one, other)
    answering.close()
    writing.close()


def test_pixels_come_with_their_channels_first() -> None:
    envs = make_venv(GymnasiumEnvs(SCREEN), 2)
    expected = torch.arange(90, dtype=torch.uint8).view(6, 5, 3).permute(2, 0, 1)
    assert (envs.observation_shape, envs.observation_dtype) == ((3, 6, 5), torch.uint8)
    assert torch.equal(envs.reset(0)[1], expected)
    envs.send(torch.zeros(2, dtype=torch.int64))
    answer = envs.recv()
    assert torch.equal(answer.observation[0], expected)
    assert torch.equal(dict(answer.finals)[1], expected)
    envs.close()


@pytest.mark.thorough
@pytest.mark.seconds
def test_atari_shows_what_it_shows_when_it_resets_a_step_later() -> None:
    """Against ale-py's other mode: the last observation comes first, and the reset with the next step."""
    spec = AtariEnvs("pong", max_episode_frames=48)
    envs = make_venv(spec, 2)
    assert (envs.observation_shape, envs.observation_dtype, envs.actions) == (
        (4, 84, 84),
        torch.uint8,
        DiscreteActions(6),
    )
    envs.close()
    shown = play(spec, 2, seed=9)
    for index in range(2):
        alone = AtariVectorEnv(
            "pong",
            1,
            max_num_frames_per_episode=48,
            reward_clipping=False,
            autoreset_mode=AutoresetMode.NEXT_STEP,
            num_threads=1,
        )
        observation, _ = alone.reset(seed=9 + index)
        assert np.array_equal(shown[0]["observation"][index].numpy(), observation[0])
        ends = 0
        for step in shown[1:]:
            observation, reward, terminated, truncated, _ = alone.step(
                step["action"][index : index + 1].numpy()
            )
            assert (step["reward"][index], step["terminated"][index], step["truncated"][index]) == (
                reward[0],
                terminated[0],
                truncated[0],
            )
            if truncated[0]:
                ends += 1
                assert np.array_equal(step["finals"][index].numpy(), observation[0])
                observation, *_ = alone.step(np.zeros(1, dtype=np.int64))
            assert np.array_equal(step["observation"][index].numpy(), observation[0])
        assert ends >= 2
        alone.close()


@pytest.mark.thorough
@pytest.mark.seconds
def test_rewards_of_atari_are_not_clipped() -> None:
    shown = play(AtariEnvs("space_invaders"), 4, seed=1, steps=150)
    assert max(float(step["reward"].max()) for step in shown[1:]) > 1


@pytest.mark.thorough
@pytest.mark.seconds
def test_large_seeds_of_atari_are_seeds_too() -> None:
    def last(seed: int) -> Tensor:
        seen: Tensor = play(AtariEnvs("pong"), 2, seed)[-1]["observation"]
        return seen

    assert torch.equal(last(2**31 + 3), last(2**31 + 3))
    assert not torch.equal(last(2**31 + 3), last(2**31 + 5))
    assert last(2**31 - 1).shape == (2, 4, 84, 84)


def test_torchrl_environments_show_what_they_show_alone() -> None:
    shown = play(TorchRLEnvs(partial(GymEnv, "CartPole-v1", max_episode_steps=12)), 2, seed=5)
    alone = gymnasium.make("CartPole-v1", max_episode_steps=12)
    alone.reset(seed=5)
    ends = 0
    observation = shown[0]["observation"][0].numpy()
    for step in shown[1:]:  # TorchRL seeds in its own way: compare from state to state
        alone.unwrapped.state = observation.astype(np.float64)  # type: ignore[attr-defined]
        expected, reward, terminated, *_ = alone.unwrapped.step(int(step["action"][0]))
        last = step["finals"].get(0, step["observation"][0]).numpy()
        assert float(step["reward"][0]) == reward
        assert bool(step["terminated"][0]) is terminated
        if not terminated:
            assert np.allclose(last, expected, atol=1e-5)
        ends += bool(step["terminated"][0] | step["truncated"][0])
        observation = step["observation"][0].numpy()
    assert ends >= 2


def test_the_last_observation_of_a_truncated_torchrl_episode_is_kept() -> None:
    shown = play(TorchRLEnvs(partial(CountingEnv, 3)), 2, seed=0, steps=7)
    assert [float(step["observation"][0, 0]) for step in shown] == [0, 1, 2, 0, 1, 2, 0, 1]
    finals = [{env: float(last[0]) for env, last in step["finals"].items()} for step in shown[1:]]
    assert finals == [{}, {}, {0: 3.0, 1: 3.0}, {}, {}, {0: 3.0, 1: 3.0}, {}]


def make_wide() -> EnvBase:
    env = CountingEnv(continuous=True)
    env.action_spec = Bounded(-1.0, 1.0, shape=(2, 2))
    env.observation_spec = Composite(observation=Unbounded(shape=(4,)))
    return env


def make_bounded() -> EnvBase:
    env = CountingEnv(continuous=True)
    env.action_spec = Bounded(-1.0, 2.0, shape=(2,))
    return env


#: TorchRL's specs of several choices, and what each of them means.
SEVERAL: dict[str, tuple[TensorSpec, MultiDiscreteActions]] = {
    "one-hot choices": (MultiOneHot((3, 2)), MultiDiscreteActions((3, 2))),
    "a stack of one-hot choices": (OneHot(3, (2, 3)), MultiDiscreteActions((3, 3))),
    "indices": (MultiCategorical((3, 2)), MultiDiscreteActions((3, 2))),
    "indices of two axes": (
        MultiCategorical(torch.tensor([[3, 2], [2, 4]])),
        MultiDiscreteActions((3, 2, 2, 4), sent_shape=(2, 2)),
    ),
    "a stack of indices": (Categorical(3, (2,)), MultiDiscreteActions((3, 3))),
    "zeros and ones": (Binary(3), MultiDiscreteActions((2, 2, 2))),
    "zeros and ones of two axes": (Binary(shape=(2, 2)), MultiDiscreteActions((2,) * 4, sent_shape=(2, 2))),
}


class Choosy(CountingEnv):
    """Takes several choices, and asserts that they are members of its spec."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.action_spec, _ = SEVERAL[kind]

    def _step(self, tensordict: TensorDict) -> TensorDict:
        action = tensordict["action"]
        assert self.action_spec.is_in(action), action
        assert action.dtype == self.action_spec.dtype
        return super()._step(tensordict.clone().set("action", torch.ones(2)))


@pytest.mark.parametrize("kind", SEVERAL)
def test_torchrl_environments_take_several_choices_in_their_own_form(kind: str) -> None:
    _, actions = SEVERAL[kind]
    shown = play(TorchRLEnvs(partial(Choosy, kind)), 2, seed=0, steps=20)
    (taken,) = {step["action"].shape for step in shown[1:]}
    assert taken == (2, *actions.shape)
    envs = make_venv(TorchRLEnvs(partial(Choosy, kind)), 2)
    assert envs.actions == actions
    assert envs.actions.sent_shape == actions.sent_shape
    envs.close()


@pytest.mark.parametrize("space", [MultiDiscrete([3, 2]), MultiBinary(3)])
def test_several_choices_of_a_gymnasium_environment_mean_the_same_through_torchrl(space: Any) -> None:
    direct = play(GymnasiumEnvs(LADDER, {"space": space, "horizon": 3}), 2, seed=0, steps=20)
    wrapped = play(TorchRLEnvs(partial(GymEnv, LADDER, space=space, horizon=3)), 2, seed=0, steps=20)
    for one, other in zip(direct[1:], wrapped[1:], strict=True):
        assert torch.equal(one["action"], other["action"])
        assert torch.equal(one["observation"][:, 2:], other["observation"][:, 2:])


def make_bytes() -> EnvBase:
    env = CountingEnv()
    env.observation_spec = Composite(observation=Unbounded((4,), dtype=torch.uint8))
    return env


def test_bytes_of_a_torchrl_environment_that_are_no_picture_are_numbers() -> None:
    envs = make_venv(TorchRLEnvs(make_bytes), 2)
    assert envs.observation_dtype is envs.reset(0).dtype is torch.float32
    envs.close()


def test_torchrl_environments_say_what_actions_they_take() -> None:
    for make, actions in (
        (CountingEnv, DiscreteActions(2)),
        (partial(CountingEnv, continuous=True), BoxActions(1, (-1.0,), (1.0,))),
        (make_bounded, BoxActions(2, (-1.0, -1.0), (2.0, 2.0))),
    ):
        envs = make_venv(TorchRLEnvs(make), 2)
        assert envs.actions == actions
        envs.close()


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (GymnasiumEnvs(ODD), "gives observations that are no numbers: mission is Text"),
        (GymnasiumEnvs(MOODY), "that are made alike have different spaces"),
        (GymnasiumEnvs(LADDER, {"space": Tuple([Discrete(2)])}), "takes actions of Tuple"),
        (GymnasiumEnvs("CartPole-v1", vectorized=True), "does not reset in the step that ends an episode"),
        (AtariEnvs("Pong"), "has no game 'Pong'"),
        (TorchRLEnvs(make_wide), "takes actions of"),
    ],
)
def test_environments_that_do_not_fit_are_refused(spec: EnvSpec, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_venv(spec, 2)


class OwnKind:
    """Environments of a kind that rlsync does not know."""

    def envs(self, num_envs: int) -> Envs:
        return make_venv(GymnasiumEnvs("CartPole-v1"), num_envs)


def test_environments_of_ones_own_kind_are_made_and_played() -> None:
    player = UniformPlayer(DiscreteActions(2), (4,))
    envs = make_venv(OwnKind(), 2, seed=0)
    assert len([e for ended in playing.play(player, envs, 2, seed=0) for e in ended]) == 2
    envs.close()

"""What environments answer: everything here reads it alike, or refuses it, and no answer changes later."""

from __future__ import annotations

import multiprocessing
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import ObservationWrapper
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten_space
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import GymEnv

from rlsync.core.errors import ConfigError, WorkerLost
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.observations import WHOLE as WHOLE_OBSERVATION
from rlsync.runs.actors.envs.specs import EnvSpec, RenderedEnvs, TorchRLEnvs, make_venv
from rlsync.runs.actors.envs.vectors import EnvStep
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.evaluation.play import FilmedGymnasium
from rlsync.runs.evaluation.try_out import overwritten, try_out
from rlsync.runs.recipes.env_settings import EnvConfig, RenderedConfig
from rlsync.runs.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet
from tests.tools.parts.answering_envs import HORIZON, ID, SAME_ARRAY, VECTOR
from tests.tools.parts.space_envs import spaced

STEPS = 2 * HORIZON + 1


def stepped(spec: GymnasiumEnvs | TorchRLEnvs, num_envs: int = 2, steps: int = STEPS) -> list[EnvStep]:
    """Answers of rlsync's own environments, to the same action each time; nothing is copied."""
    envs = make_venv(spec, num_envs, seed=0)
    action = torch.zeros(num_envs, dtype=torch.int64)
    answers = []
    for _ in range(steps):
        envs.send(action)
        answers.append(envs.recv())
    envs.close()
    return answers


def transitions_of(spec: EnvSpec, num_envs: int, steps: int) -> TensorDictBase:
    """A batch that the learner gets, made in its own process."""
    with closing(make_venv(spec, 1)) as envs:
        player = UniformPlayer(DiscreteActions(2), envs.observation_shape, envs.observation_dtype)
    collector = UnrollCollector(
        player,
        spec,
        CollectSettings(steps=steps, envs_per_worker=num_envs, transitions=True),
        num_workers=0,
    )
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


READ = [
    "reward [1]",
    "reward [1, 1]",
    "reward []",
    "reward list",
    "reward int",
    "reward float32",
    "terminated [1]",
    "terminated 0",
    "truncated numpy",
    "info None",
    "observation list",
    "observation float64",
]


@pytest.mark.parametrize("form", READ)
def test_what_an_answer_can_only_mean_is_read_as_that(form: str) -> None:
    config = EnvConfig(ID, kwargs={"form": form})
    usual = stepped(GymnasiumEnvs(ID), 1)
    for answer, expected in zip(stepped(config.spec(), 1), usual, strict=True):
        assert answer.observation.dtype == torch.float32
        for field in ("observation", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(answer, field), getattr(expected, field)), field


REFUSED = {
    "reward None": "step.. with reward = None; it has to be one number",
    "reward text": "step.. with reward = str '1.0'; it has to be one number",
    "reward of two": r"step.. with reward = \[2\] of float64; it has to be one number",
    "terminated None": "step.. with terminated = None; it has to be one bool",
    "terminated 2": "step.. with terminated = int 2; it has to be one bool",
    "terminated 0.0": "step.. with terminated = float 0.0; it has to be one bool",
    "truncated None": "step.. with truncated = None; it has to be one bool",
    "info text": "step.. with info = str 'nothing'; it has to be a dict",
    "observation None": r"reset.. with observation = None; its space promises \[3\] of float32",
    "observation [1, 3]": r"with observation = \[1, 3\] of float32; its space promises \[3\] of float32",
    "observation of four": r"with observation = \[4\] of float32; its space promises \[3\] of float32",
}


@pytest.mark.parametrize("form", REFUSED)
def test_any_other_answer_is_refused_in_the_same_words_everywhere(form: str) -> None:
    config = EnvConfig(ID, kwargs={"form": form})
    drawn = RenderedConfig(ID, img_height=8, img_width=8, frameskip=2, kwargs={"form": form})
    ways = [
        lambda: try_out(config.spec()),
        lambda: try_out(config.spec(), 2),
        lambda: transitions_of(config.spec(), 2, 3),
    ]
    if form.startswith(("reward", "terminated", "truncated")):  # what is drawn observes its picture
        ways.append(lambda: try_out(drawn.spec()))
    for way in ways:
        with pytest.raises(ConfigError, match=REFUSED[form]) as refusal:
            way()
        assert refusal.value.what.startswith(f"{ID!r} answers ")
        assert len(str(refusal.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("usual", ""),
        ("observation list", ""),
        ("observation float64", r"\[3\] of float64; its space promises \[3\] of uint8"),
        (
            "observation 300",
            r"\[3\] of int64, with values from 300 to 300; its space promises \[3\] of uint8",
        ),
    ],
)
def test_whole_numbers_are_cast_only_if_none_changes(form: str, what: str) -> None:
    spec = GymnasiumEnvs(ID, {"form": form, "dtype": "uint8"})
    if not what:
        assert [float(answer.observation[0, 0]) for answer in stepped(spec)] == [1, 2, 3, 0, 1, 2, 3, 0, 1]
        return
    with pytest.raises(ConfigError, match=what):
        try_out(spec)


@pytest.mark.parametrize(
    ("form", "what"),
    [
        ("reward [N, 2]", r"reward = \[2, 2\] of float64; it has to be 2 numbers, one for each environment"),
        ("observation [N, 1, 3]", r"observation = \[2, 1, 3\] of float32; its space promises \[2, 3\]"),
        ("no final", r"info\['final_obs'\] = None; it has to hold the last observation of each truncated"),
        ("same final", r"info\['final_obs'\] = the array of the next observation; it has to hold the last"),
    ],
)
def test_a_vector_environment_of_ones_own_is_refused_in_words(form: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        try_out(GymnasiumEnvs(VECTOR, {"form": form}, vectorized=True), 2)


@pytest.mark.parametrize(
    ("env", "what", "cure"),
    [
        (
            GymnasiumEnvs("CartPole-v1", {"autoreset_mode": "SameStep"}, vectorized=True),
            "cannot make the vector environment of 'CartPole-v1'",
            "leave vectorized=False",
        ),
        (
            GymnasiumEnvs("CartPole-v1", vectorized=True),
            "does not reset in the step that ends an episode",
            "leave vectorized=False",
        ),
        (
            GymnasiumEnvs("CartPole-v1", {"autoreset_mode": "SameStep"}),
            "'CartPole-v1' takes no autoreset_mode",
            "leave autoreset_mode out",
        ),
    ],
)
def test_environments_that_workers_could_not_reset_are_refused_before_a_worker_starts(
    env: GymnasiumEnvs, what: str, cure: str
) -> None:
    net = ImpalaNet((4,), Categorical(2))
    with pytest.raises(ConfigError, match=what) as refusal:
        UnrollCollector(net, env, CollectSettings(steps=5, envs_per_worker=2), num_workers=1)
    assert refusal.value.cure.startswith(cure)
    assert len(str(refusal.value).splitlines()) == 3
    assert not multiprocessing.active_children()


@pytest.mark.processes
def test_an_answer_that_is_refused_in_a_worker_ends_the_run_with_its_words() -> None:
    envs = GymnasiumEnvs(ID, {"form": "truncated None"})
    net = ImpalaNet((3,), Categorical(2))
    settings = CollectSettings(steps=5, envs_per_worker=1, restarts=Restarts(0))
    collector = UnrollCollector(net, envs, settings, num_workers=1)
    try:
        with pytest.raises(WorkerLost, match=r"ConfigError: '.+' answers step\(\) with truncated = None"):
            next(iter(collector))
    finally:
        collector.shutdown()


# ------------------------------------------------------------------------ one array each time

#: The first number of each observation, over two episodes of four steps.
SEEN = [1, 2, 3, 0, 1, 2, 3, 0, 1]


def numbers(arrays: list[Tensor]) -> list[float]:
    return [float(array.flatten()[0]) for array in arrays]


@pytest.mark.parametrize("kept", ["always", "steps", "two"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_no_answer_is_written_into_an_earlier_one(kept: str, num_envs: int) -> None:
    torchrl = TorchRLEnvs(partial(GymEnv, SAME_ARRAY, kept=kept))
    for spec in (GymnasiumEnvs(SAME_ARRAY, {"kept": kept}), torchrl):
        answers = stepped(spec, num_envs)
        assert numbers([answer.observation for answer in answers]) == SEEN
        assert numbers([answer.reward for answer in answers]) == [1, 2, 3, 4, 1, 2, 3, 4, 1]
        finals = [dict(answer.finals) for answer in answers if answer.finals]
        assert [numbers(list(final.values())) for final in finals] == [[4] * num_envs] * 2
    if kept == "always":
        answers = stepped(GymnasiumEnvs(VECTOR, vectorized=True), num_envs)
        assert numbers([answer.observation for answer in answers]) == SEEN
        assert numbers([answer.reward for answer in answers]) == [1, 2, 3, 4, 1, 2, 3, 4, 1]
        assert [numbers([last for _, last in answer.finals]) for answer in answers][3] == [4] * num_envs


@pytest.mark.parametrize("kept", ["always", "steps", "two"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_batch_of_transitions_keeps_what_it_was_made_of(kept: str, num_envs: int) -> None:
    frames = transitions_of(GymnasiumEnvs(SAME_ARRAY, {"kept": kept}), num_envs, STEPS)[0]
    assert numbers([*frames["observation"]]) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert numbers([*frames["next", "observation"]]) == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert numbers([*frames["next", "reward"]]) == [1, 2, 3, 4, 1, 2, 3, 4, 1]


@pytest.mark.parametrize(
    ("kept", "parts"),
    [("always", ["observation", "reward"]), ("resets", ["observation"]), ("constant", [])],
)
def test_what_an_environment_writes_into_later_is_named(kept: str, parts: list[str]) -> None:
    assert sorted(overwritten(GymnasiumEnvs(SAME_ARRAY, {"kept": kept}))) == parts


def test_pictures_that_are_drawn_into_one_array_are_kept_in_frames_and_films() -> None:
    seen = transitions_of(RenderedEnvs(SAME_ARRAY, img_height=8, img_width=8), 1, HORIZON)[0]
    assert numbers([*seen["observation"]]) == [0, 20, 40, 60]
    assert numbers([*seen["next", "observation"]]) == [20, 40, 60, 80]
    answers = stepped(RenderedEnvs(SAME_ARRAY, img_height=8, img_width=8), 1, HORIZON)
    assert numbers([last for answer in answers for _, last in answer.finals]) == [80]

    envs = FilmedGymnasium(GymnasiumEnvs(SAME_ARRAY))
    envs.reset(0)
    frames = [envs.frame]
    for _ in range(HORIZON):
        envs.send(torch.zeros(1, dtype=torch.int64))
        envs.recv()
        frames.append(envs.frame)
    envs.close()
    assert [int(frame.flat[0]) for frame in frames] == [0, 20, 40, 60, 80]


# ---------------------------------------------------------------------------------- choices


CHOICES = {
    "one of n": Discrete(3, start=-1),
    "several": MultiDiscrete([2, 3]),
    "bits": MultiBinary(4),
    "a tuple": Tuple((Discrete(2), MultiBinary(2))),
}


@pytest.mark.parametrize("choices", CHOICES)
def test_choices_are_seen_as_gymnasiums_vector_of_zeros_and_ones(choices: str) -> None:
    space = CHOICES[choices]
    envs = make_venv(spaced(space).spec(), 2)
    length = flatten_space(space).shape
    assert envs.observation_shape == length
    assert envs.observation_dtype is torch.float32
    envs.reset(0)
    for _ in range(5):
        envs.send(torch.zeros(2, dtype=torch.int64))
        answer = envs.recv()
        assert set(answer.observation.unique().tolist()) <= {0.0, 1.0}
        if choices != "bits" and choices != "a tuple":
            assert (answer.observation.sum(-1) == (2 if choices == "several" else 1)).all()
    envs.close()


def test_a_choice_outside_its_space_is_refused_with_the_space() -> None:
    class Outside(ObservationWrapper):
        def observation(self, observation: object) -> int:
            return 7

    spec = GymnasiumEnvs(spaced(Discrete(3)).id, {"observation": Discrete(3)}, wrappers=(Outside,))
    envs = make_venv(spec, 1)
    with pytest.raises(
        ConfigError, match="outside its space: 'observation' is numbers from 7 to 7"
    ) as refused:
        envs.reset(0)
    assert "Discrete(3)" in refused.value.where
    envs.close()


WHOLE, PIXELS = Box(-9, 300, (3,), np.int32), Box(0, 255, (40, 40, 3), np.uint8)
ANSWERS = {
    "as promised": (WHOLE, np.arange(3, dtype=np.int32), True),
    "longer whole numbers": (WHOLE, np.arange(3, dtype=np.int64), True),
    "floats": (WHOLE, np.arange(3, dtype=np.float32), False),
    "too large": (WHOLE, np.full(3, 2**40), False),
    "long pixels": (PIXELS, np.full((40, 40, 3), 200), True),
    "pixels of floats": (PIXELS, np.zeros((40, 40, 3), np.float32), False),
    "pixels beyond bytes": (PIXELS, np.full((40, 40, 3), 300), False),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_part_of_several_is_read_as_one_that_is_alone(answer: str) -> None:
    space, array, is_read = ANSWERS[answer]

    class Answers(ObservationWrapper):
        def observation(self, observation: object) -> object:
            return {"a": array, "b": 1} if isinstance(observation, dict) else array

    rows = []
    for whole in (space, Dict(a=space, b=Discrete(2))):
        env = GymnasiumEnvs(spaced(Discrete(2)).id, {"observation": whole}, wrappers=(Answers,))
        with closing(make_venv(env, 1)) as envs:
            if is_read:
                rows.append(envs.observations.split(envs.reset(0)))
                continue
            with pytest.raises(ConfigError, match=r"observation"):
                envs.reset(0)
    if is_read:
        alone, part = rows[0][WHOLE_OBSERVATION], rows[1]["a"]
        assert torch.equal(alone, part)
        assert alone.shape == part.shape

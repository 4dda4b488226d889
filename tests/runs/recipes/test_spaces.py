"""What an environment's spaces mean: one thing to all workers, to evaluations, and to those who check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.evaluation.try_out import random_steps
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.registry import SHIPPED, recipe_named
from rlsync.runs.recipes.spaces import ANY
from tests.tools.parts.space_envs import SENT, spaced


@pytest.fixture(autouse=True)
def nothing_was_sent() -> Iterator[None]:
    SENT.clear()
    yield
    SENT.clear()


def sent(config: EnvConfig, actions: list[Any]) -> list[Any]:
    """What environments get from these actions, one for each, and then from 60 random ones."""
    envs = make_venv(config.spec(), len(actions), seed=0)
    envs.send(torch.tensor(actions))
    envs.recv()
    for _ in random_steps(envs, torch.Generator().manual_seed(0), 60):
        pass
    envs.close()
    return SENT.copy()


# ------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize(
    "space", [Discrete(3), Discrete(3, start=-1), Discrete(2, start=10), Discrete(3, start=-1, dtype=np.int8)]
)
def test_choices_are_numbers_of_the_environments_space(space: Discrete[Any]) -> None:
    config, count = spaced(action=space), int(space.n)
    numbers = [int(space.start) + index for index in range(count)]
    assert ANY.probe(config).actions == count
    actions = sent(config, [*range(count)])
    assert [int(action) for action in actions[:count]] == numbers
    assert sorted({int(action) for action in actions[count:]}) == numbers
    assert {(type(action), action.dtype) for action in actions} == {(space.dtype.type, space.dtype)}
    assert all(map(space.contains, actions))


SEVERAL = [
    MultiDiscrete([3, 2]),
    MultiDiscrete([3, 2], start=[-1, 5], dtype=np.int16),
    MultiDiscrete([[3, 2], [2, 4]]),
    MultiDiscrete([4]),
    MultiBinary(3),
    MultiBinary((2, 3)),
]


@pytest.mark.parametrize("space", SEVERAL)
def test_several_choices_are_members_of_the_environments_space(space: Space[Any]) -> None:
    config = spaced(action=space)
    spaces = ANY.probe(config)
    nvec = np.broadcast_to(getattr(space, "nvec", 2), space.shape).ravel()
    assert (spaces.choices, spaces.actions) == (tuple(nvec), nvec.sum())
    indices = [[0] * len(nvec), [*map(int, nvec - 1)]]
    first, last, *random = sent(config, indices)
    start = np.broadcast_to(getattr(space, "start", 0), space.shape).ravel()
    assert np.array_equal(first.ravel(), start)
    assert np.array_equal(last.ravel(), start + nvec - 1)
    assert all(map(space.contains, (first, last, *random)))
    assert {(action.shape, action.dtype) for action in random} == {(space.shape, space.dtype)}
    for number, count in enumerate(nvec):
        assert len({int(action.flat[number]) for action in random}) == count


@pytest.mark.seconds
@pytest.mark.parametrize("space", [MultiDiscrete([3, 2]), MultiBinary(2)])
def test_recipes_that_make_one_choice_or_none_say_that_an_action_is_several(space: Space[Any]) -> None:
    takers = {"ppo", "impala", "laser", "dreamer_v3"}
    for name in SHIPPED:
        if name in takers:
            assert recipe_named(name).probe(spaced(action=space))
            continue
        with pytest.raises(ConfigError, match="its action is 2 choices at once") as refusal:
            recipe_named(name).probe(spaced(action=space))
        assert "at once" not in refusal.value.cure


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_of_an_action_have_the_environments_dtype_and_are_in_its_bounds(dtype: str) -> None:
    space = Box(-0.1, 0.1, (2,), np.dtype(dtype).type)
    first, second, *random = sent(spaced(action=space), [[-7.0, 7.0], [0.0, 0.05]])
    assert all(map(space.contains, [first, second, *random])), "0.1 as float32 is more than 0.1 as float64"
    assert np.array_equal(first, [space.low[0], space.high[1]])
    assert second == pytest.approx(np.array([0.0, 0.05]), rel=1e-3)


@pytest.mark.parametrize("space", [Discrete(3, start=-1), *SEVERAL, Box(-0.1, 0.1, (2,), np.float64)])
def test_players_are_made_for_the_actions_of_the_environments_that_workers_make(space: Space[Any]) -> None:
    envs = make_venv(spaced(action=space).spec(), 1)
    assert ANY.probe(spaced(action=space)).player_actions() == envs.actions
    envs.close()


def refusals(config: EnvConfig) -> set[str]:
    """The first lines of the errors of all recipes' probes, which ``rlsync check`` shows."""
    lines = set()
    for name in SHIPPED:
        with pytest.raises(ConfigError) as refusal:
            recipe_named(name).probe(config)
        lines.add(refusal.value.what)
    return lines


WHOLE = [Box(-10, 10, (2,), np.int64), Box(0, 255, (2,), np.uint8), Box(-128, 127, (2,), np.int8)]


@pytest.mark.seconds
@pytest.mark.parametrize("space", WHOLE)
def test_actions_of_whole_numbers_are_refused_by_all_in_the_same_words(space: Space[Any]) -> None:
    (what,) = refusals(spaced(action=space))
    assert f"takes actions of {space}: they are whole numbers" in what
    with pytest.raises(ConfigError) as refusal:
        make_venv(spaced(action=space).spec(), 2)
    assert refusal.value.what == what


# -------------------------------------------------------------------------------- observations


def seen(config: EnvConfig) -> torch.Tensor:
    """First observations of two environments, as workers and evaluations make them."""
    envs = make_venv(config.spec(), 2)
    observed = envs.reset(0).clone()
    assert (envs.observation_shape, envs.observation_dtype) == (observed.shape[1:], observed.dtype)
    envs.close()
    return observed


@pytest.mark.seconds
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64", "bool", "float16", "float64"])
def test_a_vector_is_float32_of_the_numbers_as_they_are_for_all(dtype: str) -> None:
    high = 1 if dtype == "bool" else 100
    config = spaced(Box(high - 1, high, (16,), np.dtype(dtype).type))
    observed = seen(config)
    assert observed.dtype is torch.float32
    assert observed.shape == (2, 16)
    assert high - 1 <= observed.min() <= observed.max() <= high
    for name in ("ppo", "impala", "dreamer_v3"):
        assert tuple(recipe_named(name).probe(replace(config)).observation_shape) == (16,)


@pytest.mark.parametrize(
    ("shape", "channels_first"),
    [
        ((6, 5, 3), (3, 6, 5)),
        ((84, 84, 12), (12, 84, 84)),  # four pictures of three colours
        ((12, 84, 84), (12, 84, 84)),
        ((4, 84, 84), (4, 84, 84)),
        ((3, 4, 8), (3, 4, 8)),
        ((84, 84, 1), (1, 84, 84)),
    ],
)
def test_the_channels_of_a_picture_are_its_shorter_axis(
    shape: tuple[int, ...], channels_first: tuple[int, ...]
) -> None:
    config = spaced(Box(0, 255, shape, np.uint8))
    observed = seen(config)
    assert (observed.dtype, observed.shape) == (torch.uint8, (2, *channels_first))
    assert recipe_named("impala").probe(config).observation_shape == channels_first


FLAT = [
    Box(0, 1, (8, 8, 12), np.uint8),  # a board
    Box(0, 10, (7, 7, 3), np.uint8),
    Box(0, 255, (8, 8, 12), np.uint8),
    Box(0, 1, (64, 64, 3), np.float32),
    Box(0, 255, (8, 8), np.uint8),
    Box(0, 255, (4, 16, 16, 3), np.uint8),
    Box(-1, 1, (), np.float64),
]


@pytest.mark.seconds
@pytest.mark.parametrize("space", FLAT, ids=str)
def test_arrays_that_are_neither_vectors_nor_pictures_are_vectors_of_their_numbers(space: Box) -> None:
    config = spaced(space)
    envs = make_venv(config.spec(), 1, seed=3)
    first = envs.reset(3)
    envs.close()
    plain = gymnasium.make(config.id, **config.kwargs).reset(seed=3)[0]
    assert torch.equal(first[0], torch.as_tensor(plain).float().reshape(-1))
    for name in ("ppo", "impala", "dreamer_v3"):
        assert recipe_named(name).probe(config).features == math.prod(space.shape)


def test_bytes_of_two_axes_are_a_grey_picture_and_a_key_makes_them_numbers() -> None:
    config = spaced(Box(0, 255, (40, 44), np.uint8))
    assert seen(config).shape == (2, 1, 40, 44)
    config.pictures = False
    assert seen(config).shape == (2, 1760)
    assert seen(config).dtype is torch.float32


def test_a_recipe_of_vectors_says_that_an_environment_gives_pixels() -> None:
    with pytest.raises(ConfigError, match="it gives pixels"):
        recipe_named("dreamer_v1").probe(spaced(Box(0, 255, (64, 64, 3), np.uint8), Box(-1, 1, (1,))))
    parts = Dict(camera=Box(0, 255, (64, 64, 3), np.uint8), speed=Box(-1, 1, (2,)))
    with pytest.raises(ConfigError, match="it gives pixels beside other parts: speed, camera"):
        recipe_named("dreamer_v3").probe(spaced(parts))

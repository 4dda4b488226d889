"""What an environment's spaces mean: one thing to all workers, to evaluations, and to those who check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, Space

from rlsync.core.errors import ConfigError
from rlsync.recipes.env_settings import EnvConfig
from rlsync.recipes.registry import SHIPPED, recipe_named
from rlsync.recipes.spaces import ANY, make_env
from rlsync.workers.envs.specs import make_venv
from tests.tools.parts.space_envs import SENT, spaced


@pytest.fixture(autouse=True)
def nothing_was_sent() -> Iterator[None]:
    SENT.clear()
    yield
    SENT.clear()


def sent_by_stock_collectors(config: EnvConfig) -> list[Any]:
    """What the environments of TorchRL's collectors get from 60 random actions."""
    make_env(config).rollout(60, break_when_any_done=False)
    return SENT.copy()


def sent_by_our_workers(config: EnvConfig, actions: list[Any]) -> list[Any]:
    """What those of rlsync's own workers and of evaluations get."""
    envs = make_venv(config.spec(), len(actions), seed=0)
    envs.send(torch.tensor(actions))
    envs.recv()
    envs.close()
    return SENT.copy()


# ------------------------------------------------------------------------------------- actions


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize(
    "space", [Discrete(3), Discrete(3, start=-1), Discrete(2, start=10), Discrete(3, start=-1, dtype=np.int8)]
)
def test_choices_are_numbers_of_the_environments_space_for_whoever_acts(
    space: Discrete[Any], num_envs: int
) -> None:
    config = replace(spaced(action=space), num_envs=num_envs)
    numbers = [int(space.start) + index for index in range(int(space.n))]
    assert ANY.probe(config).actions == space.n
    by_stock = sent_by_stock_collectors(config)
    assert sorted({int(action) for action in by_stock}) == numbers
    SENT.clear()
    ours = sent_by_our_workers(config, [*range(int(space.n))])
    assert [int(action) for action in ours] == numbers
    assert {(type(action), action.dtype) for action in by_stock + ours} == {(space.dtype.type, space.dtype)}
    assert all(map(space.contains, by_stock + ours))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_of_an_action_have_the_environments_dtype_and_are_in_its_bounds(dtype: str) -> None:
    space = Box(-0.1, 0.1, (2,), np.dtype(dtype).type)
    sent = sent_by_stock_collectors(spaced(action=space))
    sent += sent_by_our_workers(spaced(action=space), [[-7.0, 7.0], [0.0, 0.05]])
    assert all(map(space.contains, sent)), "0.1 as float32 is more than 0.1 as float64"
    assert np.array_equal(sent[-2], [space.low[0], space.high[1]])
    assert sent[-1] == pytest.approx(np.array([0.0, 0.05]), rel=1e-3)


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

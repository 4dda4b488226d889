"""What an environment's spaces mean: one thing to all workers, to evaluations, and to those who check."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple, flatten
from gymnasium.vector import AutoresetMode

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.observations import Observations, observations_of
from rlsync.runs.actors.envs.specs import GymnasiumEnvs, make_venv
from rlsync.runs.actors.envs.vectors import VectorEnvs
from rlsync.runs.actors.players.q import EpsilonGreedyPlayer, EpsilonLadder
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.evaluation.try_out import random_steps
from rlsync.runs.recipes.encoder import Masked
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.impala.heads import Categorical, MultiCategorical
from rlsync.runs.recipes.registry import SHIPPED, recipe_named
from rlsync.runs.recipes.spaces import ANY, ON_POLICY
from tests.tools.parts.space_envs import HINTED, ID, PARTS, SENT, spaced


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


def small(start: int) -> Discrete[Any]:
    """Of small numbers, where gymnasium can: 1.1 gives all the same dtype."""
    if "dtype" in inspect.signature(Discrete).parameters:
        return Discrete(3, start=start, dtype=np.int8)
    return Discrete(3, start=start)


@pytest.mark.parametrize("space", [Discrete(3), Discrete(3, start=-1), Discrete(2, start=10), small(-1)])
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


def test_a_recipe_that_cannot_leave_out_actions_refuses_a_mask_with_a_cure_that_it_takes() -> None:
    dreamer = recipe_named("dreamer_v3")
    masked = spaced(Dict(speed=Box(-1, 1, (2,)), action_mask=MultiBinary(2)))
    with pytest.raises(ConfigError, match="cannot leave out actions") as error:
        dreamer.probe(masked)
    assert error.value.where == "env.action_mask"
    assert "env.action_mask=none" in error.value.cure
    assert dreamer.probe(replace(masked, action_mask="none")).features == 4


# ----------------------------------------------------------------------------------- several parts


NESTED = Dict(
    near=Tuple((Box(-1, 1, (2, 2), np.float64), Discrete(3, start=-1))),
    bits=MultiBinary((2, 2)),
    gears=MultiDiscrete([[2, 3]], start=[[5, 0]]),
    camera=Box(0, 255, (8, 9, 3), np.uint8),
)


def test_parts_of_any_depth_are_seen_as_gymnasium_flattens_them() -> None:
    envs = make_venv(spaced(NESTED).spec(), 1)
    rows = envs.reset(5).clone()
    parts = envs.observations.split(rows)
    envs.close()
    answer = gymnasium.make(ID, observation=NESTED).reset(seed=5)[0]
    alone = {"near.0": answer["near"][0], "near.1": answer["near"][1], "bits": answer["bits"]}
    spaces = {"near.0": NESTED["near"][0], "near.1": NESTED["near"][1], "bits": NESTED["bits"]}
    for name, value in alone.items():
        flat = flatten(spaces[name], value)
        assert torch.equal(parts[name][0], torch.as_tensor(flat, dtype=torch.float32).reshape(-1)), name
    first, second = answer["gears"][0]
    assert parts["gears"][0].nonzero().flatten().tolist() == [first - 5, 2 + second]
    assert torch.equal(parts["camera"][0], torch.from_numpy(answer["camera"]).movedim(-1, 0))
    assert torch.equal(envs.observations.join(parts), rows)


@pytest.mark.parametrize("case", ["numbers", "picture and mask"])
def test_a_vector_environment_shows_the_rows_of_its_environments(case: str) -> None:
    def made() -> gymnasium.vector.VectorEnv[Any, Any, Any]:
        makes = [lambda: gymnasium.make(HINTED, parts=PARTS[case])] * 2
        return gymnasium.vector.SyncVectorEnv(makes, autoreset_mode=AutoresetMode.SAME_STEP)

    spec = GymnasiumEnvs(HINTED, {"parts": PARTS[case]})
    one, other = spec.envs(2), VectorEnvs(spec._checked_vector(made()), HINTED)
    observed = one.reset(3).clone()
    assert torch.equal(observed, other.reset(3))
    ends = 0
    for _ in range(40):
        allowed = one.observations.allowed(observed)
        action = torch.zeros(2, dtype=torch.int64) if allowed is None else allowed.int().argmax(-1)
        for envs in (one, other):
            envs.send(action)
        mine, theirs = one.recv(), other.recv()
        ends += len(mine.finals)
        for name in ("observation", "reward", "terminated", "truncated"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        for (env, last), (their_env, their_last) in zip(mine.finals, theirs.finals, strict=True):
            assert env == their_env
            assert torch.equal(last, their_last)
        observed = mine.observation
    assert ends
    one.close()
    other.close()


class Broken(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observes what a test puts in the place of a part."""

    def __init__(self, env: gymnasium.Env[Any, Any], part: str, value: Any) -> None:
        super().__init__(env)
        self._part, self._value = part, value

    def observation(self, observation: Any) -> Any:
        if self._value is None:
            return {name: value for name, value in observation.items() if name != self._part}
        return {**observation, self._part: self._value}


WRONG = {
    "'gear' is numbers from 9 to 9": ("gear", 9),
    "'gear' is missing": ("gear", None),
    r"'speed' is \[3\] of float64": ("speed", np.zeros(3)),
    r"'camera' is \[12, 12, 3\] of float32": ("camera", np.zeros((12, 12, 3), np.float32)),
    "'action_mask' is numbers from 0 to 7": ("action_mask", np.array([0, 0, 7, 1])),
    "a mask allows no action": ("action_mask", np.zeros(4, np.int8)),
}


@pytest.mark.parametrize(("what", "wrong"), WRONG.items())
def test_a_part_outside_its_space_is_refused_by_its_name(what: str, wrong: tuple[str, Any]) -> None:
    parts = {"parts": "speed,gear,camera,action_mask"}
    spec = GymnasiumEnvs(HINTED, parts, wrappers=(partial(Broken, part=wrong[0], value=wrong[1]),))
    envs = spec.envs(1)
    with pytest.raises(ConfigError, match=what) as refused:
        envs.reset(0)
    assert refused.value.where.startswith(f"reset() of the environment '{HINTED}'")
    envs.close()


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (EnvConfig(HINTED, kwargs={"parts": "gear"}, action_mask="info"), "'action_mask' is missing"),
        (spaced(Dict(gear=Discrete(2), action_mask=MultiBinary(3))), "a mask of 3 entries for 2 choices"),
        (
            replace(spaced(Discrete(2), Box(-1, 1, (2,))), action_mask="info"),
            "which no mask can forbid",
        ),
    ],
)
def test_a_mask_that_is_not_there_or_does_not_fit_is_refused(config: EnvConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_venv(config.spec(), 1).reset(0)


def test_a_mask_of_numbers_is_a_part_as_any_and_so_is_one_that_is_not_asked_for() -> None:
    masked = Dict(gear=Discrete(2), action_mask=MultiBinary(2))
    for config in (spaced(masked, Box(-1, 1, (2,))), replace(spaced(masked), action_mask="none")):
        spaces = ON_POLICY.probe(config)
        assert (spaces.observations.mask, spaces.features) == (None, 4)
    with pytest.raises(ConfigError, match="cannot leave out actions"):
        ANY.probe(spaced(masked))


# ------------------------------------------------------------------------------------------- masks


def masked_rows(count: int, choices: tuple[int, ...]) -> tuple[Observations, torch.Tensor]:
    """Rows with masks that allow at least one of each choice, and not all of all."""
    space = Dict(speed=Box(-1, 1, (2,)), action_mask=MultiBinary(sum(choices)))
    observations = observations_of(space, "drawn", choices=choices)
    dice = torch.Generator().manual_seed(1)
    mask = torch.cat([torch.eye(n)[torch.randint(n, (count,), generator=dice)] for n in choices], -1)
    mask = mask.maximum((torch.rand(mask.shape, generator=dice) < 0.4).float())
    speed = torch.randn(count, 2, generator=dice)
    return observations, observations.join({"speed": speed, "action_mask": mask})


@pytest.mark.parametrize("head", [Categorical(5), MultiCategorical((2, 3))], ids=["one", "several"])
def test_what_a_mask_forbids_has_no_probability_and_the_rest_have_those_of_the_logits(head: Any) -> None:
    actions = head.player_actions()
    observations, rows = masked_rows(400, actions.choices)
    network = Masked(torch.nn.Linear(rows.shape[-1], head.width), observations)
    with torch.no_grad():
        params = network(rows)
    allowed = observations.allowed(rows)
    assert allowed is not None
    dice = torch.Generator().manual_seed(0)
    drawn = [head.act(params, dice)[0], head.mode(params), actions.drawn(400, dice, CPU, allowed)]
    for action in drawn:
        assert (head.encode(action).bool() <= allowed).all(), "forbidden"
    log_prob, entropy = head.score(params, drawn[0])
    wanted = torch.zeros(400)
    spread = torch.zeros(400)
    each = zip(params.split(list(actions.choices), -1), allowed.split(list(actions.choices), -1), strict=True)
    for number, (logits, allows) in enumerate(each):
        one = torch.distributions.Categorical(logits=logits.masked_fill(~allows, -torch.inf))
        wanted += one.log_prob(drawn[0] if drawn[0].ndim == 1 else drawn[0][:, number])
        # that of torch is not a number where a logit is minus infinity
        spread += -(one.probs * one.probs.clamp_min(1e-38).log()).sum(-1)
    torch.testing.assert_close(log_prob, wanted)
    torch.testing.assert_close(entropy, spread)


def test_random_actions_are_spread_evenly_over_what_is_allowed() -> None:
    observations, rows = masked_rows(1, (4,))
    rows = rows.expand(20_000, -1)
    allowed = observations.allowed(rows)
    assert allowed is not None
    uniform = UniformPlayer(DiscreteActions(4), observations)
    explores = EpsilonGreedyPlayer(
        torch.nn.Linear(rows.shape[-1], 4),
        DiscreteActions(4),
        observations,
        ladder=EpsilonLadder(1.0),
        record_values=False,
    )
    for player in (uniform, explores):
        dice = torch.Generator().manual_seed(0)
        state = player.begin(len(rows), dice)
        acted = player.act(rows, torch.ones(len(rows), dtype=torch.bool), rows[:, 0], state, dice)
        shares = torch.bincount(acted.action, minlength=4) / len(rows)
        assert (shares[~allowed[0]] == 0).all()
        assert (shares[allowed[0]] - 1 / int(allowed[0].sum())).abs().max() < 0.02

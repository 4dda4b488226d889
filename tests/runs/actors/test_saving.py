"""What goes on from a saved environment answers as that does, in wrappers of gymnasium's; others are not saved."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import wrappers
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymEnv

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.answers import CheckedEnv
from rlsync.runs.actors.envs.saving import state_of
from rlsync.runs.actors.envs.specs import GymnasiumEnvs, TorchRLEnvs, make_venv
from rlsync.runs.actors.envs.vectors import Envs, EnvStep, VectorEnvs
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.player import Seat
from rlsync.runs.actors.roller import Roller
from rlsync.runs.evaluation.try_out import random_steps
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from tests.tools.parts import saving_envs

LIMIT = 20


def steps(envs: Envs, count: int, seed: int) -> list[EnvStep]:
    return list(random_steps(envs, torch.Generator().manual_seed(seed), count))


def same(one: Sequence[EnvStep], other: Sequence[EnvStep]) -> bool:
    """Whether both answered the same, to the last bit."""
    for ours, theirs in zip(one, other, strict=True):
        for name in ("observation", "reward", "terminated", "truncated"):
            if not torch.equal(getattr(ours, name), getattr(theirs, name)):
                return False
    return True


WRAPPERS: dict[str, Any] = {
    "bare": None,
    "time-aware": wrappers.TimeAwareObservation,
    "delayed": partial(wrappers.DelayObservation, delay=2),
    "sticky": partial(wrappers.StickyAction, repeat_action_probability=0.5),
    "normalized": wrappers.NormalizeObservation,
    "rewards normalized": wrappers.NormalizeReward,
    "statistics": partial(wrappers.RecordEpisodeStatistics, buffer_length=3),
    "a function": partial(wrappers.TransformReward, func=lambda reward: 2 * reward),
    "flat": wrappers.FlattenObservation,
    "skipping": partial(wrappers.MaxAndSkipObservation, skip=2),
    "checked": wrappers.PassiveEnvChecker,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.parametrize("env", ["Saving-v0", "Around-v0"])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_after_a_load_the_same_actions_are_answered(env: str, frame_stack: int, wrap: Any) -> None:
    around = () if wrap is None else (wrap,)
    name = f"{saving_envs.MODULE}:{env}"
    spec = GymnasiumEnvs(name, wrappers=around, max_episode_steps=LIMIT, frame_stack=frame_stack)
    with closing(make_venv(spec, 2, seed=0)) as one, closing(make_venv(spec, 2, seed=7)) as other:
        steps(one, LIMIT // 2 + 3, seed=0)
        states = one.saved()
        assert states is not None
        saved = pickle.dumps(states)
        after = steps(one, LIMIT, seed=1)
        assert sum(int(answer.truncated.sum()) for answer in after) >= 2
        assert not same(after, steps(other, LIMIT, seed=1)), "they are different ones"
        other.load(pickle.loads(saved))
        assert same(after, steps(other, LIMIT, seed=1))


def test_what_cannot_be_saved_says_so_and_is_not_asked() -> None:
    def many() -> SyncVectorEnv:
        make = [partial(gymnasium.make, f"{saving_envs.MODULE}:Saving-v0")] * 2
        return SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)

    for env in ("Windy-v0", "Hiding-v0"):
        with closing(make_venv(GymnasiumEnvs(f"{saving_envs.MODULE}:{env}"), 2, seed=0)) as envs:
            assert envs.saved() is None
    with closing(make_venv(TorchRLEnvs(partial(GymEnv, "CartPole-v1")), 1, seed=0)) as envs:
        assert envs.saved() is None
    with closing(VectorEnvs(many(), "many")) as envs:
        assert envs.saved() is None
        with pytest.raises(TypeError, match="VectorEnvs cannot be saved"):
            envs.load([])


def test_an_attribute_and_a_property_are_no_methods() -> None:
    class Reading(saving_envs.Windy):
        def load(self, file: str) -> None:
            raise AssertionError(file)

    class Looking(gymnasium.Wrapper[Any, Any, Any, Any]):
        @property
        def state(self) -> int:
            raise AssertionError("nobody asks")

        load = Reading.load

    env = Reading()
    env.reset(seed=0)
    assert env.state is not None
    for each in (env, Looking(saving_envs.Saving())):
        assert state_of(CheckedEnv(each, "env")) is None


def test_who_raises_is_named() -> None:
    with closing(make_venv(GymnasiumEnvs(f"{saving_envs.MODULE}:Raises-v0"), 1, seed=0)) as envs:
        with pytest.raises(ConfigError) as raised:
            envs.saved()
    assert raised.value.where == f"{saving_envs.MODULE}.Raises.state()"
    assert "neither method" in raised.value.cure


@pytest.mark.parametrize("overlap", [False, True])
def test_a_worker_that_goes_on_makes_the_rollout_that_the_other_one_makes(overlap: bool) -> None:
    """With what its player remembers, the last reward, and the returns of the episodes that have begun."""
    spec = GymnasiumEnvs(f"{saving_envs.MODULE}:Saving-v0", max_episode_steps=LIMIT)
    torch.manual_seed(0)
    player = ImpalaNet((4,), Categorical(2), hidden=(8,), lstm=4, last_reward=True).player()
    shape = RolloutShape(LIMIT - 8, 4)
    layout = shape.layout(player)
    names = [entry.leaf.name for entry in layout.entries]

    def roller(seed: int) -> Roller:
        made = Roller(Seat.taken(player, seed), partial(make_venv, spec), shape, overlap=overlap)
        made.reset(seed)
        return made

    slots = itertools.count()

    def rolled(roller: Roller) -> dict[str, torch.Tensor]:
        image = torch.zeros(layout.image_bytes, dtype=torch.uint8)
        views = dict(zip(names, layout.views(image), strict=True))
        assert roller.roll(next(slots), views, 1, lambda: False)
        return views

    one, other = roller(0), roller(9)
    rolled(one)
    saved = one.saved()
    assert saved is not None
    rolled(other)
    other.load(saved)
    other.standing = one.standing._replace(states=other.standing.states)  # the same random numbers
    ours, theirs = rolled(one), rolled(other)
    assert bool(ours["episode_return"].any())
    assert not bool(ours["is_init"][0].any())
    assert bool(ours["last_reward"].all())
    for name, array in ours.items():
        assert torch.equal(array, theirs[name]), name
    one.close()
    other.close()

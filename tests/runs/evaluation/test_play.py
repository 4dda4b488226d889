"""Episodes that are played: what a player is told in them, and which environments they are of."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from torch import Tensor

from rlsync.core.errors import RlsyncError
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.player import Acted, Player, State
from rlsync.runs.evaluation.play import Episode, Patience, Score, at_once, play
from rlsync.runs.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet, make_venv


def test_every_environment_plays_its_share_and_each_step_is_yielded() -> None:
    envs = make_venv(GymnasiumEnvs("CartPole-v1"), 3)
    steps = list(play(ImpalaNet((4,), Categorical(2)).player(), envs, 12, seed=0))
    envs.close()
    lengths = [episode.length for ended in steps for episode in ended]
    assert len(lengths) == 12
    assert steps[0] == [], "the reset"
    assert steps[-1] != [], "not a step more than needed"
    assert sum(lengths) <= 3 * (len(steps) - 1)


def test_environments_share_episodes_equally_and_are_eight_at_most() -> None:
    assert [at_once(episodes) for episodes in (20, 3, 11, 64)] == [5, 3, 1, 8]


def test_a_steady_version_ranks_above_a_lucky_one() -> None:
    steady = Score(16, 470.0, 4.0, 460.0, 480.0, 470.0)
    lucky = Score(16, 475.0, 60.0, 300.0, 500.0, 475.0)
    assert steady.rank > lucky.rank
    assert Score(1, 475.0, 0.0, 475.0, 475.0, 475.0).rank == 475.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_return_that_is_not_a_number_makes_a_score_that_ranks_last(bad: float) -> None:
    score = Score.of([Episode(20.0, 20), Episode(bad, 10)])
    assert (score.episodes, score.length_mean, score.rank) == (2, 15.0, -math.inf)
    assert math.isnan(score.return_mean)
    assert str(score) == "no mean return: one is infinite or not a number  length 15.0"
    assert math.isnan(Score.of([Episode(1e308, 1)] * 2).return_std), "their sum is infinite"


class Still(gymnasium.Env[Any, Any]):
    """Its first episode ends after three steps, and no other one does."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, ends: bool = False) -> None:
        self._ends = ends
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return np.zeros(4, np.float32), 1.0, self._ends and self._steps == 3, False, {}


gymnasium.register("Still-v0", Still)


def played(episodes: int, patience: Patience, **options: Any) -> list[Episode]:
    envs = make_venv(GymnasiumEnvs("Still-v0", options), episodes)
    try:
        return [each for ended in play(Recorder(), envs, episodes, 0, patience=patience) for each in ended]
    finally:
        envs.close()


def test_an_episode_that_never_ends_is_given_up_after_so_many_steps_or_seconds() -> None:
    for patience, after, limit in (
        (Patience(steps=50), "50 steps", "steps=50"),
        (Patience(seconds=1e-3), r"0\.001 s and \d+ steps", "s=0.001"),
    ):
        with pytest.raises(RlsyncError, match=f"^an episode has not ended after {after}\n") as error:
            played(2, patience)
        assert error.value.where == f"recipe.evaluation.give_up_after_{limit}"
        assert "env.max_episode_steps" in error.value.cure
    assert [episode.length for episode in played(2, Patience(steps=50), max_episode_steps=49)] == [49, 49]


def test_what_goes_on_after_the_episodes_that_count_is_no_endless_episode() -> None:
    assert played(1, Patience(steps=4), ends=True) == [Episode(3.0, 3)]


class Recorder(Player):
    """Pushes left, and writes down what it is told."""

    modules: ClassVar[dict[str, torch.nn.Module]] = {}
    actions = DiscreteActions(2)
    observation_shape = (4,)
    observation_dtype = torch.float32

    def __init__(self) -> None:
        self.told: list[tuple[Tensor, Tensor, Tensor]] = []

    def begin(
        self, num_envs: int, generator: torch.Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        self.told.clear()
        return {"steps": torch.zeros(num_envs)}

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: torch.Generator,
    ) -> Acted:
        assert state["steps"].tolist() == [len(self.told)] * len(observation)
        self.told.append((observation.clone(), is_init.clone(), reward.clone()))
        action = torch.zeros(len(observation), dtype=torch.int64)
        return Acted(action, {}, {"steps": state["steps"] + 1})


def test_a_player_is_told_where_episodes_begin_and_what_the_last_action_brought() -> None:
    actor, envs = Recorder(), make_venv(GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 5}), 2)
    assert len(list(play(actor, envs, 4, seed=0))) == 1 + 2 * 5
    envs.close()
    observations, begins, rewards = map(torch.stack, zip(*actor.told, strict=True))
    assert begins.nonzero().tolist() == [[0, 0], [0, 1], [5, 0], [5, 1]]
    assert rewards.tolist() == [[0.0, 0.0], *[[1.0, 1.0]] * 9]
    assert observations[begins].abs().max() < 0.05 < observations[~begins].abs().amax(-1).min()


def test_a_recurrent_network_acts_with_what_it_saw_of_this_episode_only() -> None:
    torch.manual_seed(0)
    net = ImpalaNet((3,), Categorical(4), hidden=(8,), lstm=8, last_action=True, last_reward=True)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter)
    steps, envs = 12, 5
    seen, reward = torch.randn(steps, envs, 3), torch.randn(steps, envs)
    is_init = torch.rand(steps, envs) < 0.3
    is_init[0] = True
    player, generator = net.player(deterministic=True), torch.Generator()
    state, actions = player.begin(envs, generator), []
    with torch.no_grad():
        for step in zip(seen, is_init, reward, strict=True):
            acted = player.act(*step, state, generator)
            state = acted.state
            actions.append(acted.action)
        taken = torch.stack(actions)
        before = torch.cat([torch.zeros_like(taken[:1]), taken[:-1]])
        at_once = net(seen, is_init, net.initial_state(envs), before, reward)
    assert torch.equal(taken, net.head.mode(at_once.params))
    assert len(taken.unique()) > 1

"""The environments of recipes: one or several in a worker make gymnasium's frames."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from tensordict import TensorDict

from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.spaces import ANY

SEED, STEPS = 5, 60


def rollout(config: EnvConfig) -> TensorDict:
    """Frames ``[num_envs, STEPS]`` of random actions, over the ends of episodes."""
    spaces = ANY.probe(config)
    player = UniformPlayer(spaces.player_actions(), spaces.observation_shape, spaces.observation_dtype)
    settings = CollectSettings(
        steps=STEPS,
        envs_per_worker=config.num_envs,
        seed=SEED,
        transitions=True,
        clip_reward=config.clip_reward,
    )
    collector = UnrollCollector(player, config.spec(), settings, num_workers=0)
    try:
        return next(iter(collector)).clone()
    finally:
        collector.shutdown()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_each_environment_of_a_worker_makes_the_frames_of_one_that_gymnasium_made(num_envs: int) -> None:
    batch = rollout(EnvConfig("CartPole-v1", num_envs, {"max_episode_steps": 15}))
    assert batch.batch_size == (num_envs, STEPS)
    assert batch["next", "truncated"].any()
    assert batch["next", "terminated"].any()
    for frames in batch:
        alone = gymnasium.make("CartPole-v1", max_episode_steps=15)
        assert frames["next", "done"].sum() >= 3
        length = 0
        for frame in frames:
            assert bool(frame["is_init"]) == (length == 0)
            if length == 0:  # a first observation is drawn; what follows from it is not
                alone.reset()
                alone.unwrapped.state = frame["observation"].double().numpy()
            observation, reward, terminated, truncated, _ = alone.step(int(frame["action"].argmax()))
            length += 1
            ended = terminated or truncated
            if truncated or not terminated:  # after a terminated step it is that of the next episode
                torch.testing.assert_close(frame["next", "observation"], torch.as_tensor(observation))
            assert float(frame["next", "reward"]) == reward
            assert bool(frame["next", "terminated"]) == terminated
            assert bool(frame["next", "truncated"]) == truncated
            assert bool(frame["next", "done"]) == ended
            assert int(frame["collector", "episode_length"]) == length * ended
            assert float(frame["collector", "episode_return"]) == length * ended
            length = 0 if ended else length


@pytest.mark.parametrize("num_envs", [2, 3])
def test_the_environments_of_a_worker_have_seeds_of_their_own(num_envs: int) -> None:
    config = EnvConfig("Pendulum-v1", num_envs)
    first = rollout(config)["observation"][:, 0]
    assert len(first.unique(dim=0)) == num_envs
    assert torch.equal(first, rollout(config)["observation"][:, 0])

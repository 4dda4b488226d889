"""The loss of dreamer_v1: what it makes of rewards, of what is imagined, and of its settings."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from rlsync.runs.recipes.dreamer.config import DreamerV1Config
from rlsync.runs.recipes.dreamer.v1 import DreamerV1Loss, make_loss
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.settings import EnvConfig
from rlsync.runs.recipes.spaces import BOX
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes.test_dreamer_recipes import built, small
from tests.runs.recipes.test_recipes import trained

STATE, BELIEF = 4, 16
SPACES = BOX.probe(EnvConfig("Pendulum-v1"))


def loss_of(**settings: float) -> DreamerV1Loss:
    """A loss of small networks, which are the same each time."""
    torch.manual_seed(0)
    return make_loss(DreamerV1Config(cells=BELIEF, belief=BELIEF, state=STATE, **settings), SPACES)


def sample() -> TensorDict:
    rows = {
        "state": torch.zeros(3, 5, STATE),
        "belief": torch.zeros(3, 5, BELIEF),
        "action": torch.rand(3, 5, 1),
        "next": {"observation": torch.randn(3, 5, 3), "reward": -16 * torch.rand(3, 5, 1)},
    }
    return TensorDict(rows, [3, 5])


def losses(loss: DreamerV1Loss, rows: TensorDict) -> dict[str, float]:
    torch.manual_seed(1)
    return {key: float(value.detach()) for key, value in loss(rows).items()}


def test_the_loss_learns_scaled_rewards_and_leaves_the_rows_as_they_are() -> None:
    rows = sample()
    smaller = rows.clone()
    smaller["next", "reward"] /= 8
    kept = rows.clone()
    of_rows, of_smaller = losses(loss_of(reward_scale=0.125), rows), losses(loss_of(), smaller)
    assert of_rows == pytest.approx(of_smaller)
    assert of_rows["loss_model_reward"] != pytest.approx(losses(loss_of(), rows)["loss_model_reward"])
    assert (rows == kept).all()


def test_errors_of_observations_rewards_and_values_count_half_of_their_squares() -> None:
    """Equations 7 and 10 of Hafner et al. 2019, with normal distributions of deviation 1."""
    rows, loss = sample(), loss_of()
    found = losses(loss, rows)
    torch.manual_seed(1)
    after = loss.model_loss.world_model(rows.clone())["next"].detach()
    of_rewards = rows["next", "reward"] - after["reward"]
    of_observations = rows["next", "observation"] - after["reco_pixels"].reshape(3, 5, 3)
    assert found["loss_model_reward"] == pytest.approx(float(of_rewards.square().mean()) / 2)
    assert found["loss_model_reco"] == pytest.approx(float(of_observations.square().sum(-1).mean()) / 2)
    _, imagined = loss.actor_loss(after.select("state", "belief").reshape(-1))
    values = loss.value_loss.value_model(imagined.select("state", "belief"))["state_value"]
    weight = 0.99 ** torch.arange(imagined.shape[1]).unsqueeze(-1)
    of_values = (weight * (values - imagined["lambda_target"]).square()).sum((1, 2)).mean()
    assert found["loss_value"] == pytest.approx(float(of_values.detach()) / 2, rel=1e-5)


def test_free_nats_are_free_in_the_mean_of_all_rows_and_not_in_each_row() -> None:
    model_loss = loss_of(free_nats=3.0).model_loss
    apart = torch.tensor([[0.0], [20.0]]).sqrt()  # 0 and 10 nats
    ones = torch.ones(2, 1)
    assert float(model_loss.kl_loss(0 * apart, ones, apart, ones)) == pytest.approx(5.0)
    assert float(model_loss.kl_loss(0 * apart, ones, apart / 2, ones)) == pytest.approx(3.0)


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_a_scale_of_rewards_changes_neither_stored_rewards_nor_logged_returns() -> None:
    config = small(
        "dreamer_v1", "recipe.reward_scale=0.125", "recipe.total_frames=224", "collector.num_workers=0"
    )  # of which the first 200 are an episode
    trainer = built(config)
    (returns,) = (m for m in registered_modules(trainer) if isinstance(m, EpisodeReturns))
    trained(trainer)
    rows = trainer.replay_buffer[:]
    episode = rows[rows["row"].flatten().argsort()][1:201]
    assert returns.mean == pytest.approx(float(episode["next", "reward"].sum()), rel=1e-4)
    seen = rows[rows["row"].flatten().argsort()][:200]["next", "observation"]
    cos, sin, speed = seen.double().unbind(-1)
    action = episode["action"][:, 0].double().clamp(-2, 2)
    real = -(torch.atan2(sin, cos).square() + 0.1 * speed.square() + 0.001 * action.square())
    torch.testing.assert_close(episode["next", "reward"][:, 0].double(), real, atol=1e-3, rtol=1e-3)


def test_lambda_targets_are_those_of_the_paper() -> None:
    """Equation 6 of Hafner et al. 2019, in its recursive form."""
    loss = loss_of(gamma=0.9, gae_lambda=0.8)
    start = TensorDict({"state": torch.randn(6, STATE), "belief": torch.rand(6, BELIEF)}, [6])
    with torch.no_grad():
        _, imagined = loss.actor_loss(start)
        values = loss.value_loss.value_model(imagined["next"].select("state", "belief"))["state_value"]
    target = values[:, -1]
    for step in reversed(range(imagined.shape[1])):
        target = imagined["next", "reward"][:, step] + 0.9 * (0.2 * values[:, step] + 0.8 * target)
        torch.testing.assert_close(imagined["lambda_target"][:, step], target)


def test_the_weight_of_the_difference_of_prior_and_posterior_is_that_of_the_config() -> None:
    rows = sample()
    light, full = losses(loss_of(free_nats=0.0, kl_scale=0.25), rows), losses(loss_of(free_nats=0.0), rows)
    assert light["loss_model_kl"] == pytest.approx(full["loss_model_kl"] / 4)
    assert light["loss_model_reco"] == pytest.approx(full["loss_model_reco"])


def test_the_spread_of_the_actor_begins_where_the_config_says_and_does_not_fall_below_its_least() -> None:
    actor = loss_of(actor_std=1.0, actor_least_std=0.1).actor_loss.actor_model
    states = TensorDict({"state": torch.zeros(1, STATE), "belief": torch.zeros(1, BELIEF)}, [1])
    layers = [module for module in actor.modules() if isinstance(module, torch.nn.Linear)]
    with torch.no_grad():
        layers[-1].weight.zero_()
        for bias, spread in ((0.0, 1.0), (-100.0, 0.1)):
            layers[-1].bias.fill_(bias)
            assert float(actor(states)["scale"]) == pytest.approx(spread, abs=1e-4)

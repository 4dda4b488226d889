"""ppo makes one choice or several, or draws numbers; what acts, what learns and what is recorded agree in all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete, Space
from tensordict import TensorDict
from torch import Tensor, distributions, nn

from rlsync.core.errors import ConfigError
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.registry import recipe_named
from rlsync.runs.recipes.run_files import statistics_in
from rlsync.runs.recipes.settings import PPOConfig
from rlsync.runs.recipes.spaces import Spaces
from tests.tools.parts.space_envs import spaced
from tests.tools.programs import ENDS_WITHIN_S, run_program

BOXES = {
    "bounded": Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32)),
    "half bounded": Box(np.array([0.0, -1.0], np.float32), np.array([np.inf, 1.0], np.float32)),
    "unbounded": Box(-np.inf, np.inf, (2,)),
    "float64": Box(-1.0, 1.0, (2,), np.float64),
}


def spaces_of(space: Space[Any]) -> Spaces:
    spaces: Spaces = recipe_named("ppo").probe(spaced(action=space))
    return spaces


def drawn(
    spaces: Spaces, *, deterministic: bool = False
) -> tuple[ppo.ClipPPOLoss, Tensor, Tensor, dict[str, Tensor]]:
    """A loss, and observations ``[64, 2]`` with actions and records of its player."""
    torch.manual_seed(0)
    loss = ppo.make_loss(PPOConfig(hidden=[8]), spaces)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    player = ppo.player_of(loss.actor_network, spaces, deterministic=deterministic)
    observation = torch.randn(64, spaces.features)
    with loss.actor_network_params.to_module(loss.actor_network), torch.no_grad():
        acted = player.act(
            observation,
            torch.ones(64, dtype=torch.bool),
            torch.zeros(64),
            {},
            torch.Generator().manual_seed(1),
        )
    return loss, observation, acted.action, dict(acted.records)


@pytest.mark.parametrize("box", BOXES)
def test_the_recorded_log_probability_is_that_of_the_losses_distribution(box: str) -> None:
    loss, observation, action, records = drawn(spaces_of(BOXES[box]))
    with loss.actor_network_params.to_module(loss.actor_network), torch.no_grad():
        loc, scale = loss.actor_network[0].module(observation)
    normal = distributions.Independent(distributions.Normal(loc, scale), 1)
    torch.testing.assert_close(records["action_log_prob"], normal.log_prob(action))
    assert scale.unique(dim=0).shape[0] == 1, "the scale does not depend on the observation"


@pytest.mark.parametrize("nvec", [[3, 3], [2, 5, 3]])
def test_of_several_choices_the_recorded_log_probability_is_that_of_the_losses_distribution(
    nvec: list[int],
) -> None:
    loss, observation, action, records = drawn(spaces_of(MultiDiscrete(nvec, start=[7] * len(nvec))))
    with loss.actor_network_params.to_module(loss.actor_network), torch.no_grad():
        logits = loss.actor_network[0].module(observation).split(nvec, -1)
        torchrls = loss.actor_network.get_dist(TensorDict({"observation": observation}, [64]))
    of_each = [distributions.Categorical(logits=each).log_prob(action[:, i]) for i, each in enumerate(logits)]
    torch.testing.assert_close(records["action_log_prob"], sum(of_each))
    torch.testing.assert_close(records["action_log_prob"], torchrls.log_prob(action))
    _, _, action, _ = drawn(spaces_of(MultiDiscrete(nvec)), deterministic=True)
    assert torch.equal(action, torch.stack([each.argmax(-1) for each in logits], -1))


def test_the_likeliest_action_is_the_location() -> None:
    loss, observation, action, records = drawn(spaces_of(BOXES["bounded"]), deterministic=True)
    with loss.actor_network_params.to_module(loss.actor_network), torch.no_grad():
        loc, _ = loss.actor_network[0].module(observation)
    torch.testing.assert_close(action, loc)
    assert not records


@pytest.mark.parametrize("box", BOXES)
def test_the_environment_gets_what_is_nearest_within_its_bounds(box: str) -> None:
    space = BOXES[box]
    spaces = spaces_of(space)
    _, _, action, _ = drawn(spaces)
    sent = spaces.player_actions().sent(3 * action).numpy()
    assert all(space.contains(each.astype(space.dtype)) for each in sent)
    if box == "bounded":
        assert (sent != 3 * action.numpy()).any()


def test_a_number_that_can_only_be_one_is_still_refused() -> None:
    with pytest.raises(ConfigError, match="number 1 of its action can only be 1"):
        spaces_of(Box(np.array([0, 1], np.float32), np.array([1, 1], np.float32)))


def test_networks_begin_as_the_keys_say() -> None:
    spaces = spaces_of(BOXES["bounded"])
    keys = {"hidden": [16, 16], "activation": "relu", "initial_weights": "torch", "initial_log_scale": -2}
    loss = ppo.make_loss(PPOConfig(**keys), spaces)
    _, scale = loss.actor_network[0].module(torch.zeros(3, spaces.features))
    torch.testing.assert_close(scale, torch.full((3, 2), -2.0).exp())
    for network in (loss.actor_network, loss.critic_network):
        kinds = {type(module) for module in network.modules()}
        assert (nn.ReLU in kinds, nn.Tanh in kinds) == (True, False)
        for layer in (module for module in network.modules() if isinstance(module, nn.Linear)):
            bound = layer.in_features**-0.5
            assert 0 < layer.bias.abs().max() <= bound
            assert bound / 2 < layer.weight.abs().max() <= bound


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_ppo_learns_to_run_with_normalised_observations_and_rewards(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    words = ("recipe=ppo", "env=halfcheetah", "logger=none", "run_dir=run", "recipe.compile=off")
    words = (*words, "recipe.total_frames=20480")
    done = run_program("rlsync", "train", *words, cwd=tmp_path, timeout_s=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stderr
    statistics = statistics_in(tmp_path / "run")
    assert statistics is not None
    assert statistics.return_mean is not None
    assert statistics.return_mean > 50, "random actions get about -280"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.thorough
def test_ppo_swings_a_pendulum_up_with_its_tuned_settings(tmp_path: Path) -> None:
    words = ("recipe=ppo", "env=pendulum", "logger=none", "run_dir=run", "recipe.compile=off")
    done = run_program("rlsync", "train", *words, cwd=tmp_path, timeout_s=ENDS_WITHIN_S)
    assert done.returncode == 0, done.stderr
    statistics = statistics_in(tmp_path / "run")
    assert statistics is not None
    assert statistics.return_mean is not None
    assert statistics.return_mean > -400, "a still pendulum gets about -1500"

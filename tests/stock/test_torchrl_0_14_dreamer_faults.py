"""Faults of TorchRL 0.14 around Dreamer players: see test_torchrl_0_14_faults.py."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.objectives import DreamerActorLoss

from rlsync import DreamerPlayer
from tests.stock.faults import still_happens
from tests.tools.dreamer_parts import BELIEF, STATE, make_dreamer_env, make_v3
from tests.tools.parts import ACTIONS, OBSERVATIONS


def test_fault_33_a_primer_leaves_the_previous_action_of_dreamer_at_zero() -> None:
    player = DreamerPlayer(make_v3().player)
    stock = Collector(lambda: make_dreamer_env(player), player.player, frames_per_batch=20, total_frames=-1)
    frames = next(iter(stock))
    stock.shutdown()
    still_happens(33, not frames["previous_action"].any(), "rlsync/torchrl_plugin/dreamer/player.py")


def test_fault_34_the_first_action_of_an_episode_is_masked_in_frames_as_they_are_collected() -> None:
    """Row 0 holds the first action and the observation that it leads to; ``is_init`` masks that action."""
    world_model = make_v3().model_loss.world_model

    def believed(first_action: int) -> torch.Tensor:
        torch.manual_seed(0)
        rows = {
            "state": torch.zeros(1, 3, STATE),
            "belief": torch.zeros(1, 3, BELIEF),
            "action": torch.eye(ACTIONS)[torch.tensor([[first_action, 0, 0]])],
            "is_init": torch.tensor([[[True], [False], [False]]]),
            "next": {"observation": torch.ones(1, 3, OBSERVATIONS)},
        }
        with torch.no_grad():
            return world_model(TensorDict(rows, [1, 3]))["next", "belief"]

    still_happens(
        46, torch.equal(believed(0), believed(1)), "docs/how_to/dreamer_players.md, the replayed rows"
    )


def test_fault_47_the_lambda_targets_of_dreamer_v1_are_those_of_one_step() -> None:
    """The loss hands over a tensordict without a batch, so the last dimension is taken for time."""
    rewards, values = torch.randn(2, 5, 15, 1).unbind()

    def targets(**settings: int) -> torch.Tensor:
        loss = DreamerActorLoss(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity())
        loss.make_value_estimator(gamma=0.99, lmbda=0.95, **settings)
        return loss.lambda_target(rewards, values)

    one_step = rewards + 0.99 * values
    assert not torch.allclose(targets(time_dim=-2), one_step)
    still_happens(47, torch.allclose(targets(), one_step), "rlsync/runs/recipes/dreamer/v1.py (time_dim)")

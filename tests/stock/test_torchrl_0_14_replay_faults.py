"""Faults of TorchRL 0.14 around replay buffers: see test_torchrl_0_14_faults.py."""

from __future__ import annotations

import pytest
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import MultiStep, OneHot
from torchrl.modules import QValueActor, ValueOperator
from torchrl.objectives import DQNLoss, HardUpdate, TD3Loss

from rlsync.runs.recipes import dqn
from tests.runs.recipes.test_off_policy import rollout
from tests.stock.faults import still_happens


def test_fault_32_the_end_of_an_episode_is_lost_in_returns_of_several_steps() -> None:
    summed = MultiStep(gamma=1.0, n_steps=3)(rollout([False, False, True]))
    reaches_the_end = summed["next", "observation"].flatten().tolist() == [3.0, 3.0, 3.0]
    says_so = summed["next", "terminated"].flatten().tolist()
    still_happens(32, reaches_the_end and says_so != [True] * 3, "rlsync/runs/recipes/replay/memory.py")


def test_fault_49_a_loss_that_doubles_a_critic_gives_both_copies_wider_weights_than_it_had() -> None:
    """It draws them anew, uniformly between the smallest and the largest, whatever their distribution was."""
    layer = nn.Linear(256, 256)
    nn.init.orthogonal_(layer.weight)
    actor = TensorDictModule(nn.Linear(255, 1), in_keys=["observation"], out_keys=["action"])
    critic = ValueOperator(layer, in_keys=["observation", "action"])
    loss = TD3Loss(actor, critic, num_qvalue_nets=2, bounds=(-1.0, 1.0))
    doubled = loss.qvalue_network_params["module", "weight"]
    wider = bool(doubled.std() > 1.5 * layer.weight.std())
    still_happens(49, wider, "rlsync/runs/recipes/replay/building.py (twin_critics)")


def copies(updater: type[HardUpdate], interval: int, counted: int = 0) -> list[int]:
    """At which of ten steps the target network becomes the trained one."""
    loss = DQNLoss(QValueActor(nn.Linear(1, 2), spec=OneHot(2)), action_space=OneHot(2), delay_value=True)
    update, copied = updater(loss, value_network_update_interval=interval), []
    update.load_state_dict({"counter": counted})
    trained = loss.value_network_params["module", "0", "module", "weight"]
    target = loss.target_value_network_params["module", "0", "module", "weight"]
    for step in range(1, 11):
        trained.data.fill_(step)
        update.step()
        copied += [step] * bool((target == step).all())
    return copied


def test_fault_51_the_target_network_is_copied_at_every_interval_plus_one_steps() -> None:
    wrong = copies(HardUpdate, 3) != [3, 6, 9] or copies(HardUpdate, 3, counted=5) == []
    still_happens(51, wrong, "rlsync/runs/recipes/dqn.py (CopyEvery)")


@pytest.mark.parametrize(
    ("interval", "counted", "steps"),
    [(3, 0, [3, 6, 9]), (1, 0, list(range(1, 11))), (3, 2, [1, 4, 7, 10]), (3, 5, [1, 4, 7, 10])],
)
def test_dqn_copies_its_target_at_every_interval_also_of_a_resumed_run_that_made_it_smaller(
    interval: int, counted: int, steps: list[int]
) -> None:
    assert copies(dqn.CopyEvery, interval, counted) == steps

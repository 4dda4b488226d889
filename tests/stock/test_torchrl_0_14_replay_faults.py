"""Faults of TorchRL 0.14 around replay buffers: see test_torchrl_0_14_faults.py."""

from __future__ import annotations

from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import MultiStep
from torchrl.modules import ValueOperator
from torchrl.objectives import TD3Loss

from tests.recipes.test_off_policy import rollout
from tests.stock.faults import still_happens


def test_fault_32_the_end_of_an_episode_is_lost_in_returns_of_several_steps() -> None:
    summed = MultiStep(gamma=1.0, n_steps=3)(rollout([False, False, True]))
    reaches_the_end = summed["next", "observation"].flatten().tolist() == [3.0, 3.0, 3.0]
    says_so = summed["next", "terminated"].flatten().tolist()
    still_happens(32, reaches_the_end and says_so != [True] * 3, "rlsync/recipes/replay/memory.py")


def test_fault_49_a_loss_that_doubles_a_critic_gives_both_copies_wider_weights_than_it_had() -> None:
    """It draws them anew, uniformly between the smallest and the largest, whatever their distribution was."""
    layer = nn.Linear(256, 256)
    nn.init.orthogonal_(layer.weight)
    actor = TensorDictModule(nn.Linear(255, 1), in_keys=["observation"], out_keys=["action"])
    critic = ValueOperator(layer, in_keys=["observation", "action"])
    loss = TD3Loss(actor, critic, num_qvalue_nets=2, bounds=(-1.0, 1.0))
    doubled = loss.qvalue_network_params["module", "weight"]
    wider = bool(doubled.std() > 1.5 * layer.weight.std())
    still_happens(49, wider, "rlsync/recipes/replay/building.py (twin_critics)")

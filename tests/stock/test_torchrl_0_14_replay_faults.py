"""Faults of TorchRL 0.14 around replay buffers: see test_torchrl_0_14_faults.py."""

from __future__ import annotations

from torchrl.data import MultiStep

from tests.stock.faults import still_happens
from tests.test_off_policy import rollout


def test_fault_32_the_end_of_an_episode_is_lost_in_returns_of_several_steps() -> None:
    summed = MultiStep(gamma=1.0, n_steps=3)(rollout([False, False, True]))
    reaches_the_end = summed["next", "observation"].flatten().tolist() == [3.0, 3.0, 3.0]
    says_so = summed["next", "terminated"].flatten().tolist()
    still_happens(32, reaches_the_end and says_so != [True] * 3, "rlsync/recipes/off_policy/memory.py")

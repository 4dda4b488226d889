"""What the networks of both Dreamers have in common."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.data import Composite, Unbounded
from torchrl.envs.model_based import DreamerEnv
from torchrl.modules import WorldModelWrapper
from torchrl.objectives import LossModule

from rlsync import DreamerPlayer
from rlsync.recipes.dreamer.config import DreamerConfig
from rlsync.recipes.spaces import Spaces

#: What heads read while sequences are replayed, and while steps are imagined.
REPLAYED, IMAGINED = [("next", "state"), ("next", "belief")], ["state", "belief"]


def imagined_env(
    transition: TensorDictModuleBase,
    reward: TensorDictModuleBase,
    state: int,
    recipe: DreamerConfig,
    spaces: Spaces,
) -> DreamerEnv:
    """The environment in which an actor's steps are imagined; ``state`` is the width of what is drawn."""
    world = WorldModelWrapper(transition, reward)
    env = DreamerEnv(world, prior_shape=(state,), belief_shape=(recipe.belief,))
    env.observation_spec = Composite(state=Unbounded(state), belief=Unbounded(recipe.belief))
    env.state_spec = env.observation_spec.clone()
    env.action_spec, env.reward_spec = spaces.action_spec, Unbounded((1,))
    return env


def let_act(loss: LossModule, policy: TensorDictModuleBase, recipe: DreamerConfig) -> None:
    """Let a loss have a player as its ``actor_network``, the name by which TorchRL saves what acts.

    It is no submodule: all parts of ``policy`` are parts of the loss already.
    """
    on_adoption: Any = recipe.on_adoption
    vars(loss)["actor_network"] = DreamerPlayer(policy, on_adoption=on_adoption, window=recipe.window)

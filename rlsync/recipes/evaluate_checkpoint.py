"""From a run's checkpoint to what acts, and the environments it was trained in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.checkpoint import Checkpoint, CheckpointError

from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes import dqn, parts, ppo
from rlsync.recipes.config import Config, DQNConfig, PPOConfig
from rlsync.recipes.evaluate import Actor, NetworkActor, PolicyActor
from rlsync.recipes.impala import recipe as impala
from rlsync.recipes.impala.config import ImpalaConfig, settings_of
from rlsync.recipes.impala.envs import EnvSpec, GymnasiumEnvs

#: Components of a recipe's checkpoint: the policy's weights, and what SyncWeights counts.
_POLICY, _SYNC = "policy", "trainer_module.sync_weights"


@dataclass(frozen=True, slots=True)
class Trained:
    """What a checkpoint says of its policy.

    Args:
        actor: acts with it.
        env: what it was trained in.
        version: the newest version that was published when it was written.
        frames: collected until then.
        unpublished_steps: optimizer steps that its weights are ahead of that version.
    """

    actor: Actor
    env: EnvSpec
    version: int
    frames: int
    unpublished_steps: int


def load(checkpoint: Path, config: Config, *, deterministic: bool = False) -> Trained:
    """The policy of a checkpoint, ready to act; the rest of the checkpoint is not read.

    Workers that acted in half precision are followed: the policy has the dtype that the sync map declares.

    Args:
        checkpoint: a checkpoint that a recipe's trainer wrote.
        config: of the run that wrote it.
        deterministic: take the likeliest action in place of drawing one; a Q network's greedy action, without
            exploration, is taken either way.

    Raises:
        ConfigError: the checkpoint is not one of such a run, or the environment cannot be made.
    """
    policy, actor, env = _built(config, deterministic)
    counters = _Counters()
    wanted = {_POLICY: policy, _SYNC: counters}
    try:
        Checkpoint(**wanted).load(checkpoint, map_location="cpu")
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        first = first_line(error)
        raise ConfigError(
            f"the checkpoint does not fit the run's configuration: {first}",
            str(checkpoint),
            "give a checkpoint that a run with this config.yaml wrote",
        ) from error
    found = counters.found
    steps_at = {int(version): int(steps) for version, steps in found["published"].tolist()}
    version, steps = int(found["version"]), int(found["optim_steps"])
    ahead = steps - steps_at.get(version, 0)
    return Trained(actor, env, version, int(found["frames"]), ahead)


class _Counters:
    """Takes a component of a checkpoint as it is."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict


def _built(config: Config, deterministic: bool) -> tuple[nn.Module, Actor, EnvSpec]:
    match config.recipe:
        case ImpalaConfig():
            network = impala.make_network(settings_of(config), config.env)
            actor = NetworkActor(network, deterministic=deterministic)
            return network, actor, impala.env_spec(config.env)
        case PPOConfig():
            policy = ppo.make_loss(config.recipe, parts.probe(config.env)).actor_network
        case DQNConfig():
            policy = dqn.make_policy(config.recipe, parts.probe(config.env))[0]
        case other:
            raise ConfigError(
                f"no recipe is named {other.name!r}", "recipe.name", "recipes: ppo, dqn, impala"
            )
    acts: TensorDictModuleBase = parts.workers_policy(config, policy)
    # What GymEnv makes in the workers, a single one: gymnasium.make(id, **kwargs).
    return (
        acts,
        PolicyActor(acts, deterministic=deterministic),
        GymnasiumEnvs(config.env.id, config.env.kwargs),
    )

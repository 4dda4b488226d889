"""Loads the policy of a run's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl.checkpoint import Checkpoint, CheckpointError

from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes.config import Config
from rlsync.recipes.device_config import evaluation_device
from rlsync.recipes.registry import recipe_of
from rlsync.recipes.run_files import RESOLVED
from rlsync.workers.devices import CPU

if TYPE_CHECKING:
    import torch

    from rlsync.workers.envs.specs import EnvSpec
    from rlsync.workers.player import Player

#: Components of a recipe's checkpoint: the policy's weights, and what SyncWeights counts.
_POLICY, _SYNC = "policy", "trainer_module.sync_weights"


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy with the weights of a checkpoint.

    Args:
        player: acts with the policy.
        env: the environments that it was trained in.
        version: the newest published version when the checkpoint was written.
        frames: the frames collected until then.
        unpublished_steps: the optimizer steps that the weights are ahead of that version.
        device: on which the player acts.
    """

    player: Player
    env: EnvSpec
    version: int
    frames: int
    unpublished_steps: int
    device: torch.device = CPU


def load(
    checkpoint: Path, config: Config, *, deterministic: bool = False, device: torch.device | None = None
) -> Trained:
    """The policy of a checkpoint, ready to act. Only the policy and the counters of the checkpoint are read.

    If workers acted in half precision, the policy does too: it has the dtype that the sync map declares.

    Args:
        checkpoint: a checkpoint that a recipe's trainer wrote.
        config: of the run that wrote it.
        deterministic: take the likeliest action in place of drawing one. A Q network is greedy either way.
        device: on which it is to act; None for the config's.

    Raises:
        ConfigError: there is no such recipe or device, the environment cannot be made, or the checkpoint does
            not fit.
    """
    recipe = recipe_of(config)
    device = evaluation_device(config) if device is None else device
    acting = recipe.player(config, recipe.probe(config.env), deterministic)
    counters = _Counters()
    wanted = {_POLICY: acting.weights, _SYNC: counters}
    try:
        Checkpoint(**wanted).load(checkpoint, map_location="cpu")
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        first = first_line(error)
        raise ConfigError(
            f"the checkpoint does not fit the run's configuration: {first}",
            str(checkpoint),
            f"give a checkpoint that a run with this {RESOLVED} wrote",
        ) from error
    found = counters.found
    steps_at = {int(version): int(steps) for version, steps in found["published"].tolist()}
    version, steps = int(found["version"]), int(found["optim_steps"])
    ahead = steps - steps_at.get(version, 0)
    return Trained(acting.player, acting.env, version, int(found["frames"]), ahead, device)


class _Counters:
    """Receives one component of a checkpoint, unchanged."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict

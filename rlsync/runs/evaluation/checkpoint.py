"""Loads the policy of a run's checkpoint, or its best version, so that it can play."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl.checkpoint import Checkpoint, CheckpointError

from rlsync import ConfigError
from rlsync.runs.evaluation.process import best_in
from rlsync.seams import first_line

if TYPE_CHECKING:
    from torch import nn

    from rlsync.runs.actors.envs.specs import EnvSpec
    from rlsync.runs.actors.player import Player

#: Components of a recipe's checkpoint: the policy's weights, and what SyncWeights counts.
_POLICY = "policy"
_SYNC = "trainer_module.sync_weights"
COMPONENTS = (_POLICY, _SYNC)  #: those that :func:`load` reads


@dataclass(frozen=True, slots=True)
class CheckpointPlayer:
    """What a recipe hands to ``rlsync eval``: a policy that can play once its weights are loaded."""

    #: The module into which the component ``policy`` of a checkpoint is loaded. TorchRL's Trainer fills that
    #: component from the loss module's ``actor_network``, else from its ``value_network``.
    weights: nn.Module
    player: Player  #: acts with these weights
    env: EnvSpec  #: the environments that the policy was trained in


@dataclass(frozen=True, slots=True)
class Trained:
    """Where a run stood with the weights that were loaded."""

    version: int  # the newest one published until then
    unpublished_steps: int  # optimizer steps by which a checkpoint's weights are ahead of it
    frames: int  # collected until then

    def __str__(self) -> str:
        if self.unpublished_steps:
            ahead = f" + {self.unpublished_steps} optimizer steps"
        else:
            ahead = ""
        return f"version {self.version}{ahead}  frames {self.frames:,}"


def load(checkpoint: Path, acting: CheckpointPlayer) -> Trained:
    """Give a player the weights of a checkpoint whose COMPONENTS are whole; ConfigError: it does not fit."""
    counters = Component()
    wanted = {_POLICY: acting.weights, _SYNC: counters}
    try:
        Checkpoint(**wanted).load(checkpoint, map_location="cpu")
    except (CheckpointError, OSError, TypeError, ValueError) as error:
        problem = f"the checkpoint does not fit the run's configuration: {first_line(error)}"
        cure = "give one that this rlsync wrote, with this configuration: networks of an earlier one may be others"
        raise ConfigError(problem, str(checkpoint), cure) from error
    counts = counters.state
    steps_at = {int(version): int(steps) for version, steps in counts["published"].tolist()}
    version = int(counts["version"])
    steps = int(counts["optim_steps"])
    return Trained(version, steps - steps_at.get(version, 0), int(counts["frames"]))


def load_best(
    file: Path, receipts: Path, acting: CheckpointPlayer, *, trusted: bool = False
) -> Trained:
    """Load a run's best version, whose frames are in the receipts, else 0; ConfigError: none, or no fit."""
    best = best_in(file, trusted=trusted)
    if best is None:
        cure = "take the checkpoint's weights; a run keeps one if recipe.evaluation.every_frames is not 0"
        raise ConfigError("there is no best version", str(file), cure)
    try:
        acting.weights.load_state_dict(best.weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        problem = f"{file.name} does not fit the run's configuration: {first_line(error)}"
        raise ConfigError(problem, str(file), "it is of a run with other networks") from error
    frames = 0
    try:
        if receipts.exists():
            for receipt in map(json.loads, receipts.read_text().splitlines()):
                if receipt["version"] == best.version:
                    frames = int(receipt["frames"])
                    break
        return Trained(int(best.version), 0, frames)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"cannot read what the run published: {first_line(error)}"
        raise ConfigError(problem, str(receipts), "remove or repair the file") from error


class Component:
    """One component of a checkpoint, empty or as it was loaded, unchanged."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict

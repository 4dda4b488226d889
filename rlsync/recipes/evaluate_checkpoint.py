"""Loads the policy of a run's checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl.checkpoint import Checkpoint, CheckpointError

from rlsync.core.errors import ConfigError, first_line
from rlsync.evaluation.best import best_in
from rlsync.recipes.config import Config
from rlsync.recipes.device_config import evaluation_device
from rlsync.recipes.registry import recipe_of
from rlsync.recipes.run_files import BEST, RECEIPTS, RESOLVED
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


def load_best(
    run: Path, config: Config, *, deterministic: bool = False, device: torch.device | None = None
) -> Trained:
    """The version of a run that had the best evaluation, ready to act. See :func:`.best.rank`.

    Args:
        run: its folder.
        config, deterministic, device: see :func:`load`.

    Raises:
        ConfigError: no version was kept, or it does not fit; or see :func:`load`.
    """
    best = best_in(run / BEST)
    if best is None:
        raise ConfigError(
            f"{run} holds no {BEST}",
            "--best",
            "a run keeps one if it evaluates (recipe.evaluation.every_frames); leave --best out",
        )
    recipe = recipe_of(config)
    acting = recipe.player(config, recipe.probe(config.env), deterministic)
    try:
        acting.weights.load_state_dict(best.weights)
    except RuntimeError as error:
        raise ConfigError(
            f"{BEST} does not fit the run's configuration: {first_line(error)}",
            str(run / BEST),
            "it is of a run with other networks",
        ) from error
    device = evaluation_device(config) if device is None else device
    return Trained(acting.player, acting.env, best.version, _frames_at(run, best.version), 0, device)


def _frames_at(run: Path, version: int) -> int:
    """The frames that a run had collected when it published a version; 0 if its receipts do not say."""
    receipts = run / RECEIPTS
    lines = receipts.read_text().splitlines() if receipts.exists() else []
    return next((r["frames"] for r in map(json.loads, lines) if r["version"] == version), 0)


class _Counters:
    """Receives one component of a checkpoint, unchanged."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.found = state_dict

"""Runs a recipe of rlsync's that holds a pace, for a given time, and reports its frames and updates."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

from rlsync_peer import NEVER, Report
from torchrl.trainers import Trainer

from rlsync.runs.life.training import prepare_process
from rlsync.runs.recipes.hooks.steering import KeepPace
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    LoggerConfig,
    RecipeConfig,
)
from rlsync.runs.recipes.sync_settings import RouteConfig, SyncConfig
from rlsync.torchrl_plugin.compat.trainers import registered_modules


def run(
    build: Callable[[Config], Trainer],
    env: str,
    collector: CollectorConfig,
    recipe: RecipeConfig,
    seconds: float,
    destination: str = "policy",
) -> None:
    """Train as ``rlsync train`` does until the time is over.

    Args:
        build: of the recipe.
        env: an id of gymnasium's.
        collector: what collects.
        recipe: its settings.
        seconds: from the first iteration on.
        destination: of the actor's weights.
    """
    prepare_process()
    with tempfile.TemporaryDirectory() as run_dir:
        trainer = build(
            Config(
                run_dir=run_dir,
                checkpoint_every_frames=NEVER,
                env=EnvConfig(env),
                collector=collector,
                logger=LoggerConfig(kind="none"),
                recipe=recipe,
                sync=SyncConfig(map=[RouteConfig(destination, "loss_module.actor_network")]),
            )
        )
        (pace,) = (m for m in registered_modules(trainer) if isinstance(m, KeepPace))
        trainer.register_op(
            "post_steps", Report(trainer, seconds, lambda: {"updates": pace.updates})
        )
        try:
            trainer.train()
        finally:
            trainer.collector.shutdown()

"""The evaluating process of the recipes on stock collectors, and the end of a run by its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.core.plan import POLICY
from rlsync.evaluation.evaluator import EvaluationJob, Evaluator
from rlsync.recipes import parts
from rlsync.recipes.config import Config
from rlsync.recipes.device_config import evaluation_device
from rlsync.recipes.evaluation_video import filming
from rlsync.recipes.hooks import StopOnEvaluation
from rlsync.recipes.run_files import BEST, EVALUATIONS
from rlsync.recipes.spaces import Spaces
from rlsync.recipes.timeline import versions_between_evaluations
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.transport.board.handle import BoardHandle
from rlsync.workers.rollout_collector import RolloutCollector


def register_with_evaluations(
    trainer: Trainer, config: Config, acting: TensorDictModuleBase, spaces: Spaces, learned: str = ""
) -> None:
    """Register what publishes, logs and watches, and the evaluating process if the config wants one.

    With evaluations, ``recipe.target_return`` is theirs: the returns of episodes that explore end nothing.

    Args:
        trainer: of a recipe whose frames are those of stock collectors.
        config: the run.
        acting: what the workers act with, exploration included.
        spaces: of the environment.
        learned: the names of the learned leaves of ``acting`` begin with this.

    Raises:
        ConfigError: an evaluation is asked for, and the collector has no board.
    """
    evaluates = config.recipe.evaluations().every_frames > 0 and config.run_dir is not None
    returns = parts.register_hooks(trainer, config, stop_at_return=not evaluates)
    if evaluates:
        evaluator = make_evaluator(trainer.collector, config, acting, spaces, learned)
        evaluator.register(trainer)
        StopOnEvaluation(evaluator, config.recipe.target_return, returns).register(trainer)


def make_evaluator(
    collector: BaseCollector,
    config: Config,
    acting: TensorDictModuleBase,
    spaces: Spaces,
    learned: str,
) -> Evaluator:
    """The process that plays greedily, on the board that the workers of this machine read, or one like it.

    Raises:
        ConfigError: the collector has no board, or the run no folder.
    """
    handle = _board_of(collector)
    if handle is None or config.run_dir is None:
        raise ConfigError(
            "an evaluation needs a board to read and a run folder to write to",
            "recipe.evaluation.every_frames, run_dir",
            "give run_dir, or every_frames=0",
        )
    acts = parts.policy_player(config, acting, spaces, deterministic=True)
    job = EvaluationJob(
        board=handle,
        player=acts.player,
        env=acts.env,
        episodes=config.recipe.evaluations().episodes,
        every_versions=versions_between_evaluations(config),
        file=Path(config.run_dir) / EVALUATIONS,
        seed=config.seed,
        adopt=config.collector.adopt,  # type: ignore[arg-type]
        device=evaluation_device(config),
        best=Path(config.run_dir) / BEST,
        kept=f"{POLICY}.{learned}",
        filming=filming(config),
    )
    return Evaluator(job)


def _board_of(collector: BaseCollector) -> BoardHandle | None:
    """A board of this machine with every version that a collector's workers get; None if there is none."""
    if isinstance(collector, RolloutCollector):
        return collector.board_here()
    endpoint = endpoint_of(collector)
    handle: Any = endpoint.publisher.transport.handle if isinstance(endpoint, BoardEndpoint) else None
    return handle if isinstance(handle, BoardHandle) else None

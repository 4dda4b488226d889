"""The evaluating process of a run, the end of a run by its results, and what plays a run's checkpoint."""

from __future__ import annotations

from typing import Any

from tensordict.nn import TensorDictModuleBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.core.plan import POLICY
from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.evaluation.evaluator import Evaluator, board_of
from rlsync.evaluation.play import Patience, filmed
from rlsync.evaluation.process import EvaluationJob, Filming, best_in
from rlsync.recipes.checks import VIDEO_KEY
from rlsync.recipes.registry import recipe_of
from rlsync.recipes.run import Run
from rlsync.recipes.run_files import BEST, BEST_VIDEO, EVALUATIONS, VIDEOS
from rlsync.recipes.settings import Config, EvaluationConfig
from rlsync.recipes.timeline import versions_between_evaluations
from rlsync.recipes.trainer import policy_player, register_hooks
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.workers.player import Player

#: Between the seed of a run and that of its evaluations: they begin as no worker's first episodes do.
APART = 2**30


def register_with_evaluations(
    trainer: Trainer, run: Run[Any], acting: TensorDictModuleBase, learned: str = ""
) -> None:
    """Register what publishes, logs and watches, and the evaluating process if the config wants one, whose
    returns then decide on ``recipe.target_return``. Workers act with ``acting``, exploration included; the
    names of its learned leaves begin with ``learned``. ConfigError: there is no board to evaluate from.
    """
    evaluates = run.recipe.evaluations().every_frames > 0 and run.folder is not None
    returns = register_hooks(trainer, run, stop_at_return=not evaluates)
    if evaluates:
        player = policy_player(run, acting, deterministic=True).player
        evaluator = make_evaluator(run, trainer.collector, player, learned)
        evaluator.target = run.recipe.target_return
        evaluator.stop = returns.stop
        evaluator.register(trainer)


def make_evaluator(run: Run[Any], collector: BaseCollector, player: Player, learned: str = "") -> Evaluator:
    """The process that plays on the workers' board, once it has made its first step.

    ConfigError: there is no board or no run folder. WorkerLost, AdoptionTimeout: the process did not start.
    """
    board, config, evaluation = board_of(collector), run.config, run.recipe.evaluations()
    folder, films = run.folder, evaluation.video_every
    if board is None or folder is None:
        what = "an evaluation needs a board to read and a run folder to write to"
        where = "recipe.evaluation.every_frames, run_dir, collector.transport"
        raise ConfigError(what, where, "give run_dir and the transport board, or every_frames=0")
    best_in(folder / BEST, trusted=True)  # a damaged one is told here, not by the process
    job = EvaluationJob(
        board=board,
        player=player,
        env=config.env.spec(),
        episodes=evaluation.episodes,
        every_versions=versions_between_evaluations(config),
        file=folder / EVALUATIONS,
        seed=config.seed + APART,
        adopt=config.collector.adopt,  # type: ignore[arg-type]
        device=run.evaluation_device,
        best=folder / BEST,
        kept=f"{POLICY}.{learned}",
        filming=None if films is None else Filming(folder / VIDEOS, films, folder / BEST_VIDEO),
        run_id=endpoint_of(collector).publisher.ledger.run_id,
        patience=patience_of(evaluation),
    )
    settings = config.collector
    return Evaluator(
        job, start_timeout_s=settings.start_timeout_s, silent_timeout_s=settings.silent_timeout_s
    )


def patience_of(evaluation: EvaluationConfig) -> Patience:
    return Patience(evaluation.give_up_after_steps, evaluation.give_up_after_s)


def require_screen(config: Config) -> None:
    """Raise ConfigError if a run is to be filmed and its environment, which is made here, cannot be drawn."""
    if config.recipe.evaluations().video_every is None:
        return
    try:
        filmed(config.env.spec(), config.seed, leave_out=f"{VIDEO_KEY}=null").close()
    except ConfigError as error:
        raise ConfigError(error.what, f"{VIDEO_KEY}; {error.where}", error.cure) from error


def acting_of(config: Config, *, deterministic: bool = False) -> CheckpointPlayer:
    """What acts with a checkpoint's weights, once loaded; ``deterministic`` takes the likeliest action."""
    recipe = recipe_of(config)
    return recipe.player(config, recipe.probe(config.env), deterministic)

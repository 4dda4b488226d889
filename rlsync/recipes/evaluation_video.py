"""Whether a run can film its evaluations, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.evaluation.films import Filming, check_packages, filmed
from rlsync.recipes.run_files import BEST_VIDEO, VIDEOS

if TYPE_CHECKING:
    from rlsync.recipes.config import Config

_KEY = "recipe.evaluation.video_every"


def video_errors(config: Config) -> Iterator[RlsyncError]:
    """One error if videos are asked for, and there are no evaluations, or a package is missing."""
    evaluation = config.recipe.evaluations()
    if evaluation.video_every is None:
        return
    if not evaluation.every_frames:
        yield ConfigError(
            "there is no evaluation to film",
            f"{_KEY}={evaluation.video_every}",
            "give recipe.evaluation.every_frames, or video_every=null",
        )
    try:
        check_packages(Path(BEST_VIDEO))
    except ConfigError as error:
        yield ConfigError(
            error.what, f"{_KEY}={evaluation.video_every}", f"{error.cure}; or video_every=null"
        )


def require_screen(config: Config) -> None:
    """Refuse an environment that is to be filmed and cannot be drawn. It is made, drawn once, and closed.

    Raises:
        ConfigError: it cannot.
    """
    if config.recipe.evaluations().video_every is None:
        return
    try:
        filmed(config.env.spec(), config.seed, leave_out=f"{_KEY}=null").close()
    except ConfigError as error:
        raise ConfigError(error.what, f"{_KEY}; {error.where}", error.cure) from error


def filming(config: Config) -> Filming | None:
    """What the evaluating process films; None if nothing."""
    every = config.recipe.evaluations().video_every
    if every is None or config.run_dir is None:
        return None
    run = Path(config.run_dir)
    return Filming(run / VIDEOS, every, run / BEST_VIDEO)

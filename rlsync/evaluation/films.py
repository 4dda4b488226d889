"""Videos of evaluated versions: one episode, as a gif. Loads no torchrl."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from rlsync.core.errors import RlsyncError, first_line
from rlsync.core.whole_file import write_whole
from rlsync.evaluation.filmed import FilmedEnvs, filmed
from rlsync.evaluation.video import film
from rlsync.workers.devices import CPU
from rlsync.workers.envs.rendered import draw_into_memory
from rlsync.workers.envs.specs import EnvSpec
from rlsync.workers.player import Player

_log = logging.getLogger(__name__)


def video_of_version(folder: Path, version: int) -> Path:
    """The file of one version.

    Args:
        folder: of all of them.
        version: its number.

    Example:
        >>> video_of_version(Path("videos"), 120).name
        'version_000120.gif'
    """
    return folder / f"version_{version:06d}.gif"


@dataclass(frozen=True, slots=True)
class Filming:
    """What is filmed, and where it goes.

    Args:
        folder: for the videos; it is made.
        every: evaluations; the first one is filmed.
        best: the video of the best version, filmed at whichever evaluation; None films none.
    """

    folder: Path
    every: int
    best: Path | None = None


class EvaluationFilms:
    """Films the first episode of evaluations, after they were written: a film delays no result.

    The episode is played again, with the evaluation's seed, where each step is drawn. It is the first
    episode of the evaluation's first environment. With a policy that draws its actions that holds only for
    evaluations of one episode: others draw other actions.

    If a film cannot be made, that is logged once, and evaluations go on.

    Args:
        filming: what is filmed, and where it goes.
        player: what acts, with the weights of the version.
        env: what it acts in.
        seed: of environment and actions.
        device: where the player acts.
    """

    def __init__(
        self, filming: Filming, player: Player, env: EnvSpec, seed: int, device: torch.device = CPU
    ) -> None:
        self._filming = filming
        self._player = player
        self._env = env
        self._seed = seed
        self._device = device
        self._stage: FilmedEnvs | None = None
        self._evaluations = 0
        self._told = False

    def evaluated(self, version: int, *, best: bool) -> None:
        """Film the version that acts now, if it is its turn.

        Args:
            version: its number.
            best: whether it is the best so far.
        """
        due = self._evaluations % self._filming.every == 0
        self._evaluations += 1
        shown = self._filming.best if best else None
        if not due and shown is None:
            return
        try:
            file = video_of_version(self._filming.folder, version) if due else shown
            assert file is not None, "it is due, or the best"
            self._film(file)
            if due and shown is not None:
                write_whole(shown, lambda beside: shutil.copyfile(file, beside))
        except (RlsyncError, OSError, RuntimeError, ValueError) as error:
            if not self._told:
                self._told = True
                _log.warning("no video of version %d (this is told once): %s", version, first_line(error))

    def _film(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        if self._stage is None:
            draw_into_memory()
            self._stage = filmed(self._env, self._seed)
        part = file.with_name(f".part-{os.getpid()}{file.suffix}")  # its suffix says how it is written
        try:
            film(self._player, self._stage, part, self._seed, self._device)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

"""An episode as a video: played once, and written as a gif or an mp4."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlsync.core.errors import ConfigError
from rlsync.evaluation.filmed import FilmedEnvs, Frame
from rlsync.evaluation.play import Episode, play
from rlsync.workers.devices import CPU
from rlsync.workers.player import Player

#: Frames of one film: they stay in memory until it is written. A longer episode is still played to its end.
MAX_FRAMES = 2000

#: Largest width of a gif in pixels: choosing its colours takes time for every pixel.
GIF_WIDTH = 400

#: suffix -> the modules that write it, and where each comes from.
_PACKAGES = {
    ".gif": {"imageio": "rlsync[video]", "PIL": "rlsync[video]"},
    ".mp4": {"imageio": "rlsync[video]", "imageio_ffmpeg": "imageio-ffmpeg"},
}


@dataclass(frozen=True, slots=True)
class Film:
    """A file, the episode it shows, and its frames: one before the first step and one after each.

    Example:
        >>> print(Film(Path("pong.gif"), Episode(21.0, 2500), 2000))
        pong.gif: one more episode, return 21.0, length 2500; the first 1999 steps of it
    """

    file: Path
    episode: Episode
    frames: int

    def __str__(self) -> str:
        steps, (total, length) = self.frames - 1, (self.episode.total, self.episode.length)
        cut = "" if steps == length else f"; the first {steps} steps of it"
        return f"{self.file}: one more episode, return {total:.1f}, length {length}{cut}"


def check_file(file: Path) -> None:
    """Refuse a file that cannot be written, before anything is played.

    Args:
        file: a ``.gif``, or an ``.mp4`` where imageio-ffmpeg is installed.

    Raises:
        ConfigError: its kind or its folder is wrong, or a package is missing.

    Example:
        >>> check_file(Path("pong.avi"))
        Traceback (most recent call last):
        rlsync.core.errors.ConfigError: a video cannot be written as '.avi'
          where  pong.avi
          cure   name a .gif or an .mp4
    """
    check_packages(file)
    if not os.access(file.parent, os.W_OK):
        raise ConfigError(f"cannot write into {file.parent}", str(file), "name a file in another folder")


def check_packages(file: Path) -> None:
    """Refuse a file of another kind, or one whose package is missing. Its folder need not be there.

    Args:
        file: as of :func:`check_file`.

    Raises:
        ConfigError: its kind is wrong, or a package is missing.

    Example:
        >>> check_packages(Path("nowhere/pong.gif"))
    """
    suffix = file.suffix.lower()
    if suffix not in _PACKAGES:
        raise ConfigError(f"a video cannot be written as {suffix!r}", str(file), "name a .gif or an .mp4")
    for module, package in _PACKAGES[suffix].items():
        if find_spec(module) is None:
            other = "" if suffix == ".gif" else ", or name a .gif"
            raise ConfigError(
                f"{module} is not installed, which writes {suffix}",
                str(file),
                f"pip install '{package}'{other}",
            )


def film(player: Player, envs: FilmedEnvs, file: Path, seed: int, device: torch.device = CPU) -> Film:
    """Play one episode and write it as a video; wide frames are made smaller for a gif.

    Args:
        player: what acts.
        envs: the environment.
        file: a name that :func:`check_file` accepts; an existing file is replaced.
        seed: of environment and actions.
        device: as of :func:`play`.
    """
    episodes: list[Episode] = []
    frames = 0
    with _writer(file, envs.fps) as append:
        for ended in play(player, envs, 1, seed, device):
            episodes += ended
            if frames < MAX_FRAMES:
                append(envs.frame)
                frames += 1
    return Film(file, episodes[0], frames)


@contextmanager
def _writer(file: Path, fps: float) -> Iterator[Callable[[Frame], None]]:
    import imageio.v2 as imageio

    gif = file.suffix.lower() == ".gif"
    if gif:  # bits: frames wait as palette images, a third of their bytes
        how: dict[str, Any] = {"duration": 1000 / fps, "loop": 0, "bits": 8}
    else:  # else imageio resizes frames to multiples of 16
        how = {"fps": fps, "macro_block_size": 2}
    writer: Any = imageio.get_writer(file, mode="I", **how)
    with closing(writer):
        yield lambda frame: writer.append_data(_narrowed(frame) if gif else frame)


def _narrowed(frame: Frame) -> Frame:
    from PIL import Image

    times = -(-frame.shape[1] // GIF_WIDTH)
    return frame if times == 1 else np.asarray(Image.fromarray(frame).reduce(times))

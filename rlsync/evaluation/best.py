"""The best version that was evaluated, as a file. Loads no torchrl."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError, first_line
from rlsync.core.whole_file import write_whole
from rlsync.evaluation.play import Score


def rank(score: Score) -> float:
    """What versions are ranked by: the mean return less its standard error.

    A version that was lucky in few or widely spread episodes does not replace one that is known to be good.
    With one episode there is no standard error, and the return itself counts.

    Args:
        score: of one version.

    Example:
        >>> steady = Score(16, 470.0, 4.0, 460.0, 480.0, 470.0)
        >>> lucky = Score(16, 475.0, 60.0, 300.0, 500.0, 475.0)
        >>> rank(steady) > rank(lucky)
        True
    """
    if score.episodes < 2:
        return score.return_mean
    return score.return_mean - score.return_std / math.sqrt(score.episodes - 1)


@dataclass(frozen=True, slots=True)
class Best:
    """The version with the highest rank so far.

    Args:
        version: its number.
        return_mean: over the episodes of its evaluation.
        rank: see :func:`rank`.
        weights: a state dict.
    """

    version: int
    return_mean: float
    rank: float
    weights: dict[str, Tensor]

    def write(self, file: Path) -> None:
        """Replace the file; nobody reads a half one.

        Args:
            file: where it is kept.
        """
        told = {"version": self.version, "return_mean": self.return_mean, "rank": self.rank}
        write_whole(file, lambda beside: torch.save({**told, "weights": self.weights}, beside))


def best_in(file: Path) -> Best | None:
    """What was kept so far; None if nothing was.

    Args:
        file: where it is kept.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return Best(**found)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot read the best version: {first_line(error)}", str(file), "remove the file"
        ) from error

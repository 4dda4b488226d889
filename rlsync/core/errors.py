"""Everything rlsync raises, on one screen.

    RlsyncError
    ├── SyncMapError             the sync map cannot work; raised before anything runs
    │   ├── PathSyntaxError          a path does not follow the grammar
    │   ├── SourceNotFound           a path leads nowhere on the trainer
    │   ├── DestinationNotFound      a path leads nowhere on the collector
    │   ├── LayoutMismatch           names, shapes or dtypes of the leaves do not fit
    │   ├── AmbiguousSource          a path leads to weights that are not the trained ones
    │   ├── DoesNotAct               weights arrive, and what acts does not compute with them
    │   └── NothingToSync            no byte would move, and no leaf is aliased
    ├── PublishError             weights could not be published, or did not arrive
    │   ├── WorkerLost               a worker died
    │   ├── AdoptionTimeout          a worker is alive but did not adopt in time
    │   └── BoardClosed              the learner closed the board or died
    ├── StalenessExceeded        a frame was older than the bound
    ├── NotFinite                a loss or a gradient is infinite or not a number; found before the step
    ├── ConfigError              a configuration or an argument is wrong (also a ValueError)
    └── RlsyncWarning            probably a mistake; shown as a Python warning (also a UserWarning)
        ├── NoBoard                  worker processes get their weights without rlsync's promises
        ├── IdleLeaves               some of the weights that arrive do not act
        ├── OlderWeightsAct          what older weights computed still acts when newer ones have arrived
        ├── DropoutDiffers           workers drop other shares than the learner, or one of them none
        ├── BatchStatistics          a layer acts with the statistics of a worker's few rows
        ├── NothingLearns            what is sent cannot learn, or got no gradient
        ├── NothingPublished         nobody publishes, or not to the collector whose frames are learned from
        └── NothingChanged           the same weights were published again and again

Every error and every warning prints three lines: what is wrong, where, and the cure.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType


class RlsyncError(Exception):
    """Base of all errors raised by rlsync.

    Args:
        what: what is wrong, in one sentence.
        where: the place in the user's map, config or code.
        cure: what to do about it.

    Example:
        >>> print(RlsyncError("no destination 'polcy'", "sync map, entry 1", "did you mean 'policy'?"))
        no destination 'polcy'
          where  sync map, entry 1
          cure   did you mean 'policy'?
    """

    def __init__(self, what: str, where: str = "", cure: str = "") -> None:
        super().__init__(what, where, cure)
        self.what = what
        self.where = where
        self.cure = cure

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where  {self.where}")
        if self.cure:
            lines.append(f"  cure   {self.cure}")
        return printable("\n".join(lines))


class SyncMapError(RlsyncError):
    """The sync map cannot work."""


class PathSyntaxError(SyncMapError):
    """A path does not follow the grammar."""


class SourceNotFound(SyncMapError):
    """A source path leads nowhere on the trainer."""


class DestinationNotFound(SyncMapError):
    """A destination path leads nowhere on the collector."""


class LayoutMismatch(SyncMapError):
    """Names, shapes or dtypes of source and destination leaves do not match."""


class AmbiguousSource(SyncMapError):
    """A source path leads to weights that are not the trained ones."""


class DoesNotAct(SyncMapError):
    """Weights arrive, and what acts does not compute with them."""


class NothingToSync(SyncMapError):
    """No byte would move, and no leaf is aliased."""


class PublishError(RlsyncError):
    """Weights could not be published, or did not arrive."""


class WorkerLost(PublishError, RuntimeError):  # as TorchRL raises, whose users catch that
    """A worker died."""


class AdoptionTimeout(PublishError):
    """A live worker did not adopt a version in time."""


class BoardClosed(PublishError):
    """The learner closed the board or died."""


class StalenessExceeded(RlsyncError):
    """A consumed frame was older than the bound."""


class NotFinite(RlsyncError):
    """A loss or a gradient is infinite or not a number."""


class ConfigError(RlsyncError, ValueError):
    """A configuration or an argument is wrong."""


class RlsyncWarning(RlsyncError, UserWarning):
    """Something that is probably a mistake. Python's ``warnings`` shows it, and filters it by its class."""


class NoBoard(RlsyncWarning):
    """Worker processes get their weights through TorchRL's own scheme, without rlsync's promises."""


class IdleLeaves(RlsyncWarning):
    """Some of the weights that arrive do not act."""


class OlderWeightsAct(RlsyncWarning):
    """What older weights computed still acts when newer ones have arrived."""


class DropoutDiffers(RlsyncWarning):
    """Workers drop another share of what a dropout gets than the learner, or one of them drops none."""


class BatchStatistics(RlsyncWarning):
    """A layer of the workers' policy acts with the statistics of its own batch.

    Such as BatchNorm in training mode.
    """


class NothingLearns(RlsyncWarning):
    """What is sent cannot learn, or got no gradient in the first updates."""


class NothingPublished(RlsyncWarning):
    """A collector gets no weights: there is no hook for it, or the trainer does not call it."""


class NothingChanged(RlsyncWarning):
    """The same weights were published again and again, although the optimizers made steps."""


def warn(warning: RlsyncWarning) -> None:
    """Show a warning, at the line outside of rlsync that led to it."""
    frame: FrameType | None = sys._getframe()
    depth = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "rlsync":
        frame = frame.f_back
        depth = depth + 1
    warnings.warn(warning, stacklevel=depth)


def printable(text: str) -> str:
    """Text whose control characters, but line breaks and tabs, are spelled out: a terminal obeys them."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and before it each that it was raised from or after."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """The first line of another library's error message."""
    return str(error).strip().partition("\n")[0]

"""The end of a run, whichever way it comes: a last checkpoint, and a note of how the run ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer

from rlsync import SyncWeights
from rlsync.cli.ended import Ended, begin, now
from rlsync.cli.main import EXIT_FAILED, exit_status
from rlsync.core.errors import NotFinite, RlsyncError
from rlsync.recipes.run_files import CHECKPOINT
from rlsync.torchrl_plugin.last_checkpoint import LastCheckpoint, save_before_the_end

FAILED = "failed"


class Ending:
    """Leaves in the run's folder how the run ended; see :class:`Ended`.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._how, self._status = FAILED, EXIT_FAILED
        self._trainer: Trainer | None = None
        self._sync: SyncWeights | None = None

    def __enter__(self) -> Ending:
        begin(self._run_dir)
        return self

    def watch(self, trainer: Trainer, sync: SyncWeights) -> None:
        """Take frames and version from these."""
        self._trainer, self._sync = trainer, sync

    def reached(self, how: str, status: int) -> int:
        """Note that the run came to an end without an error, and return ``status``."""
        self._how, self._status = how, status
        return status

    @contextmanager
    def saving(self, unless: Callable[[BaseException], bool] = lambda _: False) -> Iterator[None]:
        """If what is inside raises, the trainer's checkpoint is written once more.

        Args:
            unless: whether somebody else does so after this error.
        """
        try:
            yield
        except NotFinite:
            raise  # StopIfNotFinite has done so, and its error says it
        except BaseException as error:
            if not unless(error):
                self._save()
            raise

    def _save(self) -> None:
        assert self._trainer is not None
        self.tell(save_before_the_end(self._trainer))

    def tell(self, saved: LastCheckpoint) -> None:
        """Say on stderr what became of the last checkpoint."""
        assert self._trainer is not None
        told = f"no checkpoint of the end: {saved.why_not}"
        if saved.path is not None:
            frames = f"{self._trainer.collected_frames:,} frames"
            told = f"checkpoint {saved.path}: resume={self._run_dir} goes on from {frames}"
        print(told, file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        how, status, what = self._how, self._status, ""
        match error:
            case RlsyncError():
                how, status, what = FAILED, exit_status(error), str(error)
            case BaseException():
                how, status, what = FAILED, EXIT_FAILED, f"{type(error).__name__}: {error}"
        checkpoint = self._run_dir / CHECKPOINT
        Ended(
            how,
            now(),
            status,
            None if self._trainer is None else self._trainer.collected_frames,
            None if self._sync is None else self._sync.version,
            what,
            str(checkpoint) if Checkpoint.is_checkpoint(checkpoint) else None,
        ).write(self._run_dir)

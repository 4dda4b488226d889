"""One line that shows the progress of a run."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text
from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync import SyncWeights
from rlsync.recipes.hooks import EpisodeReturns

PLAIN_EVERY_S = 2.0


class LiveLine:
    """Prints frames, return, version, policy lag and publish time.

    On a terminal the line is updated after every batch. Elsewhere a new line is printed every few seconds.

    Args:
        trainer: the trainer to watch.
        sync: the trainer's hook that publishes.
        returns: the trainer's hook that counts episodes.
        console: where to print.
    """

    def __init__(
        self, trainer: Trainer, sync: SyncWeights, returns: EpisodeReturns, console: Console
    ) -> None:
        self.trainer, self.sync, self.returns, self.console = trainer, sync, returns, console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._started = time.monotonic()
        self._first_frame = trainer.collected_frames
        self._next_plain = self._started
        trainer.register_op("post_steps_log", self._on_batch)

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def seconds(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def text(self) -> str:
        """The line."""
        frames = self.trainer.collected_frames
        publish_ms = self.sync.receipts[-1].duration_s * 1e3 if self.sync.receipts else float("nan")
        parts = (
            f"frames {frames:,}",
            f"return {self.returns.mean:.1f}",
            f"version {self.sync.version}",
            f"lag {self.sync.lag_versions()}",
            f"publish {publish_ms:.2f} ms",
            f"{(frames - self._first_frame) / max(self.seconds(), 1e-9):,.0f} frames/s",
        )
        return "  ".join(parts)

    def _on_batch(self, batch: TensorDictBase | None = None) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(self.text(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now >= self._next_plain:
            self._next_plain = now + PLAIN_EVERY_S
            print(self.text(), flush=True)

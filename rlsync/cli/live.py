"""One line that shows the progress of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.text import Text
from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync import LogReceipts, SyncWeights
from rlsync.recipes.hooks import EpisodeReturns, StalenessHistogram
from rlsync.torchrl_plugin.compat.trainers import registered_modules

PLAIN_EVERY_S = 2.0


class LiveLine:
    """Prints frames, return, version, policy lag, staleness, publish time, speed and the time left.

    The policy lag is taken when a batch arrives, before the next publish; the staleness is the mean over the
    steps that were learned from since. The time left is that for all frames: a target return may end the run
    before.

    On a terminal the line is updated after every batch. Elsewhere a new line is printed every few seconds.
    """

    def __init__(
        self, trainer: Trainer, sync: SyncWeights, returns: EpisodeReturns, console: Console
    ) -> None:
        self.trainer, self.sync, self.returns, self.console = trainer, sync, returns, console
        hooks = registered_modules(trainer)
        self._metrics = [hook for hook in hooks if isinstance(hook, LogReceipts)]
        self._staleness = [hook for hook in hooks if isinstance(hook, StalenessHistogram)]
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._started = time.monotonic()
        self._first_frame = trainer.collected_frames
        self._next_plain = self._started
        trainer.register_op("post_steps_log", self._on_batch)

    @contextmanager
    def shown(self) -> Iterator[LiveLine]:
        """Inside, a terminal is drawn to."""
        with self._live or nullcontext():
            yield self

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def text(self) -> str:
        frames, total = self.trainer.collected_frames, self.trainer.total_frames
        publish_ms = self.sync.receipts[-1].duration_s * 1e3 if self.sync.receipts else float("nan")
        per_second = (frames - self._first_frame) / max(self.seconds(), 1e-9)
        parts = [
            f"frames {frames:,} / {total:,}",
            f"return {self.returns.mean:.1f}",
            f"version {self.sync.version}",
            *(f"lag {hook.lag_versions}" for hook in self._metrics),
            *(f"staleness {hook.mean:.1f}" for hook in self._staleness),
            f"publish {publish_ms:.2f} ms",
            f"{per_second:,.0f} frames/s",
        ]
        if per_second > 0:
            parts.append(f"left {duration((total - frames) / per_second)}")
        return "  ".join(parts)

    def _on_batch(self, batch: TensorDictBase | None = None) -> None:
        now = time.monotonic()
        if self._live is not None:
            self._live.update(Text(self.text(), no_wrap=True, overflow="ellipsis"), refresh=True)
        elif now >= self._next_plain:
            self._next_plain = now + PLAIN_EVERY_S
            print(self.text(), flush=True)


def duration(seconds: float) -> str:
    """A duration in the two largest units that it has.

    Example:
        >>> duration(7), duration(250), duration(8000), duration(200_000)
        ('7 s', '4 min 10 s', '2 h 13 min', '2 d 7 h')
    """
    whole = max(0, round(seconds))
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {below}"
    return f"{whole} s"

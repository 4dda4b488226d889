"""How long a gif is shown."""

from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio


def shown_ms(gif: Path) -> float:
    """How long it takes to show it; a gif holds equal frames once, and shows them for longer."""
    return sum(iio.immeta(gif, index=frame)["duration"] for frame in range(len(iio.imread(gif, index=None))))

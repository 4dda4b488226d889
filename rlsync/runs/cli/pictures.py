"""What the verbs that draw have in common: matplotlib, if it is there."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from rlsync import ConfigError


def panels_for(verb: str, out: Path) -> ModuleType:
    """What draws the picture of a verb; ConfigError without matplotlib, which is an extra, or its format."""
    try:
        from rlsync.runs.cli import panels
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "matplotlib is not installed", verb, "pip install 'rlsync[plot]'"
        ) from error
    panels.check_file(out)
    return panels

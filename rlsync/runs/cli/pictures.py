"""What the verbs that draw have in common: matplotlib, if it is there."""

from __future__ import annotations

import os
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


def labels(paths: list[Path]) -> dict[str, Path]:
    """Short names for folders: their paths without the common beginning, such as ``a/0`` and ``b/0``."""
    shared = os.path.commonpath([path.resolve().parent for path in paths])
    names = {str(path.resolve().relative_to(shared)): path for path in paths}
    if len(names) < len(paths):
        raise ConfigError("a run is named twice", "the folders of runs", "name each folder once")
    return names

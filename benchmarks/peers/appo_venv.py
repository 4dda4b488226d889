"""A separate virtual environment for Sample Factory, which needs older gymnasium and numpy than rlsync."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEFAULT = Path.home() / ".cache" / "rlsync" / "sample_factory"
PINS = (
    "torch==2.13.0",
    "sample-factory==2.1.1",
    "gymnasium==0.29.1",
    "numpy==1.26.4",
    "ale-py==0.12.1",
    "opencv-python<4.12",  # later ones want numpy 2
)
_COMPLETE = "complete"


def python_of(folder: Path) -> Path:
    """The interpreter of that environment. If it does not exist, it is made: minutes, and a network."""
    python = folder / "bin" / "python"
    if (folder / _COMPLETE).exists():
        return python
    print(f"making {folder}: {' '.join(PINS)}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINS], check=True)
    (folder / _COMPLETE).touch()
    return python

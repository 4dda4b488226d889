"""Virtual environments of their own for libraries that the benchmarks compare with."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_CACHE = Path.home() / ".cache" / "rlsync"
_COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class PeerVenv:
    """A virtual environment with one library in it.

    Args:
        name: of its folder, in the user's cache.
        pins: what pip installs there.
    """

    name: str
    pins: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """Where it lies unless told otherwise."""
        return _CACHE / self.name

    def python(self, folder: Path | None = None) -> Path:
        """Its interpreter. If it does not exist, the environment is made: minutes, and a network."""
        folder = folder or self.folder
        python = folder / "bin" / "python"
        if (folder / _COMPLETE).exists():
            return python
        print(f"making {folder}: {' '.join(self.pins)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *self.pins], check=True)
        (folder / _COMPLETE).touch()
        return python


#: It needs older gymnasium and numpy than rlsync.
SAMPLE_FACTORY = PeerVenv(
    "sample_factory",
    (
        "torch==2.13.0",
        "sample-factory==2.1.1",
        "gymnasium==0.29.1",
        "numpy==1.26.4",
        "ale-py==0.12.1",
        "opencv-python<4.12",  # later ones want numpy 2
    ),
)
STABLE_BASELINES = PeerVenv(
    "stable_baselines3",
    (
        "torch==2.13.0",
        "stable-baselines3==2.9.2",
        "mujoco>=3.1,<4",
        "imageio>=2.31",
        "packaging",
        "ale-py==0.12.1",
        "opencv-python-headless",
    ),
)
SBX = PeerVenv("sbx", (*STABLE_BASELINES.pins, "sbx-rl==0.28.0"))
RLOX = PeerVenv("rlox", ("torch==2.13.0", "rlox==1.2.0", "gymnasium>=1.1"))
RLLIB = PeerVenv(
    "rllib",
    (
        "torch==2.13.0",
        "ray[rllib]==2.60.0",
        "gymnasium==1.2.2",
        "ale-py==0.12.1",
        "opencv-python-headless",
    ),
)
#: It needs an older opencv, which needs numpy 1. Its lightning-utilities imports pkg_resources, which later
#: setuptools lack.
SHEEPRL = PeerVenv(
    "sheeprl",
    (
        "torch==2.13.0",
        "sheeprl==0.5.7",
        "lightning==2.2.5",
        "lightning-utilities==0.9.0",
        "torchmetrics==1.8.2",
        "gymnasium==0.29.1",
        "numpy==1.26.4",
        "hydra-core==1.3.0",
        "tensorboard==2.21.0",
        "moviepy==1.0.3",
        "opencv-python==4.8.0.76",
        "setuptools<81",
    ),
)

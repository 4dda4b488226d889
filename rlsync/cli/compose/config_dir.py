"""Where the YAML files of the configs are. Loads neither Hydra nor torch."""

from __future__ import annotations

from pathlib import Path

import rlsync
from rlsync.core.errors import ConfigError


def config_dir() -> Path:
    """The folder of the YAML files: in the installed package, else in the checkout.

    Raises:
        ConfigError: it is in neither place.
    """
    package = Path(rlsync.__file__).resolve().parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "train.yaml").is_file():
            return folder
    raise ConfigError(
        "the config files are missing",
        str(package / "configs"),
        "reinstall rlsync, or run from a complete checkout",
    )

"""The sizes of a DreamerV3 that all contenders get. It imports nothing that a peer's environment may lack."""

from __future__ import annotations

import argparse

#: The default and the meaning of each.
SIZES: dict[str, tuple[float, str]] = {
    "belief": (128, "numbers in the recurrent state"),
    "categoricals": (8, "draws in a stochastic state"),
    "classes": (8, "of each draw"),
    "width": (128, "of all hidden layers"),
    "layers": (1, "hidden layers of each network"),
    "batch_size": (4, "sequences in an update"),
    "sequence_length": (64, "frames of a sequence"),
    "horizon": (15, "imagined steps"),
    "replay_ratio": (0.5, "updates for each frame after the prefill"),
    "prefill": (500, "frames of random actions"),
    "buffer_frames": (100_000, "frames in the replay buffer"),
}


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Give a script an option for each size."""
    for name, (default, meaning) in SIZES.items():
        parser.add_argument(_option(name), type=type(default), default=default, help=meaning)


def words(options: argparse.Namespace) -> list[str]:
    """The options of :func:`add_sizes`, for the command of a contender."""
    return [word for name in SIZES for word in (_option(name), str(vars(options)[name]))]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

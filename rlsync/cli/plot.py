"""``rlsync plot``: what runs did, as one picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

from rlsync.cli.run_folder import RunFolder
from rlsync.core.errors import ConfigError

_EXAMPLES = """examples:
  rlsync plot runs/2026-11-20/18-00-00-000000
  rlsync plot runs/A runs/B --out compare.png

panels, as far as a run, which may still be running, has written them down:
  return       mean of the newest training episodes; evaluations at the frames of their version's publish
  policy lag   newest version minus the slowest worker's, when a batch is logged: right after its publish
  staleness    how many versions old the steps were that the learner consumed
  publishes    for how long each held the learner, and the bytes that it copied

exit status: 0 drawn, 1 the picture cannot be written, 2 not a run folder, nothing to draw, or no matplotlib
"""


def main(arguments: list[str]) -> int:
    """Draw the picture, and say where it is and what it lacks.

    Raises:
        ConfigError: a folder is not that of a run, nothing can be drawn, or matplotlib is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="rlsync plot",
        description="Draw return, policy lag, staleness and publishes of one run, or of several to compare.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="+", help="a run's folder, as rlsync train prints it")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="default: plot.png in the first run")
    given = parser.parse_args(arguments)
    panels = _panels()
    out = given.out or given.run[0] / "plot.png"
    panels.check_format(out)
    runs = {label: RunFolder(path) for label, path in labels(given.run).items()}
    figure, notes = panels.draw(runs)
    try:
        figure.savefig(out)
    except OSError as error:
        print(f"cannot write {out}: {error}")
        return 1
    for note in notes:
        print(f"left out  {note}")
    print(f"drawn     {out}")
    return 0


def labels(paths: list[Path]) -> dict[str, Path]:
    """Short names for folders: what is left of their paths without what all share.

    Raises:
        ConfigError: a folder is named twice.

    Example:
        >>> list(labels([Path("runs/a/0"), Path("runs/b/0")]))
        ['a/0', 'b/0']
        >>> list(labels([Path("runs/a/0")]))
        ['0']
    """
    whole = [path.resolve() for path in paths]
    shared = 0
    while len({path.parts[: shared + 1] for path in whole}) == 1 and shared < len(whole[0].parts) - 1:
        shared += 1
    found = {"/".join(full.parts[shared:]): path for full, path in zip(whole, paths, strict=True)}
    if len(found) < len(paths):
        raise ConfigError("a run is named twice", "rlsync plot", "name each folder once")
    return found


def _panels() -> ModuleType:
    try:
        from rlsync.cli import panels
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "matplotlib is not installed", "rlsync plot", "pip install 'rlsync[plot]'"
        ) from error
    return panels

"""``rlsync plot``: one picture of one or several runs."""

from __future__ import annotations

from pathlib import Path

from rlsync.runs.cli.main import parser_of
from rlsync.runs.cli.pictures import labels, panels_for
from rlsync.runs.life.run_folder import RunFolder
from rlsync.runs.recipes.run_files import PLOT, agents_in

_EXAMPLES = """examples:
  rlsync plot runs/2026-11-20/18-00-00-000000
  rlsync plot runs/A runs/B --out compare.png

Runs that differ in their seeds alone have one colour: a thin line each, and together their interquartile mean
with a 95 % interval (rliable's, by bootstraps over runs), as far as all of them have come.

panels (a run may still be running; a panel without recorded values is left out):
  return       mean of the newest training episodes; evaluations are drawn at the frame count at which
               their version was published
  policy lag   newest version minus the slowest worker's version, when a batch arrives: how old is what acts
  staleness    how many versions old the steps were that the learner used: how old is what it learns from
  publishes    how long each publish held the learner, and the bytes it copied

exit status: 0 drawn, 1 the disk is full, 2 not a run folder, nothing to draw, a wrong file, or no matplotlib
"""


def main(arguments: list[str]) -> int:
    about = "Draw return, policy lag, staleness and publishes of one run, or of several to compare."
    parser = parser_of("plot", about, _EXAMPLES)
    parser.add_argument(
        "run", type=Path, nargs="+", help="a run's folder, as rlsync train prints it"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.png", help=f"default: {PLOT} in the first run"
    )
    options = parser.parse_args(arguments)
    paths: list[Path] = []
    for run in options.run:
        paths += agents_in(run).values() or [run]
    runs = {label: RunFolder(path) for label, path in labels(paths).items()}
    out = options.out or options.run[0] / PLOT
    panels = panels_for("rlsync plot", out)
    figure, notes = panels.draw(runs)
    panels.write_below(figure, notes)
    figure.savefig(out)
    for note in notes:
        print(f"left out  {note}")
    print(f"drawn     {out}")
    return 0

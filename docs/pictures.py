"""Draw the pictures of the documentation again, from the present output of the commands.

python docs/pictures.py              # all, takes a few minutes
python docs/pictures.py explain.svg  # one of them
"""

from __future__ import annotations

import csv
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure
from rich.console import Console

from rlsync.cli import explain, plot
from rlsync.cli.train import prepare_process, shut_down

PICTURES = Path(__file__).parent / "pictures"
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def explained() -> str:
    """The output of ``rlsync explain``."""
    prepare_process()
    with shut_down(explain.from_config([])()) as trainer:
        return explain.plan_of(trainer).table()


def draw_explain(picture: Path) -> None:
    """The output of ``rlsync explain`` in a terminal's frame."""
    text = explained()
    width = max(map(len, text.splitlines()))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text, markup=False, highlight=False)
    drawn = console.export_svg(title="rlsync explain", unique_id="explain")
    picture.write_text(_WEB_FONT.sub("", drawn))


def draw_plot(picture: Path) -> None:
    """The picture that ``rlsync plot`` draws of a short run of the actor-learner."""
    with TemporaryDirectory() as folder:
        run = f"{folder}/run"
        train = ["recipe=impala", "recipe.total_frames=100000", "recipe.target_return=null", f"run_dir={run}"]
        subprocess.run([sys.executable, "-m", "rlsync", "train", *train], check=True)
        plot.main([run, "--out", str(picture)])


def draw_silent_sync(picture: Path) -> None:
    """The picture that ``examples/silent_sync.py`` draws."""
    example = Path(__file__).parents[1] / "examples" / "silent_sync.py"
    runpy.run_path(str(example))["main"](figure=str(picture))


def draw_pong(picture: Path) -> None:
    """A plot of the returns in ``results/pong.csv``."""
    curves: dict[str, list[tuple[float, float]]] = {}
    with (Path(__file__).parent / "results" / "pong.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            curves.setdefault(row["run"], []).append((int(row["frames"]) / 1e6, float(row["return"])))
    figure = Figure((8, 4), layout="constrained")
    axes = figure.subplots()
    for run, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=run)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set(xlabel="million agent steps", ylabel="return, mean of 20 episodes")
    axes.legend(fontsize="small")
    figure.savefig(picture)


DRAWN: dict[str, Callable[[Path], None]] = {
    "explain.svg": draw_explain,
    "plot.png": draw_plot,
    "pong.png": draw_pong,
    "silent_sync.png": draw_silent_sync,
}


def main(names: list[str]) -> None:
    """Draw the pictures with these names, or all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name in names or DRAWN:
        DRAWN[name](PICTURES / name)


if __name__ == "__main__":
    main(sys.argv[1:])

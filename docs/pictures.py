"""Draw the pictures of the documentation again, from the present output of the commands.

python docs/pictures.py              # all, takes a few minutes
python docs/pictures.py explain.svg  # one of them
"""

from __future__ import annotations

import io
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from results import rows_of
from rich.console import Console

from rlsync.runs.cli import explain, plot, watch
from rlsync.runs.cli.panels import COLOURS
from rlsync.runs.life.state import status_of

PICTURES = Path(__file__).parent / "pictures"
#: Inches, and dots an inch: letters can be read where a phone makes the picture half as wide.
WIDTH, DPI = 5.5, 140
_WEB_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def explained() -> str:
    """The output of ``rlsync explain``."""
    return explain.plan_of_config([]).table()


def draw_explain(picture: Path) -> None:
    """The output of ``rlsync explain`` in a terminal's frame."""
    text = explained()
    draw_terminal(picture, text, "rlsync explain", max(map(len, text.splitlines())))


def draw_status(picture: Path) -> None:
    """What ``rlsync status --watch`` shows of a run of the actor-learner."""
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        train = [
            "recipe=impala",
            "recipe.target_return=null",
            "recipe.total_frames=1000000",
            f"run_dir={run}",
        ]
        view, text = watch.View(run), ""
        with subprocess.Popen([sys.executable, "-m", "rlsync", "train", *train]) as trained:
            for _ in range(60):
                time.sleep(watch.EVERY_S)
                if run.is_dir():
                    text = view.of(status_of(run))
            trained.send_signal(signal.SIGINT)
    draw_terminal(picture, text, "rlsync status --watch", 90)


def draw_terminal(picture: Path, text: str, title: str, width: int) -> None:
    """A text in a terminal's frame, so many letters wide."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text, markup=False, highlight=False)
    drawn = console.export_svg(title=title, unique_id=picture.stem)
    picture.write_text(_WEB_FONT.sub("", drawn))


def draw_plot(picture: Path) -> None:
    """The picture that ``rlsync plot`` draws of a short run of the actor-learner."""
    with TemporaryDirectory() as folder:
        run = f"{folder}/run"
        train = [
            "recipe=impala",
            "recipe.total_frames=100000",
            "recipe.target_return=null",
            f"run_dir={run}",
        ]
        subprocess.run([sys.executable, "-m", "rlsync", "train", *train], check=True)
        plot.main([run, "--out", str(picture)])


def draw_crashes(picture: Path) -> None:
    """The returns of a run that nobody disturbed, and of one that was killed five times."""
    words = ["recipe=ppo", "recipe.total_frames=100000", "recipe.target_return=null"]
    words += ["checkpoint_every_frames=15000", "logger.every_frames=2048"]
    train = [sys.executable, "-m", "rlsync", "train", *words]
    with TemporaryDirectory() as folder:
        undisturbed, killed = Path(folder, "undisturbed"), Path(folder, "killed")
        subprocess.run([*train, f"run_dir={undisturbed}"], check=True)
        for frames in (8_000, 24_000, 41_000, 59_000, 83_000, None):
            run = subprocess.Popen([*train, f"run_dir={killed}", "resume=auto"])
            while run.poll() is None and (frames is None or _newest_frames(killed) < frames):
                time.sleep(0.01)
            if frames is not None:
                run.kill()
            run.wait()
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.plot(*_returns(undisturbed), color="#bbbbbb", linewidth=5, label="undisturbed")
        axes.plot(*_returns(killed), color=COLOURS[0], label="killed five times")
        for number, tail in enumerate(sorted(killed.glob("aside/*")), 1):
            frames_again, returns_again = _returns(tail)
            if not frames_again:
                continue
            label = "what it made again" if number == 1 else None
            axes.plot(frames_again, returns_again, ":", color=COLOURS[1], label=label)
            axes.plot(frames_again[-1], returns_again[-1], "x", color=COLOURS[1])
    axes.set(xlabel="frames", ylabel="mean return of the newest 20 episodes")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(frameon=False)
    figure.savefig(picture, dpi=DPI)


def _newest_frames(run: Path) -> int:
    file = run / "receipts.jsonl"
    found = re.findall(r'"frames": (\d+)', file.read_text()) if file.is_file() else []
    return int(found[-1]) if found else 0


def _returns(run: Path) -> tuple[list[float], list[float]]:
    """Frames and returns of a run, or of what it has set aside."""
    file = run / "metrics" / "scalars" / "return.csv"
    rows = [line.split(",") for line in file.read_text().splitlines()] if file.is_file() else []
    return [float(row[0]) for row in rows], [float(row[1]) for row in rows]


def draw_silent_sync(picture: Path) -> None:
    """The picture that ``examples/silent_sync.py`` draws."""
    example = Path(__file__).parents[1] / "examples" / "silent_sync.py"
    runpy.run_path(str(example))["main"](figure=str(picture))


def draw_pong(picture: Path) -> None:
    """The returns in ``results/pong.csv``, over steps and over minutes."""
    curves: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows_of("pong.csv"):
        point = tuple(float(row[key]) for key in ("frames", "seconds", "return"))
        curves.setdefault(row["run"], {}).setdefault(row["seed"], []).append(point)
    figure = Figure((WIDTH, 6), layout="constrained")
    by_steps, by_time = figure.subplots(2, sharey=True)
    for (run, seeds), colour in zip(curves.items(), COLOURS, strict=False):
        for number, points in enumerate(seeds.values()):
            frames, seconds, returns = np.array(points).T
            by_steps.plot(frames / 1e6, returns, color=colour, label=None if number else run)
            by_time.plot(seconds / 60, returns, color=colour)
    for axes, over in ((by_steps, "million agent steps"), (by_time, "minutes")):
        axes.axhline(0, color="grey", linewidth=0.5)
        axes.set(xlabel=over, ylabel="return, mean of 20 episodes")
    figure.legend(fontsize="small", loc="outside lower center")
    figure.savefig(picture, dpi=DPI)


@dataclass(frozen=True, slots=True)
class Contender:
    """The runs of one panel that share a line: those of a library with a recipe and options."""

    label: str
    library: str
    recipe: str
    options: str = ""


SB3 = "stable-baselines3"
MUJOCO = (
    Contender("sac", "rlsync", "sac"),
    Contender("SB3 SAC", SB3, "sac"),
    Contender("crossq", "rlsync", "crossq"),
)
#: A panel for each environment, with the contenders in it.
OFF_POLICY = {
    "CartPole-v1": (
        Contender("dqn", "rlsync", "dqn"),
        Contender("dqn, uniform replay", "rlsync", "dqn", "uniform"),
    ),
    "Pendulum-v1": (
        Contender("sac", "rlsync", "sac"),
        Contender("SB3 SAC", SB3, "sac"),
        Contender("td3", "rlsync", "td3"),
        Contender("SB3 TD3", SB3, "td3"),
    ),
    "HalfCheetah-v5": (
        *MUJOCO,
        Contender("td3", "rlsync", "td3"),
        Contender("SB3 TD3", SB3, "td3"),
    ),
    "Hopper-v5": MUJOCO,
}
SHEEPRL = Contender("sheeprl", "sheeprl", "dreamer_v3", "lr=0.001 for all parts")
DREAMER = {
    "CartPole-v1": (
        Contender("dreamer_v3", "rlsync", "dreamer_v3", "3500 frames"),
        Contender("dqn, prioritised", "rlsync", "dqn", "prioritized; 3500 frames"),
        SHEEPRL,
    ),
    "Pendulum-v1": (
        Contender("dreamer_v1", "rlsync", "dreamer_v1"),
        Contender("dreamer_v3", "rlsync", "dreamer_v3"),
        SHEEPRL,
    ),
    "CartPole-v1 from pixels": (
        Contender("dreamer_v3, two seeds", "rlsync", "dreamer_v3", "env=rendered_cartpole"),
    ),
}
Panels = dict[str, tuple[Contender, ...]]


def draw_returns(picture: Path, results: str, panels: Panels) -> None:
    """Greedy returns over frames: a thin line for a seed, a thick one for the mean of runs of one length."""
    rows = rows_of(f"{results}.csv")
    figure = Figure((WIDTH, 3 * len(panels)), layout="constrained")
    for axes, (env, contenders) in zip(figure.subplots(len(panels)), panels.items(), strict=True):
        for contender, colour in zip(contenders, COLOURS, strict=False):
            wanted = [env, contender.library, contender.recipe, contender.options]
            seeds: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if [row[key] for key in ("env", "library", "recipe", "options")] == wanted:
                    point = (int(row["frames"]), float(row["return_mean"]))
                    seeds.setdefault(row["seed"], []).append(point)
            lines = [np.array(sorted(points)).T for points in seeds.values()]
            ends = [x[-1] for x, _ in lines]
            # runs that end at a goal have no mean at later frames
            alike = min(ends) > 0.8 * max(ends)
            for x, y in lines:
                axes.plot(
                    x, y, color=colour, linewidth=0.7 if alike else 1.0, alpha=0.4 if alike else 0.7
                )
            if alike:
                common = np.linspace(max(x[0] for x, _ in lines), min(ends), 50)
                mean = np.mean([np.interp(common, x, y) for x, y in lines], axis=0)
                axes.plot(common, mean, color=colour, linewidth=2.5)
            axes.plot([], [], color=colour, linewidth=2.5, label=contender.label)
        axes.set(title=env, xlabel="frames", ylabel="greedy return")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(fontsize="small")
    figure.savefig(picture, dpi=DPI)


def draw_steps(picture: Path, results: str, group: str, goal: str) -> None:
    """Steps until a goal: a dot for each seed, and a bar at their median."""
    steps: dict[str, list[int]] = {}
    for row in rows_of(f"{results}.csv"):
        steps.setdefault(row[group], []).append(int(row["steps"]))
    figure = Figure((WIDTH, 1 + 0.5 * len(steps)), layout="constrained")
    axes = figure.subplots()
    for line, (counts, colour) in enumerate(zip(steps.values(), COLOURS, strict=False)):
        axes.plot(counts, [line] * len(counts), "o", color=colour, alpha=0.6)
        axes.plot(np.median(counts), line, "|", color=colour, markersize=24, markeredgewidth=3)
    axes.set_yticks(range(len(steps)), list(steps))
    axes.set(
        xlabel=f"environment steps until {goal}", ylim=(len(steps) - 0.5, -0.5), xlim=(0, None)
    )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.savefig(picture, dpi=DPI)


DRAWN: dict[str, Callable[[Path], None]] = {
    "explain.svg": draw_explain,
    "status.svg": draw_status,
    "plot.png": draw_plot,
    "pong.png": draw_pong,
    "silent_sync.png": draw_silent_sync,
    "crashes.png": draw_crashes,
    "off_policy.png": partial(draw_returns, results="off_policy", panels=OFF_POLICY),
    "dreamer.png": partial(draw_returns, results="dreamer", panels=DREAMER),
    "laser.png": partial(draw_steps, results="laser", group="algorithm", goal="a return of 450"),
    "half_precision.png": partial(
        draw_steps, results="half_precision", group="acts_in", goal="a return of 475"
    ),
}


def main(names: list[str]) -> None:
    """Draw the pictures with these names, or all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name in names or DRAWN:
        DRAWN[name](PICTURES / name)


if __name__ == "__main__":
    main(sys.argv[1:])

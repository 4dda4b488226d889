"""Draw the pictures of the documentation again, from the present output of the commands.

python docs/pictures.py              # all, takes a few minutes
python docs/pictures.py explain.svg  # one of them

Those of the gallery are what the commands on its page make. They need chromium, for a page in a browser.
"""

from __future__ import annotations

import atexit
import io
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from PIL import Image
from results import rows_of
from rich.console import Console

from rlsync.runs.cli import explain, watch
from rlsync.runs.cli.panels import COLOURS
from rlsync.runs.life.run_folder import RecordedRun
from rlsync.runs.life.state import status_of
from rlsync.runs.recipes.run_files import statistics_in

PICTURES = Path(__file__).parent / "pictures"
#: Inches, and dots an inch: letters can be read where a phone makes the picture half as wide.
WIDTH, DPI = 5.5, 140
#: So few colours make a third of the bytes.
COLOURS_OF_PNG = 64
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


GALLERY = Path(__file__).parent / "gallery.md"
#: Seconds for which a run has to have trained before its worker is killed.
KILLED_AFTER_S = 1.0
#: Of a longer output the end is shown.
MOST_LINES = 20
#: The least and the greatest width of a terminal.
LETTERS = (80, 110)


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture of the gallery and the commands that make it."""

    picture: str
    commands: tuple[str, ...]


def gallery() -> Iterator[Shown]:
    """What the page of the gallery shows, in its order."""
    sections = re.findall(
        r"\]\(pictures/(.+?)\)\n.*?```sh\n(.*?)```", GALLERY.read_text(), re.DOTALL
    )
    for picture, block in sections:
        yield Shown(picture, tuple(block.replace("\\\n", "").splitlines()))


@cache
def gallery_folder() -> Path:
    """Where the commands of the gallery are run, with the script of the quickstart as ``train.py``."""
    folder = Path(mkdtemp())
    atexit.register(shutil.rmtree, folder)
    page = (GALLERY.parent / "quickstart.md").read_text()
    scripts = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (script,) = (script for script in scripts if "__main__" in script)
    (folder / "train.py").write_text(script)
    return folder


@cache
def output_of(shown: Shown) -> str:
    """Run the commands of a picture; what those print that train nothing, each below its command."""
    output = ""
    for command, following in pairwise([*shown.commands, ""]):
        if following.startswith("kill "):
            _run_and_kill_worker(command)
        elif not command.startswith("kill "):
            printed = _in_shell(command).communicate()[0]
            if "rlsync train" not in command:
                output += f"$ {command}\n{printed}\n"
    folder = str(gallery_folder())
    return output.replace(f"{folder}/", "").replace(folder, "this folder").strip("\n")


def _in_shell(command: str) -> subprocess.Popen[str]:
    """A command of the gallery, with the ``rlsync`` of this interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        cwd=gallery_folder(),
        env=os.environ | {"PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def _run_and_kill_worker(command: str) -> None:
    (run,) = (
        word.partition("=")[2] for word in shlex.split(command) if word.startswith("run_dir=")
    )
    folder = gallery_folder() / run
    training = _in_shell(command)
    while (statistics := statistics_in(folder)) is None or statistics.seconds < KILLED_AFTER_S:
        time.sleep(0.1)
    os.kill(status_of(folder).workers[0].pid, signal.SIGKILL)
    training.communicate()
    if not any(rollout.life for rollout in RecordedRun(folder).lives[-1].rollouts):
        raise RuntimeError(f"the run ended before its worker was started again: {command}")


def draw_of_gallery(picture: Path) -> None:
    """What the last command of a picture prints or writes; the commands above it on the page are run first."""
    for shown in gallery():
        if shown.picture in DRAWN and DRAWN[shown.picture] is not draw_of_gallery:
            continue
        output = output_of(shown)
        if shown.picture == picture.name:
            break
    words = shlex.split(shown.commands[-1])
    if picture.suffix == ".svg":
        lines = output.splitlines()
        if len(lines) > MOST_LINES:
            lines[1 : 2 - MOST_LINES] = ["..."]
        longest = max(map(len, lines))
        narrowest, widest = LETTERS
        width = max(narrowest, min(longest, widest))
        draw_terminal(picture, "\n".join(lines), " ".join(words[:2]), width)
        return
    (option,) = {"--out", "--video"}.intersection(words)
    written = gallery_folder() / words[words.index(option) + 1]
    if written.suffix == ".html":
        draw_page(picture, written)
    else:
        shutil.copy(written, picture)


def draw_page(picture: Path, page: Path) -> None:
    """What a browser shows of the beginning of a page."""
    browser = ["chromium", "--headless=new", "--no-sandbox", "--hide-scrollbars"]
    window = ["--window-size=1000,1300", f"--screenshot={picture}"]
    subprocess.run([*browser, *window, page.as_uri()], check=True, stderr=subprocess.DEVNULL)


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


#: The runs of results/pong.csv that are drawn with ppo and dqn.
PEERS_OF_PPO = ("ppo", "dqn", "Stable-Baselines3", "Sample Factory")


def draw_pong(picture: Path, *, of_ppo: bool) -> None:
    """The returns in ``results/pong.csv``, over steps and over minutes: of ppo, dqn and their peers, or others."""
    curves: dict[str, dict[str, list[tuple[float, ...]]]] = {}
    for row in rows_of("pong.csv"):
        is_of_ppo = row["run"].startswith(PEERS_OF_PPO)
        if of_ppo != is_of_ppo and not row["run"].startswith("Sample Factory"):
            continue
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
    "Pendulum-v1 from pixels": (
        Contender("sac", "rlsync", "sac", "env=rendered_pendulum"),
        Contender("recipe.lr=0.001", "rlsync", "sac", "env=rendered_pendulum; recipe.lr=0.001"),
    ),
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


def draw_nodes(picture: Path) -> None:
    """The ages in ``results/nodes.csv`` over nodes, a line for each model, a panel for each speed of links."""
    rows = rows_of("nodes.csv", relay="waves", wanted_per_s="10", slow_share="0.0")
    speeds = sorted({float(row["gbit"]) for row in rows})
    sizes = sorted({float(row["model_mb"]) for row in rows})
    figure = Figure((WIDTH, 6), layout="constrained")
    panels = figure.subplots(len(speeds), sharex=True, sharey=True)
    for axes, speed in zip(panels, speeds, strict=True):
        for size, colour in zip(sizes, COLOURS, strict=False):
            points = []
            for row in rows:
                if (float(row["gbit"]), float(row["model_mb"])) == (speed, size):
                    points.append((int(row["nodes"]), float(row["age_s"])))
            nodes, ages = np.array(sorted(points)).T
            label = f"{size:g} MB" if axes is panels[0] else None
            axes.plot(nodes, ages, "o-", color=colour, label=label)
        axes.set(title=f"links of {speed:g} Gbit/s", xscale="log", yscale="log")
        axes.axhline(2.0, color="grey", linewidth=0.5)
        axes.set_ylabel("age of the oldest, s")
    panels[-1].set_xlabel("nodes")
    figure.legend(fontsize="small", loc="outside lower center", ncols=len(sizes))
    figure.savefig(picture, dpi=DPI)


DRAWN: dict[str, Callable[[Path], None]] = {
    "explain.svg": draw_explain,
    "status.svg": draw_status,
    "pong.png": partial(draw_pong, of_ppo=False),
    "pong_ppo.png": partial(draw_pong, of_ppo=True),
    "silent_sync.png": draw_silent_sync,
    "crashes.png": draw_crashes,
    "nodes.png": draw_nodes,
    "off_policy.png": partial(draw_returns, results="off_policy", panels=OFF_POLICY),
    "dreamer.png": partial(draw_returns, results="dreamer", panels=DREAMER),
    "laser.png": partial(draw_steps, results="laser", group="algorithm", goal="a return of 450"),
    "half_precision.png": partial(
        draw_steps, results="half_precision", group="acts_in", goal="a return of 475"
    ),
}
DRAWN |= {shown.picture: draw_of_gallery for shown in gallery() if shown.picture not in DRAWN}


def main(names: list[str]) -> None:
    """Draw the pictures with these names, or all pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name in names or DRAWN:
        picture = PICTURES / name
        DRAWN[name](picture)
        if picture.suffix == ".png":
            Image.open(picture).convert("RGB").quantize(COLOURS_OF_PNG).save(picture, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Writes ``docs/results/index.md``, the table of all recipes, from the evaluations that the pages keep.

    python docs/results.py

A number is the interquartile mean over seeds, as rliable has it, with a 95 % interval by 10,000 bootstraps.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlsync.runs.cli.over_seeds import OverSeeds

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER / "index.md"
SB3 = "stable-baselines3"
SB3_PPO = "stable-baselines3 2.9.2"  # of the curves of ppo
HEAD = """# All recipes

| recipe | task | measured | rlsync | peer | command |
|---|---|---|---|---|---|
"""
FOOT = """
Interquartile means over seeds (95 % bootstrap interval; number of seeds), by `python docs/results.py` from
the evaluations that each page keeps. A run that never reached the return counts as its last frame.
"""


@dataclass(frozen=True)
class Row:
    """A line of the table: one number for each seed, and those of a peer."""

    recipe: str
    task: str
    page: str
    measured: str
    numbers: Sequence[float]
    peer: str = ""
    peers: Sequence[float] = ()
    more: str = ""  # of the command
    command: str = ""

    def __str__(self) -> str:
        peer = f"{self.peer} {shown(self.peers)}" if self.peers else ""
        command = f"`{self.command or f'rlsync train recipe={self.recipe}{self.more}'}`"
        cells = (
            f"[`{self.recipe}`]({self.page})",
            self.task,
            self.measured,
            shown(self.numbers),
            peer,
            command,
        )
        return f"| {' | '.join(cells)} |"


def shown(numbers: Sequence[float]) -> str:
    over = OverSeeds.of(numbers)
    if len(numbers) == 1:
        return f"{over.iqm:,.0f} (one seed)"
    return f"{over.iqm:,.0f} ({over.low:,.0f} to {over.high:,.0f}; {len(numbers)})"


def rows_of(file: str, **which: str) -> list[dict[str, str]]:
    """The rows of a file that have these cells."""
    with (FOLDER / file).open(newline="") as opened:
        return [row for row in csv.DictReader(opened) if row.items() >= which.items()]


def runs(
    file: str, library: str, recipe: str, env: str, options: str
) -> list[list[tuple[int, float]]]:
    """Of each seed its evaluations: frames and return."""
    return curves(file, "return_mean", library=library, recipe=recipe, env=env, options=options)


def curves(file: str, value: str, **which: str) -> list[list[tuple[int, float]]]:
    """Of each seed the frames and a value, of the rows that have these cells."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows_of(file, **which):
        found.setdefault(row["seed"], []).append((int(row["frames"]), float(row[value])))
    return list(found.values())


def after(frames: int) -> Callable[[list[tuple[int, float]]], float]:
    """The return of the last evaluation until so many frames."""
    return lambda run: [value for at, value in run if at <= frames][-1]


def first(goal: float) -> Callable[[list[tuple[int, float]]], float]:
    """The frames until the first evaluation with such a return."""
    return lambda run: next((at for at, value in run if value >= goal), run[-1][0])


def steps(file: str, **which: str) -> list[float]:
    return [float(row.get("steps") or row["frames"]) for row in rows_of(file, **which)]


def best(replay: str) -> list[float]:
    """The last return of the best agent of each population that shares a replay, or does not."""
    found: dict[str, float] = {}
    for row in rows_of("swing_up.csv", replay=replay, frames="600000"):
        found[row["population"]] = max(float(row["return"]), found.get(row["population"], 0.0))
    return list(found.values())


def rows() -> list[Row]:
    off, dreamer, cartpole, pendulum = "off_policy.csv", "dreamer.csv", "CartPole-v1", "Pendulum-v1"
    cheetah, hopper = "HalfCheetah-v5", "Hopper-v5"
    pixels = "Pendulum-v1 from pixels"

    def learned(
        ours: tuple[str, ...],
        peer: str,
        theirs: tuple[str, ...],
        page: str,
        frames: int,
        more: str = "",
        late: int = 0,
    ) -> Row:
        """The returns after so many frames, or up to ``late`` more."""
        (_, _, recipe, env, _), at = ours, after(frames + late)
        numbers, peers = ([*map(at, runs(*which))] for which in (ours, theirs))
        return Row(recipe, env, page, f"return after {frames:,} frames", numbers, peer, peers, more)

    def replay(recipe: str, env: str, frames: int, section: str, more: str = "") -> Row:
        ours, theirs = ((off, library, recipe, env, "") for library in ("rlsync", SB3))
        return learned(ours, "SB3", theirs, f"off_policy.md#{section}", frames, more)

    def pong(run: str) -> list[float]:
        return [*map(first(18.0), curves("pong.csv", "return", run=run))]

    def on_policy(
        env: str, section: str, frames: int, words: str, options: str, other: str = ""
    ) -> Row:
        """The returns of ppo's training episodes after so many frames, beside those with other options."""
        numbers, others = (
            [*map(after(frames + 5_000), curves("ppo.csv", "return_mean", env=env, options=which))]
            for which in (options, other)
        )
        peer, peers = "", []
        if other:
            peer, peers = f"`{other}`", others
        if other == SB3_PPO:
            peer = "SB3"
        measured = f"return after {frames:,} frames"
        page = f"ppo.md#{section}"
        return Row(
            "ppo",
            env,
            page,
            measured,
            numbers,
            peer,
            peers,
            command=f"rlsync train recipe=ppo {words}",
        )

    until = "frames until a return of"
    impala, laser = (steps("laser.csv", algorithm=name) for name in ("impala", "laser"))
    here = "python benchmarks/laser_cartpole.py"
    return [
        Row(
            "ppo",
            cartpole,
            "off_policy.md",
            f"{until} 475",
            steps("ppo_cartpole.csv", num_envs="8"),
        ),
        on_policy(cheetah, "mujoco", 1_000_000, "env=halfcheetah", "", SB3_PPO),
        on_policy(hopper, "mujoco", 1_000_000, "env=hopper", ""),
        on_policy(
            "CartPole-v1 without velocities",
            "a-memory",
            100_000,
            "recipe.model.lstm=64",
            "recipe.model.lstm=64",
            "recipe.model.lstm=0",
        ),
        on_policy(
            "Taxi-v4",
            "a-mask-of-invalid-actions",
            300_000,
            "env=gymnasium env.id=Taxi-v4 env.action_mask=info",
            "env.action_mask=info",
            "env.action_mask=none",
        ),
        Row(
            "dqn",
            cartpole,
            "off_policy.md#cartpole-v1-dqn",
            f"{until} 475",
            [*map(first(475.0), runs(off, "rlsync", "dqn", cartpole, ""))],
        ),
        replay("sac", pendulum, 9_500, "pendulum-v1-sac-and-td3"),
        replay("td3", pendulum, 9_500, "pendulum-v1-sac-and-td3"),
        Row(
            "sac",
            pixels,
            "off_policy.md#pendulum-v1-from-pixels-sac",
            "return after 8,000 frames",
            [*map(after(8_000), runs(off, "rlsync", "sac", pixels, "env=rendered_pendulum"))],
            more=" env=rendered_pendulum",
        ),
        *(
            replay(recipe, env, 100_000, "mujoco", more=f" env.id={env} recipe.total_frames=100000")
            for recipe, env in (("sac", cheetah), ("sac", hopper), ("td3", cheetah))
        ),
        *(
            learned(
                (off, "rlsync", "crossq", env, ""),
                "`sac`",
                (off, "rlsync", "sac", env, ""),
                "off_policy.md#mujoco",
                50_000,
                f" env.id={env} recipe.total_frames=50000",
                late=500,
            )
            for env in (cheetah, hopper)
        ),
        Row("impala", cartpole, "laser.md", f"{until} 450", impala, command=here),
        Row("laser", cartpole, "laser.md", f"{until} 450", laser, "`impala`", impala, command=here),
        Row(
            "laser",
            "SparseSwingUp-v0",
            "laser.md#shared-experience",
            "return of the best of three agents after 600,000 frames",
            best("sharing"),
            "alone",
            best("alone"),
            command="rlsync train recipe=laser recipe.agents=3 env.id=swing_up:SparseSwingUp-v0",
        ),
        *(
            Row(
                recipe,
                "Pong",
                f"{page}.md#pong-from-pixels",
                f"{until} 18",
                pong(f"{recipe}, as shipped"),
                "Sample Factory",
                pong("Sample Factory 2.1.1"),
                more=" env=pong recipe.update_dtype=bfloat16",
            )
            for recipe, page in (
                ("impala", "actor_learner"),
                ("laser", "actor_learner"),
                ("ppo", "ppo"),
                ("dqn", "ppo"),
            )
        ),
        learned(
            (dreamer, "rlsync", "dreamer_v1", pendulum, ""),
            "`sac`",
            (off, "rlsync", "sac", pendulum, ""),
            "dreamer.md#pendulum-v1",
            5_000,
            late=200,
        ),
        Row(
            "dreamer_v3",
            cartpole,
            "dreamer.md#cartpole-v1",
            f"{until} 475",
            [*map(first(475.0), runs(dreamer, "rlsync", "dreamer_v3", cartpole, ""))],
        ),
        learned(
            (dreamer, "rlsync", "dreamer_v3", pendulum, ""),
            "sheeprl",
            (dreamer, "sheeprl", "dreamer_v3", pendulum, "lr=0.001 for all parts"),
            "dreamer.md#pendulum-v1",
            5_000,
            " env=pendulum recipe.total_frames=5000",
            late=200,
        ),
    ]


def page() -> str:
    return HEAD + "".join(f"{row}\n" for row in rows()) + FOOT


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)

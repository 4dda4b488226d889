"""Compare ``sac``, ``td3``, ``dqn`` and ``ppo`` with Stable-Baselines3 and TorchRL.

    python benchmarks/off_policy.py [TABLE ...] [--rounds 3] [--seconds 60] [--only NAME ...]
                                    [--peer-venv FOLDER] [--sbx-venv FOLDER] [--rlox-venv FOLDER]
                                    [--out FOLDER]

By default it makes all tables, one after the other:

    sac, td3, sac_cheetah, td3_cheetah  updates a second on Pendulum-v1 and HalfCheetah-v5. Only what comes
                                        after the prefill counts, and of that not the first third
    dqn_run, ppo_run                    whole runs on CartPole-v1: the least of all rounds
    sac_return, dqn_return, ppo_return  runs until -200 on Pendulum-v1 and until 475 on CartPole-v1, with a
                                        seed of its own in each round: the median, and each

The contenders take turns in each round, each in its own processes with one torch thread:

    rlsync, rlsync-*  `rlsync train` with this package's recipe, as shipped but for what its name says:
                      -lag-1 and -lag-0 have that lag; -2x4 and -1x8 have so many workers and environments
                      in each; -bfloat16 only where the processor has it; -crossq is recipe=crossq, beside sac
    sb3, sb3-*        Stable-Baselines3 in its own virtual environment (made at first use): one process,
                      with equal networks, batches, rates and updates for each frame
    sbx               the same settings of SBX, which is Stable-Baselines3 in jax (sac and td3 only)
    rlox              PPO of rlox, with environments and advantages in Rust and 8 environments (ppo_run only)
    torchrl           SACTrainer with async_collection=True, one worker; nothing holds a ratio (sac only)

Columns with "cpu" are by the processor time of the whole process tree: compare those on a machine with other
load. "process s" is from the start of the program to its end, imports included; "seconds" is from before the
first frame to the last update; "start s" is the processor time before. Seconds to a return leave out sb3's
evaluations; rlsync's are another process's. The output of each contender goes to a log in ``--out``, the
tables to ``tables.md`` there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peers.rates import rates, table
from peers.rounds import SEED, compare, median
from peers.venvs import RLOX, SBX, STABLE_BASELINES
from peers.watch import Sample
from peers.whole import Pick, least, whole, whole_table

from rlsync.tensors.device import bfloat16_instructions

PEERS = Path(__file__).parent / "peers"
PACKAGES = ("torch", "stable-baselines3", "rlox", "torchrl", "tensordict", "gymnasium", "numpy")
PEER = "sb3"
RLSYNC_TRAIN = (sys.executable, str(PEERS / "rlsync_train_peer.py"))

Words = Callable[[argparse.Namespace], list[str]]


# --------------------------------------------------------------------- what rlsync is told, all in one place

#: Of every run: it draws as its round says, and writes as little as its peers do.
COMMON = (f"seed={SEED}", "logger=none", "checkpoint_every_frames=1000000")

#: How workers and learner go together.
LAGS = {"lag-1": ("collector.lag=1",), "lag-0": ("collector.lag=0",)}

#: Of a run for a time: one environment and one update for each frame, as peers have them, and no own end.
PACED = (
    "recipe.total_frames=1000000000",
    "recipe.target_return=null",
    "recipe.evaluation.every_frames=0",
    "recipe.lr=0.001",
    "recipe.pace.ratio=1",
    "collector.num_workers=1",
    "collector.frames_per_batch=64",
    "env.num_envs=1",
)

DQN_RUN = (
    "recipe=dqn",
    "recipe.total_frames=12000",
    "recipe.target_return=null",
    "recipe.evaluation.every_frames=0",
)
UNIFORM = ("recipe.prioritized=false",)  # as Stable-Baselines3 draws; that file has priorities
FOUR_ENVS = (*LAGS["lag-1"], "env.num_envs=4")
PPO_RUN = ("recipe=ppo", "recipe.total_frames=20480", "recipe.target_return=null")
ONE_ENV = ("env.num_envs=1",)
TWO_BY_FOUR = ("collector.num_workers=2", "env.num_envs=4")
ONE_BY_EIGHT = ("collector.num_workers=1", "env.num_envs=8")
SAC_RETURN = ("recipe=sac", "recipe.target_return=-200", "recipe.evaluation.every_frames=500")
EAGER = ("recipe.compile=off",)
BFLOAT16 = ("recipe.update_dtype=bfloat16",)


def rlsync(*overrides: str, cold: bool = False) -> Words:
    """``rlsync train`` with these overrides, to its end; cold: nothing is compiled yet."""
    more = ["--cold"] if cold else []
    return lambda _: [*RLSYNC_TRAIN, *overrides, *COMMON, *more]


def paced(algorithm: str, env: str, lag: str, *overrides: str) -> Words:
    """``rlsync train`` for a time, with one worker and one update for each frame."""
    own = (f"recipe={algorithm}", f"env.id={env}", *PACED, *LAGS[lag], *overrides)

    def words(options: argparse.Namespace) -> list[str]:
        prefill = f"recipe.pace.prefill={options.prefill}"
        return [*RLSYNC_TRAIN, *own, prefill, *COMMON, "--seconds", str(options.seconds)]

    return words


# ------------------------------------------------------------------------------------------------- the peers


def sb3(algorithm: str, env: str, *more: str) -> Words:
    """Stable-Baselines3: for a time if it is told no number of frames."""

    def words(options: argparse.Namespace) -> list[str]:
        python = STABLE_BASELINES.python(options.peer_venv)
        asked = more if "--frames" in more else (*more, *_for_a_time(options))
        return [*_sb3_peer(python, algorithm, env), *asked]

    return words


def sbx(algorithm: str, env: str) -> Words:
    """SBX, for a time."""
    return lambda options: [
        *_sb3_peer(SBX.python(options.sbx_venv), algorithm, env),
        *("--package", "sbx"),
        *_for_a_time(options),
    ]


def _sb3_peer(python: Path, algorithm: str, env: str) -> list[str]:
    return [
        str(python),
        str(PEERS / "sb3_peer.py"),
        "--algorithm",
        algorithm,
        "--env",
        env,
        "--seed",
        SEED,
    ]


def rlox(*more: str) -> Words:
    """PPO of rlox."""
    return lambda options: [
        str(RLOX.python(options.rlox_venv)),
        str(PEERS / "rlox_peer.py"),
        *("--seed", SEED),
        *more,
    ]


def torchrl(env: str) -> Words:
    """TorchRL's own trainer."""
    return lambda options: [
        sys.executable,
        str(PEERS / "torchrl_sac_peer.py"),
        "--env",
        env,
        *_for_a_time(options),
    ]


def _for_a_time(options: argparse.Namespace) -> list[str]:
    return ["--prefill", str(options.prefill), "--seconds", str(options.seconds)]


@dataclass(frozen=True, slots=True)
class Table:
    """Contenders that are compared, and how."""

    title: str
    contenders: Mapping[str, Words]
    measure: Callable[[Sequence[Sample]], Any]
    write: Callable[[dict[str, list[Any]]], str]
    most_s: float | None = None  # of a run; None: it ends by --seconds


def rates_of(algorithm: str, env: str) -> Table:
    contenders = {
        "rlsync-lag-1": paced(algorithm, env, "lag-1"),
        "rlsync-lag-0": paced(algorithm, env, "lag-0"),
        "rlsync-eager": paced(algorithm, env, "lag-1", *EAGER),
        "rlsync-bfloat16": paced(algorithm, env, "lag-1", *BFLOAT16),
        PEER: sb3(algorithm, env),
        "sbx": sbx(algorithm, env),
    }
    if bfloat16_instructions() == []:
        del contenders["rlsync-bfloat16"]
    if algorithm == "sac":
        contenders |= {"torchrl": torchrl(env), "rlsync-crossq": paced("crossq", env, "lag-1")}
    return Table(
        f"{algorithm} on {env}, updates a second", contenders, rates, partial(table, peer=PEER)
    )


def runs_of(
    title: str, contenders: Mapping[str, Words], peer: str = PEER, pick: Pick = least
) -> Table:
    write = partial(whole_table, peer=peer, pick=pick)
    return Table(title, contenders, whole, write, most_s=3_600.0)


PEER_8, EIGHT = "sb3-8-envs", ("--num-envs", "8")
FEW_EPISODES = ("--evaluate-every", "500", "--episodes", "8")
CARTPOLE = "CartPole-v1"
TABLES: dict[str, Table] = {
    "sac": rates_of("sac", "Pendulum-v1"),
    "td3": rates_of("td3", "Pendulum-v1"),
    "sac_cheetah": rates_of("sac", "HalfCheetah-v5"),
    "td3_cheetah": rates_of("td3", "HalfCheetah-v5"),
    "dqn_run": runs_of(
        "dqn on CartPole-v1, 12,000 frames",
        {
            "rlsync": rlsync(*DQN_RUN),
            "rlsync-uniform": rlsync(*DQN_RUN, *UNIFORM),
            "rlsync-uniform-4": rlsync(*DQN_RUN, *UNIFORM, *FOUR_ENVS),
            PEER: sb3("dqn", CARTPOLE, "--frames", "12000"),
        },
    ),
    "ppo_run": runs_of(
        "ppo on CartPole-v1, 20,480 frames",
        {
            "rlsync": rlsync(*PPO_RUN),
            "rlsync-2x4": rlsync(*PPO_RUN, *TWO_BY_FOUR),
            "rlsync-1x8": rlsync(*PPO_RUN, *ONE_BY_EIGHT),
            "rlsync-1-env": rlsync(*PPO_RUN, *ONE_ENV),
            PEER: sb3("ppo", CARTPOLE, "--frames", "20480"),
            PEER_8: sb3("ppo", CARTPOLE, "--frames", "20480", *EIGHT),
            "rlox": rlox("--frames", "20480", *EIGHT),
        },
        peer=PEER_8,
    ),
    "sac_return": runs_of(
        "sac on Pendulum-v1, until -200",
        {
            "rlsync": rlsync(*SAC_RETURN),
            "rlsync-cold": rlsync(*SAC_RETURN, cold=True),
            "rlsync-eager": rlsync(*SAC_RETURN, *EAGER),
            PEER: sb3(
                "sac", "Pendulum-v1", "--frames", "20000", "--target-return", "-200", *FEW_EPISODES
            ),
        },
        pick=median,
    ),
    "dqn_return": runs_of(
        "dqn on CartPole-v1, until 475",
        {
            "rlsync": rlsync("recipe=dqn"),
            PEER: sb3(
                "dqn",
                CARTPOLE,
                "--frames",
                "50000",
                "--total-frames",
                "50000",
                "--target-return",
                "475",
                "--evaluate-every",
                "2000",
                "--episodes",
                "16",
            ),
        },
        pick=median,
    ),
    "ppo_return": runs_of(
        "ppo on CartPole-v1, until 475",
        {
            "rlsync": rlsync("recipe=ppo"),
            "rlsync-1x8": rlsync("recipe=ppo", *ONE_BY_EIGHT),
            PEER: sb3("ppo", CARTPOLE, "--frames", "150000", "--target-return", "475"),
            PEER_8: sb3("ppo", CARTPOLE, "--frames", "150000", "--target-return", "475", *EIGHT),
        },
        peer=PEER_8,
        pick=median,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument(
        "--prefill", type=int, default=1_000, help="frames, where updates are counted"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of a run whose updates are counted"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the contenders")
    parser.add_argument("--peer-venv", type=Path, default=STABLE_BASELINES.folder)
    parser.add_argument("--sbx-venv", type=Path, default=SBX.folder)
    parser.add_argument("--rlox-venv", type=Path, default=RLOX.folder)
    parser.add_argument("--out", type=Path, default=Path("off_policy"))
    given = parser.parse_args()
    if unknown := set(given.tables) - TABLES.keys():
        parser.error(f"no table {', '.join(unknown)}; there are: {', '.join(TABLES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    status, written = 0, []
    for name in given.tables or TABLES:
        made = TABLES[name]
        only = [name for name in made.contenders if given.only is None or name in given.only]
        own = {"only": only, "out": given.out / f"{name}.json", "table": given.out / f"{name}.md"}
        options = argparse.Namespace(
            **{**vars(given), **own, "seconds": made.most_s or given.seconds}
        )
        print(made.title, flush=True)
        status |= compare(options, made.contenders, PACKAGES, made.measure, made.write)
        written.append(f"{made.title}\n\n{own['table'].read_text()}")
        (given.out / "tables.md").write_text("\n".join(written))
    return status


if __name__ == "__main__":
    raise SystemExit(main())

"""Compare ``sac``, ``td3``, ``dqn`` and ``ppo`` with Stable-Baselines3 and TorchRL.

    python benchmarks/off_policy.py [TABLE ...] [--rounds 3] [--seconds 60] [--only NAME ...]
                                    [--peer-venv FOLDER] [--sbx-venv FOLDER] [--out FOLDER]

By default it makes all tables, one after the other:

    sac, td3, sac_cheetah, td3_cheetah  updates a second on Pendulum-v1 and HalfCheetah-v5. Only what comes
                                        after the prefill counts, and of that not the first third
    dqn_run, ppo_run                    whole runs on CartPole-v1, from the first frame to the last
    sac_return, dqn_return, ppo_return  runs until -200 on Pendulum-v1 and until 475 on CartPole-v1, with a
                                        seed of its own in each round

The contenders take turns in each round, each in its own processes with one torch thread:

    rlsync, rlsync-*  this package's recipe, as shipped but for what its name says; -bfloat16 only where the
                      processor has it; -crossq is recipe=crossq, beside sac
    sb3, sb3-*        Stable-Baselines3 in its own virtual environment (made at first use): one process,
                      with equal networks, batches, rates and updates for each frame
    sbx               the same settings of SBX, which is Stable-Baselines3 in jax (sac and td3 only)
    torchrl           SACTrainer with async_collection=True, one worker; nothing holds a ratio (sac only)

Columns with "cpu" are by the processor time of the whole process tree: compare those on a machine with other
load. Seconds to a return leave out sb3's evaluations; rlsync's are another process's. The output of each
contender goes to a log in ``--out``, the tables to ``tables.md`` there.
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
from peers.rounds import SEED, compare
from peers.venvs import SBX, STABLE_BASELINES
from peers.watch import Sample
from peers.whole import whole, whole_table

from rlsync.tensors.device import bfloat16_instructions

PEERS = Path(__file__).parent / "peers"
PACKAGES = ("torch", "stable-baselines3", "torchrl", "tensordict", "gymnasium", "numpy")
PEER = "sb3"

Words = Callable[[argparse.Namespace], list[str]]


def paced(algorithm: str, env: str, collector: str, *overrides: str) -> Words:
    """rlsync for a time, with one worker and one update for each frame."""
    own = ["--algorithm", algorithm, "--env", env, "--collector", collector, *overrides]
    peer = [sys.executable, str(PEERS / "rlsync_off_policy_peer.py"), *own]
    return lambda options: [*peer, *_for_a_time(options)]


def run(*overrides: str, cold: bool = False) -> Words:
    """A whole run of rlsync's, with these overrides of ``rlsync train``; cold: nothing is compiled yet."""
    common = (f"seed={SEED}", "logger=none", "checkpoint_every_frames=1000000", *(["--cold"] if cold else []))
    return lambda _: [sys.executable, str(PEERS / "rlsync_run_peer.py"), *overrides, *common]


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
    return [str(python), str(PEERS / "sb3_peer.py"), "--algorithm", algorithm, "--env", env, "--seed", SEED]


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
        "rlsync-async": paced(algorithm, env, "async"),
        "rlsync-sync": paced(algorithm, env, "sync"),
        "rlsync-eager": paced(algorithm, env, "async", "--compile", "off"),
        "rlsync-bfloat16": paced(algorithm, env, "async", "--update-dtype", "bfloat16"),
        PEER: sb3(algorithm, env),
        "sbx": sbx(algorithm, env),
    }
    if bfloat16_instructions() == []:
        del contenders["rlsync-bfloat16"]
    if algorithm == "sac":
        contenders |= {"torchrl": torchrl(env), "rlsync-crossq": paced("crossq", env, "async")}
    return Table(f"{algorithm} on {env}, updates a second", contenders, rates, partial(table, peer=PEER))


def runs_of(title: str, contenders: Mapping[str, Words]) -> Table:
    return Table(title, contenders, whole, partial(whole_table, peer=PEER), most_s=3_600.0)


DQN_RUN = (
    "recipe=dqn",
    "recipe.total_frames=12000",
    "recipe.target_return=null",
    "recipe.evaluation.every_frames=0",
)
UNIFORM = ("recipe.prioritized=false",)  # as Stable-Baselines3 draws
PPO_RUN = ("recipe=ppo", "recipe.total_frames=20480", "recipe.target_return=null")
SAC_RETURN = ("recipe=sac", "recipe.target_return=-200", "recipe.evaluation.every_frames=500")
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
            "rlsync": run(*DQN_RUN),
            "rlsync-uniform": run(*DQN_RUN, *UNIFORM),
            "rlsync-uniform-async": run(*DQN_RUN, *UNIFORM, "collector=async", "env.num_envs=4"),
            PEER: sb3("dqn", CARTPOLE, "--frames", "12000"),
        },
    ),
    "ppo_run": runs_of(
        "ppo on CartPole-v1, 20,480 frames",
        {
            "rlsync": run(*PPO_RUN),
            "rlsync-eager": run(*PPO_RUN, "recipe.compile=off"),
            "rlsync-1-env": run(*PPO_RUN, "env.num_envs=1"),
            PEER: sb3("ppo", CARTPOLE, "--frames", "20480"),
            "sb3-8-envs": sb3("ppo", CARTPOLE, "--frames", "20480", "--num-envs", "8"),
        },
    ),
    "sac_return": runs_of(
        "sac on Pendulum-v1, until -200",
        {
            "rlsync": run(*SAC_RETURN),
            "rlsync-cold": run(*SAC_RETURN, cold=True),
            "rlsync-eager": run(*SAC_RETURN, "recipe.compile=off"),
            PEER: sb3("sac", "Pendulum-v1", "--frames", "20000", "--target-return", "-200", *FEW_EPISODES),
        },
    ),
    "dqn_return": runs_of(
        "dqn on CartPole-v1, until 475",
        {
            "rlsync": run("recipe=dqn"),
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
    ),
    "ppo_return": runs_of(
        "ppo on CartPole-v1, until 475",
        {
            "rlsync": run("recipe=ppo"),
            PEER: sb3("ppo", CARTPOLE, "--frames", "150000", "--target-return", "475"),
            "sb3-8-envs": sb3(
                "ppo", CARTPOLE, "--frames", "150000", "--target-return", "475", "--num-envs", "8"
            ),
        },
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=", ".join(TABLES))
    parser.add_argument("--prefill", type=int, default=1_000, help="frames, where updates are counted")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run whose updates are counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the contenders")
    parser.add_argument("--peer-venv", type=Path, default=STABLE_BASELINES.folder)
    parser.add_argument("--sbx-venv", type=Path, default=SBX.folder)
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
        options = argparse.Namespace(**{**vars(given), **own, "seconds": made.most_s or given.seconds})
        print(made.title, flush=True)
        status |= compare(options, made.contenders, PACKAGES, made.measure, made.write)
        written.append(f"{made.title}\n\n{own['table'].read_text()}")
        (given.out / "tables.md").write_text("\n".join(written))
    return status


if __name__ == "__main__":
    raise SystemExit(main())

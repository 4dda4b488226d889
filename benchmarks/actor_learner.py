"""Compare the agent steps per second of the recipe ``impala`` on Pong with Sample Factory and TorchRL.

    python benchmarks/actor_learner.py [--seconds 60] [--rounds 1] [--only NAME ...] [--torso nature]
                                       [--lstm 0] [--cluster] [--peer-venv FOLDER] [--out FILE.json]
                                       [--table FILE.md]

The contenders run one after the other in each round, each in its own processes with one torch thread:

    rlsync-fp32, rlsync-bf16   this package's recipe; bf16 only if the processor supports it
    rlsync-fp32-split          the same with the learner's torso in two Python threads
    rlsync-fp32-lag            the same with a fixed lag of one round of rollouts: collector.lag=1
    sample_factory             Sample Factory 2.1.1, APPO, in its own virtual environment (made at first use)
    torchrl                    MultiAsyncCollector, VTrace, A2CLoss, SharedMemWeightSyncScheme; no LSTM

With ``--cluster`` they are

    rlsync-fp32, rlsync-ray    the recipe without Ray, and with its workers on one Ray node of this machine
    rllib                      RLlib 2.60's IMPALA, new API stack, in its own virtual environment; no LSTM

These run in a network that has nothing but the loopback device, where this user may make one.

All play Pong (84 x 84 x 4, four frames a step) on the CPU with 2 workers of 8 environments, rollouts of 32,
one optimizer step for every 256 steps, and the same network. Steps are agent steps that the learner has
trained on, not frames. The first third of a run does not count. "steps/cpu s" divides by the processor time
of the whole process tree. On a machine with other load, compare that column, and look at "others". The output
of each contender goes to a log next to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from peers.rounds import alone, compare, median, shown
from peers.venvs import RLLIB, SAMPLE_FACTORY
from peers.watch import Figures, figures

from rlsync.tensors.device import bfloat16_instructions

PEERS = Path(__file__).parent / "peers"
APPO, TORCHRL, RAY, RLLIB_PEER = "sample_factory", "torchrl", "rlsync-ray", "rllib"
PACKAGES = (
    "torch",
    "sample-factory",
    "torchrl",
    "tensordict",
    "gymnasium",
    "numpy",
    "ale-py",
    "opencv-python",
    "opencv-python-headless",
    "ray",
)
COLUMNS = "cpu", "others", "lag mean", "lag max"
PEERS_OF_ONE_HOST = {APPO: "APPO", TORCHRL: "TorchRL"}
PEERS_OF_A_CLUSTER = {"rlsync-fp32": "without Ray", RLLIB_PEER: "RLlib"}
OTHERS_DISTURB = 0.1  # processor seconds a second


def run_rlsync(
    options: argparse.Namespace, precision: str = "fp32", threads: int = 1
) -> list[str] | None:
    """The command for the recipe. None, with a message, if it needs bfloat16 and the processor has none."""
    if precision == "bf16" and bfloat16_instructions() == []:
        print(
            "rlsync-bf16: left out, this processor has no bfloat16, and emulates it ten times slower"
        )
        return None
    own = ["--precision", precision, "--torso-threads", str(threads)]
    return [sys.executable, str(PEERS / "rlsync_peer.py"), *own, *_like(options)]


def run_sample_factory(options: argparse.Namespace) -> list[str]:
    """The command for Sample Factory, in its own virtual environment."""
    python = SAMPLE_FACTORY.python(options.peer_venv)
    return [str(python), str(PEERS / "appo_peer.py"), *_like(options), *options.appo_args.split()]


def run_torchrl(options: argparse.Namespace) -> list[str] | None:
    """The command for TorchRL's own parts. None with an LSTM: the comparison has none for TorchRL."""
    if options.lstm:
        print("torchrl: left out, it is compared without an LSTM")
        return None
    return [
        sys.executable,
        str(PEERS / "torchrl_peer.py"),
        *_like(options),
        *options.torchrl_args.split(),
    ]


def run_rllib(options: argparse.Namespace) -> list[str] | None:
    """The command for RLlib, in its own virtual environment. None with an LSTM or an impala torso."""
    if options.lstm or options.torso != "nature":
        print("rllib: left out, it is compared with the nature torso, without an LSTM")
        return None
    python = RLLIB.python(options.peer_venv)
    return [
        *alone(),
        str(python),
        str(PEERS / "rllib_peer.py"),
        *_like(options),
        *options.rllib_args.split(),
    ]


def run_on_ray(options: argparse.Namespace) -> list[str] | None:
    """The command for the recipe with its workers on a Ray node of this machine."""
    command = run_rlsync(options)
    return command and [*alone(), *command, "--cluster"]


CONTENDERS: dict[str, Callable[[argparse.Namespace], list[str] | None]] = {
    "rlsync-fp32": run_rlsync,
    "rlsync-fp32-split": lambda options: run_rlsync(options, threads=2),
    "rlsync-fp32-lag": lambda options: [*(run_rlsync(options) or []), "--lag", "1"],
    "rlsync-bf16": lambda options: run_rlsync(options, "bf16"),
    APPO: run_sample_factory,
    TORCHRL: run_torchrl,
}
ON_A_CLUSTER: dict[str, Callable[[argparse.Namespace], list[str] | None]] = {
    "rlsync-fp32": run_rlsync,
    RAY: run_on_ray,
    RLLIB_PEER: run_rllib,
}


def _like(options: argparse.Namespace) -> list[str]:
    names = ["seconds", "workers", "envs", "rollout", "torso", *(["lstm"] if options.lstm else [])]
    return [word for name in names for word in (f"--{name}", str(vars(options)[name]))]


def table(measured: dict[str, list[Figures]], peers: Mapping[str, str] = PEERS_OF_ONE_HOST) -> str:
    """The medians over the rounds, as a Markdown table.

    Args:
        measured: by contender.
        peers: those that the others are divided by, and what their columns are called.
    """
    each = [f"x {name}" for name in peers.values()]
    columns = ("steps/s", *each, "steps/cpu s", *each, *COLUMNS)
    rows = [("contender", *columns), ("---", *("---:" for _ in columns))]
    for name, runs in measured.items():
        numbers = []
        for field in ("steps_per_s", "steps_per_cpu_s"):
            own = _median(runs, field)
            numbers.append(shown(own, 0))
            for peer in peers:
                theirs = _median(measured.get(peer, []), field)
                numbers.append(shown(own / theirs if own and theirs else None, 2))
        rest = ("cpu_per_s", "others_cpu_per_s", "lag_mean", "lag_max")
        rows.append((name, *numbers, *(shown(_median(runs, field), 2) for field in rest)))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if any(
        (_median(runs, "others_cpu_per_s") or 0.0) > OTHERS_DISTURB for runs in measured.values()
    ):
        lines += ["", "Others used the machine meanwhile: compare steps/cpu s, not steps/s."]
    return "\n".join(lines)


def _median(runs: list[Figures], field: str) -> float | None:
    return median(asdict(one)[field] for one in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=sorted({*CONTENDERS, *ON_A_CLUSTER}))
    parser.add_argument("--cluster", action="store_true", help="beside Ray and RLlib")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--torso", choices=["nature", "impala"], default="nature")
    parser.add_argument("--lstm", type=int, default=0, help="units")
    parser.add_argument(
        "--peer-venv", type=Path, help="of Sample Factory or, with --cluster, of RLlib"
    )
    parser.add_argument("--appo-args", default="", help="further arguments of peers/appo_peer.py")
    parser.add_argument(
        "--torchrl-args", default="", help="further arguments of peers/torchrl_peer.py"
    )
    parser.add_argument("--rllib-args", default="", help="further arguments of peers/rllib_peer.py")
    parser.add_argument("--out", type=Path, default=Path("actor_learner.json"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    contenders = ON_A_CLUSTER if options.cluster else CONTENDERS
    options.only = options.only or list(contenders)
    if not contenders.keys() >= set(options.only):
        parser.error(f"--only {' '.join(options.only)}: give some of {', '.join(contenders)}")
    peers = PEERS_OF_A_CLUSTER if options.cluster else PEERS_OF_ONE_HOST
    return compare(options, contenders, PACKAGES, figures, partial(table, peers=peers))


if __name__ == "__main__":
    raise SystemExit(main())

"""Compare the agent steps per second of the recipe ``impala`` on Pong with Sample Factory and TorchRL.

    python benchmarks/actor_learner.py [--seconds 60] [--rounds 1] [--only NAME ...] [--torso shallow]
                                       [--lstm 0] [--peer-venv FOLDER] [--out FILE.json] [--table FILE.md]

The contenders run one after the other in each round, each in its own processes with one torch thread:

    rlsync-fp32, rlsync-bf16   this package's recipe; bf16 only if the processor supports it
    rlsync-fp32-split          the same with the learner's torso in two Python threads
    sample_factory             Sample Factory 2.1.1, APPO, in its own virtual environment (made at first use)
    torchrl                    MultiAsyncCollector, VTrace, A2CLoss, SharedMemWeightSyncScheme; no LSTM

All play Pong (84 x 84 x 4, four frames a step) on the CPU with 2 workers of 8 environments, rollouts of 32,
one optimizer step for every 256 steps, and the same network. Steps are agent steps that the learner has
trained on, not frames. The first third of a run does not count. "steps/cpu s" divides by the processor time
of the whole process tree. On a machine with other load, compare that column, and look at "others". The output
of each contender goes to a log next to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from peers.rounds import compare, median, shown
from peers.venvs import SAMPLE_FACTORY
from peers.watch import Figures, figures

from rlsync.tensors.precision import bfloat16_instructions

PEERS = Path(__file__).parent / "peers"
APPO, TORCHRL = "sample_factory", "torchrl"
PACKAGES = (
    "torch",
    "sample-factory",
    "torchrl",
    "tensordict",
    "gymnasium",
    "numpy",
    "ale-py",
    "opencv-python",
)
COLUMNS = (
    *("steps/s", "x APPO", "x TorchRL", "steps/cpu s", "x APPO", "x TorchRL"),
    *("cpu", "others", "lag mean", "lag max"),
)
OTHERS_DISTURB = 0.1  # processor seconds a second


def run_rlsync(options: argparse.Namespace, precision: str = "fp32", threads: int = 1) -> list[str] | None:
    """The command for the recipe. None, with a message, if it needs bfloat16 and the processor has none."""
    if precision == "bf16" and bfloat16_instructions() == []:
        print("rlsync-bf16: left out, this processor has no bfloat16, and emulates it ten times slower")
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
    return [sys.executable, str(PEERS / "torchrl_peer.py"), *_like(options), *options.torchrl_args.split()]


CONTENDERS: dict[str, Callable[[argparse.Namespace], list[str] | None]] = {
    "rlsync-fp32": run_rlsync,
    "rlsync-fp32-split": lambda options: run_rlsync(options, threads=2),
    "rlsync-bf16": lambda options: run_rlsync(options, "bf16"),
    APPO: run_sample_factory,
    TORCHRL: run_torchrl,
}


def _like(options: argparse.Namespace) -> list[str]:
    names = ["seconds", "workers", "envs", "rollout", "torso", *(["lstm"] if options.lstm else [])]
    return [word for name in names for word in (f"--{name}", str(vars(options)[name]))]


def table(measured: dict[str, list[Figures]]) -> str:
    """The medians over the rounds, as a Markdown table."""
    rows = [("contender", *COLUMNS), ("---", *("---:" for _ in COLUMNS))]
    for name, runs in measured.items():
        numbers = []
        for field in ("steps_per_s", "steps_per_cpu_s"):
            own = _median(runs, field)
            numbers.append(shown(own, 0))
            for peer in (APPO, TORCHRL):
                theirs = _median(measured.get(peer, []), field)
                numbers.append(shown(own / theirs if own and theirs else None, 2))
        rest = ("cpu_per_s", "others_cpu_per_s", "lag_mean", "lag_max")
        rows.append((name, *numbers, *(shown(_median(runs, field), 2) for field in rest)))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if any((_median(runs, "others_cpu_per_s") or 0.0) > OTHERS_DISTURB for runs in measured.values()):
        lines += ["", "Others used the machine meanwhile: compare steps/cpu s, not steps/s."]
    return "\n".join(lines)


def _median(runs: list[Figures], field: str) -> float | None:
    return median(asdict(one)[field] for one in runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--torso", choices=["shallow", "deep"], default="shallow")
    parser.add_argument("--lstm", type=int, default=0, help="units")
    parser.add_argument("--peer-venv", type=Path, default=SAMPLE_FACTORY.folder)
    parser.add_argument("--appo-args", default="", help="further arguments of peers/appo_peer.py")
    parser.add_argument("--torchrl-args", default="", help="further arguments of peers/torchrl_peer.py")
    parser.add_argument("--out", type=Path, default=Path("actor_learner.json"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    return compare(options, CONTENDERS, PACKAGES, figures, table)


if __name__ == "__main__":
    raise SystemExit(main())

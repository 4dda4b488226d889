"""Compare the frames and updates per second of ``sac`` and ``td3`` with Stable-Baselines3 and TorchRL.

    python benchmarks/off_policy.py [--algorithm sac] [--env Pendulum-v1] [--seconds 60] [--rounds 1]
                                    [--only NAME ...] [--peer-venv FOLDER] [--out FILE.json]
                                    [--table FILE.md]

The contenders run one after the other in each round, each in its own processes with one torch thread:

    rlsync-async, rlsync-sync  this package's recipe, one worker, one update for each frame
    sb3                        Stable-Baselines3 in its own virtual environment (made at first use): one
                               process, one update for each frame
    torchrl                    SACTrainer with async_collection=True, one worker; nothing holds a ratio
                               (sac only)

Networks, batch size, optimizer and learning rates are equal. Only what comes after the prefill counts, and
of that not the first third. "updates/cpu s" divides by the processor time of the whole process tree: compare
that column on a machine with other load. The output of each contender goes to a log next to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peers.rates import rates, table
from peers.rounds import compare
from peers.venvs import STABLE_BASELINES

PEERS = Path(__file__).parent / "peers"
PACKAGES = ("torch", "stable-baselines3", "torchrl", "tensordict", "gymnasium", "numpy")
PEER = "sb3"


def run_rlsync(options: argparse.Namespace, collector: str) -> list[str]:
    """The command for the recipe."""
    own = ["--algorithm", options.algorithm, "--collector", collector]
    return [sys.executable, str(PEERS / "rlsync_off_policy_peer.py"), *own, *_like(options)]


def run_sb3(options: argparse.Namespace) -> list[str]:
    """The command for Stable-Baselines3, in its own virtual environment."""
    python = STABLE_BASELINES.python(options.peer_venv)
    return [str(python), str(PEERS / "sb3_peer.py"), "--algorithm", options.algorithm, *_like(options)]


def run_torchrl(options: argparse.Namespace) -> list[str] | None:
    """The command for TorchRL's own trainer. None for td3, which it has no asynchronous form of here."""
    if options.algorithm != "sac":
        print("torchrl: left out, it is compared for sac only")
        return None
    return [sys.executable, str(PEERS / "torchrl_sac_peer.py"), *_like(options)]


CONTENDERS: dict[str, Callable[[argparse.Namespace], list[str] | None]] = {
    "rlsync-async": lambda options: run_rlsync(options, "async"),
    "rlsync-sync": lambda options: run_rlsync(options, "sync"),
    PEER: run_sb3,
    "torchrl": run_torchrl,
}


def _like(options: argparse.Namespace) -> list[str]:
    return [
        word for name in ("env", "prefill", "seconds") for word in (f"--{name}", str(vars(options)[name]))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=["sac", "td3"], default="sac")
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--prefill", type=int, default=1_000, help="frames")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--peer-venv", type=Path, default=STABLE_BASELINES.folder)
    parser.add_argument("--out", type=Path, default=Path("off_policy.json"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    return compare(options, CONTENDERS, PACKAGES, rates, partial(table, peer=PEER))


if __name__ == "__main__":
    raise SystemExit(main())

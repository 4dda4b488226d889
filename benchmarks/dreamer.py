"""Compare the frames and updates per second of ``dreamer_v3`` with sheeprl's DreamerV3, on the CPU.

    python benchmarks/dreamer.py [--env CartPole-v1] [--seconds 60] [--rounds 1] [--only NAME ...]
                                 [--belief 128] [--width 128] [--replay-ratio 0.5] ...
                                 [--peer-venv FOLDER] [--out FILE.json] [--table FILE.md]

The contenders run one after the other in each round, each in its own processes with one torch thread:

    rlsync-coupled    this package's recipe, the learner's process acts too
    rlsync-decoupled  this package's recipe, one worker process acts while the learner learns
    sheeprl           sheeprl in its own virtual environment (made at first use): one process acts and learns

Sizes of the networks, batch size, sequence length, horizon and replay ratio are equal. The networks are not:
sheeprl has the first version of DreamerV3 (three optimizers, layer norm), the recipe has TorchRL's, which
follows the later one (one optimizer, RMS norm, a replay value loss).

Only what comes after the prefill counts, and of that not the first third. "updates/cpu s" divides by the
processor time of the whole process tree: compare that column on a machine with other load. The output of each
contender goes to a log next to ``--out``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peers.dreamer_sizes import add_sizes, words
from peers.rates import rates, table
from peers.rounds import compare
from peers.venvs import SHEEPRL

PEERS = Path(__file__).parent / "peers"
PACKAGES = ("torch", "sheeprl", "lightning", "torchrl", "tensordict", "gymnasium", "numpy")
PEER = "sheeprl"


def run_rlsync(options: argparse.Namespace, workers: int) -> list[str]:
    """The command for the recipe."""
    script = str(PEERS / "rlsync_dreamer_peer.py")
    return [sys.executable, script, "--workers", str(workers), *_like(options)]


def run_sheeprl(options: argparse.Namespace) -> list[str]:
    """The command for sheeprl, in its own virtual environment."""
    python = SHEEPRL.python(options.peer_venv)
    return [str(python), str(PEERS / "sheeprl_peer.py"), *_like(options)]


CONTENDERS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "rlsync-coupled": lambda options: run_rlsync(options, 0),
    "rlsync-decoupled": lambda options: run_rlsync(options, 1),
    PEER: run_sheeprl,
}


def _like(options: argparse.Namespace) -> list[str]:
    return ["--env", options.env, "--seconds", str(options.seconds), *words(options)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="CartPole-v1", help="with observations that are vectors")
    add_sizes(parser)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--peer-venv", type=Path, default=SHEEPRL.folder)
    parser.add_argument("--out", type=Path, default=Path("dreamer.json"))
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    return compare(options, CONTENDERS, PACKAGES, rates, partial(table, peer=PEER))


if __name__ == "__main__":
    raise SystemExit(main())

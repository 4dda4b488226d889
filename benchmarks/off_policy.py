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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from peers.rounds import compare, median, shown
from peers.venvs import STABLE_BASELINES
from peers.watch import Sample, figures

PEERS = Path(__file__).parent / "peers"
PACKAGES = ("torch", "stable-baselines3", "torchrl", "tensordict", "gymnasium", "numpy")
PEER = "sb3"


@dataclass(frozen=True, slots=True)
class Rates:
    """What one run did, without its first third.

    Args:
        frames_per_s: environment frames per second.
        updates_per_s: optimizer steps per second.
        updates_per_frame: the ratio of the two.
        updates_per_cpu_s: optimizer steps per second of processor time.
        cpu_per_s: processor seconds per second, of the contender's process tree.
        others_cpu_per_s: processor seconds per second of everything else on the machine.
    """

    frames_per_s: float
    updates_per_s: float
    updates_per_frame: float
    updates_per_cpu_s: float
    cpu_per_s: float
    others_cpu_per_s: float


def rates(samples: Sequence[Sample]) -> Rates:
    """The rates of the part of a run that learns.

    Raises:
        RuntimeError: there are too few reports.
    """
    learning = [sample for sample in samples if sample.said.get("updates")]
    steady = figures(learning)
    window = [sample for sample in learning if sample.at_s >= learning[-1].at_s - steady.window_s]
    updates = window[-1].said["updates"] - window[0].said["updates"]
    return Rates(
        frames_per_s=steady.steps_per_s,
        updates_per_s=updates / steady.window_s,
        updates_per_frame=updates / steady.steps,
        updates_per_cpu_s=updates / steady.window_s / steady.cpu_per_s,
        cpu_per_s=steady.cpu_per_s,
        others_cpu_per_s=steady.others_cpu_per_s,
    )


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


def table(measured: dict[str, list[Rates]]) -> str:
    """The medians over the rounds, as a Markdown table."""
    names = [field.name for field in fields(Rates)]

    def medians(contender: str) -> dict[str, float | None]:
        runs = [asdict(one) for one in measured.get(contender, [])]
        return {name: median(one[name] for one in runs) for name in names}

    peer = medians(PEER)["updates_per_s"]
    heads = [name.replace("_per_", "/").replace("_", " ") for name in names]
    rows = [("contender", *heads, "updates/s x sb3"), ("---", *("---:" for _ in range(len(names) + 1)))]
    for contender in measured:
        found = medians(contender)
        own = found["updates_per_s"]
        beside = own / peer if own and peer else None
        rows.append((contender, *(shown(found[name], 2) for name in names), shown(beside, 2)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


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
    return compare(options, CONTENDERS, PACKAGES, rates, table)


if __name__ == "__main__":
    raise SystemExit(main())

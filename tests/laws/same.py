"""``make same``: every recipe learns what it learned before, every endpoint publishes what it published.

Runs fixed short trainings and publishes twice, with the code of the merge base with main and with the code
of this tree, and compares digests of weights, losses, frames and stamps. No digest is stored: they differ by
processor.

A change that alters learning on purpose says so in the message of the commit that does it, on a line of its
own: ``Alters learning: sac, td3``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("same_probe.py")
FAILED = "error"
#: What a run depends on.
COMPARED = ("rlsync", "configs")
ALTERS = re.compile(r"^Alters learning: *(.+)$", re.MULTILINE)

#: An in-process run has no evaluating process.
ALONE = ["collector=in_process", "recipe.evaluation.every_frames=0"]
SMALL = ["recipe.hidden=[64,64]", "recipe.batch_size=64", "recipe.pace.prefill=200"]
OFF_POLICY = [*SMALL, "recipe.total_frames=456", "collector.frames_per_batch=32"]
DREAMER = [
    "recipe.cells=24",
    "recipe.belief=24",
    "recipe.batch_size=4",
    "recipe.sequence_length=8",
    "recipe.horizon=5",
    "recipe.pace.prefill=100",
    "recipe.total_frames=340",
]
#: One worker, one slot, one rollout a batch: learner and worker take turns.
LOCKSTEP = [
    "collector.num_workers=1",
    "env.num_envs=4",
    "recipe.slots=1",
    "recipe.batch_size=4",
    "recipe.unroll_length=10",
    "collector.frames_per_batch=40",
    "recipe.total_frames=8000",
]
CASES: dict[str, list[str]] = {
    "ppo": [
        "recipe=ppo",
        *ALONE,
        "recipe.total_frames=4096",
        "collector.frames_per_batch=512",
    ],
    "ppo on workers": ["recipe=ppo", "recipe.total_frames=4096", "collector.frames_per_batch=512"],
    "dqn": ["recipe=dqn", *ALONE, *OFF_POLICY, "recipe.total_frames=616"],
    "dqn, prioritised": [
        "recipe=dqn",
        *ALONE,
        *OFF_POLICY,
        "recipe.prioritized=true",
        "recipe.normalize.observations=true",
        "recipe.normalize.rewards=true",
    ],
    "sac": ["recipe=sac", *ALONE, *OFF_POLICY],
    "sac on workers": ["recipe=sac", *OFF_POLICY],
    "td3": ["recipe=td3", *ALONE, *OFF_POLICY],
    "dreamer_v1": ["recipe=dreamer_v1", *ALONE, *DREAMER],
    "dreamer_v3": ["recipe=dreamer_v3", *ALONE, *DREAMER],
    "impala": ["recipe=impala", *LOCKSTEP],
    "impala with memory": [
        "recipe=impala",
        *LOCKSTEP,
        "recipe.model.lstm=16",
        "recipe.model.last_action=true",
    ],
    "laser": ["recipe=laser", *LOCKSTEP, "recipe.replay.min_steps=400"],
    **{
        f"publish, {endpoint}": [f"publish={endpoint}"]
        for endpoint in (
            "in_process",
            "shared",
            "sync-alias",
            "sync-copy",
            "async",
            "stock",
            "server",
            "distributed",
            "ray",
        )
    },
}


def main() -> int:
    """Compare, and print a line for each case.

    Returns:
        0 if all is the same, or nothing can be compared; 1 if not.
    """
    parser = argparse.ArgumentParser(prog="make same", description=str(__doc__).partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"some of them; by default all: {', '.join(CASES)}")
    parser.add_argument("--base", help="the commit to compare with; by default the merge base with main")
    given = parser.parse_args()
    unknown = [word for word in given.cases if not any(name.startswith(word) for name in CASES)]
    if unknown:
        parser.error(f"no case begins with {unknown[0]!r}; there are: {', '.join(CASES)}")
    base = given.base or merge_base()
    if base is None:
        print("same: nothing to compare: this is main, or main is not known here; --base names a commit")
        return 0
    if not git("diff", "--name-only", base, "--", *COMPARED) and not git(
        "ls-files", "--others", "--exclude-standard", "--", *COMPARED
    ):
        print(f"same: {' and '.join(COMPARED)} are those of {base[:10]}")
        return 0
    chosen = [name for name in CASES if not given.cases or any(map(name.startswith, given.cases))]
    altered = altered_since(base)
    with checked_out(base) as before, probe(before, chosen) as old, probe(ROOT, chosen) as new:
        print(f"same: {len(chosen)} cases, this tree against {base[:10]}", flush=True)
        differing = [
            name for name, *both in zip(chosen, old, new, strict=False) if not report(name, both, altered)
        ]
    print(f"same: {len(chosen) - len(differing)} of {len(chosen)} are the same or altered on purpose")
    return 1 if differing else 0


def report(name: str, results: Sequence[dict[str, str]], altered: set[str]) -> bool:
    """Print how a case compares; whether it is as it should be."""
    before, after = results
    differ = [part for part in {**before, **after} if before.get(part) != after.get(part)]
    on_purpose = name.partition(" ")[0].rstrip(",") in altered
    if FAILED in after:
        word, well = "FAILED", False
    elif differ and not on_purpose:
        word, well = f"DIFFERS in {', '.join(differ)}", False
    else:
        word, well = f"altered on purpose: {', '.join(differ)}" if differ else "same", True
    print(f"  {name:24} {word}", flush=True)
    for part in [] if well else differ or [FAILED]:
        print(f"    {part}: {before.get(part)} became {after.get(part)}", flush=True)
    return well


@contextmanager
def probe(tree: Path, names: list[str]) -> Iterator[Iterator[dict[str, str]]]:
    """What each case gives with the code of ``tree``, one after the other, in a network of its own."""
    cases = json.dumps([CASES[name] for name in names])
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    settings = {"OMP_NUM_THREADS": "1", "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [*alone, sys.executable, str(PROBE), cases],
        env={**os.environ, **settings, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            assert started.stdout is not None
            yield chain(map(digests, started.stdout), repeat({FAILED: "the probe ended before it"}))
        finally:
            started.kill()


def digests(line: str) -> dict[str, str]:
    return dict(json.loads(line.removeprefix("digests ")))


def merge_base() -> str | None:
    """Where this branch left main; ``None`` on main itself, and where main is not known."""
    head = git("rev-parse", "HEAD")
    for main in ("origin/main", "main"):
        base = git("merge-base", "HEAD", main)
        if base and base != head:
            return base
    return None


def altered_since(base: str) -> set[str]:
    """The recipes that commits since ``base`` alter on purpose, as their messages say."""
    messages = git("log", "--format=%B", f"{base}..HEAD")
    return {name.strip() for line in ALTERS.findall(messages) for name in line.split(",")}


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of a commit, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="same-base") as folder:
        archive = subprocess.run(
            ["git", "archive", commit, *COMPARED], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def git(*words: str) -> str:
    """What git says, or nothing where it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

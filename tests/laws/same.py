"""``make same``: every recipe learns what it learned before, every endpoint publishes what it published.

Runs fixed short trainings and publishes twice, with the code of the merge base with main and with the code
of this tree, and compares digests of weights, losses, frames and stamps. No digest is stored: they differ by
processor. The merge base also records a short asynchronous run of each recipe, which this tree makes again.
What the base cannot record, or this tree cannot read, or was altered on purpose, this tree records itself.

A change that alters learning on purpose says so in the message of the commit that does it, on a line of its
own: ``Alters learning: sac, td3``. So does one after which the merge base no longer understands the words of
a case. Such a case has nothing to be compared with, so this tree runs it twice: both runs must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice, repeat
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("same_probe.py")
FAILED = "error"
#: What a run depends on.
COMPARED = ("rlsync", "configs")
ALTERS = re.compile(r"^Alters learning: *(.+)$", re.MULTILINE)

#: The learner's own process acts, and no process evaluates.
ALONE = ["collector.num_workers=0", "recipe.evaluation.every_frames=0"]
#: Two workers act while the learner learns.
ON_WORKERS = ["collector.num_workers=2", "collector.lag=1", "recipe.evaluation.every_frames=0"]
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
    "ppo on workers": [
        "recipe=ppo",
        *ON_WORKERS,
        "recipe.total_frames=4096",
        "collector.frames_per_batch=512",
    ],
    "ppo-lstm": [
        "recipe=ppo",
        *ALONE,
        "recipe.model.lstm=16",
        "recipe.total_frames=2048",
        "collector.frames_per_batch=512",
    ],
    "dqn": ["recipe=dqn", *ALONE, *OFF_POLICY, "recipe.total_frames=616"],
    "dqn, prioritised": [
        "recipe=dqn",
        *ALONE,
        *OFF_POLICY,
        "recipe.prioritized=true",
        "recipe.normalize.observations=true",
        "recipe.normalize.rewards=true",
    ],
    "dqn on workers": ["recipe=dqn", *ON_WORKERS, *OFF_POLICY],
    "sac": ["recipe=sac", *ALONE, *OFF_POLICY],
    "sac on workers": ["recipe=sac", *ON_WORKERS, *OFF_POLICY],
    "td3": ["recipe=td3", *ALONE, *OFF_POLICY],
    "crossq": ["recipe=crossq", *ALONE, *OFF_POLICY],
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
#: Two workers that wait for nobody; every version has a digest.
FREE = [
    "collector.lag=null",
    "collector.num_workers=2",
    "sync.digest_every=1",
    "recipe.evaluation.every_frames=0",
]
FREE_UNROLLS = [*FREE, *LOCKSTEP[1:], "env.num_envs=2", "recipe.slots=null", "recipe.total_frames=4000"]
#: Runs that are recorded, and made again.
RERUNS: dict[str, list[str]] = {
    "ppo rerun": ["recipe=ppo", *FREE, "recipe.total_frames=2048", "collector.frames_per_batch=256"],
    "ppo-lstm rerun": [
        "recipe=ppo",
        *FREE,
        "recipe.model.lstm=16",
        "recipe.total_frames=2048",
        "collector.frames_per_batch=256",
    ],
    "dqn rerun": ["recipe=dqn", *FREE, *OFF_POLICY, "recipe.prioritized=true"],
    "sac rerun": ["recipe=sac", *FREE, *OFF_POLICY],
    "td3 rerun": ["recipe=td3", *FREE, *OFF_POLICY],
    "crossq rerun": ["recipe=crossq", *FREE, *OFF_POLICY],
    "dreamer_v1 rerun": ["recipe=dreamer_v1", *FREE, *DREAMER],
    "dreamer_v3 rerun": ["recipe=dreamer_v3", *FREE, *DREAMER],
    "impala rerun": ["recipe=impala", *FREE_UNROLLS],
    "laser rerun": ["recipe=laser", *FREE_UNROLLS, "recipe.replay.min_steps=400"],
}
NAMES = [*CASES, *RERUNS]
#: What a rerun gives whose digests are those of the record.
EQUAL = {"digests": "equal"}


def main() -> int:
    """Compare, and print a line for each case.

    Returns:
        0 if all is the same, or nothing can be compared; 1 if not.
    """
    parser = argparse.ArgumentParser(prog="make same", description=str(__doc__).partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"some of them; by default all: {', '.join(NAMES)}")
    parser.add_argument("--base", help="the commit to compare with; by default the merge base with main")
    given = parser.parse_args()
    unknown = [word for word in given.cases if not any(name.startswith(word) for name in NAMES)]
    if unknown:
        parser.error(f"no case begins with {unknown[0]!r}; there are: {', '.join(NAMES)}")
    base = given.base or merge_base()
    if base is None:
        print("same: nothing to compare: this is main, or main is not known here; --base names a commit")
        return 0
    if not git("diff", "--name-only", base, "--", *COMPARED) and not git(
        "ls-files", "--others", "--exclude-standard", "--", *COMPARED
    ):
        print(f"same: {' and '.join(COMPARED)} are those of {base[:10]}")
        return 0
    chosen = [name for name in NAMES if not given.cases or any(map(name.startswith, given.cases))]
    both, again = [name for name in chosen if name in CASES], [name for name in chosen if name in RERUNS]
    altered = altered_since(base)
    recorded = [name for name in again if not on_purpose(name, altered)]
    print(f"same: {len(chosen)} cases, this tree against {base[:10]}", flush=True)
    with checked_out(base) as before, tempfile.TemporaryDirectory(prefix="same-runs") as runs:
        common = [CASES[name] for name in both]
        record, rerun = (
            [[f"{verb}={runs}/{RERUNS[name][0]}", *RERUNS[name]] for name in names]
            for verb, names in (("record", recorded), ("rerun", again))
        )
        with probe(before) as (ask_before, old), probe(ROOT) as (ask, new):
            ask_before(record + common)
            ask(common)
            for _ in recorded:
                next(old)
            ask(rerun)
            expected = chain(islice(old, len(both)), repeat(EQUAL))

            def once_more(names: list[str]) -> Iterator[dict[str, str]]:
                ask([CASES[name] for name in names])
                return new

            differing = wrong(chosen, zip(expected, new, strict=False), altered, once_more)
    print(f"same: {len(chosen) - len(differing)} of {len(chosen)} are the same or altered on purpose")
    return 1 if differing else 0


def wrong(
    chosen: Sequence[str],
    pairs: Iterable[tuple[dict[str, str], dict[str, str]]],
    altered: set[str],
    once_more: Callable[[list[str]], Iterable[dict[str, str]]],
) -> list[str]:
    """The chosen cases that are not as they should be, each pair reported.

    ``once_more`` runs those that were altered on purpose a second time.
    """
    found: list[str] = []
    firsts: dict[str, dict[str, str]] = {}
    for name, (before, after) in zip(chosen, pairs, strict=False):
        if not report(name, [before, after], altered):
            found.append(name)
        elif name in CASES and before != after:
            firsts[name] = after
    for (name, first), second in zip(firsts.items(), once_more([*firsts]), strict=False):
        if not report(f"{name}, twice", [first, second], set()):
            found.append(name)
    return found


def on_purpose(name: str, altered: set[str]) -> bool:
    """Whether a case is one of a recipe that was altered on purpose."""
    return name.partition(" ")[0].rstrip(",") in altered


def report(name: str, results: Sequence[dict[str, str]], altered: set[str]) -> bool:
    """Print how a case compares; whether it is as it should be."""
    before, after = results
    differ = [part for part in {**before, **after} if before.get(part) != after.get(part)]
    if FAILED in after:
        word, well = "FAILED", False
    elif FAILED in before and on_purpose(name, altered):
        word, well = "altered on purpose: the merge base cannot run it", True
    elif differ and not on_purpose(name, altered):
        word, well = f"DIFFERS in {', '.join(differ)}", False
    else:
        word, well = f"altered on purpose: {', '.join(differ)}" if differ else "same", True
    print(f"  {name:28} {word}", flush=True)
    for part in [] if well else differ or [FAILED]:
        print(f"    {part}: {before.get(part)} became {after.get(part)}", flush=True)
    return well


@contextmanager
def probe(tree: Path) -> Iterator[tuple[Callable[[list[list[str]]], None], Iterator[dict[str, str]]]]:
    """What asks for cases, and what each gives with the code of ``tree``, in a network of its own."""
    alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    settings = {"OMP_NUM_THREADS": "1", "RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with subprocess.Popen(
        [*alone, sys.executable, str(PROBE)],
        env={**os.environ, **settings, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        asked, told = started.stdin, started.stdout
        assert asked is not None
        assert told is not None

        def ask(cases: list[list[str]]) -> None:
            with suppress(BrokenPipeError):  # what it does not answer is told as failed
                print(*map(json.dumps, cases), sep="\n", file=asked, flush=True)

        try:
            yield ask, chain(map(digests, told), repeat({FAILED: "the probe ended before it"}))
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

"""TorchRL's own collector tests, with a board as the default scheme of every process collector.

    git clone --branch v0.14.1 https://github.com/pytorch/rl torchrl_checkout
    python benchmarks/torchrl_tests.py torchrl_checkout [--part 1/10] [-- -k test_name]

Runs ``test/test_collectors.py`` of the checkout with the installed TorchRL, three times:

- ``stock``: as it is;
- ``stamped``: with ``track_policy_version=True`` for each MultiSyncCollector and MultiAsyncCollector that is
  given no scheme and no weight updater. So a batch has the keys that it has with a board;
- ``board``: with ``weight_sync_schemes={"policy": BoardScheme()}`` for the same collectors.

Workers are forked from a server. Prints how many tests passed and failed, and each test whose outcome is not
the same in all runs. Exits with 1 if a test fails with a board only. What follows ``--`` goes to pytest.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

#: A test that takes longer is counted as failed.
TEST_TIMEOUT_S = 120
STOCK, STAMPED, BOARD = RUNS = "stock", "stamped", "board"
SCHEMES = "RLSYNC_TORCHRL_TESTS_SCHEMES"
PART = "RLSYNC_TORCHRL_TESTS_PART"


# -------------------------------------------------------------------------------- as a plugin of pytest


def pytest_configure(config: pytest.Config) -> None:
    """Give process collectors a board, in the run that asks for it."""
    from rlsync import Forkserver

    # of the checkout: workers find their parts in it
    server = Forkserver(preload=["test_collectors"])
    server.__enter__()
    config.add_cleanup(lambda: server.__exit__(None, None, None))
    run = os.environ.get(SCHEMES, STOCK)
    if run != STOCK:
        change_the_defaults(run)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one part; they are dealt out like cards, so that all parts take about as long."""
    part, parts = map(int, os.environ.get(PART, "1/1").split("/"))
    items[:] = items[part - 1 :: parts]


def change_the_defaults(run: str) -> None:
    """Give the process collectors of this process a BoardScheme, or stamps alone, if they have no scheme."""
    from torchrl.collectors._multi_base import MultiCollector

    from rlsync import BoardScheme

    stock = MultiCollector.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("weight_sync_schemes") is None and kwargs.get("weight_updater") is None:
            if run == BOARD:
                kwargs["weight_sync_schemes"] = {"policy": BoardScheme()}
            else:
                kwargs["track_policy_version"] = kwargs.get("track_policy_version") or True
        stock(self, *args, **kwargs)

    MultiCollector.__init__ = init


# ------------------------------------------------------------------------------------------ as a script


def outcomes(checkout: Path, schemes: str, part: str, options: list[str]) -> dict[str, str]:
    """Run the tests; the outcome of each by its name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        here = str(Path(__file__).resolve().parent)
        tests = str(checkout / "test")
        folders = [here, str(Path(here).parent), tests, os.environ.get("PYTHONPATH", "")]
        # an empty one would be the checkout, with its TorchRL
        path = os.pathsep.join(filter(None, folders))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "torchrl_tests",
            "-p",
            "no:cacheprovider",
        ]
        command += [
            "-p",
            "no:xdist",
            f"--timeout={TEST_TIMEOUT_S}",
            f"--junitxml={report}",
            *options,
        ]
        # The installed TorchRL is tested, not the checkout's: Ray's workers import from pytest's folder.
        environment = os.environ | {
            "PYTHONPATH": path,
            "PYTHONSAFEPATH": "1",
            SCHEMES: schemes,
            PART: part,
        }
        command += [
            "-c",
            str(checkout / "pytest.ini"),
            str(checkout / "test" / "test_collectors.py"),
        ]
        subprocess.run(command, cwd=folder, env=environment, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ElementTree.Element) -> str:
    told = {child.tag for child in case}
    if told & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in told else "passed"


def main() -> int:
    """Run the tests in each way, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/pytorch/rl")
    parser.add_argument(
        "--part", default="1/1", help="which part of the tests: 2/10 is the second of ten"
    )
    parser.add_argument("options", nargs="*", help="of pytest")
    chosen = parser.parse_args()
    checkout = chosen.checkout.resolve()
    found = {run: outcomes(checkout, run, chosen.part, chosen.options) for run in RUNS}
    for run, by_test in found.items():
        counts = sorted(Counter(by_test.values()).items())
        print(run, *(f"{count} {outcome}" for outcome, count in counts))
    only_with_a_board = 0
    for test in sorted(found[BOARD]):
        ends = {run: by_test.get(test, "absent") for run, by_test in found.items()}
        if len(set(ends.values())) > 1:
            print(f"{test}:", *(f"{run} {end}" for run, end in ends.items()))
        failed = {run for run, end in ends.items() if end == "failed"}
        only_with_a_board += failed == {BOARD}
    return int(only_with_a_board > 0)


if __name__ == "__main__":
    raise SystemExit(main())

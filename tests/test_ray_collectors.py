"""Collectors on Ray, in a network of their own where this user may make one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parts.namespaces import ALONE, may_unshare
from tests.parts.processes import kill, session_pids, wait_until
from tests.parts.programs import ENDS_WITHIN_S

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra rlsync[ray]")
def test_collectors_on_ray_are_stamped_checked_or_refused_and_leave_no_process() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "tests/ray_cases.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [*(ALONE if may_unshare("-n") else []), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=ENDS_WITHIN_S)
    finally:
        wait_until(lambda: not session_pids(process.pid), 20)
        left = session_pids(process.pid)
        for pid in left:
            kill(pid)
    assert process.returncode == 0, said
    assert "4 passed" in said
    assert left == set(), said

"""Linux namespaces: programs with processes or a network of their own, where this user may make them."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

from tests.tools.processes import kill, session_pids, wait_until

ROOT = Path(__file__).parents[3]

#: Runs a command in a network that has nothing but the loopback device.
ALONE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def in_a_session(
    command: list[str], *, alone: bool, timeout_s: float, grace_s: float = 30.0
) -> tuple[subprocess.CompletedProcess[str], set[int]]:
    """Run a program in the folder of the project, and end every process that it leaves.

    Args:
        command: what is run.
        alone: whether it gets a network that has nothing but the loopback device, where that can be made.
        timeout_s: how long it may take.
        grace_s: how long its processes have to leave by themselves, as trackers of multiprocessing do.

    Returns:
        How it ended, and which processes had to be ended.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    # TorchRL's RayCollector calls Ray when it is deleted. After ray.shutdown() that would start another Ray.
    environment["RAY_ENABLE_AUTO_CONNECT"] = "0"
    started = subprocess.Popen(
        [*(ALONE if alone and may_unshare("-n") else []), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = started.communicate(timeout=timeout_s)
    finally:
        wait_until(lambda: not session_pids(started.pid), grace_s)
        left = session_pids(started.pid)
        for pid in left:
            kill(pid)
    return subprocess.CompletedProcess(command, started.returncode, said, errors), left


@cache
def may_unshare(flag: str) -> bool:
    """Whether ``unshare FLAG`` works here: as root, mostly."""
    command = ["unshare", flag, "-f", "true"]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )

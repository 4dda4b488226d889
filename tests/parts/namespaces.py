"""Linux namespaces: programs with processes or a network of their own, where this user may make them."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

#: Runs a command in a network that has nothing but the loopback device.
ALONE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@cache
def may_unshare(flag: str) -> bool:
    """Whether ``unshare FLAG`` works here: as root, mostly."""
    command = ["unshare", flag, "-f", "true"]
    return (
        shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0
    )

"""What benchmarks of Ray share: a cluster on this machine, what its stores hold, what a run leaves."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private.internal_api import node_stats
from ray.cluster_utils import Cluster

#: Ray notices within about ten seconds that a node is gone. Workers get the learner's priority.
HASTY = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}

#: Ray gives a node 30 s to start, whatever the machine has to do besides.
TRIES = 5

_MARK = "RLSYNC_BENCHMARK_MARK"


@contextmanager
def cluster_of(nodes: int, store_mb: int) -> Iterator[Cluster]:
    """A head, where this process is a driver, and more nodes.

    Args:
        nodes: how many, the head among them.
        store_mb: the size of each object store.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: Ray puts sockets there
    (folder / "ray").mkdir()
    os.environ["RAY_TMPDIR"] = str(folder)  # also for the file that names the newest cluster
    options = {"num_cpus": 2, "object_store_memory": store_mb * 2**20}
    head = {
        **options,
        "include_dashboard": False,
        "_system_config": HASTY,
        "temp_dir": str(folder / "ray"),
    }
    cluster = in_time(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        for _ in range(nodes - 1):
            add_node(cluster, store_mb)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Cluster, store_mb: int) -> Any:
    """One more node."""
    return in_time(lambda: cluster.add_node(num_cpus=2, object_store_memory=store_mb * 2**20))


@contextmanager
def limited(link: str) -> Iterator[None]:
    """All that processes of this machine send each other goes through one link, for example of ``"1gbit"``.

    Raises:
        RuntimeError: this network has more than the loopback device: other programs would be limited, too.
    """
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise RuntimeError("a limited link needs a network of its own: see the top of this program")
    limit = ["rate", link, "burst", "1mb", "latency", "2s"]
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limit], check=True)
    try:
        yield
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)


def in_time(start: Callable[[], Any]) -> Any:
    """Start a part of Ray, again if a loaded machine was too slow for its deadline."""
    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as slow:
            if "timed out during startup" not in str(slow):
                raise
    return start()


def stores() -> dict[str, Any]:
    """What the object store of each living node says of itself, by Ray's id of the node."""
    return {
        node["NodeID"]: node_stats(
            node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False
        ).store_stats
        for node in ray.nodes()
        if node["Alive"]
    }


def objects_left(timeout_s: float) -> int:
    """Objects in all stores, once they are gone or the time is up."""
    until_s = time.monotonic() + timeout_s
    while (
        left := sum(store.num_local_objects for store in stores().values())
    ) and time.monotonic() < until_s:
        time.sleep(0.2)
    return left


class Leftovers:
    """What this program starts and makes from now on, and what of it is there at the end.

    Processes are known by a variable of their environment, which they inherit, whosever children they become.
    """

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        os.environ[_MARK] = self._mark
        self._files = set(Path("/dev/shm").iterdir())

    def processes(self) -> dict[int, str]:
        """The living processes, with the beginning of their command lines."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with suppress(OSError):  # it has ended, or is another user's
                    if self._mark.encode() in (folder / "environ").read_bytes():
                        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                        found[int(folder.name)] = command[:120]
        return found

    def has(self, pid: int) -> bool:
        """Whether a process lives and is one of these."""
        try:
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def files(self) -> list[str]:
        """New files of shared memory that no process has open or mapped: other programs' files are in use."""
        new = {}
        for file in set(Path("/dev/shm").iterdir()) - self._files:
            with suppress(FileNotFoundError):  # it has gone
                new[str(file)] = file.stat().st_ino
        used = _inodes_in_use() if new else set()
        return sorted(name for name, inode in new.items() if inode not in used)

    def await_none(self, timeout_s: float) -> list[str]:
        """The processes and files that are still there when the time is up."""
        until_s = time.monotonic() + timeout_s
        while (left := [*self.processes().values(), *self.files()]) and time.monotonic() < until_s:
            time.sleep(0.2)
        return left


def _inodes_in_use() -> set[int]:
    """Of files that are open or mapped, under whatever name: that of a semaphore is another one by then."""
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                found |= {
                    int(line.split()[4]) for line in (process / "maps").read_text().splitlines()
                }
            with suppress(OSError):
                found |= {descriptor.stat().st_ino for descriptor in (process / "fd").iterdir()}
    return found

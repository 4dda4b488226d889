"""Ray on this machine: one node, or a cluster of several."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.cluster_utils import Cluster

T = TypeVar("T")

#: Ray gives a node 30 s to start, whatever the machine has to do besides.
TRIES = 5

_FOLDER = "RAY_TMPDIR"


@contextmanager
def cluster_of(nodes: int, **options: Any) -> Iterator[Cluster]:
    """A head and more nodes, all alike; this process is its driver.

    Args:
        nodes: how many, the head among them.
        options: of each node.
    """
    with own_folder() as folder:
        head = {**options, "include_dashboard": False, "temp_dir": folder}
        cluster = in_time(lambda: Cluster(initialize_head=True, head_node_args=head))
        try:
            for _ in range(nodes - 1):
                add_node(cluster, **options)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def own_folder() -> Iterator[str]:
    """A folder for the files of one cluster.

    A ``Cluster`` also writes its address into Ray's folder of the whole machine, which need not be there.
    """
    whole = Path(tempfile.mkdtemp(prefix="ray"))  # short: Ray puts sockets there
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(whole)
    (whole / "ray").mkdir()
    try:
        yield str(whole / "ray")
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before
        shutil.rmtree(whole, ignore_errors=True)


def add_node(cluster: Cluster, **options: Any) -> Any:
    """One more node.

    Args:
        cluster: which it joins.
        options: of the node.
    """
    return in_time(lambda: cluster.add_node(**options))


def in_time(start: Callable[[], T], clean_up: Callable[[], object] = lambda: None) -> T:
    """Start Ray, again if a loaded machine was too slow for its deadline.

    Args:
        start: starts it.
        clean_up: removes what was started in vain.
    """
    for _ in range(TRIES - 1):
        try:
            return start()
        except Exception as slow:
            if "timed out during startup" not in str(slow):
                raise
            clean_up()
    return start()

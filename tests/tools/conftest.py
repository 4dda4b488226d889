"""The Ray that the files of cases share in a session: tests/laws/test_on_ray.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

#: Ray notices within seconds that a node is gone.
_HASTY = {
    "worker_niceness": 0,  # on a loaded machine, agents would take minutes to start
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 10_000,
    "health_check_failure_threshold": 5,
    # A slow network: small pieces one by one. 20 MB take a second or more.
    "object_manager_default_chunk_size": 5_000,
    "object_manager_max_bytes_in_flight": 1,
}


@pytest.fixture(scope="session")
def one_node() -> Iterator[Cluster]:
    """A cluster of one node, to which a run connects."""
    from tests.tools.parts.ray_cluster import cluster_of

    with cluster_of(1, num_cpus=1, object_store_memory=80 * 2**20, _system_config=_HASTY) as made:
        yield made

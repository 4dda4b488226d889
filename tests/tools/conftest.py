"""Rays that several files of cases share; files that start others run first: tests/laws/test_on_ray.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def one_ray() -> Iterator[None]:
    from tests.tools.ray_cases import own_ray

    with own_ray():
        yield


@pytest.fixture(scope="session")
def one_node() -> Iterator[None]:
    """A cluster of one node, to which a run connects."""
    from tests.tools.parts.ray_cluster import cluster_of

    alike = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "_system_config": {"worker_niceness": 0}}
    with cluster_of(1, **alike):
        yield

"""Versions on a Ray cluster, in a network of its own where this user may make one."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests.tools.parts.namespaces import in_a_session
from tests.tools.parts.programs import ENDS_WITHIN_S


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra rlsync[ray]")
def test_versions_reach_every_node_of_a_ray_cluster_and_leave_no_process() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "tests/tools/ray_transport_cases.py",
    ]
    ran, left = in_a_session(command, alone=True, timeout_s=ENDS_WITHIN_S, grace_s=90)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "29 passed" in said
    assert left == set(), said

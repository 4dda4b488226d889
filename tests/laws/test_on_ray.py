"""What holds on Ray: versions on every node, collectors of actors, the actor-learner on a cluster.

The cases are in tests/tools. A session of pytest runs several files of them on one Ray, in a network of its
own where this user may make one. There are two sessions: one goes on while the other waits.
"""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec

import pytest

from tests.tools.parts.namespaces import in_a_session

#: Files of tests/tools, less their "_cases". They cannot all share a session.
SESSIONS = {
    "collectors": ("ray_transport", "ray", "ray_board", "ray_crowd"),
    "cluster": ("cluster", "cluster_recipe", "cluster_dreamer", "stop_cluster"),
}

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra rlsync[ray]"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(600),
]


def cases_pass(marked: str, *names: str) -> None:
    """Run the cases that are so marked in a session of their own: all pass, and no process is left."""
    files = [f"tests/tools/{name}_cases.py" for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        *files,
    ]
    ran, left = in_a_session(command, alone=True, timeout_s=570, grace_s=90)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
    assert " skipped" not in said, said
    assert left == set(), said


@pytest.mark.parametrize("session", SESSIONS)
def test_versions_are_whole_exact_and_reach_every_node_and_no_process_is_left(session: str) -> None:
    cases_pass("not thorough", *SESSIONS[session])


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for names in SESSIONS.values() for name in names])
def test_so_they_are_in_all_other_cases(name: str) -> None:
    cases_pass("thorough", name)

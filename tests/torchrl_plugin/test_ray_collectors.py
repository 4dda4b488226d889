"""Collectors on Ray, in a network of their own where this user may make one."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest

from tests.tools.parts.namespaces import in_a_session
from tests.tools.parts.programs import ENDS_WITHIN_S


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra rlsync[ray]")
@pytest.mark.parametrize(
    ("cases", "tests"),
    [
        ("tests/tools/ray_cases.py", 4),
        ("tests/tools/ray_board_cases.py", 9),
        ("tests/tools/ray_crowd_cases.py", 3),
    ],
    ids=["stock", "boards", "crowds"],
)
def test_collectors_on_ray_are_stamped_checked_or_refused_and_leave_no_process(
    cases: str, tests: int
) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        cases,
    ]
    ran, left = in_a_session(command, alone=True, timeout_s=ENDS_WITHIN_S, grace_s=90)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert f"{tests} passed" in said
    assert left == set(), said

"""The row of the page that a test of the zoo stands on."""

from __future__ import annotations

import pytest

from tests.laws.zoo.parts import Row, rows


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Row:
    """The row of ``docs/silent_syncs.md`` that names the test."""
    found = {row.path.partition("::")[2]: row for row in rows()}
    assert request.node.originalname in found, "the page has no row for this test"
    return found[request.node.originalname]

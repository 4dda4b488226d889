"""Every reachable state of the board's protocol, and what goes wrong without each of its parts."""

from __future__ import annotations

import pytest

from tests.laws.protocol_model import Exploration, Protocol, explore

PAIRS = [("alias", "copy"), ("alias", "alias"), ("copy", "copy")]
BROKEN = ("torn", "unpublished", "mislabelled", "regressing", "unreadable")


def check_laws(found: Exploration) -> None:
    """All states were explored, and none breaks a law; or the story of each that does."""
    assert found.complete, f"{found.states} states and no end"
    broken = [found.story(kind) for kind in BROKEN if kind in found.violations]
    assert not broken, f"{found.states} states explored\n" + "\n".join(broken)


@pytest.mark.seconds
@pytest.mark.parametrize("modes", PAIRS, ids="+".join)
@pytest.mark.parametrize("slots", [3, 4])
@pytest.mark.each_value
def test_no_reader_acts_on_torn_unpublished_or_older_weights_whoever_dies(
    slots: int, modes: tuple[str, ...]
) -> None:
    found = explore(Protocol(slots, versions=4, modes=modes))
    check_laws(found)
    assert found.states > 10_000, f"only {found.states} states: the model does not move"


@pytest.mark.seconds
@pytest.mark.parametrize("modes", PAIRS, ids="+".join)
@pytest.mark.one_case
def test_an_exception_in_the_middle_of_a_publish_does_no_harm_either(modes: tuple[str, ...]) -> None:
    found = explore(Protocol(3, versions=3, modes=modes, interrupts=True))
    check_laws(found)


@pytest.mark.seconds
@pytest.mark.parametrize("modes", PAIRS, ids="+".join)
@pytest.mark.one_case
def test_a_lock_that_is_refused_because_somebody_looks_at_it_does_no_harm(modes: tuple[str, ...]) -> None:
    found = explore(Protocol(3, versions=3, modes=modes, looks=True))
    check_laws(found)
    assert "coalesced" in found.violations, "also a free slot may be refused"


@pytest.mark.seconds
@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize(
    ("without", "found_is"),
    [
        ({"leases": False}, "torn"),
        ({"equality": False}, "unpublished"),
        ({"equality": False}, "mislabelled"),
        ({"spares_newest": False}, "unreadable"),
        ({"coherent": False}, "regressing"),
        ({"interrupts": True, "newest": "variable"}, "unreadable"),
    ],
    ids=str,
)
def test_without_one_of_its_parts_the_protocol_breaks(
    without: dict[str, bool], found_is: str, mode: str
) -> None:
    found = explore(Protocol(3, versions=4, modes=(mode, mode), **without), until=found_is)
    print(f"{found.states} states, {found.story(found_is)}")  # noqa: T201 - shown on failure, or with -s
    assert found_is in found.violations, f"not found in {found.states} states"
    assert len(found.violations[found_is]) < 60


def test_without_leases_nothing_but_the_lock_is_missing() -> None:
    """The equality check alone does not help: the slot changes after it was checked."""
    found = explore(Protocol(3, versions=3, modes=("copy",), leases=False), until="torn")
    story = found.violations["torn"]
    checked = max(i for i, step in enumerate(story) if "as head said" in step)
    assert any("writes the first half" in step for step in story[checked:])


@pytest.mark.parametrize("modes", [("alias",), ("alias", "alias")], ids="+".join)
def test_readers_plus_two_slots_can_run_out_while_a_reader_adopts(modes: tuple[str, ...]) -> None:
    """While it adopts, a reader holds the slot it leaves and the one it takes."""
    slots = len(modes) + 2
    found = explore(Protocol(slots, versions=6, modes=modes, deaths=False), until="coalesced")
    assert "coalesced" in found.violations, f"{found.states} states"


@pytest.mark.seconds
@pytest.mark.parametrize("versions", [5, pytest.param(8, marks=pytest.mark.thorough)])
def test_two_slots_for_each_alias_reader_and_two_more_always_leave_one_free(versions: int) -> None:
    found = explore(Protocol(4, versions=versions, modes=("alias",)))
    assert found.complete
    assert "coalesced" not in found.violations, found.story("coalesced")

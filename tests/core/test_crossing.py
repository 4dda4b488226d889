"""What goes from one device to another, in words."""

from __future__ import annotations

import pytest

from rlsync.core.crossing import Crossing, crossings


@pytest.mark.parametrize(
    ("crossing", "words"),
    [
        (Crossing("cuda:0", "cuda:0", False, aliased_leaves=4), "cuda:0: 4 leaves aliased, 0 bytes"),
        (Crossing("cuda:0", "cuda:0", False, copied_bytes=904), "cuda:0: 904 bytes copied on the device"),
        (Crossing("cuda:0", "cpu", False, copied_bytes=904), "cuda:0 -> cpu: 904 bytes cross at a publish"),
        (
            Crossing("cuda:0", "cuda:1", True, copied_bytes=904),
            "cuda:0 -> host memory -> cuda:1: 904 bytes cross at a publish, 904 at each adoption",
        ),
    ],
)
def test_a_crossing_says_what_is_copied_and_when(crossing: Crossing, words: str) -> None:
    assert str(crossing) == words


def test_crossings_of_leaves_are_added_up_by_their_devices() -> None:
    both = crossings([Crossing("cpu", "cpu", True, 0, 8), Crossing("cpu", "cpu", True, 0, 16)])
    assert [crossing.copied_bytes for crossing in both] == [24]

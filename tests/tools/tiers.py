"""What `make test` leaves to `make test-all` of a test with many cases."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: Marks of tests of which `make test` runs as many cases as it takes, so that this many values meet in one.
TOGETHER = {"one_case": 0, "each_value": 1, "each_pair": 2}


def mark_thorough(items: Sequence[pytest.Item]) -> None:
    """Mark `thorough` the cases that the tests of TOGETHER can do without."""
    for name, together in TOGETHER.items():
        cases: dict[str, list[pytest.Function]] = defaultdict(list)
        for item in items:
            if not isinstance(item, pytest.Function) or item.get_closest_marker("thorough") is not None:
                continue
            if item.get_closest_marker(name) is not None:
                cases[item.nodeid.partition("[")[0]].append(item)
        for found in cases.values():
            # The cases share the very objects that the decorators list.
            values = [{name: id(value) for name, value in item.callspec.params.items()} for item in found]
            kept = covering(values, together)
            for number, item in enumerate(found):
                if number not in kept:
                    item.add_marker(pytest.mark.thorough)


def first_of_each(cases: Sequence[T], kind: Callable[[T], object]) -> list[Any]:
    """The cases of a decorator, `thorough` unless they are the first of their kind."""
    seen: set[object] = set()
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.thorough if kind(case) in seen else ()))
        seen.add(kind(case))
    return marked


def covering(cases: Sequence[Mapping[str, int]], together: int) -> set[int]:
    """The numbers of some cases that show each combination of that many values that all cases show.

    Every process of a parallel run must choose alike, so there is nothing random in it.
    """
    shows = [set(combinations(sorted(case.items()), min(together, len(case)))) for case in cases]
    kept: set[int] = set()
    missing = set().union(*shows)
    while missing:
        best = max(range(len(cases)), key=lambda number: len(shows[number] & missing))
        kept.add(best)
        missing -= shows[best]
    return kept

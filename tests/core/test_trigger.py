"""Triggers: phase-locked, composable, without state."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlsync.core.errors import ConfigError
from rlsync.core.trigger import UNITS, Combined, Counters, Every, StepsAhead, Trigger

# Slow machines are no failures.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

whole_units = st.sampled_from(["batches", "frames", "optim_steps"])
jumps = st.lists(st.integers(0, 20), max_size=30)
readings = st.builds(
    Counters,
    batches=st.integers(0, 10**6),
    frames=st.integers(0, 10**12),
    optim_steps=st.integers(0, 10**9),
    seconds=st.floats(0, 1e7),
)
simple = st.one_of(
    st.builds(Every, st.integers(1, 50), st.sampled_from(UNITS)),
    st.builds(StepsAhead, st.integers(0, 50)),
)
combined = st.recursive(
    simple,
    lambda inner: st.tuples(inner, inner, st.booleans()).map(lambda p: p[0] | p[1] if p[2] else p[0] & p[1]),
    max_leaves=4,
)


def fired(trigger: Trigger, counts: list[int], unit: str) -> list[int]:
    """The counts at which a publish happens when the trigger is asked at each of them."""
    last, out = Counters(), []
    for count in counts:
        now = Counters(**{unit: count})
        if trigger.due(last, now):
            out.append(count)
            last = now
    return out


@dataclass
class SlowState:
    """A trigger that keeps books: of every unit since the last publish, and of every multiple passed."""

    moved: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UNITS, 0))
    at: dict[str, int] = field(default_factory=lambda: dict.fromkeys(UNITS, 0))
    passed: set[tuple[str, int]] = field(default_factory=set)

    def move(self, unit: str) -> None:
        self.moved[unit] += 1
        self.at[unit] += 1
        for n in range(1, 51):
            if self.at[unit] % n == 0:
                self.passed.add((unit, n))

    def due(self, trigger: Trigger) -> bool:
        match trigger:
            case Every(n, unit):
                return (unit, n) in self.passed
            case StepsAhead(n):
                return self.moved["optim_steps"] > n
            case Combined(left, right, "|"):
                return self.due(left) or self.due(right)
            case Combined(left, right, _):
                return self.due(left) and self.due(right)
        raise AssertionError(trigger)

    def published(self) -> None:
        self.moved = dict.fromkeys(UNITS, 0)
        self.passed = set()


@given(combined, st.lists(st.lists(st.sampled_from(UNITS), max_size=12), max_size=25))
def test_any_combination_fires_where_a_reference_that_keeps_books_of_every_unit_does(
    trigger: Trigger, steps: list[list[str]]
) -> None:
    """Each step moves some counters; the trigger is asked after each."""
    slow, last, at = SlowState(), Counters(), dict.fromkeys(UNITS, 0)
    for moved in steps:
        for unit in moved:
            at[unit] += 1
            slow.move(unit)
        now = Counters.from_dict(at)
        assert trigger.due(last, now) == slow.due(trigger)
        if trigger.due(last, now):
            last = now
            slow.published()


@given(st.integers(1, 12), jumps, jumps, whole_units)
def test_a_run_resumed_from_its_checkpoint_fires_where_the_whole_run_does(
    n: int, before: list[int], after: list[int], unit: str
) -> None:
    trigger = Every(n, unit)
    counts = [sum((before + after)[: i + 1]) for i in range(len(before + after))]
    whole = fired(trigger, counts, unit)

    head = fired(trigger, counts[: len(before)], unit)
    at_last_publish = Counters(**{unit: head[-1]}) if head else Counters()
    last = Counters.from_dict(json.loads(json.dumps(asdict(at_last_publish))))
    tail = []
    for count in counts[len(before) :]:
        now = Counters(**{unit: count})
        if trigger.due(last, now):
            tail.append(count)
            last = now
    assert head + tail == whole


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1e-3, 1e4))
def test_seconds_follow_exact_arithmetic(before: float, after: float, n: float) -> None:
    exact = Fraction(after) // Fraction(n) > Fraction(before) // Fraction(n)
    assert Every(n, "seconds").due(Counters(seconds=before), Counters(seconds=after)) is exact


@given(readings, simple)
def test_nothing_is_due_when_nothing_moved(reading: Counters, trigger: Trigger) -> None:
    assert not trigger.due(reading, reading)


@given(readings, readings, simple)
def test_only_the_counters_of_its_units_matter(a: Counters, b: Counters, trigger: Trigger) -> None:
    others = dict.fromkeys(set(UNITS) - trigger.units(), 0)
    blank_a = Counters.from_dict(asdict(a) | others)
    blank_b = Counters.from_dict(asdict(b) | others)
    assert trigger.due(a, b) == trigger.due(blank_a, blank_b)


@given(readings, readings, simple, simple)
def test_or_and_and_are_those_of_logic(a: Counters, b: Counters, x: Trigger, y: Trigger) -> None:
    assert (x | y).due(a, b) == (x.due(a, b) or y.due(a, b))
    assert (x & y).due(a, b) == (x.due(a, b) and y.due(a, b))
    assert (x | y).units() == (x & y).units() == x.units() | y.units()


def test_combinations_nest_and_read_as_written() -> None:
    trigger = Every(10, "seconds") | StepsAhead(50) & Every(2, "batches")
    assert str(trigger) == "(every 10 seconds | (more than 50 optim_steps ahead & every 2 batches))"
    now = Counters(batches=2, optim_steps=51, seconds=1.0)
    assert trigger.due(Counters(), now)
    assert not trigger.due(Counters(), Counters(batches=2, optim_steps=50, seconds=1.0))
    assert trigger.due(Counters(), Counters(seconds=10.0))


def test_the_default_unit_is_batches() -> None:
    assert Every(4).units() == {"batches"}


@given(readings)
def test_counters_survive_a_checkpoint(reading: Counters) -> None:
    assert Counters.from_dict(json.loads(json.dumps(asdict(reading)))) == reading


def test_counters_of_another_release_are_read_as_far_as_they_are_known() -> None:
    assert Counters.from_dict({"frames": 7, "unheard_of": 1}) == Counters(frames=7)
    assert Counters.from_dict({}) == Counters()


@pytest.mark.parametrize(
    ("n", "unit"),
    [
        (0, "batches"),
        (-1, "frames"),
        (1.5, "optim_steps"),
        (2.0, "batches"),
        (True, "batches"),
        ("3", "batches"),
        (None, "batches"),
        (0.0, "seconds"),
        (-0.5, "seconds"),
        (math.inf, "seconds"),
        (math.nan, "seconds"),
        (1, "steps"),
        (1, "batch"),
        (1, None),
        (1, ["frames"]),
    ],
)
def test_a_bad_interval_is_refused_in_three_lines(n: object, unit: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Every(n, unit)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 3
    assert "Every(" in caught.value.where


def test_a_typo_in_the_unit_is_answered_with_the_nearest_unit() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'optim_steps'\? choose one of: batches, frames"):
        Every(1, "optim_step")  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [-1, 1.0, True, "2", None])
def test_a_bad_number_of_steps_ahead_is_refused_in_three_lines(n: object) -> None:
    with pytest.raises(ConfigError) as caught:
        StepsAhead(n)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("other", [3, "batches", None, Every])
def test_a_trigger_is_combined_with_triggers_only(other: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Every(1) | other  # type: ignore[operator]
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(ConfigError):
        Every(1) & other  # type: ignore[operator]


@given(simple, simple)
def test_triggers_are_values(x: Trigger, y: Trigger) -> None:
    assert (x | y) == (x | y)
    assert hash(x & y) == hash(x & y)
    assume(x != y)
    assert (x | y) != (x & y)

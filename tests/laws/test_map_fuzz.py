"""Random maps over random module trees: carried out to the letter, or refused before anything moves."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrl.trainers import Trainer

from rlsync import (
    AmbiguousSource,
    ConfigError,
    DestinationNotFound,
    LayoutMismatch,
    NothingToSync,
    Source,
    SourceNotFound,
    SyncMapError,
    SyncPlan,
    SyncWeights,
    resolve,
)
from tests.tools.module_trees import (
    FLOATS,
    Make,
    Seen,
    Step,
    Tree,
    copy_of,
    damaged,
    follow,
    leaves_of,
    nudge,
    spell,
    tie,
    trees,
)
from tests.tools.parts import make_collector, make_policy
from tests.torchrl_plugin.test_resolve import make_trainer

few = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
indices = st.integers(0, 30)
pairs = st.lists(st.tuples(indices, indices), max_size=2)


@dataclass
class Side:
    """Two trees that are meant to fit, and what is the same memory in and between them."""

    there: Tree
    here: Tree
    tied: list[tuple[int, int]]
    tied_there: list[tuple[int, int]]
    tied_here: list[tuple[int, int]]
    aliased: list[int]

    def build(self) -> tuple[nn.Module, nn.Module]:
        """The module at the collector and the one on the trainer."""
        generator = torch.Generator().manual_seed(0)
        there, here = self.there.build(generator), self.here.build(generator)
        tie(here, self.tied + self.tied_here)
        alias(there, here, self.aliased)
        tie(there, self.tied + self.tied_there)
        return there, here


@dataclass
class Entry:
    """One entry of a map."""

    side: int
    there: list[Step]
    here: list[Step]
    dtype: object
    exclude: tuple[str, ...]
    typo: str
    spelling: list[int]

    def written(self, plainly: bool = False) -> tuple[str, Source]:
        choices = [0] * 40 if plainly else self.spelling * 40
        there = f"net{self.side}" + "".join(map(spell, self.there, choices))
        here = f"loss_module.net{self.side}" + "".join(map(spell, self.here, reversed(choices)))
        there += ".nowhere" if self.typo == "there" else ""
        here += ".nowhere" if self.typo == "here" else ""
        return there, Source(here, self.dtype, self.exclude)


@dataclass
class Expected:
    """What must come of a map.

    Args:
        errors: one of these must be raised; none when it can be carried out.
        covered: destination leaves that must become equal to a source leaf, by full name.
        verdicts: those of the plan, by entry and leaf; zero-size leaves have no say.
        cautious: it may be refused, too: a tie leads to a leaf that is excluded.
    """

    errors: set[type[Exception]] = field(default_factory=set)
    covered: dict[str, tuple[Seen, Seen]] = field(default_factory=dict)
    verdicts: list[dict[str, str]] = field(default_factory=list)
    cautious: bool = False
    harmless: bool = False


@st.composite
def sides(draw: st.DrawFn, cast: torch.dtype | None) -> Side:
    here = draw(trees)
    there = here if cast is None else here.cast(cast)
    harm = draw(st.sampled_from(["", "", "", "here", "there"]))
    if harm == "here":
        here = draw(damaged(here))
    elif harm == "there":
        there = draw(damaged(there))
    apart = draw(st.sampled_from([False, False, True]))
    own = pairs if apart else st.just([])
    return Side(there, here, draw(pairs), draw(own), draw(own), draw(st.lists(indices, max_size=2)))


@st.composite
def entries(draw: st.DrawFn, all_sides: list[Side], cast: torch.dtype | None) -> Entry:
    at = draw(st.integers(0, len(all_sides) - 1))
    side = all_sides[at]
    there, here = list(side.there.paths()), list(side.here.paths())
    path = draw(st.sampled_from(there))
    same = path in here and draw(st.integers(0, 9)) > 0
    source = path if same else draw(st.sampled_from(here))
    leaves = sorted({*leaves_of(follow(side.build()[0], path)), *leaves_of(follow(side.build()[1], source))})
    exclude: tuple[str, ...] = ()
    if leaves and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(leaves), max_size=2))
        exclude = tuple(name if draw(st.booleans()) else f"*{name[-4:]}" for name in chosen)
    dtype = draw(st.sampled_from([cast, cast, str(cast), cast, None, *FLOATS, torch.int8]))
    typo = draw(st.sampled_from(["", "", "", "", "", "", "here", "there"]))
    spelling = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    return Entry(at, path, source, None if dtype == "None" else dtype, exclude, typo, spelling)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Side], list[Entry]]:
    cast = draw(st.none() | st.sampled_from(FLOATS))
    all_sides = draw(st.lists(sides(cast), min_size=1, max_size=2))
    return all_sides, draw(st.lists(entries(all_sides, cast), min_size=1, max_size=3))


def alias(there: nn.Module, here: nn.Module, which: list[int]) -> None:
    """Let destination leaves be the very tensors of the source."""
    for store in ("_parameters", "_buffers"):
        for name, module in there.named_modules():
            twin = dict(here.named_modules()).get(name)
            slots = vars(module)[store]
            for number, (key, tensor) in enumerate(slots.items()):
                other = vars(twin)[store].get(key) if twin is not None else None
                fits = other is not None and (other.shape, other.dtype) == (tensor.shape, tensor.dtype)
                if fits and number in which:
                    slots[key] = other


# ---------------------------------------------------------------------------------- the slow reference


def expect(modules: list[tuple[nn.Module, nn.Module]], entries: list[Entry]) -> Expected:
    """Look at every leaf of every entry with nothing but torch."""
    found = Expected()
    claimed: dict[tuple[int, str], object] = {}
    for entry in entries:
        if entry.dtype is torch.int8:
            found.errors.add(ConfigError)
        if entry.typo:
            found.errors.add(SourceNotFound if entry.typo == "here" else DestinationNotFound)
            continue
        there, here = modules[entry.side]
        stem = "".join(f"{name}." for _, name, _ in entry.there)
        stand, sent = leaves_of(follow(there, entry.there)), leaves_of(follow(here, entry.here))
        verdicts = {}
        for name in [*stand, *(n for n in sent if n not in stand)]:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in entry.exclude):
                continue
            memory = sent[name].memory if name in sent else None
            if (entry.side, stem + name) in claimed:
                found.errors.add(AmbiguousSource)
                from_the_end = "[-" in str([each.written()[0] for each in entries])
                found.harmless |= from_the_end and claimed[entry.side, stem + name] == memory
            claimed[entry.side, stem + name] = memory
            if (verdict := verdict_of(stand.get(name), sent.get(name), entry.dtype)) is None:
                found.errors.add(LayoutMismatch)
                continue
            verdicts[name] = verdict
            found.covered[f"{entry.side} {stem}{name}"] = stand[name], sent[name]
        found.verdicts.append(verdicts)
        look_at_ties(found, stand, sent, set(verdicts))
    look_at_ties_between_entries(found)
    if not claimed and not found.errors:
        found.errors.add(NothingToSync)
    return found


def verdict_of(stands: Seen | None, sent: Seen | None, dtype: object) -> str | None:
    if stands is None or sent is None or stands.tensor.shape != sent.tensor.shape:
        return None
    have, becomes = sent.tensor.dtype, sent.tensor.dtype
    if dtype is not None and have.is_floating_point:
        becomes = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype).split(".")[-1])
    if becomes != stands.tensor.dtype:
        return None
    if becomes != have:
        return "cast"
    return "aliased" if stands.memory == sent.memory else "copied"


def look_at_ties(found: Expected, stand: dict[str, Seen], sent: dict[str, Seen], covered: set[str]) -> None:
    """What is one memory there must be one memory here: else it would have two values."""
    for one in stand:
        for other in stand:
            if one >= other or stand[one].memory != stand[other].memory:
                continue
            if one in sent and other in sent and sent[one].memory == sent[other].memory:
                continue
            if {one, other} <= covered:
                found.errors.add(LayoutMismatch)
            elif covered & {one, other}:
                found.cautious = True


def look_at_ties_between_entries(found: Expected) -> None:
    sources: dict[object, set[object]] = {}
    for stands, sent in found.covered.values():
        sources.setdefault(stands.memory, set()).add(sent.memory)
    if any(len(each) > 1 for each in sources.values()):
        found.errors |= {LayoutMismatch, AmbiguousSource}


# ---------------------------------------------------------------------------------- the laws


@contextmanager
def in_place(modules: list[tuple[nn.Module, nn.Module]]) -> Iterator[Trainer]:
    collector = make_collector(make_policy())
    for number, (there, _) in enumerate(modules):
        setattr(collector, f"net{number}", there)
    named = {f"net{number}": here for number, (_, here) in enumerate(modules)}
    yield make_trainer(collector, **named)
    collector.shutdown()


def plan_or_error(sync_map: dict[str, Source], trainer: Trainer) -> SyncPlan | Exception:
    try:
        return resolve(sync_map, trainer).check()
    except (SyncMapError, ConfigError) as error:
        return error


@pytest.mark.seconds
@few
@given(scenes())
def test_a_map_is_carried_out_exactly_or_refused_with_the_right_error_and_nothing_changes(
    scene: tuple[list[Side], list[Entry]],
) -> None:
    all_sides, listed = scene
    listed = list({entry.written()[0]: entry for entry in reversed(listed)}.values())
    modules = [side.build() for side in all_sides]
    expected = expect(modules, listed)
    assume(not expected.harmless)  # one source for one leaf, spelt in two ways: refused or not
    sync_map = dict(entry.written() for entry in listed)
    before = [(copy_of(there), copy_of(here)) for there, here in modules]
    with in_place(modules) as trainer:
        stages = list(trainer._post_steps_ops), list(trainer._post_optim_ops)
        hook = hook_or_error(sync_map, trainer)
        if isinstance(hook, Exception):
            event(type(hook).__name__)
            allowed = expected.errors | ({LayoutMismatch} if expected.cautious else set())
            assert type(hook) in allowed, f"{hook} is raised, and not one of {allowed}"
            assert len(str(hook).splitlines()) == 3
            assert (list(trainer._post_steps_ops), list(trainer._post_optim_ops)) == stages
            assert unchanged(modules, before)
            return
        assert not expected.errors, f"one of {expected.errors} is due"
        event("carried out")
        check_plan(hook.plan, expected)
        assert unchanged(modules, before)
        hook.publish()
        check_arrival(modules, before, expected)
        for _, here in modules:
            nudge(here)
        hook.publish()
        check_arrival(modules, before, expected, nudged=True)


def hook_or_error(sync_map: dict[str, Source], trainer: Trainer) -> SyncWeights | Exception:
    try:
        return SyncWeights(sync_map, trainer=trainer)
    except (SyncMapError, ConfigError) as error:
        return error


def unchanged(
    modules: list[tuple[nn.Module, nn.Module]], before: list[tuple[dict[str, Tensor], dict[str, Tensor]]]
) -> bool:
    now = [(copy_of(there), copy_of(here)) for there, here in modules]
    return all(
        same(a, b) for pair, other in zip(now, before, strict=True) for a, b in zip(pair, other, strict=True)
    )


def same(now: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    return now.keys() == before.keys() and all(equal(now[name], before[name]) for name in now)


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def check_plan(plan: SyncPlan, expected: Expected) -> None:
    for route, verdicts in zip(plan.routes, expected.verdicts, strict=True):
        prefix = f"{route.destination}."
        rows = {
            row.destination.removeprefix(prefix): row
            for row in plan.rows
            if row.source.startswith(f"{route.source}.") and row.destination.startswith(prefix)
        }
        for name, verdict in verdicts.items():
            if 0 not in rows[name].shape:
                assert str(rows[name].verdict) == verdict, name
    assert len(plan.rows) == len(expected.covered)


def check_arrival(
    modules: list[tuple[nn.Module, nn.Module]],
    before: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    expected: Expected,
    nudged: bool = False,
) -> None:
    written = {stands.memory for stands, _ in expected.covered.values()}
    sources = {seen.memory for _, here in modules for seen in leaves_of(here).values()}
    for number, (there, here) in enumerate(modules):
        assert nudged or same(copy_of(here), before[number][1]), "the source was changed"
        for name, seen in leaves_of(there).items():
            key = f"{number} {name}"
            was = before[number][0][name]
            if key in expected.covered:
                _, source = expected.covered[key]
                now = current(modules, source)
                assert equal(seen.tensor, now.to(was.dtype)), f"{name} is not its source"
            elif seen.memory not in written | sources:
                assert equal(seen.tensor, was), f"{name} is not in the map and was changed"


def current(modules: list[tuple[nn.Module, nn.Module]], source: Seen) -> Tensor:
    """The present tensor of a source leaf; a number in extra state has a new one each time."""
    return next(
        seen.tensor
        for _, here in modules
        for seen in leaves_of(here).values()
        if seen.memory == source.memory
    )


@pytest.mark.seconds
@few
@given(scenes())
def test_all_spellings_of_a_path_give_the_same_plan(scene: tuple[list[Side], list[Entry]]) -> None:
    all_sides, (entry, *_) = scene
    with in_place([side.build() for side in all_sides]) as trainer:
        plans = [plan_or_error(dict([entry.written(plainly)]), trainer) for plainly in (True, False)]
    plain, fancy = plans
    if not isinstance(plain, SyncPlan) or not isinstance(fancy, SyncPlan):
        assert type(plain) is type(fancy)
        return
    for one, other in zip(plain.rows, fancy.rows, strict=True):
        assert one.destination.rpartition("]")[2].rpartition(".")[2] == other.destination.rpartition(".")[2]
        assert (one.verdict, one.kind, one.shape, one.dtype) == (
            other.verdict,
            other.kind,
            other.shape,
            other.dtype,
        )
        assert (one.payload_bytes, one.note) == (other.payload_bytes, other.note)


# ---------------------------------------------------------------------------------- found by the above


def hooked(there: nn.Module, here: nn.Module, sync_map: dict[str, str | Source]) -> SyncWeights:
    collector = make_collector(make_policy())
    collector.net0 = there
    return SyncWeights(sync_map, trainer=make_trainer(collector, net0=here))


def three(tied: tuple[str, str]) -> nn.Module:
    module = nn.Module()
    for value, name in enumerate("acb", 1):
        module.register_parameter(name, nn.Parameter(torch.full((2,), float(value))))
    module._parameters[tied[1]] = module._parameters[tied[0]]
    return module


def test_extra_state_is_cast_as_declared() -> None:
    generator = torch.Generator()
    trees = [Tree(state={"mean": Make((2,), dtype)}) for dtype in (torch.bfloat16, torch.float32)]
    there, here = (tree.build(generator) for tree in trees)
    hooked(there, here, {"net0": Source("loss_module.net0", "bfloat16")}).publish()
    assert leaves_of(there)["_extra_state.deep.mean"].tensor.dtype is torch.bfloat16


def test_a_source_that_ties_a_leaf_to_another_leaf_than_the_destination_does_is_refused() -> None:
    with pytest.raises(LayoutMismatch):
        hooked(three(("a", "b")), three(("c", "b")), {"net0": "loss_module.net0"})


def test_an_index_from_the_end_names_the_same_leaves_as_one_from_the_start() -> None:
    there, here = (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2))
    with pytest.raises(AmbiguousSource):
        hooked(there, here, {"net0[-1]": "loss_module.net0[0]", "net0[1]": "loss_module.net0[1]"})


def test_two_entries_that_lead_to_one_tied_leaf_from_two_sources_are_refused() -> None:
    there, here = (nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)) for _ in range(2))
    there[1].weight = there[0].weight
    with pytest.raises((AmbiguousSource, LayoutMismatch)):
        hooked(there, here, {"net0[0]": "loss_module.net0[0]", "net0[1]": "loss_module.net0[1]"})

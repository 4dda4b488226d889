"""Paths: the grammar, the walk, and errors that name the failing segment."""

from __future__ import annotations

import keyword
import os
import subprocess
from pathlib import Path as FilePath

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from rlsync.core.errors import DestinationNotFound, PathSyntaxError, SourceNotFound
from rlsync.core.path import Attr, Index, MappingKey, Path, parse, walk
from rlsync.core.user_input import nearest_name

# Slow machines are no failures.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def is_name(text: str) -> bool:
    return text.isidentifier() and not text.startswith("__")


names = st.one_of(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
    st.sampled_from(["größe", "策略", "ﬁne", "Ω_1", "हिन्दी", "a·b", "é"]),
    st.text(min_size=1, max_size=4),
    st.sampled_from(keyword.kwlist),
).filter(is_name)
segments = st.one_of(
    names.map(Attr),
    st.integers().map(Index),
    st.text(max_size=12).map(MappingKey),
    st.text(alphabet="'\"\\[].\n\t", max_size=6).map(MappingKey),
)
paths = st.builds(lambda first, rest: Path((first, *rest)), names.map(Attr), st.lists(segments))


class Thing:
    def __init__(self, **held: object) -> None:
        self.__dict__.update(held)


def trainer() -> Thing:
    actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    loss = nn.Module()
    loss.actor_network = actor
    loss.critics = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    loss.heads = nn.ModuleDict({"left": nn.Linear(1, 1), "with space": nn.Linear(1, 1)})
    return Thing(
        loss_module=loss,
        hooks=[10, 11, 12],
        table={"k": "v", "0": "zero as text", 0: "zero"},
        td=TensorDict({"w": torch.arange(3.0), ("n", "x"): torch.ones(2)}),
    )


def follow(root: object, text: str) -> object:
    return walk(root, parse(text), error=SourceNotFound, root_name="the trainer", where="entry 1")


def refusal(root: object, text: str) -> SourceNotFound:
    with pytest.raises(SourceNotFound) as caught:
        follow(root, text)
    return caught.value


# ---------------------------------------------------------------------------------- grammar


@pytest.mark.seconds
@given(paths)
def test_what_is_written_is_read_back_the_same(path: Path) -> None:
    assert parse(str(path)) == path


@given(st.text(max_size=30))
def test_any_text_is_a_path_or_a_syntax_error_of_three_lines(text: str) -> None:
    path = refused = None
    try:
        path = parse(text)
    except PathSyntaxError as error:
        refused = error
    if refused is not None:
        assert refused.what
        assert refused.where.startswith("character ")
        assert refused.cure
    else:
        assert path is not None
        assert parse(str(path)) == path
        assert not any(isinstance(s, Attr) and s.name.startswith("__") for s in path.segments)


@given(st.text(alphabet="ab_.[]'\"\\0123456789- ", max_size=14))
def test_texts_close_to_the_grammar_never_end_in_another_error(text: str) -> None:
    try:
        path = parse(text)
    except PathSyntaxError:
        return
    assert parse(str(path)) == path


@given(st.integers(min_value=0, max_value=10**6))
def test_digits_after_a_dot_are_an_index(n: int) -> None:
    assert parse(f"a.module.{n}.b") == parse(f"a.module[{n}].b")
    assert parse(f"a.{n}").segments == (Attr("a"), Index(n))


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("policy", (Attr("policy"),)),
        ("loss_module.actor_network", (Attr("loss_module"), Attr("actor_network"))),
        ("env.transform[0].module", (Attr("env"), Attr("transform"), Index(0), Attr("module"))),
        ("a['k'].b", (Attr("a"), MappingKey("k"), Attr("b"))),
        ('a["it\'s"]', (Attr("a"), MappingKey("it's"))),
        (r"a['it\'s']", (Attr("a"), MappingKey("it's"))),
        (r"a['\\']", (Attr("a"), MappingKey("\\"))),
        ("a['']", (Attr("a"), MappingKey(""))),
        ("a['x.y[0]']", (Attr("a"), MappingKey("x.y[0]"))),
        ("a[-1]", (Attr("a"), Index(-1))),
        ("a[0][1]", (Attr("a"), Index(0), Index(1))),
        ("a.007", (Attr("a"), Index(7))),
        ("_private", (Attr("_private"),)),
    ],
)
def test_the_grammar_reads(text: str, segments: tuple[object, ...]) -> None:
    assert parse(text).segments == segments


@pytest.mark.parametrize(
    ("text", "character"),
    [
        ("", 1),
        (".a", 1),
        ("[0]", 1),
        ("0", 1),
        ("a.", 3),
        ("a..b", 3),
        ("a b", 2),
        (" a", 1),
        ("a\n", 2),
        ("a[", 3),
        ("a[]", 3),
        ("a[0", 4),
        ("a[0:1]", 4),
        ("a[1.5]", 4),
        ("a[b]", 3),
        ("a['k]", 3),
        ("a['k'", 6),
        ("a['k'x]", 6),
        ("a]", 2),
        ("a.0b", 4),
        ("a.-1", 3),
        ("a-b", 2),
        ("a.__class__", 3),
        ("__init__", 1),
        ("a.__", 3),
        ("a.²", 3),
        ("a.٣", 3),
    ],
)
def test_a_syntax_error_names_the_character_and_a_cure(text: str, character: int) -> None:
    with pytest.raises(PathSyntaxError) as caught:
        parse(text)
    error = caught.value
    assert repr(text) in error.what
    assert error.where.startswith(f"character {character},")
    assert len(str(error).splitlines()) == 3


def test_an_index_of_thousands_of_digits_is_refused_as_any_bad_path() -> None:
    with pytest.raises(PathSyntaxError):
        parse("a." + "9" * 5000)
    with pytest.raises(PathSyntaxError):
        parse("a[" + "9" * 5000 + "]")


@pytest.mark.parametrize("wrong", [None, 3, b"policy", ["policy"]])
def test_a_path_that_is_not_a_string_is_refused(wrong: object) -> None:
    with pytest.raises(PathSyntaxError, match="a path is a string"):
        parse(wrong)  # type: ignore[arg-type]


def test_ancestors_and_what_is_left_below_them() -> None:
    path = parse("env.transform[0].module")
    assert path.startswith(parse("env.transform"))
    assert path.startswith(path)
    assert not path.startswith(parse("env.transform[1]"))
    assert not parse("environment").startswith(parse("env"))
    assert path.below(parse("env")).segments == parse("x.transform[0].module").segments[1:]
    assert parse("heads['left'].layers[0].weight").leaf_prefix() == "heads.left.layers.0.weight"


# ---------------------------------------------------------------------------------- safety

HOSTILE = [
    "__import__('os').system('touch {}')",
    "a.__class__.__base__.__subclasses__()",
    "a['k'].__class__",
    "a[__import__('os')]",
    "a[(lambda: open('{}', 'w'))()]",
    "loss_module.actor_network; open('{}', 'w')",
    "loss_module.actor_network()",
    "loss_module\n.actor_network",
    "hooks[0 if open('{}', 'w') else 1]",
    'f\'{{open("{}", "w")}}\'',
    "${{oc.env:HOME}}",
    "`touch {}`",
    "$(touch {})",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_hostile_text_is_refused_and_runs_nothing(
    template: str, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> object:
        raise AssertionError("code ran")

    for place, name in ((os, "system"), (subprocess, "Popen"), (os, "popen")):
        monkeypatch.setattr(place, name, never)
    flag = tmp_path / "flag"
    with pytest.raises(PathSyntaxError):
        parse(template.format(flag))
    assert not flag.exists()


@pytest.mark.parametrize("key", ["__import__('os')", "{0.__class__}", "%(x)s", "$(touch x)", "__class__"])
def test_a_hostile_key_is_only_a_key(key: str) -> None:
    held = Thing(table={key: "inert"})
    assert walk(held, Path((Attr("table"), MappingKey(key))), error=SourceNotFound, root_name="x") == (
        "inert"
    )
    assert walk(held, parse(str(Path((Attr("table"), MappingKey(key))))), error=SourceNotFound, root_name="x")


def test_fullwidth_underscores_do_not_reach_dunder_attributes() -> None:
    # Python normalises identifiers in source code; getattr does not.
    fullwidth = "\uff3f\uff3fclass\uff3f\uff3f"
    try:
        path = parse(f"loss_module.{fullwidth}")
    except PathSyntaxError:
        return
    with pytest.raises(SourceNotFound):
        walk(trainer(), path, error=SourceNotFound, root_name="the trainer")


# ---------------------------------------------------------------------------------- walk


def test_the_walk_reads_modules_lists_dicts_and_tensordicts() -> None:
    root = trainer()
    loss = root.loss_module
    assert follow(root, "loss_module.actor_network") is loss.actor_network
    assert follow(root, "loss_module.actor_network[0].weight") is loss.actor_network[0].weight
    assert follow(root, "loss_module.actor_network.2") is loss.actor_network[2]
    assert follow(root, "loss_module.actor_network[-1]") is loss.actor_network[2]
    assert follow(root, "loss_module.critics.1.bias") is loss.critics[1].bias
    assert follow(root, "loss_module.heads.left") is loss.heads["left"]
    assert follow(root, "loss_module.heads['with space']") is loss.heads["with space"]
    assert follow(root, "hooks[1]") == 11
    assert follow(root, "hooks[-1]") == 12
    assert follow(root, "table['k']") == "v"
    assert follow(root, "table['0']") == "zero as text"
    assert follow(root, "table[0]") == "zero"
    assert follow(root, "td['w']") is root.td["w"]
    assert torch.equal(follow(root, "td['n']['x']"), torch.ones(2))


def test_a_child_called_by_a_number_is_found_where_there_is_no_indexing() -> None:
    module = nn.Module()
    module.add_module("0", nn.Linear(1, 1))
    assert follow(Thing(net=module), "net.0") is module._modules["0"]
    assert follow(Thing(net=module), "net[0].weight") is module._modules["0"].weight


def test_every_leaf_of_a_module_is_reached_by_its_parameter_name() -> None:
    root = trainer()
    for name, parameter in root.loss_module.named_parameters():
        if " " not in name:
            assert follow(root, f"loss_module.{name}") is parameter


def test_a_typo_is_answered_with_the_segment_its_siblings_and_the_nearest_name() -> None:
    error = refusal(trainer(), "loss_module.actor_netwrok.0")
    assert error.what == "no 'actor_netwrok' on loss_module (Module)"
    assert error.where == "path 'loss_module.actor_netwrok[0]', entry 1"
    assert "did you mean 'actor_network'?" in error.cure
    for sibling in ("actor_network", "critics", "heads"):
        assert sibling in error.cure.partition("has:")[2]


def test_the_first_segment_is_looked_up_on_the_root_by_its_name() -> None:
    error = refusal(trainer(), "los_module.actor_network")
    assert error.what == "no 'los_module' on the trainer (Thing)"
    assert "did you mean 'loss_module'?" in error.cure


def test_an_index_out_of_range_says_what_the_range_is() -> None:
    error = refusal(trainer(), "hooks[3]")
    assert error.what == "no '3' on hooks (list)"
    assert "[0] to [2]" in error.cure
    assert "nothing to choose from" in refusal(Thing(hooks=[]), "hooks[0]").cure


def test_a_child_out_of_range_names_the_children_there_are() -> None:
    error = refusal(trainer(), "loss_module.critics[2]")
    assert error.what == "no '2' on loss_module.critics (ModuleList)"
    assert error.cure.endswith("loss_module.critics has: 0, 1")


def test_a_missing_key_names_the_nearest_key() -> None:
    error = refusal(Thing(table={"policy": 1, "critic": 2}), "table['polcy']")
    assert error.what == "no 'polcy' on table (dict)"
    assert "did you mean 'policy'?" in error.cure
    assert "table has: policy, critic" in error.cure


def test_a_missing_key_of_a_tensordict_names_its_keys_whatever_its_batch() -> None:
    td = TensorDict({"weight": torch.ones(2, 1), "bias": torch.ones(2, 3)}, [2])
    error = refusal(Thing(td=td, params=td[0]), "td['wieght']")
    assert error.cure == "did you mean 'weight'? td has: weight, bias"
    assert "params has: weight, bias" in refusal(Thing(params=td[0]), "params['x']").cure


def test_a_property_is_a_suggestion_too() -> None:
    class HasProperty(Thing):
        @property
        def qvalue_network(self) -> int:
            return 1

    assert "did you mean 'qvalue_network'?" in refusal(HasProperty(a=1), "qvalue_netwrok").cure


@pytest.mark.parametrize(
    "text", ["hooks.first", "table.k", "hooks['x']", "loss_module['actor_network']", "hooks[0].x.y"]
)
def test_a_segment_of_the_wrong_kind_is_refused(text: str) -> None:
    assert refusal(trainer(), text).what.startswith("no ")


def test_the_error_class_and_the_cause_are_kept() -> None:
    with pytest.raises(DestinationNotFound) as caught:
        walk(trainer(), parse("hooks[9]"), error=DestinationNotFound, root_name="the collector")
    assert isinstance(caught.value.__cause__, (AttributeError, LookupError))


def test_many_siblings_are_cut_with_an_ellipsis() -> None:
    error = refusal(Thing(**{f"name_{i:02}": i for i in range(30)}), "other")
    assert error.cure.endswith(", ...")
    assert "name_11" in error.cure
    assert "name_12" not in error.cure


@given(st.lists(names, max_size=6), names)
def test_the_nearest_name_is_one_of_those_offered_or_nothing(offered: list[str], wanted: str) -> None:
    assert nearest_name(wanted, offered) in {*offered, ""}
    assert nearest_name(wanted, [*offered, wanted]) == wanted

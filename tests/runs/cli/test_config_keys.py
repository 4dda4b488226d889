"""``rlsync ls --keys`` and the page of keys: every key with its type, range, default and comment."""

from __future__ import annotations

import json
import runpy
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from rlsync.runs.cli.main import main
from rlsync.runs.config import shipped
from rlsync.runs.config.own_hydra import KEY
from rlsync.runs.config.reference import ConfigKey, _in_words, as_paragraphs, comments_in, reference
from rlsync.runs.recipes.env_settings import settings_with
from rlsync.runs.recipes.registry import recipe_named
from rlsync.runs.recipes.settings import Config
from tests.runs.recipes.test_registry import written
from tests.tools.tiers import first_of_each

DOCS = Path(__file__).parents[3] / "docs"
GROUPS = ("recipe", "env", "collector", "cluster", "sync", "logger")
OPTIONS = [str(c).replace("/", "=") for group in GROUPS for c in shipped.groups()[group]]
PAGE = runpy.run_path(str(DOCS / "config_reference.py"))


def names_of(settings: object, prefix: str) -> set[str]:
    """Every key of a dataclass that is not a section."""
    found: set[str] = set()
    for spec in fields(settings):  # type: ignore[arg-type]
        value = getattr(settings, spec.name)
        if spec.name == KEY:
            continue
        found |= names_of(value, f"{prefix}{spec.name}.") if is_dataclass(value) else {prefix + spec.name}
    return found


@pytest.mark.parametrize("option", first_of_each(OPTIONS, lambda option: option.partition("=")[0]))
@pytest.mark.one_case
def test_every_key_of_a_shipped_option_is_listed_with_its_comment(option: str) -> None:
    group = option.partition("=")[0]
    listed = {key.name: key for key in reference([option]) if not key.is_section}
    whole = Config()
    if group == "recipe":
        whole.recipe = recipe_named(listed["recipe.name"].value).settings()
    if group == "env":
        whole.env = settings_with([key.removeprefix("env.") for key in listed if key.startswith("env.")])
    assert {key for key in listed if key.startswith(f"{group}.")} == names_of(
        getattr(whole, group), f"{group}."
    )
    assert [key for key, found in listed.items() if not found.comment] == []
    assert all(found.type for found in listed.values())


def test_without_words_every_key_of_a_run_is_listed() -> None:
    listed = {key.name: key for key in reference([]) if not key.is_section}
    assert set(listed) == names_of(Config(), "")
    assert [name for name, key in listed.items() if not key.comment] == []


@cache
def keys(*words: str) -> tuple[ConfigKey, ...]:
    return tuple(reference(list(words)))


def key(name: str, *words: str) -> ConfigKey:
    (found,) = (key for key in keys(*words) if key.name == name)
    return found


@pytest.mark.seconds
def test_a_key_has_the_type_the_range_and_the_default_of_the_chosen_option() -> None:
    assert key("recipe.optimizer", "recipe=impala").facts() == "one of adam, rmsprop; default adam"
    assert key("recipe.slots", "recipe=impala").facts() == "whole number or null, > 0; default null"
    assert key("recipe.replay.ratio", "recipe=impala").value == 0.0
    laser = key("recipe.replay.ratio", "recipe=laser")
    assert (laser.value, laser.comment[:40]) == (4.0, "Replayed unrolls for each new one. With ")
    assert key("recipe.model.lstm", "recipe=laser").comment.startswith("Units of the LSTM"), (
        "of impala's file"
    )
    frames = key("collector.frames_per_batch", "recipe=impala")
    assert (frames.value, frames.comment) == (160, "Must be unroll_length x batch_size.")


@pytest.mark.seconds
def test_the_verb_prints_the_keys_of_a_choice_and_refuses_a_typo(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "logger=tensorboard", "--keys"]) == 0
    said = capsys.readouterr().out
    assert (
        "logger.kind  one of csv, tensorboard, wandb, none; default tensorboard\n    Where metrics go" in said
    )
    assert "recipe." not in said
    assert main(["ls", "logger=tensorboard", "--keys", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "logger.kind"
    assert main(["ls", "recipe=impalla", "--keys"]) == 2
    assert "did you mean 'impala'?" in capsys.readouterr().err
    assert main(["ls", "logger=csv"]) == 0
    assert capsys.readouterr().out.startswith("logger/csv")


@pytest.mark.seconds
def test_the_keys_of_a_recipe_of_ones_own_have_the_comments_of_its_file(tmp_path: Path) -> None:
    home = written(tmp_path, installed=False)
    listed = {key.name: key for key in reference(["recipe=a2c"], home / "configs")}
    assert listed["recipe.total_frames"].comment == "The run ends here at the latest."
    assert listed["recipe.gae_lambda"].facts() == "number, >= 0 and <= 1; default 0.95"
    assert listed["recipe.gae_lambda"].comment == "", "the file does not have this key"
    assert listed["collector.frames_per_batch"].value == 200


@pytest.mark.thorough
def test_the_page_of_keys_asks_for_every_shipped_option() -> None:
    asked = set(PAGE["BLOCK"].findall((DOCS / "config_keys.md").read_text()))
    assert "" in asked
    assert [option for option in OPTIONS if not {option, option.partition("=")[0]} & asked] == []
    listed = PAGE["listed"]("logger")
    assert [option for option in OPTIONS if f"**{option}**" in listed] == [
        option for option in OPTIONS if option.startswith("logger=")
    ]


@pytest.mark.seconds
@pytest.mark.thorough
def test_the_page_of_keys_has_a_list_for_every_shipped_option() -> None:
    built = PAGE["with_keys"]((DOCS / "config_keys.md").read_text())
    assert "config-keys" not in built
    for option in OPTIONS:
        group, _, name = option.partition("=")
        assert f"### {option}" in built if group == "recipe" else f"**{option}**" in built, name
    assert "`recipe.replay.ratio`\n: number, >= 0 and &lt;= 1000; default `4.0`" in built
    assert "`seed`\n: whole number, >= 0; default `0`\n\n  Seeds torch" in built


def test_a_comment_belongs_to_the_keys_that_follow_it_without_a_gap(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "# Of the file.\n\n# Both.\none: 1\ntwo: 2\n\nbare: 3\n\n# Of the section.\nsection:\n  # Below.\n"
        "  three: 3  # behind\n  four: 4\n\n  # Say:\n  #\n  #   a=1\n  five: 5\n"
    )
    found = comments_in(file, "x.")
    assert found == {
        "x.one": "Both.",
        "x.two": "Both.",
        "x.bare": "",
        "x.section": "Of the section.",
        "x.section.three": "behind",
        "x.section.four": "Below.",
        "x.section.five": "Say:\n\n  a=1",
    }
    assert as_paragraphs(found["x.section.five"]) == ["Say:", "  a=1"]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [("list[int] | None", "list of whole number or null"), ("dict[str, Any]", "mapping"), (float, "number")],
)
def test_a_type_is_told_in_words(annotation: object, words: str) -> None:
    assert _in_words(annotation) == words

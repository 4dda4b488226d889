"""``make same`` can fail: a digest sees one changed bit; a difference is told unless a commit names it."""

from __future__ import annotations

import pytest
import torch

from rlsync.runs.recipes.registry import SHIPPED
from tests.laws.same import ALTERS, CASES, FAILED, RERUNS, report, wrong
from tests.laws.same_probe import digest_of


def test_a_digest_sees_one_changed_bit_another_name_and_another_dtype() -> None:
    state = {"a": torch.ones(3), "b": [torch.zeros(2)]}
    nudged = {"a": torch.ones(3), "b": [torch.tensor([0.0, 1e-45])]}
    renamed = {"c": torch.ones(3), "b": [torch.zeros(2)]}
    cast = {"a": torch.ones(3), "b": [torch.zeros(2, dtype=torch.float64)]}
    assert digest_of(state) == digest_of({"b": [torch.zeros(2)], "a": torch.ones(3)})
    assert len({digest_of(each) for each in (state, nudged, renamed, cast)}) == 4


@pytest.mark.parametrize(
    ("before", "after", "altered", "well"),
    [
        ({"losses": "1"}, {"losses": "1"}, set(), True),
        ({"losses": "1"}, {"losses": "2"}, set(), False),
        ({"losses": "1"}, {"losses": "2"}, {"td3"}, False),
        ({"losses": "1"}, {"losses": "2"}, {"sac"}, True),
        ({"losses": "1"}, {}, set(), False),
        ({FAILED: "no"}, {FAILED: "no"}, {"sac"}, False),
        ({FAILED: "no"}, {"losses": "1"}, {"sac"}, True),
        ({FAILED: "no"}, {"losses": "1"}, set(), False),
    ],
)
def test_a_difference_is_told_unless_a_commit_says_that_it_alters_the_recipe(
    before: dict[str, str], after: dict[str, str], altered: set[str], well: bool
) -> None:
    assert report("sac on workers", [before, after], altered) is well


@pytest.mark.parametrize(("second", "found"), [("2", []), ("3", ["sac"])])
def test_a_case_that_was_altered_on_purpose_must_give_the_same_twice(second: str, found: list[str]) -> None:
    asked: list[str] = []

    def once_more(names: list[str]) -> list[dict[str, str]]:
        asked.extend(names)
        return [{"losses": second}]

    pairs = [({"losses": "1"}, {"losses": "1"}), ({FAILED: "no"}, {"losses": "2"})]
    assert wrong(["ppo", "sac"], pairs, {"sac"}, once_more) == found
    assert asked == ["sac"]


def test_a_commit_names_the_recipes_that_it_alters() -> None:
    assert ALTERS.findall("Mend the loss\n\nAlters learning: sac, td3\n") == ["sac, td3"]


@pytest.mark.parametrize("cases", [CASES, RERUNS], ids=["cases", "reruns"])
def test_every_recipe_has_a_case(cases: dict[str, list[str]]) -> None:
    recipes = {word.removeprefix("recipe=") for words in cases.values() for word in words}
    assert {*SHIPPED} <= recipes

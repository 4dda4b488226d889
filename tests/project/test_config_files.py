"""The files in ``configs/`` say what the dataclasses say: ``make configs`` would change nothing."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from rlsync.runs.config.shipped import config_dir

CONFIGS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "configs.py"))


@pytest.mark.parametrize("file", CONFIGS["files"](), ids=CONFIGS["name_of"])
def test_values_and_comments_of_a_config_file_are_those_of_its_dataclass(file: Path) -> None:
    assert CONFIGS["written"](file) == file.read_text(), "make configs"


def test_a_changed_default_a_changed_comment_and_a_key_too_many_or_too_few_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = config_dir() / "recipe" / "ppo.yaml"
    text = shipped.read_text()
    file = tmp_path / "recipe" / "ppo.yaml"
    file.parent.mkdir()
    monkeypatch.setitem(CONFIGS["written"].__globals__, "name_of", lambda file: "recipe/ppo.yaml")
    for old, new in (("num_epochs: 4", "num_epochs: 5"), ("# Weight of the critic's loss.", "# Weight.")):
        assert old in text
        file.write_text(text.replace(old, new))
        assert CONFIGS["written"](file) == text
    for old, new, why in (
        ("  num_epochs: 4\n", "", "lacks recipe.num_epochs"),
        ("  num_epochs: 4\n", "  num_epochs: 4\n\n  # New.\n  epochs: 4\n", "has recipe.epochs"),
    ):
        file.write_text(text.replace(old, new))
        with pytest.raises(CONFIGS["NotInStep"], match=why):
            CONFIGS["written"](file)

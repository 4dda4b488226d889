"""The files in ``configs/``, and the schemas by which editors check them, say what the dataclasses say."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

import jsonschema
import pytest
from omegaconf import OmegaConf

from rlsync.runs.cli.main import main
from rlsync.runs.config import shipped
from rlsync.runs.config.shipped import RUN, SCHEMAS, config_dir

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


# ------------------------------------------------------------------------- schemas for editors


def test_the_schemas_are_those_of_the_dataclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "config_schema.py"))["texts"]()
    for file, text in made.items():
        assert file.read_text() == text, "make configs"
    assert set(made) == set(SCHEMAS.iterdir())


def schema_for(file: Path) -> jsonschema.Draft7Validator:
    """The schema that ``rlsync cp`` names in a copy of this file."""
    if file.parent == config_dir():
        named = SCHEMAS / f"{RUN}.json"
    else:
        text = shipped.text_for_editors(shipped.Shipped(file.parent.name, file.stem, file))
        named = Path(url2pathname(text.partition("$schema=file://")[2].split()[0]))
    return jsonschema.Draft7Validator(json.loads(named.read_text()))


@pytest.mark.parametrize(
    "file", sorted(config_dir().rglob("*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}"
)
def test_every_shipped_file_is_as_its_schema_says(file: Path) -> None:
    content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    assert [error.message for error in schema_for(file).iter_errors(content)] == []


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("recipe/ppo", "recipe.gamm", 0.9),
        ("recipe/ppo", "recipe.gamma", 1.5),
        ("recipe/ppo", "recipe.gamma", "high"),
        ("recipe/ppo", "recipe.pace", {}),  # of other recipes
        ("recipe/ppo", "recipe.model.lstm", -1),
        ("recipe/ppo", "recipe.hidden", []),
        ("recipe/ppo", "recipe.compile", "maybe"),
        ("tuned/sac_hopper", "seed", -1),
        ("tuned/sac_hopper", "recipe.actor_lr", 0),
        ("tuned/sac_hopper", "env.life_loss_ends_episode", "sometimes"),
        ("env/pendulum", "num_env", 3),
        ("env/pendulum", "num_envs", 0),
        ("collector/workers", "lag", 1.5),
        ("sync/actor", "map", [{"from": "a"}]),
        ("train", "logger.kind", 3),
    ],
)
def test_a_mistake_in_a_file_is_seen_by_its_schema(file: str, key: str, value: Any) -> None:
    path = config_dir() / f"{file}.yaml"
    config = OmegaConf.load(path)
    OmegaConf.update(config, key, value, force_add=True)
    assert list(schema_for(path).iter_errors(OmegaConf.to_container(config, resolve=False)))


@pytest.mark.parametrize("name", ["recipe/ppo", "env/pong", "tuned/sac_hopper"])
def test_a_copy_has_the_line_for_editors_and_means_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cp", name, "mine", "--as", "copy"]) == 0
    copy = tmp_path / "mine" / Path(name).parent / "copy.yaml"
    lines = copy.read_text().splitlines()
    marked = [line for line in lines[:2] if line.startswith("# yaml-language-server: $schema=file:///")]
    assert len(marked) == 1
    original = (config_dir() / f"{name}.yaml").read_text()
    assert [line for line in lines if line not in marked] == original.splitlines()
    group = Path(name).parent.name
    described = shipped.Shipped(group, "copy", copy).description()
    assert described == shipped.Shipped(group, "copy", config_dir() / f"{name}.yaml").description()

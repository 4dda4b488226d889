"""``rlsync ls`` and ``rlsync cp``: what is listed can be copied, and the printed commands use the copy."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlsync.runs.cli.cp import companions, find
from rlsync.runs.cli.main import main
from rlsync.runs.config import shipped
from rlsync.runs.config.shipped import config_dir
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.spaces import MASKING
from tests.tools.parts.configs import configs_of
from tests.tools.table.page import as_table
from tests.tools.tiers import first_of_each

REPO = Path(__file__).resolve().parents[3]
ALL = [str(config) for options in shipped.groups().values() for config in options]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def commands_for(copied: str, *options: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of the command lines that ``rlsync cp`` prints."""
    assert main(["cp", copied, *options]) == 0
    return [shlex.split(line) for line in said(capsys).splitlines() if line.startswith("  rlsync train")]


def test_ls_lists_every_config_file_with_what_it_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--json"]) == 0
    rows = json.loads(said(capsys))
    files = {str(path) for path in config_dir().glob("*/*.yaml")}
    assert {row["path"] for row in rows} == files
    assert all(len(row["description"]) > 10 for row in rows), "each file begins with a sentence"
    assert rows[0]["group"] == "recipe"

    assert main(["ls"]) == 0
    listed = said(capsys)
    assert re.search(r"^recipe/ppo +Proximal policy optimisation, by TorchRL's PPOTrainer *$", listed, re.M)
    assert {line.split()[0] for line in listed.splitlines() if line[0] != " "} == set(ALL)


def test_ls_of_one_group_lists_it_alone_and_a_typo_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "logger", "--json"]) == 0
    assert {row["group"] for row in json.loads(said(capsys))} == {"logger"}
    assert main(["ls", "recipes"]) == 2
    assert "did you mean 'recipe'?" in capsys.readouterr().err


@pytest.mark.parametrize("between", "=/")
def test_ls_of_one_config_takes_it_as_it_is_chosen_and_as_it_is_listed(
    between: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", f"recipe{between}ppo"]) == 0
    assert said(capsys).split()[0] == "recipe/ppo"
    assert main(["ls", "--keys", f"recipe{between}ppo"]) == 0
    assert "recipe.clip" in said(capsys)
    assert main(["ls", f"recipe{between}pppo"]) == 2
    assert "no recipe 'pppo'" in (told := capsys.readouterr().err)
    assert "did you mean 'ppo'?" in told


@pytest.mark.seconds
@pytest.mark.parametrize("config", first_of_each(ALL, lambda config: config.partition("/")[0]))
@pytest.mark.one_case
def test_each_command_that_cp_prints_composes_the_copy(
    config: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = commands_for(config, capsys=capsys)
    group, name = config.split("/")
    copy = here / "my_configs" / group / f"my_{name}.yaml"
    assert OmegaConf.load(copy) == OmegaConf.load(config_dir() / f"{config}.yaml")
    wanted = "ALE/Breakout-v5" if name == "atari" else "Acrobot-v1"
    copy.write_text(copy.read_text().replace('id: ""', f"id: {wanted}"))  # what the file asks for
    assert commands
    for _, verb, *words in commands:
        assert f"{group}=my_{name}" in words
        assert verb == "train"
        assert configs_of(*words), words


def test_an_edit_of_the_copy_is_what_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (_, *words), *_ = commands_for("recipe/ppo", capsys=capsys)
    copy = here / "my_configs" / "recipe" / "my_ppo.yaml"
    copy.write_text(copy.read_text().replace("lr: 0.002", "lr: 0.0125"))
    assert main([*words, "--cfg", "job"]) == 0
    assert OmegaConf.create(said(capsys)).recipe.lr == 0.0125


@pytest.mark.thorough
@pytest.mark.seconds
def test_a_copied_environment_keeps_what_is_tuned_for_the_original_until_its_id_is_edited(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def composed(*words: str) -> Config:
        (config,) = configs_of(*words)
        return replace(config, config_dir=None)

    for _, _, *words in commands_for("env/pong", capsys=capsys)[:1]:
        (recipe,) = [word for word in words if word.startswith("recipe=")]
        assert composed(*words) == composed(recipe, "env=pong")
        edited = (*words, "env.id=ALE/Breakout-v5")
        assert composed(*edited) == composed(recipe, "env=pong", "env.id=ALE/Breakout-v5")


def test_cp_takes_a_name_and_a_folder_and_replaces_only_by_force(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ((*_, folder, choice),) = commands_for("logger/csv", "conf", "--as", "quiet", capsys=capsys)
    assert (folder, choice) == ("conf", "logger=quiet")
    copy = here / "conf" / "logger" / "quiet.yaml"
    copy.write_text("mine")
    assert main(["cp", "logger/csv", "conf", "--as", "quiet"]) == 2
    assert "add --force to replace it" in capsys.readouterr().err
    assert copy.read_text() == "mine"
    assert main(["cp", "logger/csv", "conf", "--as", "quiet", "--force"]) == 0
    assert copy.read_text() != "mine"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["ppo"], "did you mean 'recipe/ppo'?"),
        (["recipe/pppo"], "did you mean 'recipe/ppo'?"),
        (["recipe/ppo", "--as", "dqn"], "Hydra would find that one first"),
        (["recipe/ppo", "--as", "a/b"], "use letters"),
    ],
)
def test_what_cannot_be_copied_is_refused_and_nothing_is_written(
    arguments: list[str], cure: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cp", *arguments]) == 2
    assert cure in capsys.readouterr().err
    assert list(here.iterdir()) == []


def test_a_copy_needs_beside_it_what_chooses_the_original_by_its_name() -> None:
    assert companions(find("tuned/impala_pong")) == [["recipe=impala", "env=pong"]]
    recipes = ["ppo", "dqn", "sac", "td3", "crossq", "impala", "dreamer_v1", "dreamer_v3"]
    assert companions(find("cluster/ray")) == [[f"recipe={recipe}"] for recipe in recipes]


# ------------------------------------------------------------------------ what recipes take


def test_ls_spaces_is_the_table_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = spaces_as_json(capsys)
    masking = {row["recipe"] for row in rows if row["mask"]}
    assert masking == set(re.findall(r"[a-z]+", MASKING.replace(" or ", ", ")))
    page = (REPO / "docs" / "compatibility.md").read_text()
    _, _, rest = page.partition("<!-- table of recipes -->\n")
    table, _, _ = rest.partition("<!-- end of table of recipes -->")
    assert table == as_table(tuple(rows[0]), [((row.pop("recipe"),), row) for row in rows])


def spaces_as_json(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    assert main(["ls", "--spaces", "--json", *words]) == 0
    rows: list[dict[str, str]] = json.loads(said(capsys))
    return rows


OWN = """
from dataclasses import dataclass
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.parts import DISCRETE, Recipe

@dataclass
class Settings(ppo.PPOConfig):
    name: str = "mine"

def probe(config):
    return DISCRETE.probe(config)

RECIPE = Recipe("mine", Settings, probe, ppo.RECIPE.trainer, ppo.RECIPE.acting)
"""


def test_ls_spaces_says_of_a_recipe_with_a_probe_of_its_own_that_it_has_one(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "own_probe.py").write_text(OWN)
    (here / "configs" / "recipe").mkdir(parents=True)
    (here / "configs" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\n# Mine\ndefaults:\n  - /schema/recipe/mine@recipe\n  - _self_\n"
        "recipe:\n  name: mine\n  _recipe_: own_probe:RECIPE\n"
    )
    (row,) = spaces_as_json(capsys, "recipe=mine", "--config-dir", "configs")
    assert row == {"recipe": "mine", "vectors, choices, Dict": "its own probe says", "LSTM": "yes"}
    assert main(["ls", "--spaces", "recipe=mine", "--config-dir", "configs"]) == 0
    assert "its own probe" in said(capsys)

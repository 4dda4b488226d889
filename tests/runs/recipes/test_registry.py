"""Recipes of the user's, made by following the page; and the registry."""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import textwrap
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch import nn
from torchrl.checkpoint import Checkpoint

from rlsync.core.errors import ConfigError
from rlsync.core.extensions import MOVED, RECIPES
from rlsync.runs.cli.main import main
from rlsync.runs.config.own_hydra import writable
from rlsync.runs.evaluation.checkpoint import Component
from rlsync.runs.life.kept import config_of
from rlsync.runs.recipes import parts, registry, run_files
from rlsync.runs.recipes.bounds import kept
from rlsync.runs.recipes.registry import loaded, recipe_named
from rlsync.runs.recipes.settings import Config, EnvConfig
from tests.tools.programs import as_installed, fresh_python, installed_from, run_program

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how_to" / "write_a_recipe.md"

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(PAGE.read_text()) if kind == language]


def written(folder: Path, *, installed: bool) -> Path:
    """The two files of the page; and for an installed recipe what makes them a package."""
    home = folder / "my_recipes"
    (home / "configs" / "recipe").mkdir(parents=True)
    module = [body for body in blocks("python") if ">>>" not in body and "trainer.train()" not in body]
    (home / "a2c.py").write_text("\n".join(module))
    (yaml,) = blocks("yaml")
    if installed:
        yaml = "".join(line for line in yaml.splitlines(keepends=True) if "_recipe_" not in line)
        (home / "__init__.py").touch()
        (folder / "pyproject.toml").write_text(*blocks("toml"))
    (home / "configs" / "recipe" / "a2c.yaml").write_text(yaml)
    return home


#: What a recipe outside of rlsync may import of it.
FOR_RECIPES = {"rlsync", "rlsync.runs.recipes", "rlsync.runs.recipes.parts", "rlsync.runs.recipes.pure"}


def test_a_shipped_recipe_stands_on_public_modules_alone() -> None:
    tree = ast.parse((ROOT / "rlsync" / "runs" / "recipes" / "td3.py").read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module.partition(".")[0] == "rlsync"} <= FOR_RECIPES
    names = [a for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names]
    assert {"parts", "pure"} <= {alias.name for alias in names}


@pytest.mark.slow
@pytest.mark.processes
def test_a_shipped_recipe_that_is_copied_out_and_renamed_trains(tmp_path: Path) -> None:
    source = (ROOT / "rlsync" / "runs" / "recipes" / "td3.py").read_text()
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / "mine.py").write_text(source.replace('"td3"', '"mine"').replace("TD3Config", "MineConfig"))
    (tmp_path / "configs" / "recipe" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - /schema/recipe/mine@recipe\n  - _self_\n  - override /env: pendulum\n"
        "recipe:\n  name: mine\n  _recipe_: mine:RECIPE\n  hidden: [16]\n"
    )
    few = ("recipe.total_frames=240", "recipe.pace.prefill=120", "collector.frames_per_batch=40")
    own = ("--config-dir", str(tmp_path / "configs"), "recipe=mine")
    (said,) = rlsync(tmp_path, ("train", *own, *few, "run_dir=run"))
    assert "updates as functions of tensors" in said
    assert re.search(r"^stopped: .*frames 240 ", said, re.M)


#: Runs several commands in one process.
SESSION = """
import json, sys
from rlsync.runs.cli.main import main
if __name__ == "__main__":  # a worker's process imports it, too
    for words in json.loads(sys.argv[1]):
        status = main(words)
        print(chr(30), end="", flush=True)
        assert status == 0, (words, status)
"""


def rlsync(cwd: Path, *commands: tuple[str, ...], path: Path | None = None) -> list[str]:
    """What each of several ``rlsync`` commands prints, in one process of its own."""
    paths = ":".join([str(ROOT), *([str(path)] if path else [])])
    env = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    with tempfile.NamedTemporaryFile("w", suffix=".py") as session:
        session.write(SESSION)
        session.flush()
        done = run_program(session.name, json.dumps(commands), cwd=cwd, env=env)
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout.split(chr(30))[:-1]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("installed", [True, False], ids=["entry point", "config dir"])
def test_a_recipe_of_the_page_trains_resumes_evaluates_plots_and_is_listed(
    installed: bool, tmp_path: Path
) -> None:
    home = written(tmp_path, installed=installed)
    path = installed_from(tmp_path, tmp_path / "target") if installed else None
    own = () if installed else ("--config-dir", str(home / "configs"))
    here = tmp_path / "elsewhere"
    here.mkdir()

    again = ("recipe.total_frames=800", "recipe.gae_lambda=0.9", "resume=first", "run_dir=again")
    first, resumed, listed, plan, _ = rlsync(
        here,
        ("train", *own, "recipe=a2c", "run_dir=first", "recipe.total_frames=400"),
        ("train", *own, "recipe=a2c", *again),
        ("ls", *own),
        ("check", *own, "recipe=a2c", "recipe.total_frames=400"),
        ("cp", "recipe/a2c") if installed else ("ls",),
        path=path,
    )
    assert "stopped: total_frames collected  frames 400" in first
    assert OmegaConf.load(here / "first" / run_files.RESOLVED).recipe.gae_lambda == 0.95
    assert re.search(r"^stopped: .*frames 800 ", resumed, re.M)
    assert "changed recipe.gae_lambda 0.95 -> 0.9\n" in resumed
    advantage = Component()
    Checkpoint(**{"trainer_module.advantage": advantage}).load(here / "again" / "checkpoint")
    assert float(advantage.state["lmbda"]) == pytest.approx(0.9), "the old one came back with the checkpoint"
    assert re.search(r"^recipe/a2c +Advantage actor-critic *$", listed, re.M)
    assert re.search(r"^  end +400 frames, 2 updates", plan, re.M)
    assert (here / "my_configs" / "recipe" / "my_a2c.yaml").is_file() == installed

    # Another process, that has not seen --config-dir.
    score = ("eval", "again", "--episodes=2", "--no-video", "--json")
    told, _ = rlsync(here, score, ("plot", "again"), path=path)
    scored = json.loads(told)
    assert (scored["recipe"], scored["frames"], scored["episodes"]) == ("a2c", 800, 2)
    assert (here / "again" / run_files.PLOT).stat().st_size > 10_000


@pytest.mark.thorough
@pytest.mark.processes
def test_the_keys_of_an_outside_recipe_are_typed_and_bounded(tmp_path: Path) -> None:
    home = written(tmp_path, installed=False)
    (home / "configs" / "recipe" / "lost.yaml").write_text(
        "# @package _global_\nrecipe:\n  name: lost\n  _recipe_: nowhere:RECIPE\n"
    )
    script = textwrap.dedent(
        f"""
        from rlsync.runs.cli.main import main
        folder = ["--config-dir", {str(home / "configs")!r}]
        assert main(["check", *folder, "recipe=a2c"]) == 0
        for wrong in ("recipe.gae_lambda=2", "recipe.gae_lamda=1", "recipe.hidden=wide"):
            assert main(["check", *folder, "recipe=a2c", wrong]) == 2
        assert main(["check", *folder, "recipe=lost"]) == 2
        assert main(["check", *folder, "recipe=ppo"]) == 0, "what is not chosen does no harm"
        """
    )
    file = tmp_path / "script.py"
    file.write_text(script)
    done = run_program(str(file), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recipe.gae_lambda cannot be 2.0" in done.stdout
    assert "did you mean 'recipe.gae_lambda'?" in done.stdout
    assert "a recipe cannot be imported: No module named 'nowhere'" in done.stdout


# ------------------------------------------------------------------------------------ the registry


def test_every_shipped_recipe_has_the_name_it_is_listed_under_and_settings_of_its_own() -> None:
    recipes = [recipe_named(name) for name in registry.SHIPPED]
    assert [recipe.name for recipe in recipes] == list(registry.SHIPPED)
    assert [recipe.settings().name for recipe in recipes] == list(registry.SHIPPED)


@pytest.mark.processes
def test_listing_the_recipes_imports_none_of_them() -> None:
    script = (
        "import sys; from rlsync.runs.recipes import registry; registry.names(); "
        "print('rlsync.runs.recipes.ppo' in sys.modules)"
    )
    done = fresh_python("-c", script, check=False)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("at", "what"),
    [
        ("rlsync.runs.recipes.nowhere:RECIPE", "No module named"),
        ("rlsync.runs.recipes.ppo:RECIPEE", "RECIPEE"),
        ("rlsync.runs.recipes.ppo:build", "not a Recipe"),
        ("rlsync.runs.recipes.ppo:RECIPE", "calls itself 'ppo'"),
    ],
)
def test_what_is_no_recipe_is_refused_with_the_place_it_was_looked_for(at: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as refused:
        loaded(EntryPoint("mine", at, RECIPES))
    assert at in refused.value.where


def test_an_installed_recipe_whose_module_raises_harms_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_installed(tmp_path, "hasty", f"[{RECIPES}]\nhasty = hasty:RECIPE\n")
    (tmp_path / "hasty.py").write_text("raise ValueError('no such setting')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "recipe=ppo"]) == 0
    assert main(["check", "recipe=hasty"]) == 2
    printed = capsys.readouterr().out
    assert "importing a recipe raised ValueError: no such setting" in printed
    assert "where  recipe 'hasty', at hasty:RECIPE" in printed
    assert "python -c 'import hasty' shows the line" in printed


def test_a_recipe_of_0_1_is_told_where_the_packages_are_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    as_installed(tmp_path, "older", f"[{RECIPES}]\nolder = older:RECIPE\n")
    (tmp_path / "older.py").write_text("from rlsync.recipes import parts\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", "recipe=older"]) == 2
    printed = capsys.readouterr().out
    assert "a recipe cannot be imported: No module named 'rlsync.recipes'\n" in printed
    assert "cure   write rlsync.runs.recipes in older: rlsync.recipes has moved\n" in printed
    for now in MOVED.values():
        import_module(now)


def test_an_acting_and_a_network_of_0_1_are_refused_with_what_to_write() -> None:
    recipe = replace(recipe_named("ppo"), acting=lambda run: None)
    with pytest.raises(ConfigError, match="acting cannot be called: too many positional") as refused:
        recipe.player(Config(), None, deterministic=True)
    assert refused.value.cure.startswith("write def acting(run, deterministic)")
    with pytest.raises(ConfigError, match="the workers' player is a Linear"):
        with parts.started_collector(None, nn.Linear(1, 1)):
            pass


SETTINGS = """
from dataclasses import dataclass
from torch import Tensor
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.settings import RecipeConfig

@dataclass
class MineConfig(RecipeConfig):
    name: str = "mine"
    key: {0}

RECIPE = parts.Recipe("mine", MineConfig, None, None, None)
"""


@pytest.mark.parametrize(
    ("key", "what", "where"),
    [
        (
            "float = 'many'",
            "settings that Hydra does not take: Value 'many' of type 'str' ",
            "mine.MineConfig",
        ),
        (
            "Tensor = None",
            "settings that Hydra does not take: Unexpected type annotation: Tensor",
            "mine.MineConfig",
        ),
        (
            "float = 1.0\n\n@dataclass\nclass MineConfig:\n    name: str = 'mine'",
            "its settings are <class 'mine.MineConfig'>",
            "recipe 'mine', at mine:RECIPE",
        ),
        (
            "float = 1.0\n\nclass MineConfig(MineConfig):\n    more: int = 1",
            "its settings <class 'mine.MineConfig'> are no dataclass",
            "recipe 'mine', at mine:RECIPE",
        ),
        ("float = 1.0", "the recipe has no file mine/configs/recipe/mine.yaml", "mine = mine:RECIPE"),
    ],
)
def test_an_installed_recipe_that_cannot_be_chosen_is_named_and_harms_only_itself(
    key: str,
    what: str,
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_installed(tmp_path, "mine", f"[{RECIPES}]\nmine = mine:RECIPE\n")
    (tmp_path / "mine.py").write_text(SETTINGS.format(key))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert main(["check", "recipe=ppo"]) == 0
    capsys.readouterr()
    assert main(["check", "recipe=mine"]) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(what)
    assert where in said[1]
    assert said[3:] == ["", "1 error"]


def test_the_name_of_a_shipped_recipe_cannot_be_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_installed(tmp_path, "thief", f"[{RECIPES}]\nppo = thief:RECIPE\nown = thief:RECIPE\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(registry.installed()) == ["own"]
    assert recipe_named("ppo").trainer.__module__ == "rlsync.runs.recipes.ppo"


def test_a_recipe_of_ones_own_may_not_have_the_name_of_a_shipped_one() -> None:
    with pytest.raises(ConfigError, match="rlsync's own is named 'ppo'"):
        recipe_named("ppo", at="mine:RECIPE")


@dataclass(frozen=True)
class Inner:
    """Settings that belong together and never change."""

    bound: float = 1.0


@dataclass
class Outer:
    """A config node with frozen settings in it."""

    inner: Inner = field(default_factory=Inner)


def test_a_frozen_dataclass_can_be_a_config_node_that_overrides_change() -> None:
    node = writable(Outer)
    OmegaConf.update(node, "inner.bound", 2.0)
    assert OmegaConf.to_object(OmegaConf.merge(node, {"inner": {"bound": 3.0}})).inner == Inner(3.0)


def test_a_field_with_a_list_can_be_marked_too() -> None:
    why = "the checkpoint has these layers"
    layers = make_dataclass("Layers", [("hidden", list, kept(field(default_factory=lambda: [64]), why))])
    (spec,) = fields(layers)
    assert layers().hidden == [64]
    assert spec.metadata["kept"] == why


# ------------------------------------------------------------------------------------ names of files


def literals(nodes: list[ast.AST]) -> set[str]:
    """The string constants of a module without its docstrings, f-strings in parts."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, documented)}
    values = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {value for value in values if isinstance(value, str)} - docs


def path_literals(nodes: list[ast.AST]) -> set[str]:
    """The string constants that are joined to a path with ``/``."""
    joins = (node for node in nodes if isinstance(node, ast.BinOp))
    return {
        join.right.value
        for join in joins
        if isinstance(join.op, ast.Div) and isinstance(join.right, ast.Constant)
    }


@pytest.mark.seconds
def test_the_name_of_every_file_of_a_run_stands_in_one_module() -> None:
    home = Path(run_files.__file__)
    constants = {key: value for key, value in vars(run_files).items() if key.isupper()}
    names = {value for value in constants.values() if isinstance(value, str)}
    with_suffix = {name for name in names if "." in name}
    found = {}
    for file in (ROOT / "rlsync").rglob("*.py"):
        if file != home:
            nodes = [*ast.walk(ast.parse(file.read_text()))]
            texts = literals(nodes)
            said = {name for name in with_suffix for text in texts if name in text}
            said |= names & path_literals(nodes)
            if said:
                found[str(file.relative_to(ROOT))] = said
    assert found == {}
    assert len(names) == 29


def test_a_key_that_is_gone_and_that_a_run_left_null_does_not_keep_its_config_from_being_read(
    tmp_path: Path,
) -> None:
    config = Config(run_dir=str(tmp_path), env=EnvConfig(kwargs={"own": None}))
    written = asdict(config)
    written["sync"]["when"]["lag_above"] = None
    OmegaConf.save(OmegaConf.create(written), tmp_path / run_files.RESOLVED)
    assert config_of(tmp_path) == config

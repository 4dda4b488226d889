"""``rlsync check``: everything that is wrong with a config at once, and no process started."""

from __future__ import annotations

import errno
import json
import multiprocessing.process
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlsync.core.errors import ConfigError, RlsyncWarning
from rlsync.runs.actors.cluster.session import check_address
from rlsync.runs.cli.main import main
from rlsync.runs.config.refusals import GONE
from rlsync.runs.recipes.checks import cluster_errors
from rlsync.runs.recipes.evaluating import whether_episodes_go_on
from rlsync.runs.recipes.run_files import RECEIPTS
from rlsync.runs.recipes.settings import ClusterConfig, Config, EnvConfig, RecipeConfig
from tests.runs.recipes.test_checkpoints import refusing
from tests.tools.parts import saving_envs
from tests.tools.processes import child_pids
from tests.tools.programs import as_installed

#: What is wrong with words and options of groups, and what each says. Which keys there are is not known then.
WRONG_WORDS = {
    "env=cartpol": "no env 'cartpol'",
    "recipe=pppo": "no recipe 'pppo'",
    "seed": "cannot read an override",
    "total=1,2": "total has several values",
}
#: What is wrong with keys and their values.
WRONG_KEYS = {
    "recipe.lrr=-1": "unknown key 'recipe.lrr'",
    "recipee=ppo": "unknown key 'recipee'",
    "recipe.gamma=1.5": "recipe.gamma cannot be 1.5",
    "collector.num_workers=-1": "collector.num_workers cannot be -1",
    "collector.lag=-1": "collector.lag cannot be -1",
    "sync.when.unit=batchs": "no unit 'batchs'",
    "sync.when.steps_ahead=-1": "steps ahead",
    "sync.map.0.source=loss_module..actor": "cannot read the path 'loss_module..actor'",
    "sync.map.0.dtype=bfloat61": "no dtype 'bfloat61'",
    "env.id=CartPol-v1": "cannot make the environment 'CartPol-v1'",
    "learner.device=cuda:99": "no device 'cuda:99': this machine has ",
    "collector.device=[cpu,cpu]": "2 devices for 1 worker",
    "evaluation.device=gpu": "no device is called 'gpu'",
    "resume=nowhere": "/nowhere' does not exist",
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder_where_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: object) -> None:
        raise AssertionError("a check starts no process")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)


def checked(capsys: pytest.CaptureFixture[str], *line: str) -> list[dict[str, str]]:
    """The errors of ``rlsync check --json``."""
    status = main(["check", "--json", *line])
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] == (not told["errors"])
    assert status == (2 if told["errors"] else 0)
    return told["errors"]


def whats(capsys: pytest.CaptureFixture[str], *line: str) -> list[str]:
    return [error["what"] for error in checked(capsys, *line)]


@pytest.mark.seconds
@pytest.mark.parametrize("wrong", [WRONG_WORDS, WRONG_KEYS], ids=["words", "keys"])
def test_every_error_of_a_composition_is_listed_each_in_three_lines(
    wrong: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = child_pids()
    assert main(["check", *wrong]) == 2
    *blocks, count = capsys.readouterr().out.strip().split("\n\n")
    for said in wrong.values():
        assert sum(said in block for block in blocks) == 1, said
    for block in blocks:
        what, where, cure = block.splitlines()
        assert what
        assert where.startswith("  where  ")
        assert cure.startswith("  cure   ")
    assert len(blocks) == len(wrong)
    assert count == f"{len(blocks)} errors"
    assert list(tmp_path.iterdir()) == []
    assert child_pids() == before


@pytest.mark.seconds
def test_train_says_it_all_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", "recipe.gamma=1.5", "recipe.lrr=1", "sync.map.0.source=a..b"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for what in ("recipe.gamma cannot be 1.5", "unknown key 'recipe.lrr'", "cannot read the path 'a..b'"):
        assert what in said.err
    assert len(said.err.split("\n\n")) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.seconds
def test_json_has_the_kind_and_the_three_lines(capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = checked(capsys, "sync.map.0.destination='policy['")
    assert error == {
        "kind": "PathSyntaxError",
        "what": "cannot read the path 'policy['",
        "where": "sync.map.0.destination: character 8, at the end",
        "cure": "between '[' and ']' write an integer or a quoted key",
    }


@pytest.mark.seconds
def test_what_is_shipped_is_fine_and_what_was_tried_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    said, networks, plan = capsys.readouterr().out.split("\n\n")
    *lines, looked_at = said.splitlines()
    assert networks.startswith("networks of ppo on CartPole-v1\n")
    assert plan.startswith("plan of ppo on CartPole-v1\n")
    tried = f"looked at settings; whether {Path.cwd()} can have checkpoints; 100 steps as workers step it; "
    assert looked_at.startswith(f"{tried}100 steps as evaluations play it; ")
    assert looked_at.endswith(" episodes ended")
    assert lines == [
        "nothing is wrong with this config",
        "settings recipe/ppo with tuned/ppo_cartpole (CartPole-v1, for recipe=ppo)",
        "plays CartPole-v1",
        "workers 2; lag 1: workers act while the learner learns",
        "ends at a mean return of 475 over 20 episodes, or after 150,000 frames",
    ]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (["env.id=Saving-v0"], "; episodes go on at the end of a life"),
        (["env.id=Saving-v0", "collector.lag=null"], " episodes ended"),
        (["env.id=Windy-v0"], " episodes ended"),
    ],
    ids=["saved", "free", "not saved"],
)
def test_whether_episodes_go_on_at_the_end_of_a_life_is_told(
    words: list[str], ends: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert saving_envs.MODULE in sys.modules, "it registers them"
    assert main(["check", *words]) == 0
    assert capsys.readouterr().out.split("\n\n")[0].endswith(ends)


def test_a_state_that_does_not_bring_an_environment_back_is_told() -> None:
    config = Config(env=EnvConfig(f"{saving_envs.MODULE}:Forgets-v0"))
    with pytest.warns(RlsyncWarning, match=r"another observation in step 1 after load\(state\)"):
        assert whether_episodes_go_on(config)


@pytest.mark.seconds
@pytest.mark.thorough
def test_every_shipped_recipe_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    for sweep, count in ((["recipe=glob(*)"], 9), (["recipe=ppo,dqn", "collector.lag=0,null"], 4)):
        assert main(["check", "-m", *sweep]) == 0
        assert capsys.readouterr().out.splitlines()[0] == f"nothing is wrong with these {count} configs"


@pytest.mark.seconds
@pytest.mark.thorough
def test_pong_is_fine_for_recipes_of_choices_and_refused_for_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("ale_py")
    assert checked(capsys, "-m", "recipe=ppo,dqn,impala,laser", "env=pong") == []
    refusals = whats(capsys, "recipe=td3", "env=pong")
    assert "this recipe cannot learn 'ALE/Pong-v5': its action is one of 6" in refusals


@pytest.mark.seconds
def test_a_sweep_tells_an_error_of_all_jobs_once_and_one_of_a_single_job_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert whats(capsys, "-m", "seed=0,1,-1", "recipe.gamma=2") == [
        "recipe.gamma cannot be 2.0",
        "seed cannot be -1",
    ]


def test_a_sweep_that_hydra_cannot_spell_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = checked(capsys, "-m", "recipe.lr=interval(0,1)")
    assert error["where"] == "-m"


def test_no_key_is_judged_while_an_option_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert whats(capsys, "recipe=rainbow", "recipe.atoms=51", "seed=two") == ["no recipe 'rainbow'"]


def test_a_value_of_the_wrong_type_is_told_beside_unknown_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert whats(capsys, "recipe.hidden=[wide]", "recipe.lrr=1") == [
        "unknown key 'recipe.lrr'",
        "Value 'wide' of type 'str' could not be converted to Integer",
    ]


@pytest.mark.seconds
def test_numbers_of_impala_that_do_not_go_together_are_all_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("recipe.batch_size=7", "recipe.model.hidden=[0]", "recipe.replay.min_steps=30000")
    said = whats(capsys, "recipe=laser", *line)
    assert any("is not 7 unrolls of 20" in what for what in said)
    assert any("are not a whole number of rollouts of 8" in what for what in said)
    assert any("recipe.model.hidden cannot be [0]" in what for what in said)
    assert any("never holds 30000" in what for what in said)
    assert len(said) == 4
    assert checked(capsys, "recipe=impala", "env.num_envs=0")[0]["where"] == "env.num_envs"


def test_the_keys_of_one_recipe_under_the_name_of_another_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (error,) = checked(capsys, "recipe=ppo", "recipe.name=dqn")
    assert "choose recipe=dqn" in error["cure"]


def test_a_folder_with_the_name_of_a_package_is_not_that_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # as where ray is not installed
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert find_spec("ray") is not None, "Python would import the folder"
    with pytest.raises(ConfigError, match=r"ray is not installed(?s:.*)rlsync\[ray\]"):
        check_address("auto")


def test_a_logger_that_is_not_installed_is_one_error_of_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert whats(capsys, "logger=tensorboard", "seed=-1") == [
        "seed cannot be -1",
        "tensorboard is not installed",
    ]


@pytest.mark.parametrize("recipe", ["ppo", "impala"])
def test_an_environment_without_its_package_is_not_cured_by_another_id(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "Box2D", None)
    monkeypatch.delitem(sys.modules, "gymnasium.envs.box2d", raising=False)
    assert (
        main(["check", f"recipe={recipe}", "env=gymnasium", "env.id=LunarLander-v3", "env.num_envs=8"]) == 2
    )
    what, _, cure, *_ = capsys.readouterr().out.splitlines()
    assert what.startswith("cannot make the environment 'LunarLander-v3': Box2D is not installed")
    assert cure == "  cure   install the package that the first line names, or give another env.id"


@pytest.mark.seconds
@pytest.mark.parametrize("recipe", ["ppo", "impala"])
@pytest.mark.parametrize("argument", ["max_episode_steps=0", "no_such_argument=1"])
@pytest.mark.each_value
def test_an_argument_that_gymnasium_does_not_take_is_told(
    recipe: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (what,) = whats(capsys, f"recipe={recipe}", f"+env.kwargs.{argument}")
    assert what.startswith("cannot make the environment 'CartPole-v1'")


@pytest.mark.seconds
def test_a_file_of_ones_own_is_checked_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    own = tmp_path / "own, with a comma"
    (own / "env").mkdir(parents=True)
    head = "defaults:\n  - /schema/env@_here_\n  - _self_\n"
    (own / "env" / "good.yaml").write_text(head + "id: Acrobot-v1\n")
    (own / "env" / "typo.yaml").write_text(head + "idd: Acrobot-v1\n")
    (own / "env" / "words.yaml").write_text(head + "num_envs: two\n")
    (own / "env" / "tab.yaml").write_text(head + "kwargs:\n\tone: 1\n")
    assert checked(capsys, "--config-dir", str(own), "env=good") == []
    (typo,) = checked(capsys, "--config-dir", str(own), "env=typo", "seed=two")
    assert (typo["what"], typo["where"]) == ("Key 'idd' not in 'EnvConfig'", "env/typo.yaml")
    assert typo["cure"].startswith("did you mean 'id'?")
    (words,) = checked(capsys, "--config-dir", str(own), "env=words")
    assert words["where"] == "env/words.yaml"
    (tab,) = checked(capsys, "--config-dir", str(own), "env=tab")
    assert tab["where"].endswith("tab.yaml, line 5")
    assert whats(capsys, "--config-dir", str(own), "env=god") == ["no env 'god'"]
    assert whats(capsys, "--config-dir", "nowhere") == ["no folder 'nowhere'"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("collector.lag=0",), "2; lag 0: workers wait for each update"),
        (("collector.lag=3",), "2; lag 3: workers act up to 3 rollouts ahead of the learner"),
        (("recipe=impala",), "2; no fixed lag: workers act with the newest version"),
        (("collector.num_workers=0",), "none; lag 0: the learner's own process acts between its updates"),
        (
            ("cluster=ray", "cluster.workers_per_node=4"),
            "4 on each node; lag 0: workers wait for each update",
        ),
    ],
)
def test_who_acts_and_how_far_ahead_is_told(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words]) == 0
    assert f"\nworkers {says}\n" in capsys.readouterr().out


@pytest.mark.one_case
@pytest.mark.parametrize("word", GONE)
@pytest.mark.parametrize("add", ["", "+"])
def test_what_habit_types_and_is_gone_is_told_with_what_takes_its_place(
    word: str, add: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = add + (word if "=" in word else f"{word}=sync")
    (error,) = checked(capsys, line)
    assert error["where"] == f"override {line}"
    assert error["cure"] == GONE[word]
    given = re.findall(r"collector\.lag=(?:0|null)|collector\.num_workers=0|sync=actor", error["cure"])
    for instead in given:
        if not instead.startswith("sync="):  # of another map a check starts the workers
            assert not checked(capsys, instead)
    assert given or error["cure"].startswith("leave it out")


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("yaml", "cure"),
    [
        ("defaults: [override /collector: async]", "collector.lag=null"),
        ("collector: {kind: async}", "collector.lag=0"),
        ("collector: {transport: board}", "leave it out"),
    ],
)
def test_what_is_gone_is_told_of_a_file_of_the_users_too(
    yaml: str, cure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe").mkdir()
    defaults = "defaults: [/schema/recipe/ppo@recipe, _self_]\n"
    if yaml.startswith("defaults"):
        defaults, yaml = defaults.replace("]", f", {yaml.removeprefix('defaults: [')}"), ""
    text = f"# @package _global_\n{defaults}recipe: {{name: ppo}}\n{yaml}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    (error,) = checked(capsys, f"--config-dir={tmp_path}", "recipe=mine")
    assert cure in error["cure"]
    assert "recipe/mine.yaml" in error["where"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("words", "what", "where", "cure"),
    [
        (("collector.lag=-1",), "collector.lag cannot be -1", "collector.lag", "a number >= 0, or null"),
        (
            ("collector.num_workers=0", "collector.device=[cpu,cpu]"),
            "a list of devices has one for each worker",
            "collector.device",
            "give one device",
        ),
        (
            ("cluster=ray", "collector.num_workers=0"),
            "the nodes of a cluster have no worker",
            "collector.num_workers=0",
            "give 1 or more, or cluster=none",
        ),
        (
            ("cluster=ray", "collector.lag=2"),
            "the nodes of a cluster keep no lag of 2",
            "collector.lag=2",
            "or cluster=none",
        ),
        (
            ("collector.frames_per_batch=2047",),
            "a batch of 2047 frames is not as many steps of each of 16 environments",
            "collector.frames_per_batch",
            "collector.num_workers x env.num_envs = 16, for example 2032",
        ),
        (
            ("collector.frames_per_batch=2047", "collector.num_workers=0"),
            "a batch of 2047 frames is not as many steps of each of 8 environments",
            "collector.frames_per_batch",
            "a multiple of env.num_envs = 8, for example 2040",
        ),
    ],
)
def test_a_lag_workers_and_batches_that_do_not_fit_are_told_once_each_in_three_lines(
    words: tuple[str, ...], what: str, where: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (error,) = checked(capsys, *words)
    assert error["what"].startswith(what)
    assert error["where"].startswith(where)
    assert cure in error["cure"]


def test_a_recipe_that_does_not_say_that_it_acts_on_nodes_is_refused_there() -> None:
    config = Config(recipe=RecipeConfig(name="mine"), cluster=ClusterConfig("ray"))
    (error,) = cluster_errors(config)
    assert error.what == "the recipe 'mine' cannot act on a cluster"
    assert error.where == "cluster.kind=ray"
    assert "give cluster=none, or a recipe that acts on nodes: ppo, " in error.cure


def test_a_list_of_devices_has_one_for_each_worker_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("cluster=ray", "cluster.workers_per_node=4")
    assert not checked(capsys, *words, "collector.device=[cpu,cpu,cpu,cpu]")
    assert whats(capsys, *words, "collector.device=[cpu,cpu]") == ["2 devices for 4 workers"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("words", "asked", "key"),
    [
        (("recipe=ppo", "sync.when.unit=seconds"), "collector.lag", "sync.when.unit"),
        (("recipe=laser", "recipe.when_full=drop_oldest"), "collector.lag", "recipe.when_full"),
        (("recipe=impala", "cluster=ray"), "life_frames", "cluster.kind"),
        (("recipe=sac", "sync.when.unit=seconds", "collector.lag=null"), "life_frames", "sync.when.unit"),
        (("recipe=laser", "recipe.when_full=drop_newest"), "life_frames", "recipe.when_full"),
        (("recipe=dqn", "sync.digest_every=null"), "life_frames", "sync.digest_every"),
    ],
)
def test_what_a_fixed_lag_or_lives_cannot_go_with_is_refused_by_its_key(
    words: tuple[str, ...], asked: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (error,) = checked(capsys, *words, f"{asked}=1")
    assert error["where"] == key
    otherwise = {"collector.lag": "or give collector.lag=null", "life_frames": "or leave life_frames out"}
    assert error["cure"].endswith(otherwise[asked])


def test_that_a_folder_has_no_checkpoint_is_told_before_the_keys_that_its_run_would_have(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("empty").mkdir()
    errors = checked(capsys, "resume=empty", "recipe.unroll_length=7")
    assert errors[0]["what"] == f"cannot resume: '{Path.cwd()}/empty' holds no checkpoint"


@pytest.mark.parametrize("recipe", ["ppo", "impala"])
def test_more_workers_than_fit_into_memory_are_told(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    errors = checked(capsys, f"recipe={recipe}", "collector.num_workers=21657356972")
    assert errors[0]["what"] == "collector.num_workers cannot be 21657356972"
    assert errors[0]["cure"] == "give a number >= 0 and <= 1000"
    assert "21657356972 workers are more than a machine runs" in {error["what"] for error in errors}


def test_the_folder_of_another_run_is_not_written_to(capsys: pytest.CaptureFixture[str]) -> None:
    taken = Path("first")
    taken.mkdir()
    assert not checked(capsys, f"run_dir={taken}")
    (taken / RECEIPTS).touch()
    (error,) = checked(capsys, f"run_dir={taken}")
    assert error["what"] == f"the folder '{Path.cwd()}/first' holds another run"
    assert f"resume={taken.absolute()}" in error["cure"]


def test_what_the_file_system_of_a_runs_folder_lacks_is_told(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refusing(os.fsync, errno.EINVAL))
    with pytest.warns(RlsyncWarning, match="the file system of the run's folder cannot sync folders"):
        assert not checked(capsys, f"run_dir={tmp_path}/run")


def test_a_folder_that_no_run_can_write_to_is_told_before_one_begins(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        (error,) = checked(capsys, f"run_dir={folder}")
        assert error["what"] == f"cannot write into {tmp_path / 'file'}: Not a directory"
    monkeypatch.chdir("/proc")
    (error,) = checked(capsys, "run_dir=run")
    assert error["what"] == "cannot write into /proc: No such file or directory"
    assert not checked(capsys, f"hydra.run.dir={tmp_path}/run"), "the run is not written here"


def test_priorities_that_torchrls_loss_does_not_weigh_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    (error,) = checked(capsys, "recipe=crossq", "recipe.prioritized=true")
    assert error["where"] == "recipe.prioritized"


OWN_RECIPES = """
from dataclasses import dataclass
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.registry import Acting, Recipe

@dataclass
class Settings(ppo.PPOConfig):
    name: str = "forgets"

@dataclass
class Numbers(ppo.PPOConfig):
    name: str = "numbers"

@dataclass
class Words(ppo.PPOConfig):
    name: str = "words"

    def errors(self, config):
        yield "that is too deep"

@dataclass
class Critics(ppo.PPOConfig):
    name: str = "critics"

def critic(run, deterministic):
    player = ppo.RECIPE.acting(run, deterministic).player
    return Acting(ppo.make_loss(run.recipe, run.spaces).critic_network, player)

CRITICS = Recipe("critics", Critics, ppo.RECIPE.probe, ppo.RECIPE.trainer, critic)
FORGETS = Recipe("forgets", Settings, ppo.RECIPE.probe, lambda run: None, ppo.RECIPE.acting)
NUMBERS = Recipe("numbers", Numbers, ppo.RECIPE.probe, ppo.RECIPE.trainer, lambda run, deterministic: 3)
WORDS = Recipe("words", Words, ppo.RECIPE.probe, ppo.RECIPE.trainer, ppo.RECIPE.acting)
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("forgets", "the builder returned None\n  where  recipe 'forgets'\n  cure   let it return "),
        (
            "numbers",
            "acting returned a value of type int\n  where  recipe 'numbers'\n  cure   let it return ",
        ),
        ("critics", "the recipe 'critics' returned another network there than the one that a "),
        ("words", "that is too deep\n  where  errors() of 'words'\n  cure   yield rlsync.ConfigError("),
    ],
)
def test_what_an_installed_recipe_makes_is_looked_at(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = f"own_{name}"
    as_installed(tmp_path, package, f"[rlsync.recipes]\n{name} = {package}:{name.upper()}\n")
    (tmp_path / package / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / package / "__init__.py").write_text(OWN_RECIPES)
    schema = f"defaults:\n  - /schema/recipe/{name}@recipe\n  - _self_\n"
    yaml = f"# @package _global_\n{schema}recipe:\n  name: {name}\n"
    (tmp_path / package / "configs" / "recipe" / f"{name}.yaml").write_text(yaml)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["check", f"recipe={name}", "collector.num_workers=0"]) == 2
    assert capsys.readouterr().out.startswith(told)

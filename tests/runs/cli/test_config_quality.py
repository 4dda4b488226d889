"""The shipped configs: all typed, all explained, and hard to misspell in silence."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

from rlsync import BoardScheme, SyncWeights, WatchWorkers
from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line, own_hydra
from rlsync.runs.config.command_line import choices
from rlsync.runs.config.refusals import keys_of, nearest
from rlsync.runs.config.shipped import config_dir
from rlsync.runs.config.torchrl_configs import BoardSchemeConfig, SyncWeightsConfig
from rlsync.runs.life.job import Job, examined_jobs
from rlsync.runs.recipes.impala import CollectSettings
from rlsync.runs.recipes.settings import CollectorConfig, Config, SyncConfig
from tests.tools.parts.configs import configs_of
from tests.tools.programs import run_program
from tests.tools.tiers import first_of_each

REPO = Path(__file__).resolve().parents[3]
FILES = sorted(config_dir().rglob("*.yaml"))
RECIPES = sorted(file.stem for file in (config_dir() / "recipe").glob("*.yaml"))
_KEY = re.compile(r"(?P<indent> *)(?:- )?(?P<key>\w+):(?P<value> .*)?$")


@pytest.fixture(scope="module", autouse=True)
def _types_are_registered() -> None:
    own_hydra.register()


def name_of(file: Path) -> str:
    return file.relative_to(config_dir()).as_posix()


def config_of(*line: str) -> Config:
    (config,) = configs_of(*line)
    return config


def known_keys(*line: str) -> list[str]:
    with own_hydra.initialised():
        return list(keys_of(compose(own_hydra.CONFIG_NAME, list(line))))


# --------------------------------------------------------------------------------- documentation


def documented(lines: list[str], at: int) -> bool:
    """Whether a key has a comment: on its line, or above the lines without a gap that it is one of."""
    if " # " in lines[at]:
        return True
    while at > 0 and lines[at - 1].strip():
        at -= 1
        if lines[at].strip().startswith("#"):
            return True
    return False


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_key_of_every_file_has_a_comment(file: Path) -> None:
    body = file.read_text().partition("\nhydra:")[0]
    lines = body[body.index("_self_") :].splitlines() if "_self_" in body else body.splitlines()
    bare = [
        line.strip()
        for at, line in enumerate(lines)
        if (match := _KEY.match(line)) and match["value"] and not documented(lines, at)
    ]
    assert bare == []


def test_there_is_a_type_for_every_file_that_does_not_build_on_another() -> None:
    untyped = {name_of(file) for file in FILES} - {
        name_of(file) for file in FILES if "/schema/" in file.read_text()
    }
    assert {name for name in untyped if not name.startswith("tuned/")} == {
        "env/pong.yaml",
        "env/rendered_cartpole.yaml",
        "env/rendered_pendulum.yaml",
        "recipe/laser.yaml",
    }


@pytest.mark.parametrize(
    ("of", "argument", "setting"),
    [
        (WatchWorkers, "silent_timeout_s", CollectorConfig.silent_timeout_s),
        (CollectSettings, "silent_timeout_s", CollectorConfig.silent_timeout_s),
        (BoardScheme, "adopt", CollectorConfig.adopt),
        (BoardScheme, "start_timeout_s", BoardSchemeConfig.start_timeout_s),
        (SyncWeights, "history", SyncConfig.history),
        (SyncWeights, "finite", SyncWeightsConfig.finite),
        (SyncWeights, "background", SyncWeightsConfig.background),
    ],
)
def test_a_setting_has_the_default_of_the_argument_that_it_fills(
    of: type, argument: str, setting: object
) -> None:
    assert inspect.signature(of).parameters[argument].default == setting


def commands() -> list[str]:
    """The commands in the comments of all files, but for those that need a folder of the user's."""
    found = []
    for file in FILES:
        for line in file.read_text().splitlines():
            match = re.match(r"#\s+rlsync (train|check)\b(?P<line>.*?)(\s{2,}|$)", line)
            if match and "FOLDER" not in line:
                found.append(match["line"].strip())
    return found


def kind_of(command: str) -> object:
    """Whose keys a command is about: its recipe, whether it sweeps, and the groups of its keys."""
    words = command.split()
    return frozenset(word if word.startswith("recipe=") else word.partition(".")[0] for word in words)


@pytest.mark.seconds
@pytest.mark.parametrize("command", first_of_each(commands(), kind_of))
@pytest.mark.one_case
def test_the_commands_in_the_comments_are_right(command: str) -> None:
    if "pong" in command or "atari" in command:
        pytest.importorskip("ale_py")
    assert configs_of(*command.split())


def test_no_environment_variable_is_read_and_none_is_needed(tmp_path: Path) -> None:
    assert [name_of(file) for file in FILES if "oc.env" in file.read_text()] == []
    words = ("train", "recipe=impala", "--cfg", "job")
    done = run_program("rlsync", *words, cwd=tmp_path, env={"PYTHONPATH": str(REPO)})
    assert OmegaConf.create(done.stdout).recipe.name == "impala"


# ----------------------------------------------------------------------------------------- typos


def typos_of(name: str) -> list[str]:
    """A letter lost, one too many, and two that changed places."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return [name[:-1], name + name[-1], *([swapped] if swapped != name else [])]


@pytest.mark.seconds
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.one_case
def test_a_typo_in_any_key_of_any_group_is_nearest_to_that_key(recipe: str) -> None:
    known = known_keys(f"recipe={recipe}")
    leaves = [key for key in known if not any(other.startswith(key + ".") for other in known)]
    wrong = {}
    for key in leaves:
        parent, dot, last = key.rpartition(".")
        for typo in typos_of(last) if len(last) > 3 else []:
            found = nearest(parent + dot + typo, known)
            if typo and not typo.isdigit() and found != key:
                wrong[parent + dot + typo] = found
    assert wrong == {}


def refusals_of(*line: str) -> list[RlsyncError]:
    """Everything that is wrong with one command line."""
    return examined_jobs(command_line.read(list(line)))[1]


@pytest.mark.one_case
@pytest.mark.parametrize(
    "typos",
    [
        {
            "logger.every_frame=1": "logger.every_frames",
            "sync.histoy=1": "sync.history",
            "sync.when.evry=1": "sync.when.every",
            "sync.map.0.sorce=x": "sync.map.0.source",
            "collector.num_worker=1": "collector.num_workers",
            "env.num_env=1": "env.num_envs",
            "recipe.gama=1": "recipe.gamma",
            "sead=1": "seed",
        },
        {
            "recipe.model.lstmm=1": "recipe.model.lstm",
            "recipe.replay.ratoi=1": "recipe.replay.ratio",
            "recipe.evaluation.episode=9": "recipe.evaluation.episodes",
        },
        {"sync.when={evry:1}": "every"},
        {"sync.map=[{destination:policy,sorce:x}]": "source"},
    ],
    ids=["keys", "keys of impala", "a key of a mapping", "a key in a list"],
)
def test_a_typo_in_a_key_is_refused_with_the_nearest_key(typos: dict[str, str]) -> None:
    of_impala = ["recipe=impala"] if "recipe.model.lstmm=1" in typos else []
    refused = refusals_of(*of_impala, *typos)
    assert [error.cure.partition("?")[0] for error in refused] == [
        f"did you mean {meant!r}" for meant in typos.values()
    ]
    assert all(len(str(error).splitlines()) == 3 for error in refused)


GROUPS = sorted({file.parent.name for file in FILES} - {config_dir().name})


def test_a_typo_in_a_group_is_refused_with_the_nearest() -> None:
    typos = {group[:-1] + group[-1] * 2: group for group in GROUPS}
    refused = refusals_of(*(f"{typo}=null" for typo in typos))
    for error, (typo, group) in zip(refused, typos.items(), strict=True):
        assert f"unknown key '{typo}'" in error.what
        assert error.cure.startswith(f"did you mean {group!r}?")


def test_a_typo_in_an_option_is_refused_with_the_nearest() -> None:
    options = {group: next(iter(of_group)) for group, of_group in choices().items() if group in GROUPS}
    refused = refusals_of(*(f"{group}={option}x" for group, option in options.items()))
    for error, (group, option) in zip(refused, options.items(), strict=True):
        assert f"no {group} '{option}x'" in error.what
        assert error.cure.startswith(f"did you mean {option!r}?")


# ------------------------------------------------------------------------------------------ maps


def routes(*line: str) -> list[tuple[str, str, str | None]]:
    return [(r.destination, r.source, r.dtype) for r in config_of(*line).sync.map]


def test_one_entry_of_the_map_is_overridden_by_its_number() -> None:
    assert routes("sync=value_greedy", "sync.map.1.source=loss_module.x", "sync.map.0.dtype=bfloat16") == [
        ("policy.module[0]", "loss_module.value_network", "bfloat16"),
        ("policy.module[1]", "loss_module.x", None),
    ]
    assert routes("sync.map.0={destination:a,source:b}") == [("a", "b", None)]


def test_all_entries_are_given_as_a_list_of_any_length() -> None:
    two = "sync.map=[{destination:\"policy.module[0]\",source:a.b},{destination:'env.transform[1]',source:c}]"
    assert routes(two) == [("policy.module[0]", "a.b", None), ("env.transform[1]", "c", None)]
    assert routes("sync=value_greedy", "sync.map=[{destination:policy,source:a}]") == [("policy", "a", None)]


def test_a_list_keeps_its_length_and_the_error_says_how_to_change_it() -> None:
    refused = refusals_of(
        "sync.map.1.source=x",
        "+sync.map.2.source=x",
        "+sync.map.3={destination:a,source:b}",
        "++sync.map.4={destination:a,source:b}",
        "~sync.map.0",
    )
    assert len(refused) == 5
    assert all(
        "or give all, quoted for the shell: 'sync.map=[{destination:" in error.cure for error in refused
    )


def test_brackets_in_a_key_are_refused_with_the_spelling_that_hydra_reads() -> None:
    with pytest.raises(ConfigError) as refused:
        config_of("sync.map[0].source=x")
    assert "sync.map.0.source=" in refused.value.cure


# ---------------------------------------------------------------------------------------- sweeps


@pytest.mark.seconds
@pytest.mark.thorough
def test_hydra_sweeps_like_the_check_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[tuple[Any, ...]] = []

    def train(job: Job, parent: None, **_: object) -> int:
        config, source = job.config, job.config.sync.map[0].source
        trained.append((config.recipe.name, source, config.seed, Path(str(config.run_dir)).name))
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlsync.runs.life.launch.train_job", train)
    assert main(["train", "-m", "recipe=ppo,dqn", "sync.map.0.source=a.b,c.d", "seed=range(1,2)"]) == 0
    capsys.readouterr()
    assert trained == [
        ("ppo", "a.b", 1, "0"),
        ("ppo", "c.d", 1, "1"),
        ("dqn", "a.b", 1, "2"),
        ("dqn", "c.d", 1, "3"),
    ]

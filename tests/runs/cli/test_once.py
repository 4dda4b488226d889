"""Before a run starts, its config is checked once, and one environment is made to look at."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line, composing, own_hydra
from rlsync.runs.config.shipped import config_dir
from rlsync.runs.life.job import Job, jobs_of
from rlsync.runs.recipes import checks, ppo
from rlsync.runs.recipes.run_files import RECEIPTS
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig, PPOConfig
from tests.tools.parts.counted import ID

pytestmark = pytest.mark.usefixtures("fork_workers")

PPO = ("env.num_envs=1", "recipe.total_frames=128", "recipe.num_epochs=1", "collector.frames_per_batch=64")
IMPALA = ("recipe=impala", "env.num_envs=2", "recipe.total_frames=160", "recipe.batch_size=4")
IMPALA += ("recipe.unroll_length=10", "collector.frames_per_batch=40")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often configs were checked."""
    counts: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(checks, "bound_errors", counting("checked", checks.bound_errors))
    return counts


def made(file: Path) -> tuple[int, int]:
    """Environments that were made in this process, and in others."""
    pids = [int(line) for line in file.read_text().split()]
    here = pids.count(os.getpid())
    return here, len(pids) - here


def train(folder: Path, *words: str) -> Path:
    file = folder / "made.txt"
    env = ("env=gymnasium", f"env.id='{ID}'", f"+env.kwargs.file={file}", "recipe.target_return=null")
    assert main(["train", *words, *env, "logger=none"]) == 0
    return file


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("words", "of_workers"), [(PPO, 2), (IMPALA, 4)], ids=["ppo", "impala"])
@pytest.mark.one_case
def test_one_run_is_checked_once_and_makes_one_environment_besides_the_workers(
    words: tuple[str, ...], of_workers: int, here: Path, counted: Counter[str]
) -> None:
    assert made(train(here, *words)) == (1, of_workers)
    assert counted == {"checked": 1}
    (run,) = here.glob("runs/*/*")
    assert OmegaConf.load(run / "config.yaml").env.id == ID
    assert OmegaConf.load(run / ".hydra" / "config.yaml").env.id == ID
    assert f"env.id='{ID}'" in OmegaConf.load(run / ".hydra" / "overrides.yaml")
    assert (run / "train.log").exists()


@pytest.mark.parametrize(("words", "times"), [(("seed=1",), 1), (("env.id=Acrobot-v1", "seed=1"), 2)])
def test_keys_are_set_without_composing_once_more(
    words: tuple[str, ...], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[object] = []
    stock = own_hydra.compose
    monkeypatch.setattr(own_hydra, "compose", lambda *a, **kw: composed.append(a) or stock(*a, **kw))
    (job,) = jobs_of(command_line.read(["recipe=dqn", "recipe.lr=0.5", *words]))
    assert (job.config.recipe.lr, job.config.seed) == (0.5, 1)
    assert len(composed) == times


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """How often Hydra composes: for rlsync, and in its own main function."""
    composed: list[object] = []
    stock = ConfigLoaderImpl.load_configuration

    def load(self: ConfigLoaderImpl, **arguments: Any) -> DictConfig:
        composed.append(arguments["overrides"])
        return stock(self, **arguments)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", load)
    return composed


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configs of the jobs that were run; nothing is trained."""
    configs: list[Config] = []

    def train(job: Job, parent: object, **_: object) -> int:
        configs.append(job.config)
        return 0

    monkeypatch.setattr("rlsync.runs.life.launch.train_job", train)
    return configs


@pytest.mark.parametrize(
    "words",
    [
        ("recipe=ppo", "seed=3"),
        ("env=pong", "recipe=impala", "seed=3"),
        ("+env.kwargs.max_episode_steps=100", "seed=3"),
    ],
    ids=["keys", "tuned", "added"],
)
@pytest.mark.one_case
def test_a_job_is_run_with_the_config_that_was_composed_for_its_check(
    words: tuple[str, ...], here: Path, loads: list[object], trained: list[Config]
) -> None:
    assert main(["train", *words, "run_dir=it"]) == 0
    assert len(loads) == 1
    (config,) = trained
    assert (config.seed, config.run_dir) == (3, str(here / "it"))
    about = OmegaConf.load(here / "it" / ".hydra" / "hydra.yaml").hydra
    assert about.overrides.task == [*words, "run_dir=it"]
    assert about.job.override_dirname == ",".join(sorted([*words, "run_dir=it"]))
    assert (here / "it" / "train.log").exists()


def test_a_config_is_printed_as_it_was_composed_for_its_check(
    here: Path, loads: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "recipe=dqn", "recipe.lr=0.5", "--cfg", "job", "--package", "recipe"]) == 0
    assert len(loads) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("# @package recipe\n")
    assert OmegaConf.create(printed).lr == 0.5


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (("seed=0,0", "recipe.lr=1"), [(0, 1.0), (0, 1.0)]),
        (("recipe.lr=1e-3,0.001,2", "seed=1"), [(1, 1e-3), (1, 1e-3), (1, 2.0)]),
        (("seed=0,1", "recipe.lr=1", "seed=5,6,7"), [(5, 1.0), (6, 1.0), (7, 1.0)]),
        (("recipe.lr=1,2", "seed=range(0,2)"), [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0)]),
        (("hydra/sweeper=basic", "recipe.lr=1,2", "seed=3"), [(3, 1.0), (3, 2.0)]),
    ],
    ids=["equal words", "equal values", "a key twice", "a product", "the sweeper named"],
)
def test_each_job_of_a_sweep_is_the_one_that_hydra_gave_its_number(
    words: tuple[str, ...], jobs: list[tuple[int, float]], here: Path, trained: list[Config]
) -> None:
    assert main(["train", "-m", *words, "hydra.sweep.dir=swept", "hydra.sweeper.max_batch_size=2"]) == 0
    ran: Any = [(config.seed, config.recipe.lr) for config in trained]
    assert ran == jobs
    assert [config.run_dir for config in trained] == [str(here / f"swept/{n}") for n in range(len(jobs))]


def test_a_sweep_in_random_order_has_the_one_that_was_checked(here: Path, trained: list[Config]) -> None:
    assert main(["train", "-m", "seed=shuffle(range(0,6))", "hydra.sweep.dir=swept"]) == 0
    recorded = [OmegaConf.load(here / f"swept/{n}/.hydra/overrides.yaml") for n in range(6)]
    assert recorded == [[f"seed={config.seed}"] for config in trained]
    assert sorted(config.seed for config in trained) == list(range(6))


def test_a_sweep_over_all_options_has_those_of_the_users_folder(here: Path, trained: list[Config]) -> None:
    (here / "mine" / "logger").mkdir(parents=True)
    (here / "mine" / "logger" / "apart.yaml").write_text("defaults: [csv, _self_]\nevery_frames: 77\n")
    assert main(["train", "-m", "--config-dir", "mine", "logger=glob([a*,c*])", "hydra.sweep.dir=swept"]) == 0
    recorded = [OmegaConf.load(here / f"swept/{n}/.hydra/overrides.yaml") for n in range(2)]
    assert recorded == [["logger=apart"], ["logger=csv"]]
    assert [config.logger.every_frames == 77 for config in trained] == [True, False]


@pytest.mark.parametrize("flags", [("-m",), ()], ids=["asked for", "by the config"])
@pytest.mark.one_case
def test_the_jobs_that_a_config_adds_to_a_sweep_are_checked_when_they_run(
    flags: tuple[str, ...], here: Path, trained: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine").mkdir()
    mode = "" if flags else "  mode: MULTIRUN\n"
    (here / "mine" / "swept.yaml").write_text(
        f"defaults:\n  - train\n  - _self_\nhydra:\n  searchpath: ['file://{config_dir()}']\n{mode}"
        "  sweep:\n    dir: swept\n"
        "  sweeper:\n    params:\n      seed: 3,4\n      env.id: CartPole-v1,Acrobot-v1\n"
    )
    line = ["train", *flags, "--config-path", str(here / "mine"), "--config-name", "swept"]
    assert main([*line, "env.id=Acrobot-v1", "recipe.gamma=0.9"]) == 0
    ran = [(config.seed, config.env.id, config.run_dir) for config in trained]
    assert ran == [(3, "Acrobot-v1", str(here / "swept/0")), (4, "Acrobot-v1", str(here / "swept/1"))]
    capsys.readouterr()
    assert main([*line, "recipe.gamma=2"]) == 2
    assert capsys.readouterr().err.startswith("recipe.gamma cannot be 2")


def test_a_job_is_run_anew_from_the_pickle_that_hydra_left(here: Path, trained: list[Config]) -> None:
    pickles = "+hydra.callbacks.them._target_=hydra.experimental.callbacks.PickleJobInfoCallback"
    assert main(["train", "env=atari", "recipe=impala", "env.id=ALE/Pong-v5", "run_dir=it", pickles]) == 0
    rerun = ["train", "--trust", "--experimental-rerun", "it/.hydra/config.pickle"]
    with pytest.warns(UserWarning, match="Experimental rerun CLI option"):
        assert main(rerun) == 0
    first, again = trained
    assert again == first


def test_a_key_may_be_a_group_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "configs" / "evaluation").mkdir(parents=True)
    (tmp_path / "configs" / "evaluation" / "other.yaml").write_text("device: meta\n")
    words = ["--config-dir", str(tmp_path / "configs"), "+evaluation=other", "seed=1"]
    line = command_line.read(words)
    with own_hydra.initialised():
        made, errors = composing.composition(line, line.jobs[0])
    assert made is not None
    assert (made.config.evaluation.device, made.config.seed, errors) == ("meta", 1, [])


@pytest.mark.thorough
def test_hydras_own_settings_are_overridden_as_ever(here: Path) -> None:
    train(here, *PPO, "hydra.run.dir=there", "hydra.job.name=mine", "hydra.output_subdir=about")
    assert (here / "there" / "config.yaml").is_file()
    assert (here / "there" / "mine.log").exists()
    assert (here / "there" / "about" / "hydra.yaml").is_file()


def test_a_builder_called_from_python_checks_and_probes_once(here: Path, counted: Counter[str]) -> None:
    file = here / "made.txt"
    config = Config(
        env=EnvConfig(ID, 1, {"file": str(file)}),
        collector=CollectorConfig(frames_per_batch=64),
        recipe=PPOConfig(total_frames=64, hidden=[8]),
    )
    ppo.RECIPE.build(config).shutdown()
    assert made(file)[0] == 1
    assert counted == {"checked": 1}


def test_a_run_has_the_folder_that_it_is_given_whatever_its_name(here: Path) -> None:
    train(here, *PPO, "run_dir='Läufe, alle/ünö=1'")
    assert (here / "Läufe, alle" / "ünö=1" / "config.yaml").is_file()


def test_a_sweep_that_ends_early_says_which_jobs_were_not_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "rlsync.runs.life.launch.train_job", lambda job, parent, **_: 130 * (job.config.seed == 1)
    )
    with pytest.raises(SystemExit, match="130"):
        main(["train", "-m", "seed=0,1,2", *PPO])
    assert capsys.readouterr().err.endswith("the sweep ends with its job 1: none after it is run\n")


def test_a_job_that_fails_does_not_keep_a_sweep_from_those_after_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def fails_second(job: Job, parent: None, **_: object) -> int:
        trained.append(job.config.seed)
        if job.config.seed == 1:
            raise ZeroDivisionError("in an environment")
        return 2 * (job.config.seed == 2)

    monkeypatch.setattr("rlsync.runs.life.launch.train_job", fails_second)
    assert main(["train", "-m", "seed=0,1,2,3", "hydra.sweep.dir=swept", *PPO]) == 1, (
        "as the first that failed"
    )
    assert trained == [0, 1, 2, 3]
    told = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError: in an environment" in told
    assert [line for line in told if "the others go on" in line] == [
        "job 1 of the sweep failed; the others go on",
        "job 2 of the sweep failed; the others go on",
    ]
    assert told[-3:-1] == ["job 1 of the sweep failed", f"  where  {here}/swept/1"]


@pytest.mark.parametrize("words", [("hydra.run.dir=first/0",), ("-m", "hydra.sweep.dir=first")])
def test_a_folder_that_a_key_of_hydras_names_is_not_another_runs(
    words: tuple[str, ...], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlsync.runs.life.launch.train_job", lambda job, parent, **_: 0)
    assert main(["train", *PPO, *words]) == 0
    (here / "first" / "0" / RECEIPTS).touch()
    if "-m" in words:
        assert main(["train", *PPO, *words]) == 2
    else:
        assert main(["train", *PPO, *words]) == 2
    assert "first/0' holds another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("hydra.run.dir=${nowhere}",), "Interpolation key 'nowhere' not found"),
        (("-m", "hydra.sweeper.max_batch_size=0"), "Hydra stopped with AssertionError"),
    ],
)
def test_what_hydra_cannot_run_is_told_in_three_lines(
    words: tuple[str, ...], told: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *PPO, *words]) == 2
    what, where, cure = capsys.readouterr().err.splitlines()
    assert what == told
    assert words[-1] in where
    assert cure.startswith("  cure")


@pytest.mark.parametrize("error", [HydraException, AttributeError])
def test_ctrl_c_while_hydra_composes_is_no_error_of_the_config(
    error: type[Exception], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stumble(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:  # as in OmegaConf, which puts flags back
            raise error("'NoneType' object has no attribute '_invalidate_flags_cache'")

    monkeypatch.setattr(own_hydra, "compose", stumble)
    assert main(["train", *PPO]) == 130
    assert capsys.readouterr().err == ""

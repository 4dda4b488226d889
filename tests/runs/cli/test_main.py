"""The ``rlsync`` command, mostly as a user starts it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import jsonschema
import pytest
import torch
from omegaconf import OmegaConf
from rich.console import Console

from rlsync import __version__
from rlsync.core.errors import ConfigError
from rlsync.runs.cli.main import main, will_start_workers
from rlsync.runs.life.ending import Interrupts
from rlsync.runs.life.resume import load
from rlsync.runs.life.training import LiveLine, TrainingLife, prepare_process, shut_down
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.run_files import (
    CHECKPOINT,
    STATISTICS,
    RunStatistics,
    duration,
    statistics_in,
    statistics_schema,
)
from rlsync.runs.recipes.settings import CollectorConfig, Config, PPOConfig
from tests.tools.processes import descendant_pids, is_alive, wait_until
from tests.tools.programs import ENDS_WITHIN_S, Program
from tests.tools.tiers import first_of_each

REPO = Path(__file__).resolve().parents[3]
SMALL = (
    "recipe.total_frames=512",
    "recipe.num_epochs=1",
    "collector.frames_per_batch=256",
)
#: Runs until it is stopped.
ENDLESS = ("recipe.total_frames=100000000", "recipe.target_return=null", "recipe.compile=off")


class Run:
    """One ``rlsync`` process, in its own process group as under a shell, with its output so far.

    With ``afresh`` a new interpreter runs it, as a shell does; else it is forked with its imports loaded.
    """

    def __init__(self, folder: Path, *arguments: str, afresh: bool = False) -> None:
        self.folder = folder
        environment = os.environ | {"PYTHONPATH": str(REPO)}
        self.process: Program | subprocess.Popen[str]
        if afresh:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlsync", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        else:
            self.process = Program("rlsync", *arguments, cwd=folder, env=environment, merged=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def wait_for(self, pattern: str, timeout_s: float) -> None:
        def said() -> bool:
            return re.search(pattern, self.output, re.MULTILINE) is not None

        wait_until(lambda: said() or self.process.poll() is not None, timeout_s, 0.05)
        assert said(), f"no {pattern!r} within {timeout_s} s:\n{self.output}"

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends SIGINT to the whole foreground group, workers included."""
        os.killpg(self.process.pid, signal.SIGINT)

    def exit_status(self, timeout_s: float) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(timeout=5)
        return status

    def run_folder(self) -> Path:
        (line,) = re.findall(r"^run (.+)$", self.output, re.MULTILINE)
        return Path(line)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self._reader.join(timeout=5)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ("", True),
        ("recipe=dqn seed=3", True),
        ("--help", False),
        ("recipe=dqn --cfg job", False),
        ("cluster=ray", False),
        ("recipe=laser recipe.agents=4", False),
        ("recipe=ppo collector.num_workers=0", False),
        ("ppo seed=3", False),  # which is refused
        ("~env.kwargs.render_mode +seed=3", True),
    ],
)
def test_a_training_begins_its_fork_server_before_its_imports_where_workers_are_forked(
    words: str, starts: bool
) -> None:
    assert will_start_workers(words.split()) is starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


def finished(folder: Path, *arguments: str, timeout_s: float = ENDS_WITHIN_S, afresh: bool = False) -> Run:
    run = Run(folder, *arguments, afresh=afresh)
    try:
        status = run.exit_status(timeout_s)
    finally:
        run.kill()
    assert status == 0, run.output
    return run


def receipts_in(run_folder: Path) -> list[dict[str, Any]]:
    """All receipts, in order."""
    return [json.loads(line) for line in (run_folder / "receipts.jsonl").read_text().splitlines()]


def versions_in(run_folder: Path) -> list[int]:
    """The versions of all receipts, in order."""
    return [receipt["version"] for receipt in receipts_in(run_folder)]


def checked_statistics(run_folder: Path) -> RunStatistics:
    """The statistics that a run of one life has left, after a look at whether they fit its receipts."""
    jsonschema.validate(json.loads((run_folder / STATISTICS).read_text()), statistics_schema())
    found, receipts = statistics_in(run_folder), receipts_in(run_folder)
    assert found is not None
    assert found.version == receipts[-1]["version"]
    assert found.published_bytes == sum(receipt["copied_bytes"] for receipt in receipts)
    durations = sorted(receipt["duration_s"] * 1e3 for receipt in receipts)
    assert found.publish_ms_p50 == pytest.approx(median(durations))
    assert found.publish_ms_p95 is not None
    assert durations[0] <= found.publish_ms_p95 <= durations[-1]
    assert found.updates_per_frame == found.updates / found.frames
    assert found.frames_per_s == pytest.approx(found.frames / found.seconds)
    assert found.frames_by_worker is not None
    assert sum(found.frames_by_worker.values()) == found.frames
    assert 0 < found.learner_wait_s < found.seconds
    assert found.to_frames_ms_p50 is not None, "no publish was seen to arrive"
    assert found.to_frames_ms_p50 > 0
    assert found.adoption_ms_p50 is not None, "no worker was seen to adopt"
    assert found.adoption_ms_p95 is not None
    assert 0 <= found.adoption_ms_p50 <= found.adoption_ms_p95 < found.seconds * 1e3
    return found


# ------------------------------------------------------------------------------- the command line


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rlsync {__version__}\n"


def test_no_verb_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


#: Command lines, what is said of them, and what the cure says.
WRONG = [
    ("train recipe.lrr=1", "unknown key 'recipe.lrr'", "did you mean 'recipe.lr'?"),
    ("train recipee=ppo", "unknown key 'recipee'", "did you mean 'recipe'?"),
    ("train env=cartpol", "no env 'cartpol'", "did you mean 'cartpole'?"),
    ("train +recipe.x=1", "unknown key 'recipe.x'", "recipe has:"),
    ("train recipe=dqn recipe.num_epochs=2", "unknown key 'recipe.num_epochs'", "recipe has:"),
    ("train env.kwargs.x=1", "unknown key 'env.kwargs.x'", "write +env.kwargs.x="),
    ("train +env.kwargs.lenght=1", "unexpected keyword argument 'lenght'", "~env.kwargs.NAME drops it"),
    ("train logger=jsonl", "no logger 'jsonl'", "write logger.kind=jsonl"),
    ("train recipe.lr=fast", "'fast'", "give a number; "),
    ("train seed=-1", "seed cannot be -1", "give a number >= 0"),
    ("train sync.when.every=0", "positive whole number", "for example"),
    ("train sync.map=[{destination:policy,sorce:x}]", "'sorce'", "did you mean 'source'?"),
    ("train recipe.name=dq", "no recipe 'dq'", "did you mean 'dqn'?"),
    ("train -m seed=1,two", "'two'", "give a whole number; "),
    ("train seed", "cannot read an override", "key=value"),
    ("train env=gymnasium", "no environment is named", "env.id=Acrobot-v1"),
    ("train env.id=CartPol-v1", "cannot make the environment 'CartPol-v1'", "env.id="),
    ("train resume=nowhere", "/nowhere' does not exist", "run folder"),
    ("explain recipe.lrr=1", "unknown key 'recipe.lrr'", "did you mean 'recipe.lr'?"),
    ("explain nowhere.py:build", "no file 'nowhere.py'", "check the path"),
]


#: Told of several groups and keys alike.
ALIKE = re.compile(r"^no (recipe|env) |'(fast|two)'")


def kind_of(case: tuple[str, str, str]) -> tuple[str, object]:
    """The verb, and the error without what it is about."""
    arguments, what, _ = case
    alike = ALIKE.match(what)
    return arguments.split()[0], alike.lastindex if alike else what.partition(" '")[0]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("arguments", "what", "cure"),
    first_of_each(WRONG, kind_of),
)
def test_what_is_wrong_is_said_in_three_lines_before_anything_runs(
    arguments: str,
    what: str,
    cure: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    first, where, last = said.err.splitlines()
    assert what in first
    assert where.startswith("  where  ")
    assert last.startswith("  cure   ")
    assert cure in last
    assert said.out == ""
    assert list(tmp_path.iterdir()) == [], "nothing is written either"


def test_an_argument_for_gymnasium_may_be_added(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "+env.kwargs.max_episode_steps=9", "--cfg", "job"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert shown.env.kwargs == {"max_episode_steps": 9}


def test_cfg_job_prints_the_config_and_runs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recipe=dqn", "seed=7", "--cfg", "job"]) == 0
    shown = OmegaConf.create(capsys.readouterr().out)
    assert (shown.seed, shown.recipe.name) == (7, "dqn")
    assert [route.destination for route in shown.sync.map] == [
        "policy.module[0]",
        "policy.module[1]",
    ], "a recipe brings its own sync map"
    assert list(tmp_path.iterdir()) == []


def test_help_of_train_lists_the_groups_a_user_may_choose_from(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--help"]) == 0
    said = capsys.readouterr().out
    assert "recipe=crossq|dqn|dreamer_v1|dreamer_v3|impala|laser|ppo|sac|td3" in said
    assert "schema" not in said


def test_a_learner_takes_numbers_for_zero_that_would_slow_it_down() -> None:
    moments = torch.full((64,), 1e-39)
    assert (moments * 1.5 > 0).all()
    prepare_process()
    assert (moments * 1.5 == 0).all()


# ---------------------------------------------------------------------------------------- explain


@pytest.mark.usefixtures("fork_workers")
def test_explain_prints_the_plan_of_a_config_with_no_path_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "recipe=dqn", "collector.num_workers=1"]) == 0
    table = capsys.readouterr().out
    assert "policy.module[0].module.0.module.0.weight" in table
    assert "<- loss_module.value_network.module.0.module.0.weight" in table
    assert "every 4 optim_steps" in table
    assert "…" not in table


@pytest.mark.usefixtures("fork_workers")
def test_explain_json_is_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", "collector.num_workers=1", "sync.when.every=3"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["trigger"] == "every 3 batches"
    assert {row["verdict"] for row in plan["rows"]} == {"copied"}
    assert plan["payload_bytes"] == sum(row["payload_bytes"] for row in plan["rows"])


USERS_FILE = """
import torch.multiprocessing

from rlsync import BoardScheme, SyncWeights
from tests.tools.parts import make_policy, make_workers, make_a2c_trainer
from torchrl.collectors import MultiSyncCollector

def build(source="loss_module.actor_network"):
    print("building")
    torch.multiprocessing.set_start_method("fork", force=True)  # sooner there than spawned workers
    collector = make_workers(MultiSyncCollector, make_policy(), schemes={"policy": BoardScheme()})
    trainer = make_a2c_trainer(collector, weight_update_map={"policy": "loss_module.actor_network"})
    SyncWeights({"policy": source}).register(trainer)
    return trainer

def build_with_a_typo():
    return build("loss_module.actor_netwrk")
"""


@pytest.mark.usefixtures("forked_builds")
def test_explain_builds_the_trainer_of_a_file_and_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(USERS_FILE)
    monkeypatch.chdir(tmp_path)

    def explained(function: str) -> tuple[int, str, str]:
        status = main(["explain", f"train.py:{function}", "--json", "--timeout-s", "200"])
        return status, *capfd.readouterr()

    _, out, errors = explained("build")
    assert json.loads(out)["rows"], "JSON and nothing else"

    status, out, errors = explained("build_with_a_typo")  # its workers wait for their learner
    assert (status, out) == (2, "")
    assert errors.splitlines()[-3].startswith("no 'actor_netwrk' on loss_module")


# --------------------------------------------------------------------------------------- training


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_on_a_terminal_one_line_is_redrawn_and_elsewhere_lines_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(*, terminal: bool) -> str:
        recipe = PPOConfig(total_frames=512, num_epochs=1)
        trainer = ppo.RECIPE.build(
            Config(recipe=recipe, collector=CollectorConfig(num_workers=1, frames_per_batch=256))
        )
        screen = StringIO()
        console = Console(file=screen, force_terminal=terminal, width=120)
        with shut_down(trainer), LiveLine(TrainingLife(trainer, Interrupts()), console).shown():
            trainer.train()
        return screen.getvalue()

    drawn = shown(terminal=True)
    assert "frames 512 / 512" in drawn
    assert drawn.count("\n") == 1, "the line stays in its place"
    assert shown(terminal=False) == ""
    assert re.match(r"frames 256 / 512  return (none|[\d.]+)  version", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "target"),
    [
        (("recipe.target_return=30",), 30),
        pytest.param((), 450, marks=pytest.mark.thorough),
    ],
    ids=["low", "default"],
)
def test_the_default_training_reaches_its_target_and_ends_by_itself(
    words: tuple[str, ...], target: float, tmp_path: Path
) -> None:
    run = finished(tmp_path, "train", *words)
    ended, slow = run.output.splitlines()[-2:]
    assert ended.startswith("stopped: target return reached")
    assert slow.startswith("learner busy ")
    mean = re.search(r"mean return of the last 20 episodes ([\d.]+)", ended)
    assert mean is not None
    assert float(mean[1]) >= target
    progress = (
        r"^frames [\d,]+ / 150,000  return [\d.]+  version \d+  lag 0  staleness 0.0  publish [\d.]+ ms"
    )
    progress += r"  [\d,]+ frames/s  left \d+"
    assert re.search(progress, run.output, re.MULTILINE)

    folder = run.run_folder()
    assert folder.parent.parent == tmp_path / "runs"
    assert OmegaConf.load(folder / "config.yaml").recipe.name == "ppo"
    versions = versions_in(folder)
    assert versions == sorted(set(versions)), "one version a publish, never reused"
    assert checked_statistics(folder).updates == receipts_in(folder)[-1]["optim_steps"]
    curve = (folder / "metrics" / "scalars" / "return.csv").read_text().splitlines()
    assert len(curve) == len(versions) - 1, "one point a batch; the first publish has none"
    assert (folder / "checkpoint" / "manifest.json").is_file()


@dataclass(frozen=True)
class Stopped:
    """What Ctrl-C left behind."""

    run: Run
    status: int
    survivors: set[int]
    frames: int


@pytest.fixture(scope="module")
def stopped(folder: Path) -> Iterator[Stopped]:
    run = Run(folder, "train", *ENDLESS, "collector.frames_per_batch=256", afresh=True)
    try:
        run.wait_for("^frames", timeout_s=60)
        workers = descendant_pids(run.process.pid)
        assert len(workers) == 2
        run.interrupt()
        status = run.exit_status(timeout_s=30)
        wait_until(lambda: not any(map(is_alive, workers)), 60.0)
        found = re.search(r"^stopped: interrupted  frames ([\d,]+)", run.output, re.MULTILINE)
        assert found is not None, run.output
        survivors = {pid for pid in workers if is_alive(pid)}
        yield Stopped(run, status, survivors, int(found[1].replace(",", "")))
    finally:
        run.kill()


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process_behind(stopped: Stopped) -> None:
    assert stopped.status == 130
    assert stopped.survivors == set()
    assert (stopped.run.run_folder() / "checkpoint" / "manifest.json").is_file()
    assert "Traceback" not in stopped.run.output


@pytest.mark.slow
@pytest.mark.usefixtures("fork_workers")
def test_resume_with_another_recipe_or_other_networks_is_refused(
    stopped: Stopped, capsys: pytest.CaptureFixture[str]
) -> None:
    source = stopped.run.run_folder()
    assert main(["train", "recipe=dqn", f"resume={source}"]) == 2
    assert "add recipe=ppo" in capsys.readouterr().err

    config = Config(recipe=PPOConfig(hidden=[16]))
    trainer = ppo.RECIPE.build(config)
    with shut_down(trainer):
        with pytest.raises(
            ConfigError,
            match=r"does not fit this configuration: .*'loss_module': The size of tensor a \(16\) must",
        ):
            load(trainer, source / CHECKPOINT)
        assert all(worker.is_alive() for worker in trainer.collector.procs), "no worker was given the weights"


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(folder: Path) -> None:
    # A batch that takes minutes: the first Ctrl-C cannot end the run for a long time.
    run = Run(folder, "train", *ENDLESS, "collector.frames_per_batch=200000")
    try:
        assert wait_until(lambda: len(descendant_pids(run.process.pid)) == 2, 60, 0.05)
        workers = descendant_pids(run.process.pid)
        run.interrupt()
        run.wait_for("stopping after this iteration.*; Ctrl-C again kills, without", timeout_s=10)
        run.interrupt()
        assert run.exit_status(timeout_s=10) == 130, run.output
        assert wait_until(lambda: not any(map(is_alive, workers)), 60.0)
    finally:
        run.kill()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_sweep_runs_every_job_in_a_folder_of_its_own(folder: Path) -> None:
    run = finished(folder, "train", "-m", "seed=0,1", "logger=none", *SMALL)
    folders = [Path(line) for line in re.findall(r"^run (.+)$", run.output, re.MULTILINE)]
    assert [path.name for path in folders] == ["0", "1"]
    assert [OmegaConf.load(path / "config.yaml").seed for path in folders] == [0, 1]
    assert len(re.findall("^stopped: total_frames collected", run.output, re.MULTILINE)) == 2
    assert not re.search(r"^\[\d{4}-", run.output, re.MULTILINE), "no line as Hydra logs it"
    assert "SyncWeights replaces" in (folders[0] / "train.log").read_text()


def test_a_duration_is_told_in_its_two_largest_units() -> None:
    told = [duration(seconds) for seconds in (7, 250, 8000, 200_000)]
    assert told == ["7 s", "4 min 10 s", "2 h 13 min", "2 d 7 h"]

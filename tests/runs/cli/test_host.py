"""A run in somebody else's program: in a thread, in a daemonic process, in those of a launcher of Hydra's."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from rlsync.runs import RunResult
from rlsync.runs.cli.main import main
from rlsync.runs.life.host import JobFailed, Lifeline, sweep_apart
from rlsync.runs.life.state import ended
from rlsync.runs.recipes.run_files import CHECKPOINT, EVALUATIONS
from tests.runs.cli.test_main import ENDLESS, Run
from tests.tools.processes import descendant_pids, is_alive, wait_until
from tests.tools.programs import ENDS_WITHIN_S

#: Starts a process for each job, as joblib does, in a way of its own that no worker knows. If one of them
#: ends, it kills the others.
LAUNCHER = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import context

import cloudpickle
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import run_job, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import open_dict


class Process(context.SpawnProcess):
    _start_method = "of the host"


class Context(context.SpawnContext):
    _name = "of the host"
    Process = Process


context._concrete_contexts["of the host"] = Context()


def job(pickled):
    singletons, hydra_context, config, task, number = cloudpickle.loads(pickled)
    setup_globals()
    Singleton.set_state(singletons)
    HydraConfig.instance().set_config(config)
    return cloudpickle.dumps(
        run_job(
            task_function=task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=hydra_context,
        )
    )


class AtOnce(Launcher):
    def setup(self, *, hydra_context, task_function, config):
        self.parts = hydra_context, config, task_function

    def launch(self, job_overrides, initial_job_idx):
        setup_globals()
        hydra_context, config, task = self.parts
        with ProcessPoolExecutor(len(job_overrides) + 1, Context()) as pool:
            futures = []
            for number, words in enumerate(job_overrides, initial_job_idx):
                its = hydra_context.config_loader.load_sweep_config(config, list(words))
                with open_dict(its):
                    its.hydra.job.id, its.hydra.job.num = str(number), number
                work = Singleton.get_state(), hydra_context, its, task, number
                futures.append(pool.submit(job, cloudpickle.dumps(work)))
            return [cloudpickle.loads(future.result()) for future in futures]


target = {"_target_": f"{__name__}.AtOnce"}
ConfigStore.instance().store(group="hydra/launcher", name="at_once", node=target, provider="test")
"""

HAS_JOBLIB = find_spec("hydra_plugins") is not None and find_spec("hydra_plugins.hydra_joblib_launcher")
NEEDS_JOBLIB = pytest.mark.skipif(not HAS_JOBLIB, reason="needs the package hydra-joblib-launcher")

#: Launchers that start processes.
APART = [
    pytest.param("at_once", marks=pytest.mark.thorough),
    pytest.param("joblib", marks=[NEEDS_JOBLIB, pytest.mark.thorough]),
]


def write_plugin(folder: Path, name: str, source: str) -> None:
    """A plugin that Hydra finds when a command starts in this folder."""
    (folder / "hydra_plugins" / name).mkdir(parents=True)
    (folder / "hydra_plugins" / name / "__init__.py").write_text(source)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR2])
def test_a_sweep_that_is_stopped_tells_jobs_in_other_processes_and_its_own_processes_hold_signals_back(
    number: signal.Signals,
) -> None:
    def sweep() -> None:
        with sweep_apart() as lifeline:
            assert number in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "what is started here inherits it"
            jobs = [held(pickle.loads(pickle.dumps(lifeline))) for _ in range(2)]
            assert [job.poll() for job in jobs] == [False, False]
            os.kill(os.getpid(), number)
            assert [job.poll(ENDS_WITHIN_S) for job in jobs] == [True, True]
            assert held(lifeline).poll(), "for a job that has not begun"
            raise JobFailed("job 0 of the sweep was stopped", status=128 + number)

    with pytest.raises(SystemExit, match=str(128 + number)):
        sweep()
    assert number not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def held(lifeline: Lifeline) -> Connection:
    """What a job on this machine holds."""
    connection = lifeline.held()
    assert connection is not None
    return connection


def test_an_error_of_a_job_is_the_sweeps_where_no_signal_came() -> None:
    with pytest.raises(JobFailed) as raised, sweep_apart():
        raise pickle.loads(pickle.dumps(JobFailed("job 1 of the sweep failed", "swept/1", "look", 2)))
    assert (raised.value.status, str(raised.value).splitlines()[1]) == (2, "  where  swept/1")


def test_a_job_on_another_machine_has_no_lifeline_and_one_of_a_dead_sweep_ends() -> None:
    with sweep_apart() as lifeline:
        assert replace(lifeline, host="another").held() is None
    assert held(lifeline).poll()


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, name="mine")
    thread.start()
    thread.join(ENDS_WITHIN_S)


@pytest.mark.parametrize("words", [("-m", "seed=0,1"), ("restarts=1", "run_dir=it")])
def test_what_only_a_signal_could_end_is_refused_in_a_thread_before_it_has_a_folder(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    statuses: list[int] = []
    in_thread(lambda: statuses.append(main(["train", *words])))
    what, where, cure = capfd.readouterr().err.splitlines()
    assert statuses == [2]
    assert "in a thread Python delivers no signals" in what
    assert (where, "subprocess.run" in cure) == ("  where  thread 'mine'", True)
    assert not list(tmp_path.iterdir())


def train_in_daemon(pipe: Connection) -> None:
    pipe.send(main(["train"]))


@pytest.mark.processes
def test_a_run_in_a_daemonic_process_is_refused_before_it_has_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=train_in_daemon, args=(theirs,), name="of a pool", daemon=True)
    process.start()
    process.join(ENDS_WITHIN_S)
    assert ours.poll()
    assert ours.recv() == 2
    assert "this process is daemonic" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


SMALL = ("logger=none", "collector.frames_per_batch=256", "recipe.num_epochs=1")
FEW = ("collector.num_workers=0", "recipe.total_frames=512", "recipe.compile=off")

#: Tries three learning rates and prints what came of each, as a sweeper does that goes by results.
SWEEPER = """
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Trials(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        fixed = [word for word in arguments if not word.startswith("recipe.lr")]
        for number, rate in enumerate(("0.001", "-1", "0.002")):
            (job,) = self.launcher.launch([[*fixed, f"recipe.lr={rate}"]], initial_job_idx=number)
            try:
                print("trial", float(job.return_value))
            except Exception as error:
                print("trial", type(error).__name__)


target = {"_target_": f"{__name__}.Trials"}
ConfigStore.instance().store(group="hydra/sweeper", name="trials", node=target, provider="test")
"""


@pytest.mark.seconds
@pytest.mark.parametrize("launcher", ["basic", *APART])
def test_a_sweeper_gets_the_objective_of_each_job_and_a_failed_one_is_a_failed_trial(
    launcher: str, tmp_path: Path
) -> None:
    write_plugin(tmp_path, "trials", SWEEPER)
    write_plugin(tmp_path, "at_once", LAUNCHER)
    words = ("-m", "hydra/sweeper=trials", "recipe.lr=interval(0.001,0.01)", *SMALL, "hydra.sweep.dir=swept")
    words += (f"hydra/launcher={launcher}",)
    run = Run(tmp_path, "train", *words, *FEW, afresh=True)  # it looks for plugins when it starts
    try:
        assert run.exit_status(ENDS_WITHIN_S) == 0, run.output
    finally:
        run.kill()
    trials = re.findall("^trial (.+)$", run.output, re.MULTILINE)
    first, last = (RunResult.of(tmp_path / "swept" / number) for number in "02")
    assert trials == [str(first.last_return), "JobFailed", str(last.last_return)]
    assert "recipe.lr cannot be -1" in run.output


def test_a_key_that_only_a_sweeper_sets_is_checked_before_a_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "hydra" / "sweeper").mkdir(parents=True)
    (tmp_path / "mine" / "hydra" / "sweeper" / "best.yaml").write_text("_target_: somewhere.Best\n")
    for word in ("recipe.lrr=choice(0.1,0.2)", "recipe.lrr=interval(0.1,0.2)"):
        assert main(["train", "--config-dir", "mine", "-m", "hydra/sweeper=best", word]) == 2
        assert capsys.readouterr().err.startswith("unknown key 'recipe.lrr'")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


ENVS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv


class Same(CartPoleEnv):
    def __init__(self, reward, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.reward = reward

    def step(self, action):
        observation, _, terminated, truncated, info = super().step(action)
        return observation, self.reward, terminated, truncated, info


gymnasium.register("Same-v0", Same, max_episode_steps=50)
"""


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("launcher", APART)
def test_ctrl_c_ends_a_sweep_whose_sweeper_goes_on_after_failed_trials(launcher: str, tmp_path: Path) -> None:
    write_plugin(tmp_path, "trials", SWEEPER)
    write_plugin(tmp_path, "at_once", LAUNCHER)
    words = ("hydra/sweeper=trials", f"hydra/launcher={launcher}", "recipe.lr=interval(0.001,0.01)")
    run = Run(tmp_path, "train", "-m", *words, "hydra.sweep.dir=swept", *SMALL, *ENDLESS, afresh=True)
    try:
        run.wait_for("updates as functions of tensors", ENDS_WITHIN_S)
        workers = descendant_pids(run.process.pid)
        run.interrupt()
        assert run.exit_status(ENDS_WITHIN_S) == 128 + signal.SIGINT, run.output
    finally:
        run.kill()
    assert not re.findall("^trial ", run.output, re.MULTILINE), run.output
    assert "job 0 of the sweep was stopped" in run.output
    assert (tmp_path / "swept" / "0" / CHECKPOINT).is_dir()
    assert len(workers) > 1
    wait_until(lambda: not any(map(is_alive, workers)), ENDS_WITHIN_S)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("launcher", APART)
def test_a_launchers_jobs_live_on_when_one_fails_and_have_saved_after_ctrl_c(
    launcher: str, tmp_path: Path
) -> None:
    write_plugin(tmp_path, "at_once", LAUNCHER)
    (tmp_path / "rewarding.py").write_text(ENVS)
    words = (
        f"hydra/launcher={launcher}",
        "hydra.sweep.dir=swept",
        "env=gymnasium",
        "env.id='rewarding:Same-v0'",
    )
    words += ("+env.kwargs.reward=1.0,nan", "recipe.evaluation.every_frames=256", *SMALL, *ENDLESS)
    run = Run(tmp_path, "train", "-m", *words, afresh=True)  # it looks for plugins when it starts
    try:
        run.wait_for("job 1 of the sweep failed; the others go on", ENDS_WITHIN_S)
        wait_until(lambda: (tmp_path / "swept" / "0" / EVALUATIONS).exists(), ENDS_WITHIN_S)
        run.interrupt()
        assert run.exit_status(ENDS_WITHIN_S) == 128 + signal.SIGINT, run.output
    finally:
        run.kill()
    stopped = ended(tmp_path / "swept" / "0")
    assert stopped is not None
    assert stopped.how in ("interrupted", "terminated"), "as its own signal or the sweep's word was faster"
    assert stopped.checkpoint is not None
    failed = ended(tmp_path / "swept" / "1")
    assert failed is not None
    assert "is nan" in failed.error
    assert "job 0 of the sweep was stopped" in run.output

"""Environments that raise, hang, print or end their process while workers make them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from rlsync.core.errors import AdoptionTimeout, ConfigError, WorkerLost
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from rlsync.runs.recipes.spaces import DISCRETE
from rlsync.sync.starting import StartLogs
from tests.runs.cli.test_main import REPO, Run
from tests.tools.parts.foreign_envs import ID
from tests.tools.processes import child_pids, session_pids, wait_until
from tests.tools.programs import run_program

PPO = ("recipe=ppo", "collector.frames_per_batch=64", "recipe.num_epochs=1")
DQN = ("recipe=dqn", "recipe.pace.prefill=64", "collector.frames_per_batch=64")
WHERE = f"\n  where  starting the workers of a collector; env.id={ID}\n"

# ------------------------------------------------------------------- TorchRL's worker processes


def run_of(folder: Path, how: str, *words: str) -> tuple[int, str]:
    """The exit status and the output of a run; no process of it is left."""
    env = ("env=gymnasium", f"env.id={ID}", f"+env.kwargs.how={how}")
    ends = ("recipe.total_frames=640", "recipe.target_return=null", "run_dir=it", "logger=none")
    run = Run(folder, "train", *words, *env, *ends)
    try:
        status = run.exit_status(240)
        assert wait_until(lambda: not session_pids(run.process.pid), 30), "a process is left"
    finally:
        run.kill()
    return status, run.output


@pytest.mark.processes
@pytest.mark.parametrize("words", [PPO, DQN], ids=["ppo", "dqn"])
@pytest.mark.one_case
def test_an_environment_that_raises_is_told_with_the_workers_number(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    status, output = run_of(tmp_path, "raises", *words)
    assert status == 1
    says = r"^worker [01] \(pid \d+, exited with status 1\) ended before it was ready: "
    says += "RuntimeError: the simulator has no licence"
    assert re.search(says + re.escape(WHERE) + "  cure   ", output, re.MULTILINE), output
    assert "its second line" in output, "the worker's own error is there, too"


@pytest.mark.thorough
@pytest.mark.processes
def test_an_environment_that_hangs_is_told_with_the_place(tmp_path: Path) -> None:
    status, output = run_of(tmp_path, "hangs", *PPO, "collector.start_timeout_s=15")
    assert status == 1
    says = (
        r"^worker 0 \(pid \d+\) is not ready after 15 s: it is making its environments, in hangs \(.+foreign"
    )
    says += r"_envs.py, line \d+\); not ready are the workers 0, 1"
    cure = r"  cure   .+collector.start_timeout_s$"
    assert re.search(says + re.escape(WHERE) + cure, output, re.MULTILINE), output
    assert "worker 0: looking for a display" in output


@pytest.mark.processes
def test_an_environment_that_ends_its_process_is_told_with_its_last_words(tmp_path: Path) -> None:
    status, output = run_of(tmp_path, "exits", *DQN)
    assert status == 1
    says = r"^worker [01] \(pid \d+, exited with status 7\) ended before it was ready"
    assert re.search(says + re.escape(WHERE), output, re.MULTILINE), output
    assert re.search(r"^worker [01]: assertion failed in sim.cc$", output, re.MULTILINE), output


# ---------------------------------------------------------------------------- rlsync's own


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "error", "says", "printed"),
    [
        ("raises", WorkerLost, "ready: RuntimeError: the simulator has no licence$", ""),
        (
            "exits",
            WorkerLost,
            "exited with status 7. ended before it was ready$",
            "assertion failed in sim.cc",
        ),
        (
            "hangs",
            AdoptionTimeout,
            r"environments, in hangs \(.+foreign_envs.py, line",
            "looking for a display",
        ),
    ],
)
def test_an_environment_of_the_actor_learner_is_told_with_the_workers_number(
    how: str, error: type[Exception], says: str, printed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    before = child_pids()
    envs = GymnasiumEnvs(ID, {"how": how})
    with pytest.raises(error) as refusal:
        UnrollCollector(
            ImpalaNet((4,), Categorical(2)),
            envs,
            CollectSettings(steps=5, envs_per_worker=1),
            start_timeout_s=8.0 if how == "hangs" else 240.0,
        )
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3
    assert re.match(rf"worker [01] \(pid \d+.+{says}", lines[0]), lines[0]
    assert child_pids() <= before
    assert printed in capfd.readouterr().err


PRINTS = """
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.settings import CollectSettings
from tests.tools.parts.foreign_envs import ID

envs = GymnasiumEnvs(ID, {"how": "prints"})
net = ImpalaNet((4,), Categorical(2))
UnrollCollector(net, envs, CollectSettings(steps=5, envs_per_worker=1, start_method="fork")).shutdown()
"""


@pytest.mark.processes
def test_what_environments_of_the_actor_learner_print_carries_the_workers_number(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PRINTS)
    done = run_program("program.py", cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPO)})
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    for worker in (0, 1):
        for line in ("simulator 1.2", "from C, on stdout", "from C, on stderr"):
            assert f"worker {worker}: {line}" in lines


# ------------------------------------------------------------------------------- the parts


def test_an_environment_that_raises_in_the_check_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError("no display")

    broken = EnvSpec("Broken-v0", entry_point=fails)
    monkeypatch.setitem(gymnasium.registry, broken.id, broken)
    with pytest.raises(ConfigError, match="cannot make the environment 'Broken-v0': OSError: no display"):
        DISCRETE.probe(EnvConfig(broken.id))


def test_a_log_that_the_learner_has_closed_changes_no_other_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = StartLogs(1, timeout_s=None)
    log = logs.each[0]
    fd = int(Path(log.address.path).name)
    logs.close()
    with (tmp_path / "other").open("w") as other:
        other.write("kept")
        other.flush()
        assert other.fileno() == fd, "the number of the closed file is given away again"
        with log.making():
            sys.stdout.write("printed as ever\n")
    assert (tmp_path / "other").read_text() == "kept"
    assert capfd.readouterr().out == "printed as ever\n"

"""However a run ends, it leaves a checkpoint and says how it ended; ``resume=`` goes on from there."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.trainers import Trainer

from rlsync.core.errors import WorkerLost
from rlsync.runs.cli.main import main
from rlsync.runs.life.ending import SIGNALS, Ending, Interrupts, end_children
from rlsync.runs.life.output import EXIT_UNREAD
from rlsync.runs.life.state import Ended, begin, ended, learner_in, status_of
from rlsync.runs.life.training import shut_down
from rlsync.runs.recipes import dqn, ppo
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.ending.last_checkpoint import CollectorState, LastCheckpoint, save_before_the_end
from tests.runs.cli.test_main import ENDLESS, REPO, Run, finished, receipts_in
from tests.runs.recipes.test_recipes import WhenConfig, small_dqn, small_ppo
from tests.tools.parts.namespaces import ALONE, may_unshare
from tests.tools.processes import (
    child_pids,
    descendant_pids,
    is_alive,
    kill,
    session_pids,
    stopped,
    wait_until,
    what_is,
)
from tests.tools.programs import Program, fresh_python, run_program

TRAIN = ("train", "logger=none", "collector.frames_per_batch=256", "recipe.num_epochs=1", *ENDLESS)
IMPALA = ("train", "recipe=impala", "logger=none", "recipe.max_restarts=0", *ENDLESS)


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """The exit status of ``rlsync status``, what it tells machines, and what it tells people."""
    code = main(["status", "--json", str(run)])
    told = json.loads(capsys.readouterr().out)
    assert main(["status", str(run)]) == code
    return code, told, capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_run_that_is_stopped_before_its_first_frame_ends_its_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attach, began = Interrupts.attach, []

    def stop_first(self: Interrupts, stop: Any, *limit: Any) -> None:
        began.extend(process.name for process in multiprocessing.active_children())
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_until(lambda: self.signal is not None, 30.0)
        attach(self, stop, *limit)

    monkeypatch.setattr(Interrupts, "attach", stop_first)
    words = ("logger=none", "recipe.evaluation.every_frames=256", *ENDLESS)
    with pytest.raises(SystemExit) as ending:
        main(["train", *words, f"run_dir={tmp_path}"])
    assert ending.value.code == 128 + signal.SIGTERM
    assert "interrupted before the first frame" in capsys.readouterr().out
    assert "rlsync evaluator" in began
    assert multiprocessing.active_children() == []


def goes_on(folder: Path, run: str) -> None:
    """The run is resumed in its own folder, for one more batch."""
    frames = json.loads((folder / run / "ended.json").read_text())["frames"]
    words = (f"resume={run}", f"recipe.total_frames={frames + 1}", f"run_dir={run}")
    resumed = finished(folder, "train", *words)
    assert f"resumed from {folder / run}/checkpoint  frames {frames:,}" in resumed.output


def test_a_run_that_ends_by_itself_says_when_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("recipe.total_frames=256", "recipe.target_return=1", "recipe.target_episodes=1")
    finished(tmp_path, *TRAIN, *words, "run_dir=it")
    assert not (tmp_path / "it" / "board.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["it"], "a run has one folder"
    code, told, said = status(Path("it"), capsys)
    assert (code, told["state"], told["ended"]["status"]) == (1, "ended", 0)
    end = told["ended"]
    assert said.splitlines()[:2] == [
        f"ended {end['at']}: target return reached  frames 256  version {end['version']}",
        f"checkpoint {tmp_path}/it/checkpoint",
    ]
    assert told["statistics"]["frames"] == 256
    (run_id,) = {receipt["run_id"] for receipt in receipts_in(Path("it"))}
    assert run_id
    assert (end["run_id"], told["statistics"]["run_id"]) == (run_id, run_id)


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True], ids=["learner", "all"])
@pytest.mark.one_case
def test_sigterm_ends_a_run_like_ctrl_c(
    whole_group: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, *TRAIN, "run_dir=it")
    try:
        run.wait_for("^frames", 60)
        workers = descendant_pids(run.process.pid)
        (os.killpg if whole_group else os.kill)(run.process.pid, signal.SIGTERM)
        assert run.exit_status(60) == 143, run.output
        assert wait_until(lambda: not any(map(is_alive, workers)), 60)
    finally:
        run.kill()
    assert "stopped: terminated  frames" in run.output
    assert "Traceback" not in run.output
    _, told, _ = status(tmp_path / "it", capsys)
    assert (told["ended"]["how"], told["ended"]["status"]) == ("terminated", 143)
    if whole_group:  # of a stop of the learner alone, tests/runs/cli/test_rerun.py holds that
        goes_on(tmp_path, "it")


class Stopped:
    """Notes that it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, why: str) -> None:
        self.calls += 1


@pytest.mark.parametrize("number", SIGNALS)
def test_each_signal_that_terminals_and_schedulers_send_asks_for_a_stop(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("rlsync.runs.life.ending.kill_everything", killed.append)
    stop: Any = Stopped()
    with Interrupts.caught() as interrupts:
        interrupts.attach(stop)
        for sent in (number, signal.SIGHUP, number):
            signal.raise_signal(sent)
    assert (interrupts.signal, interrupts.exit_status()) == (number, 128 + number)
    assert stop.calls == 1 + len(killed), "only the first one, and what would have ended this process"
    assert killed == ([] if number == signal.SIGHUP else [128 + number]), "SIGHUP may come twice"


@pytest.mark.processes
def test_whoever_kills_all_leaves_it_to_the_thread_that_started_a_process_to_hear_how_it_ended() -> None:
    others = [each.pid for each in multiprocessing.active_children()]
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    assert process.pid is not None
    end_children(besides=others)
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ChildProcessError: it was asked for
    assert end is not None
    assert (end.si_code, end.si_status) == (os.CLD_KILLED, signal.SIGKILL)
    process.join()
    process.close()


@pytest.mark.processes
def test_a_second_ctrl_c_does_not_interrupt_what_is_written_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Ended.write

    def write_slowly(end: Ended, folder: Path) -> None:
        time.sleep(0.5)
        write(end, folder)

    monkeypatch.setattr(Ended, "write", write_slowly)
    before = signal.getsignal(signal.SIGINT)
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))

    def run() -> None:
        with Interrupts.caught(is_called=True) as interrupts, Ending.of(tmp_path, interrupts):
            worker.start()
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            while not interrupts.abandoned:
                pass
            raise WorkerLost("worker 0 was killed", "here", "none")  # the run hears of it before the Ctrl-C

    with pytest.raises(KeyboardInterrupt):
        run()
    end = ended(tmp_path)
    assert end is not None
    assert (end.how, end.error) == ("interrupted", "")
    assert signal.getsignal(signal.SIGINT) is before
    worker.join(60)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("dies", [False, True], ids=["says", "dies"])
def test_what_a_parent_says_counts_apart_from_signals_of_this_process(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("rlsync.runs.life.ending.kill_everything", killed.append)
    stop = Stopped()
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs, Interrupts.caught(theirs) as interrupts:
        interrupts.attach(stop)
        ours.close() if dies else ours.send_bytes(b"end")
        assert wait_until(lambda: stop.calls == 1, 60)
        assert (interrupts.signal, interrupts.how()) == (signal.SIGTERM, "terminated")
        signal.raise_signal(signal.SIGINT)  # a terminal and job schedulers send it to parent and child
    assert (stop.calls, killed) == (1, [])
    assert interrupts.exit_status() == 128 + signal.SIGTERM


def test_under_nohup_a_closed_terminal_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts.caught() as interrupts:
            signal.raise_signal(signal.SIGHUP)
        assert interrupts.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_that_the_host_program_had_set_is_called_when_the_run_has_ended(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("rlsync.runs.life.ending.kill_everything", killed.append)
    calls: list[str] = []
    stop: Any = Stopped()

    def handler(number: int, frame: object) -> None:
        calls.append(f"{signal.Signals(number).name} after {stop.calls} stop")

    before = signal.signal(number, handler)
    try:
        with Interrupts.caught() as interrupts:
            interrupts.attach(stop)
            for _ in range(3):  # what a second one means, the host program decides
                signal.raise_signal(number)
            assert wait_until(lambda: stop.calls == 1, 60)
            assert calls == []
        assert calls == [f"{number.name} after 1 stop"]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert (interrupts.exit_status(), killed) == (128 + number, [])


#: What is forked by pytest may start threads, which would get the signal: a new program has one.
LISTENS_LATE = """
import os, signal, time
from rlsync.runs.life.ending import Interrupts

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
with Interrupts.caught() as interrupts:
    until_s = time.monotonic() + 60
    while interrupts.signal is None and time.monotonic() < until_s:
        time.sleep(0.01)
assert interrupts.how() == "terminated"
assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


@pytest.mark.processes
def test_a_signal_that_was_held_back_in_the_process_of_a_job_comes_when_its_run_listens() -> None:
    ended = fresh_python("-c", LISTENS_LATE, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.thorough
@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_has_saved_and_goes_on(tmp_path: Path) -> None:
    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "rlsync", *TRAIN, "run_dir=it"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=own_terminal,
    ) as run:
        os.close(theirs)
        try:
            said = b""
            while b"frames " not in said:
                said += os.read(ours, 1 << 16)
            family = descendant_pids(run.pid)
            os.close(ours)
            assert run.wait(60) in (EXIT_UNREAD, 128 + signal.SIGHUP), "a print may be faster than the signal"
            assert wait_until(lambda: not any(map(is_alive, family)), 20)
        finally:
            run.kill()
    assert (
        json.loads((tmp_path / "it" / "ended.json").read_text())["checkpoint"] == f"{tmp_path}/it/checkpoint"
    )
    goes_on(tmp_path, "it")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "learner killed", "workers killed", "twice"])
@pytest.mark.parametrize("words", [TRAIN, IMPALA], ids=["ppo", "impala"])
def test_what_environments_of_workers_have_started_ends_with_the_run(
    words: tuple[str, ...], how: str, tmp_path: Path
) -> None:
    few = ("collector.num_workers=2", "env.num_envs=1")
    run = Run(tmp_path, *words, *few, "env.id=tests.tools.childish:Childish-v0", "run_dir=it")
    try:
        run.wait_for("^frames", 60)
        family = descendant_pids(run.process.pid)
        workers = [pid for pid in family if os.getpgid(pid) == pid]
        children = {pid for worker in workers for pid in child_pids(worker)}
        assert len(workers) == len(children) == 2
        match how:
            case "ctrl-c":
                run.interrupt()
                assert run.exit_status(60) == 130, "no close() of an environment has waited in vain"
                assert "killed" not in run.output
            case "twice":
                run.interrupt()
                run.interrupt()
            case "learner killed":
                os.kill(run.process.pid, signal.SIGKILL)
            case "workers killed":
                for worker in workers:  # one alone would be started again
                    os.kill(worker, signal.SIGKILL)
        run.exit_status(60)
        assert wait_until(lambda: not any(map(is_alive, family)), 20), sorted(filter(is_alive, family))
    finally:
        run.kill()


@pytest.mark.skipif(
    find_spec("ray") is None or not may_unshare("-n"), reason="needs Ray in a network of its own"
)
@pytest.mark.slow
@pytest.mark.thorough
def test_the_death_of_rays_gcs_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    words = ("recipe=impala", "cluster=ray", "collector.num_workers=1", "logger=none", *ENDLESS, "run_dir=it")
    with subprocess.Popen(
        [*ALONE, sys.executable, "-m", "rlsync", "train", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPO), "RAY_USAGE_STATS_ENABLED": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as run:
        try:
            assert run.stdout is not None
            next(line for line in run.stdout if line.startswith("frames "))
            (gcs,) = (pid for pid in session_pids(run.pid) if "gcs_server" in what_is(pid))
            os.kill(gcs, signal.SIGKILL)
            assert run.wait(120) == 1
        finally:
            for pid in session_pids(run.pid):
                kill(pid)
    end = json.loads((tmp_path / "it" / "ended.json").read_text())
    assert (end["how"], end["checkpoint"]) == ("failed", f"{tmp_path}/it/checkpoint")
    assert "Ray's GCS is gone" in end["error"]


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_standard_streams_are_no_error(closed: tuple[int, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "rlsync", "ls"],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: [os.close(number) for number in closed],
        timeout=60,
    )
    assert ended.returncode == 0


@pytest.mark.thorough
@pytest.mark.seconds
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_run_whose_output_nobody_reads_any_more_has_saved_and_goes_on(
    unbuffered: str, tmp_path: Path
) -> None:
    words, env = (*TRAIN, "run_dir=it"), os.environ | {"PYTHONUNBUFFERED": unbuffered}
    run: Program | subprocess.Popen[str]
    if unbuffered:  # a new interpreter alone heeds it
        command, pipe = [sys.executable, "-m", "rlsync", *words], subprocess.PIPE
        run = subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=pipe, stderr=pipe)
    else:
        run = Program("rlsync", *words, cwd=tmp_path, env=env)
    assert run.stdout is not None
    assert run.stderr is not None
    with run.stderr:
        try:
            next(line for line in run.stdout if line.startswith("frames "))
            run.stdout.close()
            errors = run.stderr.read()
            assert run.wait(60) == EXIT_UNREAD
        finally:
            run.kill()
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
    assert f"checkpoint {tmp_path}/it/checkpoint: resume={tmp_path}/it goes on from" in errors
    assert "nobody reads the output any more" in errors
    goes_on(tmp_path, "it")


@pytest.mark.parametrize(
    ("words", "unbuffered"), [("--help", ""), ("--help", "1"), ("ls", ""), ("ls --json", "")]
)
def test_a_reader_that_has_read_enough_is_no_error(words: str, unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rlsync", *words.split()]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    try:
        ended = subprocess.run(
            command, env=env, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (EXIT_UNREAD, b"")


@pytest.mark.seconds
def test_a_run_that_was_killed_is_told_from_one_that_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = watching = Run(tmp_path, *TRAIN, "run_dir=it")
    try:
        run.wait_for("^frames", 60)
        watching = Run(tmp_path, "status", "--watch", "it")
        watching.wait_for("^learner", 60)
        family = descendant_pids(run.process.pid)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        assert wait_until(lambda: not any(map(is_alive, family)), 20)
        assert watching.exit_status(60) == 1
        assert "\nkilled, or the machine stopped" in watching.output
    finally:
        run.kill()
        watching.kill()
    code, told, said = status(tmp_path / "it", capsys)
    assert (code, told["state"], told["ended"]) == (1, "killed", None)
    assert told["version"] == told["statistics"]["version"]
    assert said.startswith("killed, or the machine stopped; the run last wrote something 20")
    assert "no checkpoint" in said


BAD_HOOK = """
import sys
from rlsync.runs.cli import train
from rlsync.runs.life.output import EXIT_UNREAD
from rlsync.runs.cli.main import main
from rlsync import LogReceipts

def fails(self, batch=None, calls=[]):
    calls.append(batch)
    if len(calls) == 3:
        raise ZeroDivisionError("a user's hook")

LogReceipts._report = fails
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_an_error_in_a_hook_leaves_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text(BAD_HOOK)
    done = run_program("program.py", *TRAIN, "run_dir=it", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: a user's hook" in done.stderr
    assert f"checkpoint {tmp_path}/it/checkpoint: resume={tmp_path}/it goes on from 768 frames" in done.stderr
    _, told, _ = status(tmp_path / "it", capsys)
    assert (told["ended"]["error"], told["ended"]["frames"]) == ("ZeroDivisionError: a user's hook", 768)
    goes_on(tmp_path, "it")


@pytest.mark.processes
def test_a_forked_process_that_lives_on_does_not_hold_the_end_of_a_run_up() -> None:
    lives_on = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    try:
        with Interrupts.caught():
            lives_on.start()  # it has the pipe of the signals open, too
        assert lives_on.is_alive()
    finally:
        lives_on.kill()
        lives_on.join()


@pytest.mark.usefixtures("fork_workers")
def test_what_a_run_started_is_ended_when_it_fails() -> None:
    trainer = ppo.RECIPE.build(small_ppo(batch=32))
    ended: list[str] = []
    trainer.register_op("shutdown", lambda: ended.append("the evaluator"))
    trainer.register_op("post_steps", fails)
    with pytest.raises(Stop), shut_down(trainer):
        trainer.train()
    assert ended == ["the evaluator"]


def fails() -> None:
    raise Stop


# ------------------------------------------------------------------------ the last checkpoint


class Stop(Exception):
    """Raised in the trainer's loop."""


def after_one_batch(trainer: Trainer, call: Callable[[], object] = lambda: None) -> Trainer:
    """The trainer after an exception that was raised after its first batch; `call()` while its workers live."""

    def fail() -> None:
        raise Stop

    trainer.register_op("post_steps", fail)
    with pytest.raises(Stop), trainers.BeforeWorkersEnd(trainer, lambda error: call()):
        trainer.train()
    return trainer


@pytest.mark.usefixtures("fork_workers")
def test_the_last_checkpoint_of_a_failed_training_is_written_while_its_workers_live(tmp_path: Path) -> None:
    trainer = ppo.RECIPE.build(small_ppo(run_dir=str(tmp_path), batch=32))
    seen: list[object] = []
    trainer.register_op("shutdown", lambda: seen.append("the stage"))
    state = CollectorState.of(trainer)
    assert state is not None

    def save() -> None:
        seen.append(save_before_the_end(trainer).path)
        seen.append([process.is_alive() for process in trainer.collector.procs])
        seen.append(set(state.state_dict()) == whole)

    whole = set(state.state_dict())
    with shut_down(trainer):
        after_one_batch(trainer, save)
        trainers.ShutdownStage.of(trainer)()
    assert seen == [tmp_path / CHECKPOINT, [True, True], True, "the stage"]


@pytest.mark.usefixtures("fork_workers")
def test_an_error_that_is_handled_around_a_training_is_not_how_it_ended() -> None:
    trainer = dqn.RECIPE.build(small_dqn(WhenConfig(), workers=1, batch=32))
    told: list[BaseException] = []
    try:
        raise Stop
    except Stop:
        with trainers.BeforeWorkersEnd(trainer, told.append):
            trainer.train()
    assert told == []


@pytest.mark.usefixtures("fork_workers")
def test_a_stopped_worker_does_not_hold_the_last_checkpoint_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsync.torchrl_plugin.ending.last_checkpoint.ANSWER_WITHIN_S", 0.2)
    trainer = ppo.RECIPE.build(small_ppo(run_dir=str(tmp_path), batch=32))
    saved: list[LastCheckpoint] = []

    def save() -> None:
        with stopped(trainer.collector.procs[1].pid):
            saved.append(save_before_the_end(trainer))

    try:
        after_one_batch(trainer, save)
        assert [each.path for each in saved] == [tmp_path / CHECKPOINT]
    finally:
        trainer.shutdown()
    again = ppo.RECIPE.build(small_ppo(batch=32))
    try:
        CollectorState.of(again)
        again.load_from_file(tmp_path / CHECKPOINT)
    finally:
        again.shutdown()


@pytest.mark.usefixtures("fork_workers")
def test_weights_that_are_not_finite_do_not_replace_a_good_checkpoint(tmp_path: Path) -> None:
    trainer = after_one_batch(
        dqn.RECIPE.build(small_dqn(WhenConfig(), run_dir=str(tmp_path), workers=1, batch=32))
    )
    try:
        assert save_before_the_end(trainer).path is not None
        good = (tmp_path / CHECKPOINT / "manifest.json").read_text()
        with torch.no_grad():
            next(iter(trainer.loss_module.parameters())).fill_(float("nan"))
        refused = save_before_the_end(trainer)
    finally:
        trainer.shutdown()
    assert (refused.path, refused.why_not) == (None, "the weights are not finite")
    assert (tmp_path / CHECKPOINT / "manifest.json").read_text() == good


@pytest.mark.usefixtures("fork_workers")
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    trainer = after_one_batch(ppo.RECIPE.build(small_ppo(run_dir=str(tmp_path), batch=32)))

    class Unwilling:
        def state_dict(self) -> dict[str, Any]:
            raise WorkerLost("no state")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    try:
        assert save_before_the_end(trainer).path is not None
        good = (tmp_path / CHECKPOINT / "manifest.json").read_text()
        trainer.register_module("unwilling", Unwilling())
        refused = save_before_the_end(trainer)
    finally:
        trainer.shutdown()
    assert refused.path is None
    assert "WorkerLost: no state" in refused.why_not
    assert (tmp_path / CHECKPOINT / "manifest.json").read_text() == good
    assert [path.name for path in tmp_path.glob(".*")] == [], "no half one is left either"


# ------------------------------------------------------------------------------------ the note


def test_the_note_is_whole_or_not_there(tmp_path: Path) -> None:
    end = Ended("failed", "2026-11-20 18:00:00", 1, 10, 2, error="what\n  where  here\n  cure   this")
    (tmp_path / "board.json").write_text("{}")
    end.write(tmp_path)
    assert ended(tmp_path) == end
    assert [path.name for path in tmp_path.iterdir()] == ["ended.json"], "the board's address goes with it"


#: A run's folder on a disk that fills up between the begin of the run and its end.
FULL = """
from contextlib import suppress
from pathlib import Path
from rlsync.runs.life.state import Ended, begin, ended

begin(Path())
with suppress(OSError), open("rest", "wb", buffering=0) as rest:
    while True:
        rest.write(bytes(4096))
with suppress(OSError):
    Path("more").write_text("more")
assert not Path("more").read_text()
for error in ("no space", "No space left on device\\n  where  here\\n  cure   free some"):
    end = Ended("failed", "2026-11-20 18:00:00", 1, 10, 2, error)
    end.write(Path())
    assert ended(Path()) == end
"""


@pytest.mark.thorough
@pytest.mark.skipif(not may_unshare("-m"), reason="needs the right to mount")
@pytest.mark.seconds
@pytest.mark.processes
def test_a_full_disk_takes_the_note_too(tmp_path: Path) -> None:
    mounted = 'mount -t tmpfs -o size=100k x "$0" && cd "$0" && exec "$1" -c "$2"'
    subprocess.run(
        ["unshare", "-m", "sh", "-c", mounted, str(tmp_path), sys.executable, FULL],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        check=True,
    )


@pytest.mark.processes
def test_the_folder_of_a_run_that_goes_on_is_not_resumed_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = multiprocessing.get_context("fork").Process(target=_begin_and_stay, args=(tmp_path,))
    learner.start()
    try:
        assert wait_until(lambda: learner_in(tmp_path) == learner.pid, 30.0)
        assert main(["check", f"run_dir={tmp_path}"]) == 2
        assert capsys.readouterr().out.startswith(f"pid {learner.pid} trains in '{tmp_path}'")
        assert status_of(tmp_path).told.startswith(f"pid {learner.pid} trains: the run is starting, or")
        assert status_of(tmp_path).healthy
    finally:
        learner.kill()
        learner.join()
    assert main(["check", f"run_dir={tmp_path}"]) == 0
    assert status_of(tmp_path).state == "killed"


def _begin_and_stay(folder: Path) -> None:
    begin(folder)
    time.sleep(600)

"""What ``FILE.py:FUNCTION`` may name, for ``rlsync explain`` and ``doctor``, and what is said of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torchrl.trainers import Trainer

from rlsync import ConfigError
from rlsync.runs.cli.main import main
from rlsync.runs.life.apart import Failed, Say, Stage, run_apart
from rlsync.runs.life.users_trainer import build, target_of
from tests.tools.parts import is_alive, wait_until
from tests.tools.running import in_three_lines

FILE = """
from tests.tools.parts import make_a2c_trainer, make_collector, make_policy

def make(steps, *, policy):
    return make_a2c_trainer(make_collector(policy))

def complete(batches=5):
    return make(batches, policy=make_policy())

def with_more():
    return complete(), "and more"

def trained():
    trainer = complete()
    trainer.train()
    return trainer

def nothing():
    pass

trainer = complete()
number = 3
"""


@pytest.fixture
def train_py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a user, in the present folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "train", None)  # put back after the test
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.py"
    file.write_text(FILE)
    return file


def built(name: str) -> tuple[Trainer, list[object]]:
    """A trainer, and what was said before."""
    said: list[object] = []
    return build(target_of(f"train.py:{name}"), 60.0, said.append), said


@pytest.mark.usefixtures("train_py")
@pytest.mark.parametrize("name", ["complete", "with_more", "trainer"])
def test_a_function_without_required_arguments_or_a_trainer_itself_will_do(name: str) -> None:
    trainer, said = built(name)
    assert isinstance(trainer, Trainer)
    assert [stage.name for stage in said] == ["running train.py", "building it"]
    assert all(stage.limit_s == 60.0 for stage in said)


@pytest.mark.usefixtures("train_py")
@pytest.mark.parametrize(
    ("name", "what", "cure"),
    [
        (
            "make",
            "make needs arguments: steps, policy",
            "train.py has complete, with_more, trained, nothing, trainer",
        ),
        ("complet", "no function or trainer 'complet' in train.py", "did you mean 'complete'?"),
        ("nothing", "nothing gives NoneType, and no trainer", "return a Trainer"),
        ("number", "number gives int, and no trainer", "return a Trainer"),
        ("trained", "the trainer is trained before it can be looked at", "before it trains"),
    ],
)
def test_what_makes_no_trainer_is_refused(name: str, what: str, cure: str) -> None:
    with pytest.raises(ConfigError) as refused:
        built(name)
    assert refused.value.what == what
    assert cure in refused.value.cure
    assert in_three_lines(refused.value)


@pytest.mark.parametrize(
    ("lines", "what", "where"),
    [
        ("x = 1\nraise ValueError('no data')\n", "ValueError: no data", "running train.py, line 2"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3", "running train.py, line 2"),
        ("complete().train()\n", "the trainer is trained before it can be looked at", "train.py, line 1"),
    ],
)
def test_a_file_that_cannot_be_run_as_a_module_is_told_of_the_main_guard(
    lines: str, what: str, where: str, train_py: Path
) -> None:
    before = FILE if "complete" in lines else ""
    train_py.write_text(before + lines)
    with pytest.raises(ConfigError) as refused:
        built("complete")
    at = where.replace("line 1", f"line {len(FILE.splitlines()) + 1}")
    assert (refused.value.what, refused.value.where.partition(", before")[0]) == (what, at)
    assert '__name__ == "__main__"' in refused.value.cure


@pytest.mark.usefixtures("train_py")
@pytest.mark.parametrize("verb", ["explain", "doctor", "doctor --trainer"])
@pytest.mark.parametrize(
    ("word", "what", "cure"),
    [
        ("nofile.py", "no file 'nofile.py'", "give FILE.py:FUNCTION"),
        ("nofile.py:make", "no file 'nofile.py'", "check the path"),
        (
            "train.py",
            "'train.py' names a file, but no function",
            "has complete, with_more, trained, nothing, trainer",
        ),
        ("train.py:", "'train.py:' names a file, but no function", "give FILE.py:FUNCTION"),
        ("train.py:a.b", "'a.b' is no name", "give FILE.py:FUNCTION"),
        ("train:complete", "'train' names no Python file", "give FILE.py:FUNCTION"),
        (".", "'.' is a folder", "give FILE.py:FUNCTION"),
        ("broken.py:make", "broken.py, line 1: ", "correct it"),
    ],
)
def test_a_word_of_another_form_is_refused_before_anything_runs(
    verb: str, word: str, what: str, cure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.py").write_text("def make(:\n")
    assert main([*verb.split(), word]) == 2
    first, where, last = capsys.readouterr().err.splitlines()
    assert first.startswith(what)
    assert where == f"  where  {word}"
    assert cure in last
    assert ("overrides" in last) == (verb == "explain" and "give FILE" in last)


def test_a_file_of_ones_own_takes_no_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train.py:make", "recipe=dqn"]) == 2
    assert capsys.readouterr().err.startswith("'train.py:make' is no override")


# ------------------------------------------------------------------------------ a process of its own


def _hang(file: Path, say: Say) -> None:
    started = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
    file.write_text(str(started.pid))
    say(Stage("waiting for ever", 0.2, "hurry up"))
    started.wait()


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.seconds
def test_work_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    said = run_apart(_hang, tmp_path / "pid")
    assert said == Failed("waiting for ever took more than 0.2 s", "hurry up")
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())), 60.0)


WITH_A_DREAMER = """
from rlsync import DreamerPlayer, SyncWeights, dreamer_map
from tests.tools.dreamer_parts import make_dreamer_collector, make_stock_trainer, make_v3


def build():
    dreamer = make_v3()
    player = DreamerPlayer(dreamer.player)
    trainer = make_stock_trainer(dreamer, make_dreamer_collector(player))
    SyncWeights(dreamer_map(dreamer.loss_module, player)).register(trainer)
    return trainer
"""


@pytest.mark.usefixtures("forked_builds")
def test_a_map_of_dreamer_map_is_explained_with_its_short_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(WITH_A_DREAMER)
    assert main(["explain", f"{file}:build", "--timeout-s", "120"]) == 0
    said = capsys.readouterr().out
    assert "policy.player.module[0] <- loss_module.model_loss.world_model.module[0]" in said
    assert "18 aliased, 0 bytes a publish" in said

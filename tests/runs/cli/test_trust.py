"""A run folder that somebody else wrote: every file of it gets an evil content, and no verb runs it."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from rlsync.core.errors import RlsyncWarning
from rlsync.runs.cli.main import main
from rlsync.runs.config import trust
from rlsync.runs.recipes.run_files import (
    BEST,
    BOARD,
    CHECKPOINT,
    DIGESTS,
    ENDED,
    RESOLVED,
    STARTED,
    STATISTICS,
)

SMALL = (
    "recipe=dqn",
    "recipe.total_frames=128",
    "collector.frames_per_batch=64",
    "collector.num_workers=1",
    "recipe.batch_size=16",
    "recipe.pace.prefill=0",
    "recipe.evaluation.every_frames=64",
    "recipe.evaluation.episodes=1",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of this user."""
    run = tmp_path_factory.mktemp("runs") / "own"
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        assert main(["train", *SMALL, f"run_dir={run}"]) == 0
    finally:
        multiprocessing.set_start_method(before, force=True)
    if not (run / BEST).is_file():  # the run was faster than its evaluation
        torch.save({"version": 1, "return_mean": 0.0, "rank": 0.0, "weights": {}}, run / BEST)
    return run


class Evil:
    """Writes a file when it is loaded from a pickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def foreign(runs: Path, tmp_path: Path) -> Path:
    """A copy of the run: the same files, the random number included."""
    return Path(shutil.copytree(runs, tmp_path / "foreign"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Is there once the evil code has run."""
    return tmp_path / "mark"


def verbs(run: Path) -> list[list[str]]:
    """Every verb that reads a run folder, with what lets it read most."""
    return [
        ["eval", str(run), "--episodes=1", "--no-video"],
        ["eval", str(run), "--episodes=1", "--no-video", "--best"],
        ["check", f"resume={run}", "recipe.total_frames=1000"],
        ["status", str(run)],
        ["plot", str(run)],
        ["export", str(run), str(run / "policy.pt2")],
    ]


def put(config: Path, key: str, value: Any) -> None:
    held = OmegaConf.load(config)
    OmegaConf.update(held, key, value, force_add=True)
    OmegaConf.save(held, config)


# ---------------------------------------------------------------------------------- each file


@pytest.mark.slow
@pytest.mark.thorough
def test_no_file_of_a_run_folder_runs_code_when_its_content_is_evil(foreign: Path, mark: Path) -> None:
    evil = pickle.dumps(Evil(mark))
    alike = {re.sub(r"[0-9a-f]{32}|\d+", "N", file.name): file for file in files(foreign)}
    assert {"prefetch.pkl", "N-N.N.pt", "tensor_N.memmap", "meta.json", RESOLVED, BEST, STARTED} < {*alike}
    play, best, check, status, plot, export = verbs(foreign)
    for file in alike.values():
        whole = file.read_bytes()
        file.write_bytes(evil)
        loaded = CHECKPOINT in file.parts or file.name == RESOLVED
        for words in (play, check, export) if loaded else (best, status, plot):
            assert main(words) in (0, 1, 2), (file, words)
            assert not mark.exists(), (file, words)
        file.write_bytes(whole)


def files(run: Path) -> list[Path]:
    return [file for file in run.rglob("*") if file.is_file() and file.parent.name != "scalars"]


def part(run: Path, name: str) -> Path:
    """A component of the run's checkpoint."""
    return next((run / CHECKPOINT / "components").glob(f"*-{name}"))


def as_non_tensor(folder: Path, data: bytes) -> None:
    """What tensordict writes for an object that is no tensor, in place of the first tensor of a state."""
    meta = json.loads((folder / "meta.json").read_text())
    key = next(key for key, value in meta.items() if isinstance(value, dict) and "shape" in value)
    meta[key] = {"type": "NonTensorData"}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / key).mkdir()
    (folder / key / "meta.json").write_text(
        json.dumps({"_type": "<class 'tensordict.tensorclass.NonTensorData'>"})
    )
    (folder / key / "other.pickle").write_bytes(data)


PICKLES: dict[str, Callable[[Path, Evil], object]] = {
    "other.pickle": lambda run, evil: as_non_tensor(part(run, "policy") / "state", pickle.dumps(evil)),
    "prefetch.pkl": lambda run, evil: (part(run, "replay_buffer") / "prefetch.pkl").write_bytes(
        pickle.dumps(evil)
    ),
    "transform.t": lambda run, evil: torch.save(evil, part(run, "replay_buffer") / "transform.t"),
    "state.pt": lambda run, evil: torch.save(
        evil, part(run, "policy") / "state.pt", _use_new_zipfile_serialization=False
    ),
    "a link": lambda run, evil: (part(run, "policy") / "state" / "other").symlink_to(run),
}


@pytest.mark.each_value
@pytest.mark.parametrize("verb", ["eval", "check"])
@pytest.mark.parametrize("name", PICKLES)
def test_a_checkpoint_with_more_than_data_is_refused_before_anything_is_loaded(
    name: str, verb: str, foreign: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    PICKLES[name](foreign, Evil(mark))
    (foreign / CHECKPOINT / DIGESTS).unlink()  # whoever alters a file can write its digest, too
    words = next(words for words in verbs(foreign) if words[0] == verb)
    assert main(words) == 2
    told = capsys.readouterr()
    assert "you did not start the run that this comes from" in told.out + told.err
    assert "add --trust" in told.out + told.err
    assert not mark.exists()


def test_with_trust_the_pickle_is_loaded(foreign: Path, mark: Path) -> None:
    PICKLES["other.pickle"](foreign, Evil(mark))
    (foreign / CHECKPOINT / DIGESTS).unlink()
    main([*verbs(foreign)[0], "--trust"])
    assert mark.exists()


def test_an_archive_is_no_foreign_checkpoint(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.make_archive(str(foreign / "packed"), "zip", foreign / CHECKPOINT)
    shutil.rmtree(foreign / CHECKPOINT)
    (foreign / "packed.zip").rename(foreign / CHECKPOINT)
    assert main(verbs(foreign)[0]) == 2
    assert "the checkpoint is an archive" in capsys.readouterr().err


def test_weights_of_the_best_version_are_not_read_by_torchs_older_way(
    foreign: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(Evil(mark), foreign / BEST, _use_new_zipfile_serialization=False)
    assert main(verbs(foreign)[1]) == 2
    assert "of a kind that rlsync does not write" in capsys.readouterr().err
    assert not mark.exists()


# --------------------------------------------------------------------------------- config.yaml


@pytest.fixture
def evil_module(foreign: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module beside a config folder that lies in the run's folder."""
    name = f"evil_{mark.parent.name}"
    (foreign / f"{name}.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    (foreign / "configs").mkdir()
    monkeypatch.setattr("sys.path", [*sys.path])
    return name


def test_a_recipe_that_lies_in_the_folder_is_not_imported_without_trust(
    evil_module: str, foreign: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(foreign / RESOLVED, "config_dir", str(foreign / "configs"))
    put(foreign / RESOLVED, "recipe.name", "mine")
    put(foreign / RESOLVED, "recipe._recipe_", f"{evil_module}:RECIPE")
    for words in verbs(foreign)[::2][:2]:
        assert main(words) == 2
        told = capsys.readouterr()
        assert f"its recipe is the code of {evil_module}:RECIPE" in told.out + told.err
        assert not mark.exists()
        assert main([*words, "--trust"]) == 2  # it makes no RECIPE
        assert mark.exists()
        mark.rmdir()
        del sys.modules[evil_module]


def test_a_recipe_beside_the_config_dir_of_the_command_line_is_the_users_own(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(foreign / RESOLVED, "recipe.name", "mine")
    put(foreign / RESOLVED, "recipe._recipe_", "nowhere_at_all:RECIPE")
    configs = tmp_path / "configs"
    (configs / "recipe").mkdir(parents=True)
    (configs / "recipe" / "mine.yaml").write_text("name: mine\n_recipe_: nowhere_at_all:RECIPE\n")
    assert main(["check", "--config-dir", str(configs), f"resume={foreign}"]) == 2
    assert "No module named 'nowhere_at_all'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("env.id", "evil_envs:CartPole-v1", "env.id=CartPole-v1"),
        ("env.make", "evil_envs:make", "env.make=null"),
        ("env.kwargs", {"reward": "evil_envs.reward"}, "env=gymnasium"),
        ("env.wrappers", ["evil_envs.Wrapper"], "env.wrappers=[]"),
        ("cluster.address", "evil.example:6379", "cluster.address=null"),
        ("logger.kwargs", {"base_url": "evil"}, "logger=csv"),
    ],
)
@pytest.mark.one_case
def test_a_foreign_key_that_names_code_is_refused_unless_trusted_or_replaced(
    key: str, value: object, instead: str, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(foreign / RESOLVED, key, value)
    words = ["check", f"resume={foreign}", "recipe.total_frames=1000"]
    refusal = f"{key} is {value}, and you did not start the run"
    assert main(words) == 2
    assert refusal in capsys.readouterr().out
    for more in ("--trust", instead):
        main([*words, more])
        assert "you did not start the run" not in capsys.readouterr().out
    status = main(verbs(foreign)[0])
    assert (status == 2) == key.startswith("env."), "rlsync eval reads the keys of env alone"
    assert (refusal in capsys.readouterr().err) == key.startswith("env.")


@pytest.mark.parametrize("text", ["${oc.env:RLSYNC_SECRET}", "\x1b]0;title\x07"])
def test_a_config_with_an_interpolation_or_an_escape_is_refused_and_printed_as_text(
    text: str, foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLSYNC_SECRET", "hidden")
    put(foreign / RESOLVED, "env.id", text)
    for words in (*verbs(foreign)[:3], *verbs(foreign)[4:]):
        assert main(words) == 2, words
    told = "".join(capsys.readouterr())
    assert ascii(text) in told.replace("\\\\", "\\")
    assert "hidden" not in told
    assert "\x1b" not in told


# -------------------------------------------------------------------------- what is told of a run


def test_escapes_in_what_a_run_wrote_of_itself_are_printed_as_text(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = json.loads((foreign / ENDED).read_text())
    (foreign / ENDED).write_text(json.dumps({**ended, "how": "\x1b[2J\u202efine"}))
    assert main(["status", str(foreign)]) == 1
    told = capsys.readouterr().out
    assert "\\x1b[2J\\u202efine" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("file", "content"),
    [
        (STATISTICS, {"frames": "many"}),
        (ENDED, {"how": "well", "at": "now", "status": 0, "frames": "many"}),
        (ENDED, []),
        (BOARD, {"address": 3, "board_id": 1}),
        (BOARD, {"address": {"pid": 1, "path": "/etc/passwd"}, "board_id": 1}),
    ],
)
def test_a_record_of_other_types_is_an_error_of_three_lines(
    file: str, content: Any, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / ENDED).unlink()
    (foreign / file).write_text(json.dumps(content))
    assert main(["status", str(foreign)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_job_that_hydra_pickled_is_not_loaded(foreign: Path, mark: Path) -> None:
    (foreign / ".hydra" / "config.pickle").write_bytes(pickle.dumps(Evil(mark)))
    assert main(["train", "--experimental-rerun", str(foreign / ".hydra" / "config.pickle")]) == 2
    assert not mark.exists()


# ---------------------------------------------------------------------------------- whose run it is


def test_the_folder_of_a_run_is_known_also_after_it_was_moved_and_a_copy_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert not trust.is_mine(run)
    trust.claim(run, trusted=False)
    assert trust.is_mine(run)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    moved = run.rename(tmp_path / "moved")
    assert trust.is_mine(moved)
    assert not trust.is_mine(copy)


def test_a_number_that_leads_out_of_the_state_folder_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "inode").write_text(f"{tmp_path.stat().st_ino} x\n")
    (tmp_path / STARTED).write_text(str(tmp_path / "inode"))
    assert not trust.is_mine(tmp_path)


def test_to_begin_a_run_among_foreign_files_does_not_make_them_the_users_own(foreign: Path) -> None:
    trust.claim(foreign, trusted=False)
    assert not trust.is_mine(foreign)
    trust.claim(foreign, trusted=True)
    assert trust.is_mine(foreign)


def test_a_state_folder_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.warns(RlsyncWarning, match="cannot be recorded as yours"):
        trust.claim(tmp_path / "run", trusted=False)

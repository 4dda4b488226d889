"""What a machine refuses, and what a user writes by mistake, is told in three lines, without a traceback."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsync.core.errors import RlsyncError, printable
from rlsync.core.path import parse
from rlsync.runs.cli.main import main
from rlsync.runs.config.reference import reference
from rlsync.runs.evaluation.play import Score
from rlsync.runs.life.output import Refused, output_read
from rlsync.runs.recipes.bounds import caught
from rlsync.runs.recipes.checks import file_errors
from rlsync.runs.recipes.registry import names
from rlsync.runs.recipes.settings import CollectorConfig, Config
from rlsync.torchrl_plugin.examine import machine
from rlsync.transport.board.writer import BoardWriter
from tests.runs.cli.test_main import REPO
from tests.tools.parts.namespaces import may_unshare
from tests.tools.running import in_three_lines

LONG = "a" * 3000


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The lines of the one error of a verb."""
    assert main(words) in (1, 2)
    output = capsys.readouterr()
    lines = (output.err or output.out).splitlines()
    assert [line[:8] for line in lines[1:3]] == ["  where ", "  cure  "], lines
    return lines


# ---------------------------------------------------------------------------------- the machine


def test_a_locale_that_lacks_a_letter_ends_no_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    ascii_only = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert main(["--version"]) == 0
    sys.stdout.write(str(Score(1, 28.0, 13.0, 15.0, 41.0, 28.0)))
    ascii_only.flush()
    assert b"return 28.0 \\xb1 13.0" in ascii_only.buffer.getvalue()


def refusing(number: int, *more: object) -> Callable[[], object]:
    def refuse() -> None:
        raise OSError(number, os.strerror(number), "/nowhere/x", None, *more)

    return refuse


@pytest.mark.parametrize(
    ("refused", "number"),
    [
        *((refusing(number), number) for number in (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ESTALE)),
        *((refusing(number), number) for number in (errno.ENFILE, errno.EMLINK, errno.ENOSYS)),
        (refusing(errno.EXDEV, "/else/x"), errno.EXDEV),
        (lambda: Path("/dev/full").write_text("x"), errno.ENOSPC),
        (lambda: Path("/dev/null/x").mkdir(), errno.ENOTDIR),
        (lambda: Path(LONG).mkdir(), errno.ENAMETOOLONG),
        (lambda: Path("/dev").mkdir(), errno.EEXIST),
        (lambda: os.open("/", os.O_WRONLY), errno.EISDIR),
    ],
)
def test_what_the_machine_refuses_is_told_in_three_lines(
    refused: Callable[[], object], number: int, tmp_path: Path
) -> None:
    def as_libraries_do() -> None:
        try:
            refused()
        except OSError as error:
            raise RuntimeError("a library's own error") from error

    with pytest.raises(Refused) as caught, output_read(tmp_path):
        as_libraries_do()
    assert caught.value.what == os.strerror(number)
    assert caught.value.cure
    if number != errno.ENOSPC:  # a write does not tell where
        assert in_three_lines(caught.value)


def test_a_user_who_may_start_no_more_threads_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught, output_read(tmp_path):
        raise RuntimeError("can't start new thread")
    assert caught.value.what == "can't start new thread"
    assert "ulimit -u" in caught.value.cure


def test_the_errors_of_programs_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), output_read(tmp_path):
        (tmp_path / "rom.bin").read_bytes()


def test_a_run_whose_folder_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="the folder of the run is gone"), output_read(tmp_path / "run"):
        (tmp_path / "run" / "checkpoint").rename(tmp_path / "other")


def test_torchs_error_of_a_full_disk_is_told_in_three_lines(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No space left on device"), output_read(tmp_path):
        raise RuntimeError("unable to write to file </x.memmap>: No space left on device (28)")


#: A container's bounds, as its processes see them.
CGROUP = "mount -t tmpfs x /sys/fs/cgroup"

#: What is done to a machine before a run, and what the error says.
MACHINES = {
    "mount -t tmpfs -o ro x .": "Read-only file system",
    "mount -t tmpfs -o size=100k x .": "No space left on device",
    "mount -t tmpfs -o size=4k x /dev/shm && echo x > /dev/shm/x": "No space left on device",
    "mkdir run && touch run/metrics": "File exists",
    "ulimit -n 32": "this process may open 32 files",
    f"{CGROUP} && echo 15 > /sys/fs/cgroup/pids.max && echo 10 > /sys/fs/cgroup/pids.current": "5 more processes",
    f"{CGROUP} && echo 40000000 > /sys/fs/cgroup/memory.max": "40,000,000 bytes of memory, and 2 workers",
}


@pytest.mark.skipif(not may_unshare("-m"), reason="needs the right to mount")
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("machine", MACHINES)
def test_a_run_on_a_machine_that_refuses_ends_in_three_lines(machine: str, tmp_path: Path) -> None:
    words = ("recipe.total_frames=512", "recipe.num_epochs=1", "collector.frames_per_batch=256")
    program = f"{machine} && cd . && exec {sys.executable} -m rlsync train run_dir=run {' '.join(words)}"
    ended = subprocess.run(
        ["unshare", "-m", "bash", "-c", f'cd "$0" && {program.replace("cd .", "cd $PWD")}', str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode in (1, 2)
    said, *where = ended.stderr.partition(MACHINES[machine])[1:]
    assert said, ended.stderr
    assert "\n  cure   " in where[0]
    assert "most recent call last" not in ended.stderr.partition("Exception ignored in")[0]


def test_a_limit_of_file_sizes_that_a_board_does_not_fit_in_is_told_before_anything_runs() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, before[1]))
    try:
        (error,) = file_errors(Config())
        (found,) = (finding for finding in machine.machine() if "board" in finding.what)
        with pytest.raises(RlsyncError, match=r"no room for .* File too large") as refused:
            BoardWriter()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found.verdict == "fail"
    for cure in (error.cure, found.cure, refused.value.cure):
        assert "ulimit -f unlimited" in cure
    assert not list(file_errors(Config()))


def test_a_limit_of_open_files_that_is_too_low_is_told_before_anything_runs() -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not list(file_errors(Config()))
    many = Config(collector=CollectorConfig(num_workers=before[0]))
    (error,) = file_errors(many)
    assert in_three_lines(error)


# ------------------------------------------------------------------------------------- the user


@pytest.mark.one_case
@pytest.mark.parametrize("word", [f"run_dir={LONG}", f"resume={LONG}", f"{LONG}=1", f"recipe={LONG}"])
def test_a_word_of_3000_characters_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "check", word)


@pytest.mark.parametrize("verb", ["eval", "status", "plot"])
def test_so_is_the_name_of_a_folder(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, verb, LONG)


def test_a_path_of_a_million_characters_is_read_in_one_pass() -> None:
    assert parse("a" * 1_000_000).leaf_prefix() == "a" * 1_000_000  # with two nested passes it takes hours


def test_a_run_of_too_many_rounds_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipe.total_frames=99999999999999999999"]) == 0
    assert "no plan: a plan of more than 2,000,000 rounds takes too long to make" in capsys.readouterr().out


@pytest.mark.parametrize(
    "word", ["recipe=dqn recipe.pace.ratio=1e300", "recipe=laser recipe.replay.ratio=1e300"]
)
def test_a_ratio_that_no_run_can_hold_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "check", *word.split())
    assert lines[0].endswith("ratio cannot be 1e+300")


@cache
def keys(*recipes: str) -> list[str]:
    """What ``rlsync ls --keys`` lists, of these recipes or of all."""
    return sorted({key.name for name in recipes or names() for key in reference([f"recipe={name}"])})


TEXTS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["null", "true", "[]", "{}", "[1,2]", "{a:1}", "''", "cpu", "ppo", "1e400", "${seed}", "???"]
    ),
    st.text(max_size=8),
)


def words(*recipes: str) -> st.SearchStrategy[list[str]]:
    """Command lines with keys of these recipes, or of all."""
    word = st.one_of(
        st.builds(
            lambda sign, key, text: f"{sign}{key}={text}",
            st.sampled_from(["", "", "", "+", "++", "~"]),
            st.deferred(lambda: st.sampled_from(keys(*recipes))),
            TEXTS,
        ),
        st.sampled_from([f"recipe={name}" for name in names()]),
        st.sampled_from(
            ["env=atari", "env=cartpole", "env=rendered", "cluster=ray", "-m", "--json", "logger=none"]
        ),
        st.text(max_size=12),
    )
    return st.lists(word, min_size=1, max_size=4)


def listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The check ends by itself, with an exit status and, if it refuses, errors of three lines."""
    with suppress(SystemExit):  # argparse
        status = main(["check", *words])
        torch.set_flush_denormal(
            False
        )  # a trainer was built here; what draws the next words needs all floats
        output = capsys.readouterr()
        assert status in (0, 1, 2)
        if status and "--json" not in words:
            errors = (output.err or output.out).split("\n\n")
            assert "\n  where  " in errors[0] or "\n  cure   " in errors[0], errors
        if status != 1 and "--json" in words and "--help" not in words:
            assert json.loads(output.out)["ok"] == (status == 0)


@pytest.mark.seconds
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=words("impala"))
def test_no_command_line_ends_in_a_traceback(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    listed(words, capsys)


@pytest.mark.parametrize("part", range(6))
@pytest.mark.slow
@pytest.mark.thorough
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(words=words())
def test_nor_does_any_of_150(part: int, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    listed(words, capsys)


def test_a_terminal_obeys_no_character_of_an_error() -> None:
    assert printable("\x1b[31mred") == r"\x1b[31mred"


def test_the_key_of_a_config_is_put_before_the_place_of_an_error() -> None:
    (error,) = caught(lambda: parse("a..b"), "sync.map.0.source")
    assert error.where == "sync.map.0.source: character 3, at '.'"

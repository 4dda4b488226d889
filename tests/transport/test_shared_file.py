"""The shared file, of either kind: its locks, who may open it, and what is left when a process is killed."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.torchrl_plugin.examine import machine
from rlsync.transport.board import BoardReader, BoardWriter
from rlsync.transport.shared_file import KIND_VARIABLE, FolderFile, SharedFile, kind
from tests.tools.parts.namespaces import may_unshare
from tests.tools.processes import open_fds
from tests.tools.programs import Program, run_program


@pytest.fixture(params=["memfd", "folder"])
def file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedFile]:
    monkeypatch.setenv(KIND_VARIABLE, request.param)
    made = SharedFile.create("rlsync-test")
    made.resize(2 * 4096)
    yield made
    made.close()


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this test's own folder files lie."""
    monkeypatch.setenv(KIND_VARIABLE, "folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"rlsync-{os.getuid()}"


def test_locks_of_two_open_files_exclude_each_other_unless_both_are_shared(file: SharedFile) -> None:
    other = SharedFile.open(file.address)
    assert type(other) is type(file)
    assert file.try_lock(3, exclusive=True)
    assert [other.try_lock(at, exclusive=False) for at in (3, 4)] == [False, True]
    assert [other.is_locked(3), file.is_locked(3), file.is_locked(4)] == [True, False, False]
    assert file.is_locked(4, exclusively=False)
    assert not file.try_lock(4, exclusive=True)
    assert file.try_lock(4, exclusive=False)
    file.unlock(3)
    assert other.try_lock(3, exclusive=True)
    other.close()
    assert not file.is_locked(3)
    file.unlock(4)
    assert not file.is_locked(4, exclusively=False)
    assert file.try_lock(4, exclusive=True)


def test_a_mapping_shows_what_is_written_and_a_discarded_range_is_zeros(file: SharedFile) -> None:
    other = SharedFile.open(file.address)
    seen = other.map(2 * 4096, 0, writable=False, populate=True)
    file.map(4096, 4096, writable=True).fill_(7)
    file.write(b"\x05", 0)
    assert (seen[0], seen[4096], other.read(1, 4096)) == (5, 7, b"\x07")
    file.discard(4096, 4096)
    other.close()
    assert (int(seen[0]), int(seen[4096:].max())) == (5, 0), "the mapping outlives the descriptor"


LOCKS_AND_WAITS = """
import pickle, sys, time
from rlsync.transport.shared_file import SharedFile
file = SharedFile.open(pickle.loads(bytes.fromhex(sys.argv[1])))
file.try_lock(0, exclusive=True), file.try_lock(1, exclusive=False)
mapped = file.map(4096, 0, writable=False)  # keeps no lock alive, nor does a child
print(flush=True)
time.sleep(300)
"""


@pytest.mark.processes
def test_locks_of_a_killed_process_are_dropped(file: SharedFile, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOCKS_AND_WAITS)
    other = Program(str(program), pickle.dumps(file.address).hex(), cwd=tmp_path, merged=True)
    try:
        assert other.stdout.readline() == "\n"
        assert file.is_locked(0)
        assert file.is_locked(1, exclusively=False)
    finally:
        other.kill()
        assert other.wait(20) == -signal.SIGKILL
        other.stdout.close()
    assert file.try_lock(0, exclusive=True)
    assert file.try_lock(1, exclusive=True)


def test_who_claims_a_byte_is_not_refused_because_somebody_looks_at_it(file: SharedFile) -> None:
    looker, over = SharedFile.open(file.address), threading.Event()

    def look() -> None:
        while not over.is_set():
            looker.is_locked(7)

    looking = threading.Thread(target=look)
    looking.start()
    for _ in range(2000):
        assert file.claim(7)
        file.unlock(7)
    over.set()
    looking.join()
    assert looker.try_lock(7, exclusive=True)
    assert not file.claim(7)
    looker.close()


@pytest.mark.processes
def test_a_forked_child_keeps_no_lock_and_removes_nothing(file: SharedFile) -> None:
    assert file.try_lock(0, exclusive=True)
    if (child := os.fork()) == 0:
        os._exit(0 if file.fd < 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    other = SharedFile.open(file.address)
    assert other.is_locked(0)
    file.unlock(0)
    assert not other.is_locked(0)
    other.close()


def test_a_folder_is_private_and_goes_with_its_owner(folders: Path) -> None:
    before = open_fds()
    file = SharedFile.create("rlsync-test")
    assert isinstance(file, FolderFile)
    (folder,) = folders.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folders, folder)] == [0o700, 0o700]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    file.close()
    assert list(folders.iterdir()) == []
    assert open_fds() == before
    with pytest.raises(BoardClosed, match="is gone"):
        SharedFile.open(file.address)


CREATES_AND_IS_KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from rlsync.transport.shared_file import SharedFile
file = SharedFile.create("rlsync-test")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.thorough
@pytest.mark.seconds
def test_the_folder_of_a_killed_owner_is_removed_when_the_next_one_is_made(folders: Path) -> None:
    living = SharedFile.create("rlsync-test")
    subprocess.run([sys.executable, "-c", CREATES_AND_IS_KILLED, str(folders.parent)], check=False)
    assert len(list(folders.iterdir())) == 2
    other = SharedFile.create("rlsync-test")
    assert {path.parent for path in folders.glob("*/rlsync-test")} == {
        Path(file.address.path).parent for file in (living, other)
    }
    living.close()
    other.close()


def test_a_folder_that_others_may_enter_is_refused(folders: Path) -> None:
    folders.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not this user's alone"):
        SharedFile.create("rlsync-test")


@pytest.mark.usefixtures("folders")
def test_a_worker_takes_the_last_version_of_a_learner_that_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.build({"policy": [LeafSpec("x", "parameter", (1,), torch.float32)]})
    board = BoardWriter()
    board.lay_out(layout)
    seen: list[float] = []
    monkeypatch.setenv(KIND_VARIABLE, "memfd")  # a worker's own setting does not matter
    reader = BoardReader(board.handle, lambda version, layout, views: bool(seen.append(float(views[0]))))
    for version in (1, 2):
        board.publish([torch.tensor([float(version)])], stamp=Stamp(1, version))
    board.close()
    assert reader.adopt() == 2, "and does not wait for a lock that nobody can give"
    assert reader.closed_by_learner
    assert seen == [2.0]
    reader.close()


@pytest.mark.processes
@pytest.mark.parametrize("missing", ["F_OFD_SETLK", "memfd_create"])
def test_a_platform_without_linux_calls_takes_folders(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KIND_VARIABLE, raising=False)
    assert kind() is SharedFile
    monkeypatch.delattr(fcntl if missing == "F_OFD_SETLK" else os, missing)
    assert kind() is FolderFile
    finding = machine.memory_file()
    assert (finding.verdict, finding.found.split(",")[0]) == ("ok", "folder")
    assert machine.lock().verdict == "ok"
    monkeypatch.setenv(KIND_VARIABLE, "memfd")
    with pytest.raises(ConfigError, match="no shared file is a 'memfd'") as refused:
        SharedFile.create("rlsync-test")
    assert len(str(refused.value).splitlines()) == 3
    assert "one of: folder" in refused.value.cure


IN_ANOTHER_CONTAINER = """
import ctypes, os, pickle, sys
from rlsync.core.errors import BoardClosed
from rlsync.transport.shared_file import SharedFile
CLONE_NEWPID = 0x20000000
assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
if os.fork() == 0:
    assert os.getpid() == 1
    SharedFile.host.cache_clear()  # the fork server may have asked
    try:
        pickle.loads(bytes.fromhex(sys.argv[1])).open()
    except BoardClosed as refused:
        print(refused, flush=True)
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.processes
@pytest.mark.skipif(not may_unshare("-p"), reason="this user may not make a namespace of processes")
def test_a_worker_in_another_container_is_refused_although_it_finds_a_process_of_that_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KIND_VARIABLE, "memfd")
    board = BoardWriter()
    handle = pickle.dumps(board.handle).hex()
    program = tmp_path / "program.py"
    program.write_text(IN_ANOTHER_CONTAINER)
    done = run_program(str(program), handle, cwd=tmp_path)
    board.close()
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == f"the board of process {os.getpid()} is memory of another host or container"
    assert "pid:[" in said[1]
    assert "RayBoardScheme keeps a board on each node" in said[2]


def test_a_board_of_before_a_restart_of_this_host_is_gone() -> None:
    board = BoardWriter()
    address = replace(board.handle.address, host="boot 0, pid:[0]")
    with pytest.raises(BoardClosed, match="another host"):
        SharedFile.open(address)
    SharedFile.open(replace(address, host="")).close()  # written by an rlsync that did not say its host
    board.close()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "tests",
    [
        "tests/transport/test_board.py tests/runs/actors/test_ring.py tests/transport/test_board_machine.py",
        "tests/laws/test_transport_contract.py tests/laws/test_canary.py tests/sync",
        "tests/torchrl_plugin/test_forkserver.py tests/torchrl_plugin/test_watch_workers.py",
        "tests/runs/actors/test_unroll_collector.py tests/runs/recipes/test_killed_and_resumed.py",
        "tests/runs/recipes/test_recipes.py tests/runs/cli/test_status.py",
    ],
)
def test_what_leans_on_shared_files_passes_with_folders_too(tests: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not thorough"]
    environment = os.environ | {KIND_VARIABLE: "folder", "TMPDIR": str(tmp_path), "PYTEST_ADDOPTS": ""}
    command += tests.split()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    # The last tests may have killed an owner: whoever makes a file next removes what is left of it.
    next_one = "from rlsync import WeightBoard; WeightBoard().close()"
    subprocess.run([sys.executable, "-c", next_one], env=environment, check=True, timeout=200)
    assert not list(tmp_path.glob("rlsync-*/*")), "folders are left"

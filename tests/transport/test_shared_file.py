"""The shared file: refused, with a cure, without its locks and on another host than its owner's."""

from __future__ import annotations

import fcntl
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlsync.cli import machine
from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board import BoardWriter
from rlsync.transport.ring.reader import RolloutRing
from rlsync.transport.shared_file import FileAddress, SharedFile
from tests.tools.parts.namespaces import may_unshare


@pytest.fixture
def _no_ofd_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")


def make_ring() -> RolloutRing:
    return RolloutRing(Layout.build({"rollout": [LeafSpec("x", "buffer", (1,), torch.float32)]}), 1, 1)


MAKERS: dict[str, Callable[[], object]] = {
    "a new file": lambda: SharedFile.create("rlsync-test"),
    "another process's file": lambda: SharedFile.open(FileAddress(os.getpid(), "/dev/null")),
    "a board": BoardWriter,
    "a ring": make_ring,
}


@pytest.mark.usefixtures("_no_ofd_locks")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_without_ofd_locks_shared_memory_is_refused_before_a_file_is_made(make: Callable[[], object]) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(ConfigError, match="no open-file-description locks") as refused:
        make()
    assert len(str(refused.value).splitlines()) == 3
    assert "Linux" in refused.value.cure
    assert set(Path("/proc/self/fd").iterdir()) <= before


@pytest.mark.usefixtures("_no_ofd_locks")
@pytest.mark.parametrize("probe", [machine.lock, machine.memory_file])
def test_doctor_says_that_the_locks_are_missing(probe: Callable[[], machine.Finding]) -> None:
    finding = probe()
    assert finding.verdict == "fail"
    assert "no open-file-description locks" in finding.found
    assert finding.cure
    assert "Linux" in finding.cure


IN_ANOTHER_CONTAINER = """
import pickle, sys
from rlsync.core.errors import BoardClosed
try:
    pickle.loads(bytes.fromhex(sys.argv[1])).open()
except BoardClosed as refused:
    print(refused)
"""


@pytest.mark.seconds
@pytest.mark.skipif(not may_unshare("-p"), reason="this user may not make a namespace of processes")
def test_a_worker_in_another_container_is_refused_although_it_finds_a_process_of_that_number() -> None:
    board = BoardWriter()
    handle = pickle.dumps(board.handle).hex()
    command = ["unshare", "-pf", sys.executable, "-c", IN_ANOTHER_CONTAINER, handle]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=True
    ).stdout.splitlines()
    board.close()
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

"""The shared file: on a platform without open-file-description locks it is refused, with a cure."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlsync import WeightBoard
from rlsync.cli.doctor import machine
from rlsync.core.errors import ConfigError
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.ring.reader import RolloutRing
from rlsync.transport.shared_file import FileAddress, SharedFile


@pytest.fixture
def _no_ofd_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(fcntl, "F_OFD_SETLK")


def make_ring() -> RolloutRing:
    return RolloutRing(Layout.build({"rollout": [LeafSpec("x", "buffer", (1,), torch.float32)]}), 1, 1)


MAKERS: dict[str, Callable[[], object]] = {
    "a new file": lambda: SharedFile.create("rlsync-test"),
    "another process's file": lambda: SharedFile.open(FileAddress(os.getpid(), "/dev/null")),
    "a board": WeightBoard,
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

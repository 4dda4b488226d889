"""A disk that is full, wherever rlsync maps a file there: an error in three lines, never a dead process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.parts.namespaces import ROOT, may_unshare

DISK_KIB = 2048

#: Runs with a small disk of its own as working directory; prints what became of each try.
PROGRAM = """
import os, sys, tempfile, warnings
from pathlib import Path

import torch
from torch import nn

from rlsync.core.errors import RlsyncError, RlsyncWarning
from rlsync.core.ledger import Stamp
from rlsync.runs.recipes.checkpoints import WholeCheckpoint, taken
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board.writer import BoardWriter
from rlsync.runs.actors.ring.reader import RolloutRing

warnings.simplefilter("error", RlsyncWarning)
tempfile.tempdir = os.getcwd()


def ballast(left_kib):
    Path("ballast").unlink(missing_ok=True)
    facts = os.statvfs(".")
    with open("ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, facts.f_bavail * facts.f_frsize - left_kib * 1024)


def tried(act):
    try:
        act()
        return "done"
    except RlsyncError as error:
        assert len(str(error).splitlines()) == 3, error
        assert "No space left on device" in error.what, error
        return "refused"


run = Path("run")
run.mkdir()


def saved():
    return WholeCheckpoint(policy=nn.Linear(100, 300)).save(run / "checkpoint")


few = Path("../few/run")
few.mkdir()
try:
    WholeCheckpoint(policy=nn.Linear(2, 2)).save(few / "checkpoint")
except RlsyncError as error:
    print("inodes", error.cure.endswith("(df -i)"))

print("checkpoint", *{tried(saved) for left in range(0, 300, 12) if ballast(left) is None})
ballast(300)
saved()
for left in range(0, 300, 12):
    ballast(left)
    tried(saved)
    assert taken(run, trusted=False) is not None

layout = Layout.build({"policy": [LeafSpec("w", "parameter", (10_000,), torch.float32)]})


def published():
    board = BoardWriter()
    try:
        board.lay_out(layout)
        board.publish([torch.ones(10_000)], stamp=Stamp(1, 1))
    finally:
        board.close()


def rolled():
    RolloutRing(layout, 3, 1).close()


for name, act in (("board", published), ("ring", rolled)):
    print(name, *sorted({tried(act) for left in range(0, 800, 44) if ballast(left) is None}))

ballast(600)
checkpoint = WholeCheckpoint(policy=nn.Linear(100, 300))
warnings.simplefilter("ignore")
checkpoint.save(run / "checkpoint")
for time in range(2):
    ballast(0)
    print(f"later-{time}", tried(lambda: checkpoint.save(run / "checkpoint")))
assert taken(run, trusted=False) is not None
"""


@pytest.mark.skipif(not may_unshare("-m"), reason="needs the right to mount")
@pytest.mark.processes
@pytest.mark.slow
def test_what_is_mapped_on_a_full_disk_is_refused_in_three_lines(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    mounted = "mkdir few && mount -t tmpfs -o nr_inodes=8 x few"
    mounted += f" && mkdir disk && mount -t tmpfs -o size={DISK_KIB}k x disk && cd disk"
    ended = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'cd "$0" && {mounted} && exec "$1" ../program.py',
            tmp_path,
            sys.executable,
        ],
        env=os.environ | {"PYTHONPATH": str(ROOT), "RLSYNC_SHARED_FILE": "folder"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr
    told = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines()}
    assert told["inodes"] == ["True"]
    assert sorted(told["checkpoint"]) == ["done", "refused"]
    assert told["board"] == told["ring"] == ["done", "refused"]
    assert told["later-0"] == told["later-1"] == ["done"], "in the room that is kept for the next one"

"""What ``rlsync doctor`` asks of this machine and its packages. Each probe tries the thing itself."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import nn

from rlsync import ConfigError, RlsyncError
from rlsync.core.ledger import Stamp
from rlsync.core.machine import affine_cores, require_checkpoints
from rlsync.tensors.device import bfloat16_instructions
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.torchrl_plugin.examine.verdicts import Finding, Grade
from rlsync.transport.board.format import DATA_AT
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.shared_file import KIND_VARIABLE, PAGE_BYTES, SharedFile

_SMALL_SHM_BYTES = 64 * 2**20  #: Docker's default size of /dev/shm; a few batches of pixels fill it
#: TorchRL's own schemes use one or two descriptors for each tensor, its batches one for each field.
_FEW_DESCRIPTORS = 1024
_NEEDED_DESCRIPTORS = 128
_CGROUP = Path("/sys/fs/cgroup")
_OPEN = "import os, sys; os.close(os.open(sys.argv[1], os.O_RDWR))"
_OPEN_TIMEOUT_S = 30.0


def machine_findings() -> list[Finding]:
    """What of the installed packages and of this machine a run depends on."""
    return [*packages(), *machine()]


def machine() -> list[Finding]:
    accelerators = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    return [
        Finding("ok", "platform", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Finding("ok", "accelerators", ", ".join(accelerators) or "none that torch can use"),
        memory_file(),
        lock(),
        torch_sharing(),
        shm_size(),
        descriptors(),
        checkpoints(Path.cwd()),
        threads(torch.get_num_threads(), usable_cores()),
        omp(os.environ.get("OMP_NUM_THREADS"), usable_cores()),
        bfloat16(),
        publish_ratio(),
    ]


def memory_file() -> Finding:
    """Whether a board's memory file can be made, written, and opened by another process."""
    subject = "shared memory of a board"
    cure = "allow memfd_create, and /proc/<pid>/fd between processes of one user (hidepid, seccomp, gVisor)"
    cure += f", or set {KIND_VARIABLE}=folder"
    try:
        file = SharedFile.create("rlsync-doctor")
        file.allocate(0, PAGE_BYTES)
        file.resize(DATA_AT)  # which a board's file has, mostly empty
        file.map(PAGE_BYTES, 0, writable=True).fill_(7)
        written = file.read(1, 0) == b"\x07"
        command = [sys.executable, "-S", "-c", _OPEN, file.address.path]
        opened = subprocess.run(
            command, capture_output=True, text=True, timeout=_OPEN_TIMEOUT_S, check=False
        )
        file.close()
    except RlsyncError as error:
        return Finding("fail", subject, error.what, error.cure)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("fail", subject, str(error), cure)
    if not written:
        return Finding("fail", subject, "data written through a mapping cannot be read back", cure)
    if opened.returncode:
        last = opened.stderr.strip().rpartition("\n")[2]
        return Finding("fail", subject, f"another process cannot open it: {last}", cure)
    return Finding("ok", subject, f"{file.KIND}, mapped, written, opened by another process")


def lock() -> Finding:
    """Whether locks of open files exclude each other, and end with their owner."""
    subject = "locks of open files"
    try:
        one = SharedFile.create("rlsync-doctor")
        other = SharedFile.open(one.address)
        one.resize(PAGE_BYTES)
        steps = [
            one.try_lock(0, exclusive=True),
            not other.try_lock(0, exclusive=False),
            other.try_lock(1, exclusive=True),
        ]
        one.unlock(0)
        steps += [other.try_lock(0, exclusive=True), one.is_locked(0)]
        other.close()
        steps.append(not one.is_locked(0))
        one.close()
    except RlsyncError as error:
        return Finding("fail", subject, error.what, error.cure)
    except OSError as error:
        return Finding(
            "fail", subject, str(error), f"{KIND_VARIABLE}=folder, or no sandbox that filters fcntl"
        )
    if not all(steps):
        cure = "report this machine's kernel with --markdown"
        return Finding("fail", subject, f"they do not work: {steps}", cure)
    return Finding("ok", subject, "exclude each other, and end with their owner")


def checkpoints(folder: Path) -> Finding:
    """Whether a run in a folder can write checkpoints, and what its file system lacks for that."""
    subject = "checkpoints in this folder"
    try:
        lacks = require_checkpoints(folder, str(folder))
    except ConfigError as error:
        return Finding("warn", subject, error.what, error.cure)
    if lacks:
        cure = "give a run_dir on a local disk: here more is written, and a power cut may cost a checkpoint"
        return Finding("warn", subject, f"its file system cannot {', '.join(lacks)}", cure)
    return Finding("ok", subject, "files and folders are synced, renamed and linked")


def torch_sharing() -> Finding:
    """Whether torch can put a tensor into shared memory. TorchRL's batches need this."""
    subject = "torch's shared memory"
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        torch.zeros(1024, device="cpu").share_memory_().fill_(1.0)
    except (OSError, RuntimeError) as error:
        cure = "give the container a /dev/shm (docker: --shm-size=1g)"
        return Finding("fail", subject, f"{strategy}: {error}", cure)
    return Finding("ok", subject, f"strategy {strategy}")


def shm_size(folder: Path = Path("/dev/shm")) -> Finding:
    """How much room /dev/shm has for TorchRL's batches. A board does not use it."""
    subject = str(folder)
    if not folder.is_dir():
        cure = "mount a tmpfs: process collectors share batches there"
        return Finding("warn", subject, "does not exist", cure)
    room = shutil.disk_usage(folder)
    size = f"{room.free // 2**20:,} MiB free of {room.total // 2**20:,} MiB"
    if min(room.total, room.free) <= _SMALL_SHM_BYTES:
        cure = (
            "docker: --shm-size=1g; batches of process collectors and TorchRL's own schemes need it"
        )
        return Finding("warn", subject, size, cure)
    return Finding("ok", subject, size)


def descriptors() -> Finding:
    subject = "file descriptors"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"at most {_limit(soft)} a process, {_limit(hard)} if raised"
    if soft == resource.RLIM_INFINITY or soft >= _FEW_DESCRIPTORS:
        return Finding("ok", subject, limits)
    verdict: Grade = "fail"
    if soft >= _NEEDED_DESCRIPTORS:
        verdict = "warn"
    number = 4096
    if hard > 0:  # not infinite
        number = min(hard, number)
    return Finding(verdict, subject, limits, f"ulimit -n {number}")


def threads(count: int, cores: int) -> Finding:
    """How many threads torch uses in this process, compared with the cores it may use."""
    counts = f"{count} in this process, {cores} usable cores"
    if count > cores:
        cure = f"torch.set_num_threads({cores}), or fewer: workers need cores, too"
        return Finding("warn", "torch threads", counts, cure)
    return Finding("ok", "torch threads", counts)


def omp(setting: str | None, cores: int) -> Finding:
    """The value of OMP_NUM_THREADS, which each worker process inherits."""
    subject = "OMP_NUM_THREADS"
    if setting is None:
        return Finding(
            "ok", subject, "not set: TorchRL's workers use one thread, other processes all cores"
        )
    if not setting.isdigit() or not 1 <= int(setting) <= cores:
        return Finding(
            "warn", subject, f"{setting}, with {cores} usable cores", f"export {subject}=1"
        )
    return Finding("ok", subject, setting)


def bfloat16() -> Finding:
    """Whether this CPU has instructions for bfloat16. Without them it is slower than float32."""
    subject = "bfloat16 on this CPU"
    if native := bfloat16_instructions():
        return Finding("ok", subject, f"fast: {', '.join(native)}")
    cure = "keep policies in float32 on the CPU: no bf16 autocast, no Source(..., dtype='bfloat16')"
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Finding("warn", subject, "emulated: no faster than float32", cure)
    slower = "not supported by oneDNN here: convolutions are about ten times slower"
    return Finding("warn", subject, slower, cure)


#: Of the publish that is measured: large enough that the copy is what counts, and over in a moment.
_LEAVES = 16
_FLOATS = 250_000
_TRIALS = 20


def publish_ratio() -> Finding:
    """How long a publish on a board holds the learner, beside one copy of the same bytes."""
    try:
        board = BoardWriter()
    except RlsyncError as error:  # which another finding tells
        return Finding("warn", "a publish", f"not measured: {error.what}", error.cure)
    network = nn.ParameterList()
    copy = nn.ParameterList()
    for _ in range(_LEAVES):
        network.append(torch.ones(_FLOATS, device="cpu"))
        copy.append(torch.zeros(_FLOATS, device="cpu"))
    leaves = Leaves(network, "a network")
    plain = Leaves(copy, "a copy")
    publishes = []
    copies = []
    with closing(board):
        board.lay_out(Layout.build({"policy": leaves.specs()}))
        for version in range(1, _TRIALS + 1):
            began = time.perf_counter()
            with torch.no_grad():
                torch._foreach_copy_(plain.tensors(), leaves.tensors())
            copied = time.perf_counter()
            board.publish(leaves.tensors(), stamp=Stamp(1, version))
            publishes.append(time.perf_counter() - copied)
            copies.append(copied - began)
    # The least of each: the first publishes get their memory from the kernel, and a busy machine delays some.
    ratio = min(publishes) / min(copies)
    megabytes = sum(leaf.payload_bytes for leaf in leaves.specs()) / 1e6
    cost = f"{megabytes:.0f} MB in {ratio:.2f} times a plain copy of the same bytes"
    return Finding("ok", "a publish", cost)


def usable_cores() -> int:
    """The cores that this process may use, by its affinity and by the quota of its container."""
    return min(affine_cores(), quota_cores(_CGROUP))


def quota_cores(cgroup: Path) -> int:
    """The CPU quota of a cgroup (version 1 or 2) in cores, rounded up; a huge number if there is none."""
    unlimited = 2**30
    try:
        if (both := cgroup / "cpu.max").is_file():
            quota, period = both.read_text().split()
        else:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
        if quota == "max" or int(quota) <= 0:
            return unlimited
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return unlimited


def _limit(limit: int) -> str:
    if limit == resource.RLIM_INFINITY:
        return "any number"
    return f"{limit:,}"


_PACKAGE = "rlsync"
_NOT_FOR_USERS = ("dev", "docs")  #: extras for people who work on rlsync itself


def packages() -> list[Finding]:
    """Python, rlsync, its requirements, and the requirements of its extras if they are installed."""
    python = SpecifierSet(importlib.metadata.metadata(_PACKAGE)["Requires-Python"])
    return [
        Finding("ok", _PACKAGE, importlib.metadata.version(_PACKAGE)),
        judged("python", platform.python_version(), python),
        *_required(),
    ]


def judged(name: str, version: str, tested: SpecifierSet) -> Finding:
    versions = version
    if tested:
        versions += f" (tested with {tested})"
    if tested.contains(Version(version).base_version, prereleases=True):
        return Finding("ok", name, versions)
    return Finding("fail", name, versions, f"pip install '{name}{tested}'")


def _required() -> Iterator[Finding]:
    names = set()
    extras = {*(importlib.metadata.metadata(_PACKAGE).get_all("Provides-Extra") or [])}
    extras.difference_update(_NOT_FOR_USERS)
    for requirement in map(Requirement, importlib.metadata.requires(_PACKAGE) or ()):
        marker = requirement.marker
        needed = marker is None or marker.evaluate({"extra": ""})
        of_users = any(marker and marker.evaluate({"extra": extra}) for extra in extras)
        if requirement.name in names or not (needed or of_users):
            continue
        names.add(requirement.name)
        nightly = _nightly(requirement)
        if nightly is not None:
            yield nightly
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if needed:
                cure = f"pip install '{requirement.name}{requirement.specifier}'"
                yield Finding("fail", requirement.name, "not installed", cure)
        else:
            yield judged(requirement.name, version, requirement.specifier)


def _nightly(requirement: Requirement) -> Finding | None:
    """What is said of a build of the night, which has the files of a requirement, but another name."""
    name = f"{requirement.name}-nightly"
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    wanted = f"{requirement.name}{requirement.specifier}"
    cure = f"pip uninstall {name}, then pip install --force-reinstall '{wanted}'"
    return Finding("warn", name, f"{version}, in the place of {wanted} (tested)", cure)

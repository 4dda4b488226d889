"""Every test: one thread, a fixed seed, no process left behind."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from importlib import import_module, reload
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

# Before numpy and torch: spawned workers inherit it, and one thread each is all a test machine has to give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A question whether there is CUDA, as markers of tests ask, keeps forked processes from using it otherwise.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import pytest
import yaml

from tests.tools.processes import child_pids, kill, open_fds, shared_mappings, wait_until, what_is
from tests.tools.programs import HAS_RUNS, PRELOAD
from tests.tools.tiers import mark_thorough

LEAVE_TIMEOUT_S = 5.0

# A shell makes its background jobs ignore Ctrl-C, and programs inherit that: what a test interrupts would
# run on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup does the same to the signal of a closed terminal, which a run then leaves ignored, as it should.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

#: Tests that use one of these start processes.
PROCESS_FIXTURES = {
    "fork_workers",
    "forked_builds",
    "spawn_workers",
    "start",
    "runs",
    "stopped",
    "compared",
    "installed",
}
#: Tests that name one of these start processes, too.
PROCESS_STARTERS = {
    "on_a_board",
    "make_workers",
    "collecting",
    "subprocess",
    "Run",
    "finished",
    "run_program",
    "fresh_python",
}

#: Read by `make types`, not run; run by tests/laws/test_on_ray.py, where Ray is installed; and what prints
#: whenever it is imported.
collect_ignore = ["project/typing_cases", "tools/ray_cases.py", "tools/parts/loud.py"]


# ------------------------------------------------------------------------------ how long a run takes

#: When this process began to run tests.
_BEGAN = time.monotonic()
_LEFT = "left to make test-all"


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "begin no test after so many seconds, and name those that are left"
    parser.addoption("--budget-s", type=float, default=None, help=told)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    budget_s = item.config.getoption("budget_s")
    if budget_s is not None and time.monotonic() - _BEGAN > budget_s:
        pytest.skip(_LEFT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    left = Counter(test.nodeid.partition("::")[0] for test in skipped if _LEFT in str(test.longrepr))
    if left:
        terminalreporter.section(f"{left.total()} tests {_LEFT}: the budget is used up")
        for file, count in left.items():
            terminalreporter.line(f"{count:4} of {file}")


# ------------------------------------------------------------------- which tests start processes


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out, and most tests that start processes: it need not be written down."""
    mark_thorough(items)
    # The two longest tests begin first: the others run beside them, and nobody waits for them at the end.
    items.sort(key=lambda item: item.path.name != "test_on_ray.py")
    for item in items:
        match item:
            case pytest.Function():
                names = PROCESS_STARTERS & set(item.function.__code__.co_names)
                starts = bool(names or PROCESS_FIXTURES & set(item.fixturenames))
            case pytest.DoctestItem():
                starts = any("start_method=" in example.source for example in item.dtest.examples)
            case _:
                starts = False
        if starts:
            item.add_marker(pytest.mark.processes)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what puts runs on the plug where what runs need is not installed: ``make test-plug``."""
    if HAS_RUNS or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    return "rlsync.runs" in text or "tests.runs" in text or None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the fork server of the tests, if a test needs it.

    Collectors that leave the start method to Python start their workers from it, in milliseconds; a spawned
    worker imports torch and TorchRL by itself for four seconds of processor time.
    """
    if not session.items:  # xdist hands them out to others
        return
    # TorchRL and gymnasium import it for MuJoCo, and it starts a process to find its library: not in a test.
    with suppress(ImportError):
        import_module("glfw")
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    multiprocessing.set_start_method("forkserver", force=True)
    _parse_files_once()
    # Cases on Ray start processes in Ray's own.
    starts = not all(is_quick(item) or item.path.name.endswith("_cases.py") for item in session.items)
    if starts:
        loaded = list(map(import_module, PRELOAD))
    gc.collect()
    gc.freeze()  # what is loaded stays: else a fifth of the processor time goes into looking at it again
    if starts:
        resource_tracker.ensure_running()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("multiprocessing.util.spawnv_passfds", partial(_fork_server, patch, loaded[0].load))
            forkserver.ensure_running()


def _fork_server(
    patch: pytest.MonkeyPatch, load: Callable[[], None], _: bytes, args: list[str], passed: Sequence[int]
) -> int:
    """Fork the fork server, with what this process has loaded: a new one would load it for eight seconds.

    A later one, in place of one that was killed, is new.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        patch.undo()
        for descriptor in Path("/proc/self/fd").iterdir():  # else xdist waits for it, too, when we are gone
            number = int(descriptor.name)
            if number > 2 and number not in passed and descriptor.exists() and descriptor.is_fifo():
                os.close(number)
        forkserver._forkserver.__init__()  # it holds the lock under which we start it
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        sys.orig_argv[:] = args
        _warn_as_python_does()
        load()
        exec(args[-1])  # its loop
    finally:
        os._exit(0)


def _warn_as_python_does() -> None:
    """Here pytest hears of warnings, and some are errors."""
    reload(warnings)
    warnings.resetwarnings()
    for kind in (ResourceWarning, ImportWarning, PendingDeprecationWarning, DeprecationWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def is_quick(item: pytest.Item) -> bool:
    """Whether it must do without processes; ``make test-quick`` runs it, unless it takes seconds."""
    return item.get_closest_marker("processes") is None and item.get_closest_marker("slow") is None


class _Starts:
    """Refuses to start a process in a test that ``make test-quick`` runs."""

    def __init__(self) -> None:
        self.refused_in: str | None = None
        sys.addaudithook(self._hear)  # os.fork, subprocess
        start = BaseProcess.start

        def heard_start(process: BaseProcess) -> None:  # a fork server forks for us, unheard
            self._hear("multiprocessing", ())
            start(process)

        BaseProcess.start = heard_start  # type: ignore[method-assign]

    def _hear(self, event: str, _: tuple[object, ...]) -> None:
        if self.refused_in and event in ("os.fork", "subprocess.Popen", "multiprocessing"):
            pytest.fail(f"{self.refused_in} starts a process: mark it with pytest.mark.processes")


_STARTS = _Starts()


@contextmanager
def may_start_processes() -> Iterator[None]:
    """For a fixture of a whole module that quick tests share with others."""
    refused, _STARTS.refused_in = _STARTS.refused_in, None
    try:
        yield
    finally:
        _STARTS.refused_in = refused


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _STARTS.refused_in = item.nodeid if is_quick(item) else None
    try:
        return (yield)
    finally:
        _STARTS.refused_in = None


# --------------------------------------------------------------------------------- every test


@pytest.fixture(autouse=True, scope="session")
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of tests are not recorded beside those of the user."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def _parse_files_once() -> None:
    """A quarter of each composition is PyYAML, which reads the same forty files again; also in programs."""
    parse, parsed = yaml.load, dict[tuple[str, str], Any]()

    def load(stream: str | TextIO, Loader: type[yaml.SafeLoader]) -> Any:  # noqa: N803
        text = stream if isinstance(stream, str) else stream.read()
        if (text, Loader.__name__) not in parsed:
            if not isinstance(stream, str):
                stream.seek(0)  # an error names the file
            parsed[text, Loader.__name__] = parse(stream, Loader)
        return deepcopy(parsed[text, Loader.__name__])

    yaml.load = load


@pytest.fixture(autouse=True)
def _same_start_for_every_test() -> None:
    import torch  # not above: the process that hands tests out to others runs none, and all wait for it

    torch.set_num_threads(1)  # a TorchRL collector changes it when it shuts down
    torch.set_flush_denormal(False)  # rlsync's command line changes it
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch's own also writes down the stack, once for each device
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Hydra sets up logging for the process it runs in, which later tests would hear."""
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)
        if isinstance(handler, logging.FileHandler):
            handler.close()


@pytest.fixture(autouse=True)
def _no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves child processes fails; they are killed for the sake of the next one.

    A quick test cannot start any. What is seen to begin beside it belongs to the fork server, which is still
    starting when the first tests run, or to an earlier test, which has failed for it.
    """
    if is_quick(request.node):
        yield
        return
    before = child_pids()
    yield
    left = _left_after(before)
    told = [what_is(pid) for pid in sorted(left)]
    for pid in left:
        kill(pid)
    multiprocessing.active_children()  # reaps them
    assert not left, f"the test left child processes behind (killed now): {'; '.join(told)}"


def _left_after(before: set[int]) -> set[int]:
    def left() -> set[int]:
        multiprocessing.active_children()
        return child_pids() - before

    if left():
        gc.collect()  # a collector without a shutdown() ends its workers when it is collected
        wait_until(lambda: not left(), LEAVE_TIMEOUT_S)
    return left()


@pytest.fixture
def same_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what distributed collectors write to the environment."""
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def fork_workers() -> Iterator[None]:
    """Collectors built in the test fork their workers from this process.

    Not for tests whose process has threads of torch.distributed: a child that inherits their locks can hang.
    """
    gc.collect()
    gc.freeze()  # else a worker collects what earlier tests left, also objects whose threads it does not have
    with start_method("fork"):
        yield


@pytest.fixture
def forked_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers that a verb builds apart are built in a child of the fork server, not in a new interpreter."""
    server = multiprocessing.get_context("forkserver")
    monkeypatch.setattr("rlsync.runs.life.apart.multiprocessing.get_context", lambda method: server)


@pytest.fixture
def spawn_workers() -> Iterator[None]:
    """Collectors built in the test spawn their workers, as TorchRL does unless told otherwise."""
    with start_method("spawn"):
        yield


@contextmanager
def start_method(method: str) -> Iterator[None]:
    """How processes are started in the block where nobody says how."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


class LeakCheck:
    """The descriptors and shared memory this process holds, against a baseline.

    Only this process counts: /dev/shm itself is shared with everybody else on the machine.
    """

    def __init__(self) -> None:
        resource_tracker.ensure_running()  # else its pipe would count against the first test
        self.rebase()

    def rebase(self) -> None:
        """Take the present state as the baseline: call it after a first, warming round."""
        self._baseline = self._held()

    def leaks(self) -> dict[str, int]:
        """What is held now and was not, with how many of each."""
        return dict(self._held() - self._baseline)

    def _held(self) -> Counter[str]:
        gc.collect()
        return Counter(map(_kind, open_fds())) + Counter(map(_kind, shared_mappings()))


def _kind(name: str) -> str:
    """`pipe:[123]`, `/dev/shm/torch_1_2`: the numbers are new each time, only how many counts."""
    if name.startswith("/dev/shm/"):
        return "/dev/shm"
    return name.partition(":[")[0]


@pytest.fixture
def no_leaks() -> Iterator[LeakCheck]:
    """Fails a test that leaves descriptors or shared memory; `rebase()` after a warming round."""
    check = LeakCheck()
    yield check
    wait_until(lambda: not check.leaks(), LEAVE_TIMEOUT_S, poll_s=0.1)
    assert not check.leaks(), f"the test left behind: {check.leaks()}"

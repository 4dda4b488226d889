"""Python programs that start in milliseconds: forked from a process that has their imports loaded.

``python -m rlsync`` imports torch and TorchRL for about four seconds of processor time. The tests start it
dozens of times, and most of them ask what it does after that. A :class:`Program` runs the same module as the
main module of a process of its own, with its own arguments, folder, environment and output, but the process
is forked from the fork server of the tests. Tests about starting itself (imports, the installed command,
Ctrl-C with a fork server) use :mod:`subprocess`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import context
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from threading import Thread

#: For a program that ends by itself. A loaded machine is slow: only a hang gets there. A test may take 300 s.
ENDS_WITHIN_S = 280.0

#: Whether what the runs need is installed; the plug does without, and so do its tests.
HAS_RUNS = find_spec("hydra") is not None

#: What the fork server of the tests has loaded beside TorchRL: it forks workers and programs.
PRELOAD = [
    "rlsync.torchrl_plugin.forkserver_preload",
    "gymnasium.envs.classic_control",
    "tests.tools.parts",
]
if HAS_RUNS:
    PRELOAD += [
        "rlsync.runs.cli.main",
        "rlsync.runs.cli.train",
        "rlsync.runs.config",
        "rlsync.runs.recipes.impala",
        "rlsync.runs.recipes.ppo",
        "rlsync.runs.recipes.dqn",
        "rlsync.runs.actors.worker",
        "tests.tools.warm",
    ]


@dataclass(frozen=True)
class _Main:
    """What a program is given."""

    module: str
    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    start_method: str | None


class Program:
    """``python -m module arguments...`` in its own process group, with stdout and stderr on pipes.

    Its worker processes are forked, also where it asks for a fork server: one of its own would load TorchRL
    once more. It has the part of the interface of :class:`subprocess.Popen` that tests use.

    Args:
        module: what is run as the main module; or the path of a file, if it ends in ``.py``.
        arguments: of the command line.
        cwd: the folder to run in.
        env: the whole environment; by default that of this process.
        start_method: how the program starts processes where it leaves the choice to Python. With another one
            than ``fork`` it has the fork server that it asks for.
        merged: whether stderr goes to the pipe of stdout.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        start_method: str | None = "fork",
        merged: bool = False,
    ) -> None:
        server = multiprocessing.get_context("forkserver")
        ours_out, theirs_out = Pipe(duplex=False)
        ours_err, theirs_err = (None, theirs_out) if merged else Pipe(duplex=False)
        main = _Main(module, arguments, str(cwd), dict(env or os.environ), start_method)
        self._process = server.Process(target=_run, args=(main, theirs_out, theirs_err))
        self._process.start()
        theirs_out.close()
        theirs_err.close()
        self.stdout = _text(ours_out)
        self.stderr = None if ours_err is None else _text(ours_err)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired("python -m", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def run_program(
    module: str,
    *arguments: str,
    cwd: Path,
    timeout_s: float = ENDS_WITHIN_S,
    env: Mapping[str, str] | None = None,
    start_method: str | None = "fork",
) -> CompletedProcess[str]:
    """Run a program to its end, as :func:`subprocess.run` with ``capture_output`` and ``text``."""
    program = Program(module, *arguments, cwd=cwd, env=env, start_method=start_method)
    told: dict[str, str] = {}
    streams = {"out": program.stdout, "err": program.stderr}
    readers = [
        Thread(target=lambda key=key, stream=stream: told.update({key: stream.read()}), daemon=True)
        for key, stream in streams.items()
    ]
    try:
        for reader in readers:
            reader.start()
        status = program.wait(timeout_s)
    finally:
        program.kill()
        for reader in readers:
            reader.join(5)
        for stream in streams.values():
            stream.close()
    return CompletedProcess([module, *arguments], status, told.get("out", ""), told.get("err", ""))


def fresh_python(*arguments: str, cwd: Path | None = None, check: bool = True) -> CompletedProcess[str]:
    """Run a new interpreter to its end, for tests about what a program imports or how it starts."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=check
    )


def installed_from(source: Path, target: Path) -> Path:
    """Install a package as pip does, offline, into a folder for ``PYTHONPATH``; returns the folder."""
    pip = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--no-index")
    fresh_python(*pip, "--no-build-isolation", "--target", str(target), str(source))
    return target


def as_installed(folder: Path, name: str, entry_points: str) -> None:
    """Put the metadata of an installed package with entry points into a folder of ``sys.path``."""
    about = folder / f"{name}-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(entry_points)


def _text(connection: Connection):
    stream = os.fdopen(os.dup(connection.fileno()), "r", encoding="utf-8", errors="replace")
    connection.close()
    return stream


# ------------------------------------------------------------------------------ in the process


def _run(main: _Main, out: Connection, err: Connection) -> None:
    """Become the main program: what the process was before does not show."""
    os.setsid()
    os.chdir(main.folder)
    os.environ.clear()
    os.environ.update(main.environment)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out.fileno(), 1), (err.fileno(), 2)):
        os.dup2(source, target)
    out.close()
    err.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    sys.path[:0] = ["", *filter(None, main.environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [main.module, *main.arguments]
    multiprocessing.set_start_method(main.start_method, force=True)
    if main.start_method == "fork":
        from rlsync.sync import families  # loaded before, in the fork server

        context._concrete_contexts["forkserver"] = context._concrete_contexts["fork"]  # type: ignore[assignment]
        families._Process = context.ForkProcess  # type: ignore[assignment, misc]
    if main.module.startswith("tests."):
        sys.modules.pop(main.module, None)  # a test may have imported it
    with _ended_as_python_does():
        if main.module.endswith(".py"):
            runpy.run_path(main.module, run_name="__main__")
        else:
            runpy.run_module(main.module, run_name="__main__", alter_sys=True)


@contextmanager
def _ended_as_python_does() -> Iterator[None]:
    """A main module's exit: what it raises is printed, exit functions run, output is flushed."""
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        # A process of multiprocessing runs multiprocessing's own exit functions, after this.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()

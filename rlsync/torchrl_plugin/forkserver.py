"""Worker processes that start in milliseconds: forked from a server that has TorchRL loaded."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from multiprocessing import forkserver

import psutil

from rlsync.core.errors import ConfigError
from rlsync.sync.families import let_forks_use_cuda

#: what the server loads; nothing else imports it
PRELOAD = "rlsync.torchrl_plugin.forkserver_preload"


class Forkserver:
    """Starts the worker processes of collectors in milliseconds, from a server that has TorchRL loaded.

    A spawned worker imports torch and TorchRL by itself, for seconds of processor time each. This class
    starts a server process that imports them once. Workers of collectors that are constructed inside the
    ``with`` block are forked from the server::

        with rlsync.Forkserver():
            collector = MultiSyncCollector(...)

    The constructor returns at once, and the server loads TorchRL in the background. So a program that makes
    the object first, and then imports and builds its own parts, hardly waits for its workers.

    What a worker gets is what a spawned worker gets: it is forked from the server, not from this process, so
    it has no thread, lock, CUDA context or tensor of the learner. As with ``spawn``, the program needs
    ``if __name__ == "__main__":``, each worker imports the main module, and what the collector is given must
    be picklable. The random states of Python, numpy and torch are drawn anew in each worker. The server ends
    when this process and all workers have ended, however they ended.

    What differs from ``spawn``:

    - Environment variables that are set after the server was started do not reach the workers of TorchRL's
      collectors. rlsync's own workers have those of their start.
    - A worker is sent at most about 250 file descriptors. Tensors in what the collector is given need one
      each, but a policy whose weights come from a :class:`BoardScheme` needs none.
    - Where NVML does not work, importing TorchRL asks CUDA for its devices, and torch then refuses CUDA in
      forked processes; on several GPUs dm_control renders on one device for all workers.

    TorchRL's own start method is used instead, with a RuntimeWarning, when the platform has no fork server,
    when a fork server without TorchRL runs in this process already, or with torch below 2.8. A program that
    chose ``fork`` keeps it, without a warning. Python has one fork server a process; every object of this
    class uses it. Inside the block the start method of the whole process is ``forkserver``: do not start
    other processes there from another thread.

    Args:
        preload: names of further modules that the server loads, for example the one that defines the
            environments. They must start no thread and must not use CUDA.

    Raises:
        ConfigError: a module of ``preload`` cannot be found.

    Source: :mod:`multiprocessing`, start method "forkserver".

    Example:
        >>> server = Forkserver(preload=["gymnasium"])
        >>> with server:
        ...     pass  # construct collectors here
    """

    def __init__(self, preload: Sequence[str] = ()) -> None:
        if isinstance(preload, str):
            preload = [preload]
        self._preload = [PRELOAD, *(name for name in preload if name != PRELOAD)]
        for name in self._preload:
            _check_found(name)
        self._before: list[str | None] = []
        #: Whether workers are started from the server; if not, TorchRL's own start method is used.
        self.used = _starts_instead_of_spawn() and self._start()

    def __enter__(self) -> Forkserver:
        import torchrl  # noqa: F401  (sets its start method, "spawn", when it is imported first)

        self._before.append(multiprocessing.get_start_method(allow_none=True))
        if self.used and _starts_instead_of_spawn() and self._start():
            multiprocessing.set_start_method("forkserver", force=True)
        return self

    def __exit__(self, *raised: object) -> None:
        multiprocessing.set_start_method(self._before.pop(), force=True)

    def _start(self) -> bool:
        """Start the server unless it runs; whether it can be used."""
        why = _reason_against() or _ensure_running(self._preload)
        if why is not None:
            message = (
                f"workers are started by TorchRL's own start method, which takes longer: {why}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=3)
        return why is None


def _ensure_running(preload: list[str]) -> str | None:
    """Start this process's fork server unless it runs; what kept it from starting, if anything."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_forkserver_preload(preload)
    let_forks_use_cuda()
    try:
        forkserver.ensure_running()
    except OSError as error:
        return f"the fork server cannot be started: {error}"
    finally:
        # Python asks for the start method meanwhile, and so settles on one if none was chosen yet. A TorchRL
        # that is imported after that would take "fork" for the program's choice.
        multiprocessing.set_start_method(before, force=True)
    return None


def _check_found(name: str) -> None:
    # Python's server ignores a module that it cannot import.
    try:
        exists = find_spec(name) is not None
    except ModuleNotFoundError:
        exists = False
    if not exists:
        cure = "give names of modules as an import statement has them"
        raise ConfigError(f"there is no module {name!r}", "Forkserver(preload=...)", cure)


def _starts_instead_of_spawn() -> bool:
    """Whether the program left the start method to TorchRL: one that chose ``fork`` keeps it."""
    return multiprocessing.get_start_method(allow_none=True) != "fork"


def _reason_against() -> str | None:
    """What speaks against the server in this process, if anything."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "this platform has no fork server"
    running = _command_of_the_server()
    if running and PRELOAD not in running:
        return "a fork server runs in this process already, without TorchRL; make a Forkserver before it"
    return None


def _command_of_the_server() -> str:
    """The fork server's command line, by a private name of Python 3.4 to 3.14; empty if none runs."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return ""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:  # it has ended; a new one will be started
        return ""

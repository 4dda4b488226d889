"""What the fork server loads for all workers; see :mod:`rlsync.torchrl_plugin.forkserver`.

Only the server imports this module. Python can have a fork server import modules but not call a function,
so, unlike every other module of rlsync, this one acts when it is imported, and only in a fork server.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import warnings
from importlib import import_module

#: What a worker of a collector on a board imports until its first frame (torch._dynamo: for a check whether
#: it runs compiled). None of them starts a thread when it is imported.
MODULES = (
    "torch",
    "tensordict",
    "torchrl.collectors",
    "torchrl.envs",
    "rlsync.torchrl_plugin.scheme",
    "torch._dynamo",
    "gymnasium",
)


def load() -> None:
    """Load what workers need, and see to it that they start as spawned ones do."""
    learner = os.getppid()
    # Ctrl-C is the learner's; later Python does this
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the learner has shown them
        for name in MODULES:
            if os.getppid() != learner:
                os._exit(0)  # nobody will ask for a worker
            import_module(name)
    signal.signal(signal.SIGINT, before)
    server = os.getpid()
    os.register_at_fork(after_in_child=lambda: _begin(server))
    # workers share this memory with the server as long as their collector does not touch it
    gc.freeze()


def _begin(server: int) -> None:
    """In a new worker: undo what fork shares and spawn does not."""
    if os.getppid() != server:
        return  # started by a worker
    import numpy
    import torch

    # Python draws the state of its own generator anew. These two would be the same in all workers, which
    # would then explore alike; spawned workers have states of their own.
    numpy.random.seed()
    torch.default_generator.seed()
    multiprocessing.set_forkserver_preload([__name__])  # for a ParallelEnv in this worker


# Whether this process was started as a fork server, by multiprocessing.forkserver.
if any("from multiprocessing.forkserver import main" in word for word in sys.orig_argv):
    load()

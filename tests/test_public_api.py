"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import rlsync

PUBLIC = [
    "AdoptionTimeout",
    "AmbiguousSource",
    "BoardClosed",
    "BoardScheme",
    "BoundStaleness",
    "ConfigError",
    "DestinationNotFound",
    "Every",
    "LagAbove",
    "LayoutMismatch",
    "LogPolicyLag",
    "NothingToSync",
    "PathSyntaxError",
    "PublishError",
    "Receipt",
    "RlsyncError",
    "Source",
    "SourceNotFound",
    "StalenessExceeded",
    "SyncMapError",
    "SyncPlan",
    "SyncWeights",
    "UpdateWeights",
    "VerifySync",
    "WatchWorkers",
    "WeightBoard",
    "WorkerLost",
    "__version__",
    "resolve",
]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def test_the_public_names_are_these_and_no_others():
    assert sorted(rlsync.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(rlsync, name) is not None


def test_every_error_belongs_to_one_tree():
    for name in PUBLIC:
        public = getattr(rlsync, name)
        if isinstance(public, type) and issubclass(public, BaseException):
            assert issubclass(public, rlsync.RlsyncError), name


def test_importing_loads_neither_rich_nor_hydra_nor_matplotlib_nor_ray():
    heavy = run(
        "import rlsync, sys\n"
        "print([m for m in ('rich', 'hydra', 'omegaconf', 'matplotlib', 'ray') if m in sys.modules])"
    )
    assert heavy.strip() == "[]"


def test_importing_registers_nothing_and_a_call_registers_the_backend():
    told = run(
        "import rlsync\n"
        "from rlsync.torchrl_plugin.scheme import register_backend\n"
        "from torchrl.weight_update import WeightSyncScheme\n"
        "try:\n"
        "    WeightSyncScheme.from_backend('board')\n"
        "except ValueError:\n"
        "    print('unknown')\n"
        "register_backend()\n"
        "print(type(WeightSyncScheme.from_backend('board', adopt='copy')).__name__)\n"
    )
    assert told.split() == ["unknown", "BoardScheme"]


def test_core_runs_on_the_standard_library_alone():
    told = run(
        "import sys, types\n"
        "package = types.ModuleType('rlsync'); package.__path__ = [sys.argv[0] or 'rlsync']\n"
        "import importlib.util, pathlib\n"
        "root = pathlib.Path(importlib.util.find_spec('rlsync').origin).parent\n"
        "package.__path__ = [str(root)]; sys.modules['rlsync'] = package\n"
        "import rlsync.core.path, rlsync.core.plan, rlsync.core.trigger, rlsync.core.errors\n"
        "print('torch' in sys.modules)\n"
    )
    assert told.strip() == "False"

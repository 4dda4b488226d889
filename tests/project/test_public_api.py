"""The public names, and what importing them costs."""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import rlsync
import rlsync.seams
from rlsync.core import errors
from tests.tools.programs import fresh_python, run_program

ROOT = Path(__file__).parents[2]

PUBLIC = [
    "AdoptionTimeout",
    "AmbiguousSource",
    "BatchStatistics",
    "BoardClosed",
    "BoardScheme",
    "BoundStaleness",
    "ConfigError",
    "DestinationNotFound",
    "DoesNotAct",
    "DreamerPlayer",
    "DropoutDiffers",
    "Every",
    "Forkserver",
    "IdleLeaves",
    "LayoutMismatch",
    "LogPolicyLag",
    "LogReceipts",
    "NoBoard",
    "NodeBoardScheme",
    "NotFinite",
    "NothingChanged",
    "NothingLearns",
    "NothingPublished",
    "NothingToSync",
    "OlderWeightsAct",
    "PathSyntaxError",
    "PublishError",
    "RayBoardScheme",
    "Receipt",
    "RecordSchedule",
    "Rerun",
    "RlsyncError",
    "RlsyncWarning",
    "SendShards",
    "Source",
    "SourceNotFound",
    "StalenessExceeded",
    "StepsAhead",
    "Stop",
    "SyncMapError",
    "SyncPlan",
    "SyncWeights",
    "UpdateWeights",
    "VerifySync",
    "WatchWorkers",
    "WeightBoard",
    "WorkerLost",
    "__version__",
    "dreamer_map",
    "load_policy",
    "resolve",
]


def run(code: str) -> str:
    done = fresh_python("-c", code)
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


def test_each_public_name_is_loaded_from_where_a_type_checker_sees_it():
    stub = ast.parse(Path(rlsync.__file__).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    typed = {name.asname: node.module for node in imports for name in node.names}
    assert set(typed) == set(rlsync.__all__) - {"__version__"}
    for name, module in typed.items():
        assert getattr(rlsync, name) is getattr(importlib.import_module(module), name), name
        assert rlsync.__dict__[name] is getattr(rlsync, name), "kept after its first use"


def test_every_error_is_public():
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert {name for name in kinds if issubclass(vars(errors)[name], Exception)} <= set(rlsync.__all__)


def test_a_star_import_gives_every_public_name():
    found: dict[str, object] = {}
    exec("from rlsync import *", found)
    assert set(rlsync.__all__) <= set(found)


@pytest.mark.processes
def test_dir_names_what_is_not_loaded_yet():
    assert run(
        "import rlsync, sys; print(set(rlsync.__all__) <= set(dir(rlsync)), 'torch' in sys.modules)"
    ) == ("True False\n")


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rlsync' has no attribute 'SyncWeight'"):
        _ = rlsync.SyncWeight
    with pytest.raises(ImportError, match="cannot import name 'SyncWeight'"):
        exec("from rlsync import SyncWeight")


@pytest.mark.processes
@pytest.mark.thorough
def test_no_public_name_loads_rich_or_hydra_or_matplotlib_and_rlsync_alone_does_not_load_ray():
    heavy = run(
        "import rlsync\nimport sys\n"
        "print('ray' in sys.modules)\n"
        "from rlsync import *\n"  # which imports torchrl.collectors, and this loads ray where it is installed
        "print([m for m in ('rich', 'hydra', 'omegaconf', 'matplotlib') if m in sys.modules])"
    )
    assert heavy.split() == ["False", "[]"]


@pytest.mark.processes
def test_importing_registers_nothing_and_a_call_registers_the_backend(tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(
        "import rlsync.runs.recipes.ppo\n"
        "from rlsync.torchrl_plugin.scheme import register_backend\n"
        "from torchrl.weight_update import WeightSyncScheme\n"
        "try:\n"
        "    WeightSyncScheme.from_backend('board')\n"
        "except ValueError:\n"
        "    print('unknown')\n"
        "register_backend()\n"
        "print(type(WeightSyncScheme.from_backend('board', adopt='copy')).__name__)\n"
    )
    assert run_program("it.py", cwd=tmp_path).stdout.split() == ["unknown", "BoardScheme"]


def seams() -> dict[str, str]:
    """Each row of the page about the seams: a name, and what it says of it."""
    page = (ROOT / "docs" / "seams.md").read_text()
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE))


def taken_from_seams() -> dict[str, set[str]]:
    """What runs take: names of the seams, each with the names that are taken from it where it is a module."""
    taken: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "rlsync" / "runs").rglob("*.py"):
        tree = ast.parse(file.read_text())
        names = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "rlsync.seams"
            for alias in node.names
        }
        for name in names:
            taken[name] |= set()
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(value=ast.Name(id=str(name)), attr=str(member)) if name in names:
                    taken[name].add(member)
    return taken


def test_every_seam_is_taken_by_the_runs_and_stands_on_its_page() -> None:
    rows = seams()
    assert set(rows) == set(rlsync.seams.__all__) == set(taken_from_seams())
    for name, members in taken_from_seams().items():
        if isinstance(getattr(rlsync.seams, name), ModuleType):
            listed = re.findall(r"`(\w+)`", rows[name].rpartition(": ")[2])
            assert members <= set(listed), name


def test_a_seam_is_the_thing_itself_and_an_unknown_one_is_an_attribute_error() -> None:
    assert rlsync.seams.Layout is importlib.import_module("rlsync.tensors.layout").Layout
    assert rlsync.seams.families is importlib.import_module("rlsync.sync.families")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rlsync.seams.nothing  # noqa: B018


@pytest.mark.processes
@pytest.mark.seconds
def test_a_worker_loads_no_torchrl_through_the_seams() -> None:
    code = "import sys, rlsync.runs.actors.worker, rlsync.runs.evaluation.process; "
    code += "print([m for m in sys.modules if m.startswith(('torchrl', 'rlsync.torchrl_plugin'))])"
    assert run(code).strip() == "[]"

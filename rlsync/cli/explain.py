"""``rlsync explain``: what a sync map moves, leaf by leaf, without training."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

from torchrl.trainers import Trainer

from rlsync import SyncPlan, SyncWeights
from rlsync.cli.compose import overrides, schema
from rlsync.cli.train import prepare_process, shut_down
from rlsync.core.errors import ConfigError
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.torchrl_plugin import compat

_EXAMPLES = """examples:
  rlsync explain
  rlsync explain recipe=dqn --json
  rlsync explain train_mine.py:make_trainer

exit status: 0 the map can be carried out, 2 it cannot, or the arguments name no trainer
"""
_FILE_TARGET = re.compile(r"(?P<file>.+\.py):(?P<function>[^\W\d]\w*)")


def main(arguments: list[str]) -> int:
    """Print the plan of a config, or of the trainer that a function in a file returns.

    Raises:
        ConfigError: the arguments name neither.
        SyncMapError: the map cannot be carried out.
    """
    parser = argparse.ArgumentParser(
        prog="rlsync explain",
        description="Print what a sync map moves, leaf by leaf, without training.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config-dir", metavar="DIR", help="a folder of your own configs, as for rlsync train"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "target",
        nargs="*",
        help="overrides as for rlsync train, or path/to/file.py:function, which returns a trainer",
    )
    given = parser.parse_args(arguments)
    own = [] if given.config_dir is None else ["--config-dir", given.config_dir]
    build = from_file(given.target) or from_config([*own, *given.target])
    prepare_process()
    with contextlib.redirect_stdout(sys.stderr):  # what a build prints is not the plan
        trainer = checked_trainer(build())
        with shut_down(trainer):
            plan = plan_of(trainer)
    print(plan.to_json() if given.json else plan.table())
    return 0


def checked_trainer(made: object) -> Trainer:
    """Refuse what a user's function returned unless it is a trainer.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(made, Trainer):
        raise ConfigError(
            f"the function returned {type(made).__name__}", "rlsync explain", "return a Trainer"
        )
    return made


def plan_of(trainer: Trainer) -> SyncPlan:
    """The plan of the SyncWeights hook that is registered with a trainer.

    Raises:
        ConfigError: none is.
    """
    for module in compat.registered_modules(trainer):
        if isinstance(module, SyncWeights):
            return module.plan
    raise ConfigError(
        "the trainer has no SyncWeights hook",
        type(trainer).__name__,
        "SyncWeights({...}).register(trainer) before the function returns",
    )


def from_config(arguments: list[str]) -> Callable[[], Trainer]:
    """A function that builds the trainer that the overrides describe."""
    line = overrides.read(arguments)
    with schema.initialised(line.flags.config_path):
        job, *more = overrides.jobs(line)
    if more:
        raise ConfigError("a sweep has many plans", "rlsync explain", "name one config")
    return job.build


def from_file(arguments: list[str]) -> Callable[[], Trainer] | None:
    """The function that ``path/to/file.py:function`` names; None if that is not what is asked for.

    The file's folder goes on sys.path, as if Python ran it, so that workers can import it too.

    Raises:
        ConfigError: the file, or the function in it, does not exist.
    """
    found = _FILE_TARGET.fullmatch(arguments[0]) if len(arguments) == 1 else None
    if found is None:
        return None
    file, name = Path(found["file"]).resolve(), found["function"]
    if not file.is_file():
        raise ConfigError(f"no file {found['file']!r}", arguments[0], "check the path")
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = vars(module).get(name)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        hint = did_you_mean(nearest_name(name, names))
        raise ConfigError(
            f"no function {name!r} in {file.name}",
            arguments[0],
            f"{hint}it has {', '.join(names)}",
        )
    return function

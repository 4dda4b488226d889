"""The trainer of the user's own that ``FILE.py:FUNCTION`` names."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError
from rlsync.runs.life.apart import Say, Stage
from rlsync.seams import first_line, user_input

#: What is asked for, as help texts and errors name it.
FORM = "FILE.py:FUNCTION"
MEANING = (
    "a function that needs no arguments and returns a trainer, or the name of a trainer in the file"
)
_GUARD = 'put what a script does under if __name__ == "__main__":'


@dataclass(frozen=True, slots=True)
class NamedTrainer:
    word: str
    file: Path
    name: str
    offered: str  # which names the file has, in words

    @property
    def where(self) -> str:
        return f"{self.file.name}:{self.name}"


def target_of(word: str, or_else: str = "") -> NamedTrainer:
    """Read ``FILE.py:FUNCTION``. The file is read, but not run. ``or_else`` says what else could be given."""
    path, colon, name = word.rpartition(":")
    if not colon:
        path = word
        name = ""
    file = Path(path)
    form = f"give {FORM}: {MEANING}{or_else}"
    if file.is_dir():
        raise ConfigError(f"{path!r} is a folder", word, form)
    if file.suffix != ".py":
        raise ConfigError(f"{path!r} names no Python file", word, form)
    if not file.is_file():
        raise ConfigError(f"no file {path!r}", word, f"check the path; {form}")
    names = _offered(_read(file, word))
    offered = f"{file.name} has {', '.join(names) or 'none'}"
    if not colon or not name.isidentifier():
        if name:
            problem = f"{name!r} is no name"
        else:
            problem = f"{word!r} names a file, but no function or trainer in it"
        raise ConfigError(problem, word, f"{form}; {offered}")
    return NamedTrainer(word, file.resolve(), name, offered)


def build(target: NamedTrainer, timeout_s: float, say: Say) -> Trainer:
    """Run the user's file, with its folder on ``sys.path``, and take the trainer that it names."""
    hint = f"{_GUARD}; if that is not it, give a longer --timeout-s"
    say(Stage(f"running {target.file.name}", timeout_s, hint))
    with _never_training():
        module = _run(target)
        say(Stage("building it", timeout_s))
        return _trainer_of(_made(target, module), target)


def _read(file: Path, where: str) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        place = file.name
        problem = str(error)
        if isinstance(error, SyntaxError):
            problem = error.msg
            if error.lineno:
                place += f", line {error.lineno}"
        cure = f"correct it; python {file} shows the place"
        raise ConfigError(f"{place}: {problem}", where, cure) from None


def _offered(tree: ast.Module) -> list[str]:
    """The functions of a file that need no arguments, and the values that it makes by a call."""
    names = []
    for part in tree.body:
        match part:
            case ast.FunctionDef(name=name, args=args):
                needed = len(args.posonlyargs) + len(args.args) > len(args.defaults)
                if not needed and None not in args.kw_defaults:
                    names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                names.append(name)
    return [name for name in names if not name.startswith("_")]


def _run(target: NamedTrainer) -> ModuleType:
    sys.path.insert(0, str(target.file.parent))
    spec = importlib.util.spec_from_file_location(target.file.stem, target.file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[target.file.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except RlsyncError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {first_line(error)}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(target.file)]
        place = f"running {target.file.name}"
        if lines:
            place += f", line {lines[-1]}"
        place += f", before {target.name} was looked for"
        raise ConfigError(problem, place, f"see the traceback above; {_GUARD}") from error
    return module


def _made(target: NamedTrainer, module: ModuleType) -> object:
    """The value that the name stands for; of a function, what it returns."""
    if target.name not in vars(module):
        names = [name for name in vars(module) if name[0] != "_"]
        hint = user_input.did_you_mean(user_input.nearest_name(target.name, names))
        problem = f"no function or trainer {target.name!r} in {target.file.name}"
        raise ConfigError(problem, target.word, f"{hint}{target.offered}")
    value = vars(module)[target.name]
    if isinstance(value, Trainer) or not callable(value):
        return value
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = []
    for parameter in inspect.signature(value).parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in free:
            needed.append(parameter.name)
    if needed:
        cure = f"name a function that needs none, and makes collector, loss and hook itself; {target.offered}"
        raise ConfigError(f"{target.name} needs arguments: {', '.join(needed)}", target.word, cure)
    return value()


def _trainer_of(made: object, target: NamedTrainer) -> Trainer:
    values = (made,)
    if isinstance(made, tuple):
        values = made
    trainers = [value for value in values if isinstance(value, Trainer)]
    if len(trainers) != 1:
        problem = f"{target.name} gives {type(made).__name__}, and no trainer"
        raise ConfigError(
            problem, target.word, "return a Trainer, or a tuple with one, before it is trained"
        )
    return trainers[0]


@contextmanager
def _never_training() -> Iterator[None]:
    """Refuse ``trainer.train()``: the trainer is only to be looked at."""

    def refuse(trainer: Trainer) -> None:
        caller = inspect.stack()[1]
        problem = "the trainer is trained before it can be looked at"
        cure = f"name a function that returns the trainer before it trains, or {_GUARD}"
        raise ConfigError(problem, f"{Path(caller.filename).name}, line {caller.lineno}", cure)

    train = Trainer.train
    Trainer.train = refuse
    try:
        yield
    finally:
        Trainer.train = train

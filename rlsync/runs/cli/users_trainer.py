"""The trainer that ``FILE.py:FUNCTION`` names, made in a process of its own, which cannot hang this one."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType

from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError
from rlsync.core.errors import first_line
from rlsync.core.path import did_you_mean, nearest_name
from rlsync.runs.life.training import prepare_process
from rlsync.sync.families import end_group, start_as
from rlsync.sync.processes import ending

#: What is asked for, as help texts and errors name it.
FORM = "FILE.py:FUNCTION"
MEANING = (
    "a function that needs no arguments and returns a trainer, or the name of a trainer in the file"
)
HANGS = "find out where it hangs (py-spy dump), or give a longer --timeout-s"
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
    path, colon, name = word.rpartition(":") if ":" in word else (word, "", "")
    file = Path(path)
    form = f"give {FORM}: {MEANING}{or_else}"
    if file.is_dir():
        raise ConfigError(f"{path!r} is a folder", word, form)
    if file.suffix != ".py":
        raise ConfigError(f"{path!r} names no Python file", word, form)
    if not file.is_file():
        raise ConfigError(f"no file {path!r}", word, f"check the path; {form}")
    offered = f"{file.name} has {', '.join(_offered(_read(file, word))) or 'none'}"
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
        if isinstance(error, SyntaxError) and error.lineno:
            line = f", line {error.lineno}"
        else:
            line = ""
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        cure = f"correct it; python {file} shows the place"
        raise ConfigError(f"{file.name}{line}: {said}", where, cure) from None


def _offered(tree: ast.Module) -> list[str]:
    """The functions of a file that need no arguments, and the values that it makes by a call."""
    found = []
    for part in tree.body:
        match part:
            case ast.FunctionDef(name=name, args=args):
                needed = len(args.posonlyargs) + len(args.args) > len(args.defaults)
                if not needed and None not in args.kw_defaults:
                    found.append(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                found.append(name)
    return [name for name in found if not name.startswith("_")]


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
        said = f"{type(error).__name__}: {first_line(error)}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(target.file)]
        place = f"running {target.file.name}" + (f", line {lines[-1]}" if lines else "")
        place += f", before {target.name} was looked for"
        raise ConfigError(said, place, f"see the traceback above; {_GUARD}") from error
    return module


def _made(target: NamedTrainer, module: ModuleType) -> object:
    """The value that the name stands for; of a function, what it returns."""
    if target.name not in vars(module):
        hint = did_you_mean(nearest_name(target.name, [n for n in vars(module) if n[0] != "_"]))
        problem = f"no function or trainer {target.name!r} in {target.file.name}"
        raise ConfigError(problem, target.word, f"{hint}{target.offered}")
    value = vars(module)[target.name]
    if isinstance(value, Trainer) or not callable(value):
        return value
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = inspect.signature(value).parameters.values()
    needed = [p.name for p in named if p.default is p.empty and p.kind not in free]
    if needed:
        cure = f"name a function that needs none, and makes collector, loss and hook itself; {target.offered}"
        raise ConfigError(f"{target.name} needs arguments: {', '.join(needed)}", target.word, cure)
    return value()


def _trainer_of(made: object, target: NamedTrainer) -> Trainer:
    values = made if isinstance(made, tuple) else (made,)
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

    def refuse(trainer: Trainer, *_: object, **__: object) -> None:
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


TIMEOUT_S = 60.0  #: default of ``--timeout-s``
_START_TIMEOUT_S = 300.0  #: for the process to import torch and TorchRL, on a busy machine too
_SHUTDOWN_TIMEOUT_S = 15.0  #: for the process to end after its result


@dataclass(frozen=True, slots=True)
class Stage:
    """What the process does next, how long it may take, and what to do if it takes longer."""

    name: str
    limit_s: float
    cure: str = HANGS


@dataclass(frozen=True, slots=True)
class Failed:
    why: str
    cure: str


#: What the user's code runs in says its stages and then its result; what it does after that has no deadline.
Say = Callable[[object], None]
Work = Callable[..., None]


def run_apart(work: Work, *arguments: object) -> object:
    """Call ``work(*arguments, say)``, a function of a module, in a process of its own.

    Returns what it says last, after a :class:`Stage` before each step. All processes of its session are
    killed in the end. What it prints goes to stderr; an RlsyncError that it raises is raised here.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(work, arguments, theirs), name="rlsync")
    start_as("spawn", process)
    theirs.close()
    try:
        said = _hear(ours, process, Stage("starting its process", _START_TIMEOUT_S))
        wait([process.sentinel], 0.0 if isinstance(said, Failed) else _SHUTDOWN_TIMEOUT_S)
    finally:
        end_group(process)  # in every case: all processes of its session
        process.join()
        ours.close()
    if isinstance(said, RlsyncError):
        raise said
    return said


def _hear(pipe: Connection, process: SpawnProcess, stage: Stage) -> object:
    try:
        while pipe.poll(stage.limit_s):
            said = pipe.recv()
            if not isinstance(said, Stage):
                return said
            stage = said
    except EOFError:
        process.join(_SHUTDOWN_TIMEOUT_S)
        if process.exitcode is None:
            how = "without a word"
        else:
            how = ending(process.exitcode)
        return Failed(f"{stage.name}: its process ended, {how}", "look for its own error above")
    return Failed(f"{stage.name} took more than {stage.limit_s:g} s", stage.cure)


def _in_child(work: Work, arguments: tuple[object, ...], pipe: Connection) -> None:
    os.setsid()
    os.dup2(2, 1)
    prepare_process()
    try:
        work(*arguments, pipe.send)
    except RlsyncError as error:
        pipe.send(error)
        raise SystemExit(1) from None
    except Exception as error:
        traceback.print_exc()
        pipe.send(Failed(f"{type(error).__name__}: {first_line(error)}", "see the traceback above"))
        raise SystemExit(1) from error

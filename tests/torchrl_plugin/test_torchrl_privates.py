"""TorchRL's private names are used in the compat package of each house, and nowhere else in rlsync."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torchrl
from torchrl.weight_update import WeightSyncScheme

import rlsync
from rlsync.runs import compat as compat_of_runs
from rlsync.torchrl_plugin import compat

PACKAGE = Path(rlsync.__file__).parent
COMPAT = {Path(package.__file__).parent for package in (compat, compat_of_runs)}
FILES = sorted(file for file in PACKAGE.rglob("*.py") if COMPAT.isdisjoint(file.parents))
# Names of torch's modules and tensors. Trainer has some of them too, but the floors below never see one.
TORCHS = {"_modules", "_parameters", "_buffers", "_version", "_cache"}
BELOW = ("core", "tensors", "transport", "sync")
# TorchRL's interface for schemes, although the names are private.
INTERFACE = {
    "_init_on_sender_impl",
    "_init_on_receiver_impl",
    "_setup_connection_and_weights_on_sender_impl",
    "_setup_connection_and_weights_on_receiver_impl",
}


_NAME = re.compile(r"\b(?:def |self\.)(\w+)")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def names_in(source: str) -> set[str]:
    """The private names of methods and of attributes of ``self`` in a piece of source."""
    return {name for name in _NAME.findall(source) if is_private(name)}


@cache
def private_names(folder: Path) -> set[str]:
    return {
        name
        for file in folder.rglob("*.py")
        if COMPAT.isdisjoint(file.parents)
        for name in names_in(file.read_text())
    }


def theirs() -> set[str]:
    return private_names(Path(torchrl.__file__).parent)


def is_own(node: ast.expr) -> bool:
    """``self``, ``cls`` or ``super()``."""
    match node:
        case ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")):
            return True
    return False


def foreign_accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private names that are read or written on other objects, also by ``getattr`` and ``setattr``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name) and not is_own(value):
                yield node.lineno, name
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                if is_private(name):
                    yield node.lineno, name


def private_imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torchrl":
                dotted = [f"{module}.{alias.name}" for alias in names]
            case ast.Import(names=names):
                dotted = [alias.name for alias in names if alias.name.split(".")[0] == "torchrl"]
            case _:
                continue
        yield from ((node.lineno, name) for name in dotted if any(map(is_private, name.split("."))))


def module_of(file: Path) -> ModuleType:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return importlib.import_module(".".join(parts).removesuffix(".__init__"))


@cache
def source_of(kind: type) -> str:
    """The source of a class, also of one whose module is given as the package that its file is in."""
    for file in sorted(Path(inspect.getfile(kind)).parent.glob("*.py")):
        text = file.read_text()
        for node in ast.parse(text).body if f"class {kind.__name__}" in text else ():
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                return ast.get_source_segment(text, node) or ""
    return inspect.getsource(kind)


def inherited(kind: type) -> set[str]:
    """The private names that the TorchRL classes above ``kind`` define or assign."""
    theirs = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "torchrl"]
    return {name for base in theirs for name in names_in(source_of(base))}


def uses_of_inherited(tree: ast.Module, file: Path) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.bases:
            names = inherited(getattr(module_of(file), node.name)) - INTERFACE
            for inner in ast.walk(node):
                match inner:
                    case ast.Attribute(value=value, attr=name) if is_own(value) and name in names:
                        yield inner.lineno, name
                    case ast.FunctionDef(name=name) if name in names:
                        yield inner.lineno, name


def found_in(file: Path) -> list[str]:
    tree = ast.parse(file.read_text())
    allowed = private_names(PACKAGE) | (TORCHS if file.relative_to(PACKAGE).parts[0] in BELOW else set())
    uses = [(line, name) for line, name in foreign_accesses(tree) if name in theirs() - allowed]
    uses += [*private_imports(tree), *uses_of_inherited(tree, file)]
    return [f"{file.relative_to(PACKAGE.parent)}:{line}: {name}" for line, name in sorted(uses)]


@pytest.mark.seconds
def test_no_module_but_compat_touches_a_private_name_of_torchrl() -> None:
    assert [use for file in FILES for use in found_in(file)] == []


def test_compat_says_which_private_methods_are_an_interface() -> None:
    assert [name for name in INTERFACE if name not in str(compat.__doc__)] == []
    assert {name for name in INTERFACE if hasattr(WeightSyncScheme, name)} == INTERFACE


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(collector): return collector._running_free", "_running_free"),
        ("def f(trainer): trainer._post_steps_ops.clear()", "_post_steps_ops"),
        ("def f(c): return getattr(c, '_weight_sync_schemes', None)", "_weight_sync_schemes"),
        (
            "from torchrl.collectors._multi_base import MultiCollector",
            "torchrl.collectors._multi_base.MultiCollector",
        ),
    ],
)
def test_the_search_finds_what_it_looks_for(source: str, name: str) -> None:
    tree = ast.parse(source)
    found = [*foreign_accesses(tree), *private_imports(tree)]
    assert [use for _, use in found] == [name]
    assert name in theirs() - private_names(PACKAGE) or name.startswith("torchrl.")

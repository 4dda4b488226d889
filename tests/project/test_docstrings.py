"""Every public name says its law, its arguments, its errors, and shows an example."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import pytest

import rlsync
from rlsync.core import errors
from rlsync.runs.recipes import impala

MODULES = (rlsync, impala)


@dataclass(frozen=True)
class Public:
    """A class, a function, or a public method or property of a class."""

    name: str
    what: Any
    owner: type | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.what) or ""

    @property
    def class_doc(self) -> str:
        return inspect.getdoc(self.owner) or "" if self.owner else ""

    @property
    def function(self) -> FunctionType | None:
        """What runs: of a class its own constructor, if it has one."""
        match self.what:
            case type():
                made = vars(self.what)
                return made.get("__post_init__" if is_dataclass(self.what) else "__init__")
            case property():
                return self.what.fget
            case staticmethod() | classmethod():
                return self.what.__func__
            case FunctionType():
                return inspect.unwrap(self.what)
        return None

    @property
    def parameters(self) -> list[str]:
        """What a caller may pass; of a class what its own constructor takes, not its metaclass."""
        if isinstance(self.what, type):
            called = vars(self.what).get("__init__") or vars(self.what).get("__new__")
        else:
            called = None if isinstance(self.what, property) else self.function
        found = inspect.signature(called).parameters if called else ()
        return [name for name in found if name[0] != "_" and name not in ("self", "cls")]

    @property
    def commented(self) -> set[str]:
        """The fields of a record that a comment explains, behind them or above them, as Sphinx reads it."""
        if not (is_dataclass(self.what) or (isinstance(self.what, type) and issubclass(self.what, tuple))):
            return set()
        return {above or behind for above, behind in COMMENTED.findall(inspect.getsource(self.what))}


def everything() -> Iterator[Public]:
    for module in MODULES:
        for name in module.__all__:
            what = getattr(module, name)
            if not isinstance(what, type | FunctionType):
                continue  # a version, a union of classes
            yield Public(name, what)
            if isinstance(what, type):
                yield from members(name, what)


def members(name: str, kind: type) -> Iterator[Public]:
    for attribute in inspect.classify_class_attrs(kind):
        ours = attribute.defining_class.__module__.startswith("rlsync.")
        if ours and attribute.name[0] != "_" and attribute.kind != "data":
            yield Public(f"{name}.{attribute.name}", attribute.object, kind)


ALL = list(everything())
TOP = [public for public in ALL if public.owner is None]

each = pytest.mark.parametrize("public", ALL, ids=str)

# ------------------------------------------------------------------------------ reading a docstring

SECTION = r"^{title}:\n((?:[ \t]+\S.*\n|\s*\n)+)"
COMMENTED = re.compile(r"#: .*\n +(\w+): |^ +(\w+): [^#\n]*#: ", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \w+)*):", re.MULTILINE)


def entries(doc: str, title: str) -> set[str]:
    """The names that a section of a docstring explains."""
    found = re.search(SECTION.format(title=title), doc + "\n", re.MULTILINE)
    listed = ENTRY.findall(found[1]) if found else []
    return {name for line in listed for name in line.replace("*", "").split(", ")}


def error_named(name: str) -> type[BaseException]:
    name = name.rpartition(".")[2]  # an annotation may name its module
    return getattr(errors, name, None) or getattr(builtins, name)


# ------------------------------------------------------------------------- what a function may raise


@cache
def nodes_of(function: FunctionType) -> list[ast.AST]:
    return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))


class Body:
    """What stands in a function, and what that leads to."""

    def __init__(self, function: FunctionType, owner: type | None) -> None:
        self.function = function
        self.owner = owner

    def look_up(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(name):
                return self.function.__globals__.get(name, getattr(builtins, name, None))
            case ast.Attribute(ast.Name("self"), name) if self.owner is not None:
                return inspect.getattr_static(self.owner, name, None)
            case ast.Attribute(ast.Name(module), name):
                held = self.function.__globals__.get(module)
                return getattr(held, name, None) if isinstance(held, ModuleType) else None
        return None

    def raised(self) -> set[type[BaseException]]:
        """The errors of the raise statements in this body."""
        found = set()
        for node in nodes_of(self.function):
            if isinstance(node, ast.Raise) and node.exc is not None:
                made = self.look_up(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)
                if isinstance(made, FunctionType):  # a function that makes the error
                    made = error_named(str(made.__annotations__["return"]))
                if isinstance(made, type):
                    found.add(made)
        return found - {NotImplementedError, StopIteration}

    def calls(self) -> Iterator[Body]:
        """The functions of rlsync that this body calls, and the properties of its own that it reads."""
        for node in nodes_of(self.function):
            target = self.look_up(node.func if isinstance(node, ast.Call) else node)
            if isinstance(target, property):
                yield Body(target.fget, self.owner)
            elif isinstance(node, ast.Call):
                owner = target if isinstance(target, type) else self.owner
                called = Public("", target).function
                if isinstance(called, FunctionType) and called.__module__.startswith("rlsync."):
                    yield Body(called, owner)


def errors_of(public: Public) -> set[type[BaseException]]:
    if not isinstance(public.function, FunctionType):
        return set()
    owner = public.owner or (public.what if isinstance(public.what, type) else None)
    body = Body(public.function, owner)
    return body.raised().union(*(called.raised() for called in body.calls()))


# --------------------------------------------------------------------------------------------- tests


@each
def test_every_public_name_is_described(public: Public) -> None:
    assert public.doc, f"{public} has no docstring"
    first = public.doc.split("\n\n")[0]
    assert first.rstrip().endswith((".", "::", "...")), f"no sentence: {first!r}"


@each
def test_every_argument_is_explained(public: Public) -> None:
    explained = entries(public.doc, "Args") | public.commented
    missing = [name for name in public.parameters if name not in explained]
    assert not missing, f"{public} does not explain {missing}"


@each
def test_every_error_that_is_raised_here_or_one_call_below_is_named(public: Public) -> None:
    named = entries(public.doc, "Raises") | entries(public.class_doc, "Raises")
    known = tuple(error_named(name) for name in named)
    missing = {
        error.__name__
        for error in errors_of(public)
        if not any(issubclass(error, other) or issubclass(other, error) for other in known)
    }
    assert not missing, f"{public} does not say that it raises {sorted(missing)}"


@pytest.mark.parametrize("public", TOP, ids=str)
def test_every_class_and_function_shows_an_example_that_runs(public: Public) -> None:
    if isinstance(public.what, type) and issubclass(public.what, rlsync.RlsyncError):
        public = Public("RlsyncError", rlsync.RlsyncError)  # one shows what all of them look like
    assert ">>> " in public.doc, f"{public} shows no example"

"""rlsync: weights from a learner to the workers that act with them, in TorchRL.

You know which weights acted: every frame was made by exactly one published version, and says which.

``import rlsync`` loads none of its modules: a public name is loaded when it is first used. A relay or a
command line that needs only a part of rlsync does not pay for torchrl.
"""

import ast as _ast
from importlib import import_module as _import_module
from pathlib import Path as _Path

__version__ = "0.2.0.dev0"


def _names_in(file: str) -> dict[str, str]:
    """By public name, the module that defines it: what the stub beside a file imports."""
    stub = _ast.parse(_Path(file).with_suffix(".pyi").read_text())
    return {
        name.name: str(imports.module)
        for imports in stub.body
        if isinstance(imports, _ast.ImportFrom)
        for name in imports.names
    }


def _loaded(name: str, modules: dict[str, str]) -> object:
    """What a public name stands for: something that its module has, or a module of that package."""
    with _import_module("rlsync.core.nameless").told_of_a_user_without_a_name():
        module = _import_module(modules[name])
        if not hasattr(module, name):
            return _import_module(f"{modules[name]}.{name}")
    return getattr(module, name)


_MODULES = _names_in(__file__)

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> object:
    """Load a public name (PEP 562). Python calls this for names that the package does not have yet."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = public = _loaded(name, _MODULES)  # the next use finds it here
    return public


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""rlsync: weights from a learner to the workers that act with them, in TorchRL.

You know which weights acted: every frame was made by exactly one published version, and says which.

``import rlsync`` loads none of its modules: a public name is loaded when it is first used. A relay or a
command line that needs only a part of rlsync does not pay for torchrl.
"""

import ast as _ast
from collections.abc import Callable as _Callable
from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

__version__ = "0.2.0"


def _lazily(
    namespace: dict[str, _Any],
) -> tuple[list[str], _Callable[[str], object], _Callable[[], list[str]]]:
    """What is public in a module, and its ``__getattr__`` and ``__dir__``, by PEP 562.

    The names are those that the stub beside the module's file imports: each is loaded when it is first used.
    """
    stub = _ast.parse(_Path(namespace["__file__"]).with_suffix(".pyi").read_text())
    #: By public name, the module that defines it, or the package that it is a module of.
    modules = {
        name.name: str(imports.module)
        for imports in stub.body
        if isinstance(imports, _ast.ImportFrom)
        for name in imports.names
    }

    def load(name: str) -> object:
        """Python calls this for names that the module does not have yet."""
        if name not in modules:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        with _import_module("rlsync.core.nameless").told_of_a_user_without_a_name():
            # as "from ... import name" does, which looks for a module of that name, too
            home = __import__(modules[name], fromlist=[name])
        namespace[name] = public = getattr(home, name)  # the next use finds it here
        return public

    return [*modules], load, lambda: sorted({*namespace, *modules})


_names, __getattr__, __dir__ = _lazily(globals())

__all__ = [*_names, "__version__"]

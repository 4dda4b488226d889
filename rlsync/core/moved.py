"""Modules that have a new name: the old one still works, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping


def moved(old: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A module's ``__getattr__`` (PEP 562) that finds names in their new homes.

    Args:
        old: the old module.
        homes: for each name that it had, ``module:name`` of today.

    Example:
        >>> find = moved("rlsync.core.plans", {"Receipt": "rlsync.core.plan:Receipt"})
        >>> with warnings.catch_warnings(record=True) as told:
        ...     warnings.simplefilter("always")
        ...     found = find("Receipt")
        >>> found.__name__, str(told[0].message)
        ('Receipt', 'rlsync.core.plans.Receipt is now rlsync.core.plan.Receipt')
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        module, _, new = homes[name].partition(":")
        warnings.warn(f"{old}.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), new)

    return find

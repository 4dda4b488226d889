"""Fields that know their bounds, so that a bad value is refused before anything runs.

A check is a generator of errors: the launcher lists them all, Python code refuses at the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.core.path import did_you_mean, nearest_name


@dataclass(frozen=True, slots=True)
class Bound:
    """The values a field accepts: a choice of names, or a range of numbers."""

    choices: tuple[str, ...] = ()
    low: float = float("-inf")
    high: float = float("inf")
    low_excluded: bool = False

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` lies within the bound; None, where the type allows it, always does."""
        if value is None:
            return True
        if self.choices:
            return value in self.choices
        above = value > self.low if self.low_excluded else value >= self.low
        return bool(above and value <= self.high)

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        sign = ">" if self.low_excluded else ">="
        return f"a number {sign} {self.low:g}" + (
            f" and <= {self.high:g}" if self.high < float("inf") else ""
        )


def above_zero(default: Any) -> Any:
    """A field that accepts numbers above zero."""
    return field(default=default, metadata={"bound": Bound(low=0, low_excluded=True)})


def not_below_zero(default: Any) -> Any:
    """A field that accepts zero and numbers above."""
    return field(default=default, metadata={"bound": Bound(low=0)})


def fraction(default: Any) -> Any:
    """A field that accepts numbers from zero to one."""
    return field(default=default, metadata={"bound": Bound(low=0, high=1)})


def one_of(default: str, *others: str) -> Any:
    """A field that accepts these names, the first being its default."""
    return field(default=default, metadata={"bound": Bound(choices=(default, *others))})


def bound_errors(config: Any, prefix: str = "") -> Iterator[ConfigError]:
    """One error for each field, here or in a nested dataclass, whose value lies outside its bound.

    Args:
        config: an instance of a dataclass whose fields were made with the functions above.
        prefix: stands before the names of the fields.
    """
    for spec in fields(config):
        key, value = prefix + spec.name, getattr(config, spec.name)
        if is_dataclass(value):
            yield from bound_errors(value, key + ".")
        elif "bound" in spec.metadata and not spec.metadata["bound"].accepts(value):
            bound = spec.metadata["bound"]
            hint = did_you_mean(nearest_name(str(value), bound.choices))
            yield ConfigError(f"{key} cannot be {value!r}", key, f"{hint}give {bound}")


def caught(check: Callable[[], object], key: str = "") -> Iterator[RlsyncError]:
    """What ``check`` raises, if it does; ``key``, where given, stands before the place that the error names.

    Example:
        >>> from rlsync.core.path import parse
        >>> [error.where for error in caught(lambda: parse("a..b"), "sync.map.0.source")]
        ["sync.map.0.source: character 3, at '.'"]
    """
    try:
        check()
    except RlsyncError as error:
        yield type(error)(error.what, f"{key}: {error.where}" if key else error.where, error.cure)


def refuse(errors: Iterable[RlsyncError]) -> None:
    """Raise the first error, if there is one."""
    for error in errors:
        raise error

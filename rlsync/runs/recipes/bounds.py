"""Fields that know their bounds; checks are generators of errors, of which a builder raises the first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rlsync import ConfigError, RlsyncError
from rlsync.core.extensions import installed
from rlsync.core.user_input import did_you_mean, nearest_name

P = ParamSpec("P")
T = TypeVar("T")
N = TypeVar("N")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Bound:
    """The values a field accepts: a choice of names, a range of numbers, or widths of layers."""

    choices: tuple[str, ...] = ()
    group: str = ""  # names of entry points that are choices, too
    low: float = float("-inf")
    high: float = float("inf")
    low_excluded: bool = False
    high_excluded: bool = False
    widths: bool = False

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.choices, *(installed(self.group, self.choices) if self.group else ()))

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` lies within; None, where the type allows it, always does, and NaN never."""
        if value is None:
            return True
        if self.choices:
            # what is installed is looked for last
            return value in self.choices or value in self._names
        if self.widths:
            return bool(value) and min(value) >= 1
        above = value > self.low if self.low_excluded else value >= self.low
        return bool(above and (value < self.high if self.high_excluded else value <= self.high))

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self._names)}"
        if self.widths:
            return "widths, like [64,64]"
        sign = ">" if self.low_excluded else ">="
        if self.high_excluded and self.high == float("inf"):
            kind = "a finite number"
        else:
            kind = "a number"
        return f"{kind} {sign} {self.low:g}" + (
            f" and <= {self.high:g}" if self.high < float("inf") else ""
        )


#: The metadata of a field for the widths of a network's layers, of which there is at least one.
WIDTHS: Mapping[str, Any] = {"bound": Bound(widths=True)}


def above_zero(default: Any, *, finite: bool = False, most: float = float("inf")) -> Any:
    """A field that accepts numbers above zero, up to ``most``; with ``finite``, not infinity."""
    bound = Bound(low=0, high=most, low_excluded=True, high_excluded=finite)
    return field(default=default, metadata={"bound": bound})


def at_least(low: float, default: Any) -> Any:
    """A field that accepts ``low`` and numbers above."""
    return field(default=default, metadata={"bound": Bound(low=low)})


def not_below_zero(default: Any, *, most: float = float("inf")) -> Any:
    """A field that accepts zero and numbers above, up to ``most``."""
    return field(default=default, metadata={"bound": Bound(low=0, high=most)})


def fraction(default: Any) -> Any:
    """A field that accepts numbers from zero to one."""
    return field(default=default, metadata={"bound": Bound(low=0, high=1)})


def one_of(default: str, *others: str, group: str = "") -> Any:
    """A field that accepts these names; the first is its default. Entry points of a ``group`` add theirs."""
    return field(
        default=default, metadata={"bound": Bound(choices=(default, *others), group=group)}
    )


def kept(default: Any, why: str) -> Any:
    """A field that a resumed run cannot change; the error says ``why``: what would no longer fit."""
    return _with(default, "kept", why)


@dataclass(frozen=True, slots=True)
class Restored:
    """What brings a setting's old value back when a checkpoint is loaded: a buffer, or an option."""

    # the name of buffers with one number, in the loss module or in modules of hooks
    buffer: str = ""
    option: str = ""  # the name of an option in the parameter groups of optimizers
    group: int | None = None  # of that parameter group only; None: of all
    optimizer: str = ""  # of optimizers of this class only, such as "Adam"; empty: of all


def in_buffer(default: Any, name: str) -> Any:
    """A field whose value TorchRL's losses or value estimators keep in the buffer ``name`` of checkpoints."""
    return _with(default, "restored", Restored(buffer=name))


def in_optimizer(
    default: Any, option: str, *, group: int | None = None, optimizer: str = ""
) -> Any:
    """A field whose value optimizers keep as an option, which checkpoints restore; see :class:`Restored`."""
    return _with(default, "restored", Restored("", option, group, optimizer))


def learning_rate(default: Any, *, group: int | None = None) -> Any:
    """A field for the learning rate of all parameter groups, or of one."""
    if isinstance(default, Field):
        rate = default
    else:
        rate = above_zero(default, finite=True)
    return in_optimizer(rate, "lr", group=group)


def _with(default: Any, name: str, value: object) -> Any:
    """A field like ``default``, with one more entry in its metadata."""
    spec = default if isinstance(default, Field) else field(default=default)
    defaults: dict[str, Any] = {"default": spec.default, "default_factory": spec.default_factory}
    return field(**defaults, metadata={**spec.metadata, name: value})


def same_as(settings: Any, name: str, default: Any = MISSING) -> Any:
    """A field with the range and the default of ``settings.name``, or with a default of its own."""
    (spec,) = (spec for spec in fields(settings) if spec.name == name)
    return field(default=spec.default if default is MISSING else default, metadata=spec.metadata)


def values_for(settings: Any, config: Any) -> dict[str, Any]:
    """The values in ``config`` of all fields that ``settings`` has under the same name."""
    shared = {spec.name for spec in fields(settings)} & {spec.name for spec in fields(config)}
    return {name: getattr(config, name) for name in sorted(shared)}


def fields_as_keywords(
    settings: Callable[P, S],
) -> Callable[[Callable[[T, N, S], None]], Callable[Concatenate[T, N, P], None]]:
    """Let callers of a constructor give the fields of its settings by name, as keywords.

    The constructor is ``(self, first, settings)``; names and defaults are not written a second time.
    """

    def decorate(construct: Callable[[T, N, S], None]) -> Callable[Concatenate[T, N, P], None]:
        @wraps(construct)
        def with_keywords(*args: Any, **options: Any) -> None:
            given = {first: options.pop(first)} if first in options else {}
            construct(*args, **given, settings=settings(**options))  # type: ignore[call-arg]

        me, first = list(inspect.signature(construct).parameters)[:2]
        own = [inspect.signature(construct).parameters[name] for name in (me, first)]
        keywords = inspect.signature(settings).parameters.values()
        with_keywords.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
        return with_keywords

    return decorate


def bound_errors(config: Any, prefix: str = "") -> Iterator[ConfigError]:
    """One error for each field, here or in a nested dataclass, whose value lies outside its bound."""
    for spec in fields(config):
        key = prefix + spec.name
        value = getattr(config, spec.name)
        if is_dataclass(value):
            yield from bound_errors(value, key + ".")
        elif "bound" in spec.metadata and not spec.metadata["bound"].accepts(value):
            bound = spec.metadata["bound"]
            hint = did_you_mean(nearest_name(str(value), bound._names))
            none = ", or null" if "None" in str(spec.type) else ""
            yield ConfigError(f"{key} cannot be {value!r}", key, f"{hint}give {bound}{none}")


def caught(check: Callable[[], object], key: str = "") -> Iterator[RlsyncError]:
    """The error that ``check`` raises, if any. A ``key`` is put before the place that the error names."""
    try:
        check()
    except RlsyncError as error:
        yield type(error)(error.what, f"{key}: {error.where}" if key else error.where, error.cure)


def refuse(errors: Iterable[RlsyncError]) -> None:
    for error in errors:
        raise error

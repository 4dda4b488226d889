"""Fields that know their bounds; checks are generators of errors, of which a builder raises the first."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from rlsync import ConfigError, RlsyncError
from rlsync.seams import extensions, user_input

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings: TypeAlias = "DataclassInstance | type[DataclassInstance]"

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
    of_0_1: Mapping[str, str] = field(default_factory=dict)  # what choices of 0.1 are called now

    @property
    def _names(self) -> tuple[str, ...]:
        if not self.group:
            return self.choices
        return (*self.choices, *extensions.installed(self.group, self.choices))

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` lies within; None, where the type allows it, always does, and NaN never."""
        if value is None:
            return True
        if self.choices:
            # what is installed is looked for last
            return value in self.choices or value in self._names
        if self.widths:
            return bool(value) and min(value) >= 1
        if self.low_excluded:
            above = value > self.low
        else:
            above = value >= self.low
        if self.high_excluded:
            below = value < self.high
        else:
            below = value <= self.high
        return bool(above and below)

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self._names)}"
        if self.widths:
            return "widths, like [64,64]"
        if self.high_excluded and self.high == float("inf"):
            kind = "a finite number"
        else:
            kind = "a number"
        if self.low_excluded:
            words = f"{kind} > {self.low:g}"
        else:
            words = f"{kind} >= {self.low:g}"
        if self.high < float("inf"):
            words += f" and <= {self.high:g}"
        return words


#: The metadata of a field for the widths of a network's layers, of which there is at least one.
WIDTHS: Mapping[str, Any] = {"bound": Bound(widths=True)}


def above_zero(default: object, *, finite: bool = False, most: float = float("inf")) -> Any:
    """A field that accepts numbers above zero, up to ``most``; with ``finite``, not infinity."""
    bound = Bound(low=0, high=most, low_excluded=True, high_excluded=finite)
    return field(default=default, metadata={"bound": bound})


def at_least(low: float, default: object) -> Any:
    """A field that accepts ``low`` and numbers above."""
    return field(default=default, metadata={"bound": Bound(low=low)})


def not_below_zero(default: object, *, most: float = float("inf")) -> Any:
    """A field that accepts zero and numbers above, up to ``most``."""
    return field(default=default, metadata={"bound": Bound(low=0, high=most)})


def between(low: float, high: float, default: object) -> Any:
    """A field that accepts numbers from ``low`` to ``high``."""
    return field(default=default, metadata={"bound": Bound(low=low, high=high)})


def fraction(default: object) -> Any:
    """A field that accepts numbers from zero to one."""
    return field(default=default, metadata={"bound": Bound(low=0, high=1)})


def one_of(
    default: str, *others: str, group: str = "", of_0_1: Mapping[str, str] | None = None
) -> Any:
    """A field that accepts these names; the first is its default. Entry points of a ``group`` add theirs.

    ``of_0_1``: names that 0.1 had, and what they are called now. They are refused, and read in its runs.
    """
    bound = Bound(choices=(default, *others), group=group, of_0_1=of_0_1 or {})
    return field(default=default, metadata={"bound": bound})


def kept(default: object, why: str) -> Any:
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


def in_buffer(default: object, name: str) -> Any:
    """A field whose value TorchRL's losses or value estimators keep in the buffer ``name`` of checkpoints."""
    return _with(default, "restored", Restored(buffer=name))


def in_optimizer(
    default: object, option: str, *, group: int | None = None, optimizer: str = ""
) -> Any:
    """A field whose value optimizers keep as an option, which checkpoints restore; see :class:`Restored`."""
    return _with(default, "restored", Restored("", option, group, optimizer))


def learning_rate(default: object, *, group: int | None = None) -> Any:
    """A field for the learning rate of all parameter groups, or of one."""
    if isinstance(default, Field):
        rate = default
    else:
        rate = above_zero(default, finite=True)
    return in_optimizer(rate, "lr", group=group)


def _with(default: object, name: str, value: object) -> Any:
    """A field like ``default``, with one more entry in its metadata."""
    if not isinstance(default, Field):
        return field(default=default, metadata={name: value})
    defaults: dict[str, Any] = {
        "default": default.default,
        "default_factory": default.default_factory,
    }
    return field(**defaults, metadata={**default.metadata, name: value})


def same_as(settings: Settings, name: str, default: object = MISSING) -> Any:
    """A field with the range and the default of ``settings.name``, or with a default of its own."""
    (spec,) = (spec for spec in fields(settings) if spec.name == name)
    if default is MISSING:
        default = spec.default
    return field(default=default, metadata=spec.metadata)


def names_of(settings: Settings) -> set[str]:
    """The names of the fields of a dataclass, or of one of its objects."""
    return {spec.name for spec in fields(settings)}


def values_for(settings: Settings, config: DataclassInstance) -> dict[str, Any]:
    """The values in ``config`` of all fields that ``settings`` has under the same name."""
    shared = sorted(names_of(settings) & names_of(config))
    return {name: getattr(config, name) for name in shared}


def fields_as_keywords(
    settings: Callable[P, S],
) -> Callable[[Callable[[T, N, S], None]], Callable[Concatenate[T, N, P], None]]:
    """Let callers of a constructor give the fields of its settings by name, as keywords.

    The constructor is ``(self, first, settings)``; names and defaults are not written a second time.
    """

    def decorate(construct: Callable[[T, N, S], None]) -> Callable[Concatenate[T, N, P], None]:
        @wraps(construct)
        def with_keywords(*args: Any, **options: Any) -> None:
            if first.name in options:
                args += (options.pop(first.name),)
            construct(*args, settings=settings(**options))  # type: ignore[call-arg]

        me, first = list(inspect.signature(construct).parameters.values())[:2]
        keywords = inspect.signature(settings).parameters.values()
        with_keywords.__signature__ = inspect.Signature([me, first, *keywords])  # type: ignore[attr-defined]
        return with_keywords

    return decorate


def bound_errors(config: DataclassInstance, prefix: str = "") -> Iterator[ConfigError]:
    """One error for each field, here or in a nested dataclass, whose value lies outside its bound."""
    for spec in fields(config):
        key = prefix + spec.name
        value = getattr(config, spec.name)
        if is_dataclass(value) and not isinstance(value, type):
            yield from bound_errors(value, key + ".")
        elif "bound" in spec.metadata and not spec.metadata["bound"].accepts(value):
            bound = spec.metadata["bound"]
            nearest = bound.of_0_1.get(str(value)) or user_input.nearest_name(
                str(value), bound._names
            )
            cure = f"{user_input.did_you_mean(nearest)}give {bound}"
            if "None" in str(spec.type):
                cure += ", or null"
            yield ConfigError(f"{key} cannot be {value!r}", key, cure)


def caught(check: Callable[[], object], key: str = "") -> Iterator[RlsyncError]:
    """The error that ``check`` raises, if any. A ``key`` is put before the place that the error names."""
    try:
        check()
    except RlsyncError as error:
        where = error.where
        if key:
            where = f"{key}: {where}"
        yield type(error)(error.what, where, error.cure)


def refuse(errors: Iterable[RlsyncError]) -> None:
    for error in errors:
        raise error

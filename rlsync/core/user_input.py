"""What a user wrote, checked and said back: counts, choices, timeouts, the nearest name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from numbers import Integral, Real

from rlsync.core.errors import ConfigError


def nearest_name(wanted: str, offered: Iterable[str], cutoff: float = 0.6) -> str:
    """The offered name closest to ``wanted``, or an empty string."""
    close = difflib.get_close_matches(str(wanted), list(offered), n=1, cutoff=cutoff)
    if close:
        return close[0]
    return ""


def check_choice(what: str, chosen: str, offered: Collection[str], where: str) -> None:
    """Refuse (ConfigError) what is not offered."""
    if chosen not in offered:
        near = did_you_mean(nearest_name(str(chosen), offered))
        raise ConfigError(
            f"no {what} {chosen!r}", where, f"{near}choose one of: {', '.join(offered)}"
        )


def check_count(what: str, given: object, least: int, where: str, cure: str) -> None:
    """Refuse (ConfigError) all but a whole number of at least ``least``."""
    # numpy's are fine
    if not isinstance(given, Integral) or isinstance(given, bool) or given < least:
        raise ConfigError(
            f"{what} is a whole number of at least {least}, got {short(given)}", where, cure
        )


def check_timeouts(who: str, *, may_be_none: bool = True, **seconds: object) -> None:
    """Refuse (ConfigError) arguments of ``who`` that are no numbers of seconds above zero."""
    if may_be_none:
        cure = "for example 300.0; None waits for ever"
    else:
        cure = "for example 300.0"
    for name, timeout_s in seconds.items():
        number = (
            isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and float(timeout_s) > 0
        )
        if not number and not (timeout_s is None and may_be_none):
            problem = f"a timeout is a number of seconds above zero, got {short(timeout_s)}"
            raise ConfigError(problem, f"{who}({name}={short(timeout_s)})", cure)


def short(value: object) -> str:
    """A value of the user's in at most one line: a module prints its whole tree."""
    line, _, more = repr(value).partition("\n")
    if not more and len(line) <= 80:
        return line
    return f"{type(value).__name__}(...)"


def did_you_mean(name: str) -> str:
    """The first words of a cure; an empty string if no name is near."""
    if name:
        return f"did you mean {name!r}? "
    return ""

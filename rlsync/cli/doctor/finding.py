"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        verdict: ``ok``; ``warn`` if it costs speed or may fail later; ``fail`` if it does not work.
        what: what was checked.
        found: the result.
        cure: what to do about it; empty when it is ok.
    """

    verdict: Grade
    what: str
    found: str
    cure: str = ""


def worst(findings: list[Finding]) -> Grade:
    """The worst verdict of the findings.

    Example:
        >>> worst([Finding("ok", "torch", "2.13"), Finding("warn", "/dev/shm", "64 MB")])
        'warn'
    """
    order: tuple[Grade, ...] = ("ok", "warn", "fail")
    return max((f.verdict for f in findings), key=order.index, default="ok")

"""One line of what the doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Args:
        verdict: ``ok``; ``warn`` for what costs speed or may bite later; ``fail`` for what does not work.
        what: the thing.
        found: how it is.
        cure: what to do about it; empty when it is ok.
    """

    verdict: Verdict
    what: str
    found: str
    cure: str = ""


def worst(findings: list[Finding]) -> Verdict:
    """The worst verdict of all.

    Example:
        >>> worst([Finding("ok", "torch", "2.13"), Finding("warn", "/dev/shm", "64 MB")])
        'warn'
    """
    order: tuple[Verdict, ...] = ("ok", "warn", "fail")
    return max((f.verdict for f in findings), key=order.index, default="ok")

"""Compare the installed versions with those that the metadata of the installed rlsync requires."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlsync.cli.doctor.finding import Finding

_PACKAGE = "rlsync"
#: Extras for people who work on rlsync itself.
_NOT_FOR_USERS = ("dev", "docs")


def packages() -> list[Finding]:
    """Python, rlsync, its requirements, and the requirements of its extras if they are installed."""
    metadata = importlib.metadata.metadata(_PACKAGE)
    python = SpecifierSet(metadata["Requires-Python"])
    return [
        Finding("ok", _PACKAGE, importlib.metadata.version(_PACKAGE)),
        judged("python", platform.python_version(), python),
        *_required(),
    ]


def judged(name: str, version: str, tested: SpecifierSet) -> Finding:
    """Compare one version with the tested range.

    Example:
        >>> judged("torchrl", "0.15.0", SpecifierSet(">=0.14,<0.15")).verdict
        'fail'
    """
    found = f"{version} (tested with {tested})" if tested else version
    if tested.contains(Version(version).base_version, prereleases=True):
        return Finding("ok", name, found)
    return Finding("fail", name, found, f"pip install '{name}{tested}'")


def _required() -> Iterator[Finding]:
    seen = set()
    for requirement in map(Requirement, importlib.metadata.requires(_PACKAGE) or ()):
        extra = _extra_of(requirement)
        if requirement.name in seen or extra in _NOT_FOR_USERS:
            continue
        seen.add(requirement.name)
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not extra:
                yield Finding(
                    "fail",
                    requirement.name,
                    "not installed",
                    f"pip install '{requirement.name}{requirement.specifier}'",
                )
            continue
        yield judged(requirement.name, version, requirement.specifier)


def _extra_of(requirement: Requirement) -> str:
    """The extra that requires it; empty if rlsync itself does."""
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        return ""
    extras = importlib.metadata.metadata(_PACKAGE).get_all("Provides-Extra") or []
    return next((extra for extra in extras if requirement.marker.evaluate({"extra": extra})), "")

"""The seams: what may stand on rlsync takes these names, beyond those of ``rlsync`` itself.

``rlsync.runs``, which trains by itself, takes nothing else of the plug; so can a package of yours. A name that
begins with a small letter and is a module stands for its functions: ``seams.families.end_group``. As with
``rlsync``, a name is loaded when it is first used, so a worker does not load torchrl. docs/seams.md says what
each one is.
"""

from rlsync import _loaded, _names_in

_MODULES = _names_in(__file__)

__all__ = [*_MODULES]  # they are texts


def __getattr__(name: str) -> object:
    """Load a seam (PEP 562). Python calls this for names that the module does not have yet."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = seam = _loaded(name, _MODULES)  # the next use finds it here
    return seam


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

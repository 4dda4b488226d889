"""The seams: what may stand on rlsync takes these names, beyond those of ``rlsync`` itself.

``rlsync.runs``, which trains by itself, takes nothing else of the plug; so can a package of yours. A name that
begins with a small letter and is a module stands for its functions: ``seams.families.end_group``. As with
``rlsync``, a name is loaded when it is first used, so a worker does not load torchrl. docs/seams.md says what
each one is.
"""

from rlsync import _lazily

__all__, __getattr__, __dir__ = _lazily(globals())

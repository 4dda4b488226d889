"""The house that stands on the plug: everything that trains by itself.

``train`` runs one training, ``RunResult`` reads what became of one. As with ``rlsync``, a name is loaded when it
is first used.
"""

from rlsync import _lazily

__all__, __getattr__, __dir__ = _lazily(globals())

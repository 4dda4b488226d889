"""What a hook may add to the lines that end a run."""

from __future__ import annotations

from abc import ABC, abstractmethod


class InSummary(ABC):
    """A registered hook with one more line for the end of ``rlsync train``.

    Example:
        >>> class Patience(InSummary):
        ...     def summary_line(self) -> str:
        ...         return "learning rate halved 3 times"
        >>> Patience().summary_line()
        'learning rate halved 3 times'
    """

    @abstractmethod
    def summary_line(self) -> str:
        """The line, without a line break; called once, after the last frame."""

"""``rlsync doctor``: checks this machine, and whether a trainer's weights reach its workers."""

from rlsync.cli.doctor.verb import main

__all__ = ["main"]

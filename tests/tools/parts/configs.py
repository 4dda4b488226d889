"""The checked configs of a command line."""

from __future__ import annotations

from rlsync.runs.config import command_line
from rlsync.runs.life.job import jobs_of
from rlsync.runs.recipes.settings import Config


def configs_of(*words: str) -> list[Config]:
    """The config of every job that ``rlsync train`` would run for these words."""
    return [job.config for job in jobs_of(command_line.read(list(words)))]

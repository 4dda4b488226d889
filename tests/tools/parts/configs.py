"""The checked configs of a command line."""

from __future__ import annotations

from rlsync.cli.compose import command_line
from rlsync.cli.job import jobs_of
from rlsync.recipes.settings import Config


def configs_of(*words: str) -> list[Config]:
    """The config of every job that ``rlsync train`` would run for these words."""
    return [job.config for job in jobs_of(command_line.read(list(words)))]

"""Hands checked jobs over to Hydra, which makes their folders and their logging, and runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import run_and_report
from hydra.types import RunMode
from omegaconf import DictConfig

from rlsync.cli.compose import overrides, schema
from rlsync.cli.compose.overrides import CommandLine

#: Runs one job, whose composed config it is given.
Task = Callable[[DictConfig], None]


def hand_over(app: Hydra, line: CommandLine, task: Task) -> None:
    """Run the jobs of a command line, or print the config if that is what is asked for.

    Hydra composes nothing anew: its loader still has the configs that were checked.

    Args:
        app: what :func:`schema.initialised` gave, still entered.
        line: the command line.
        task: runs one job.
    """
    words = list(line.overrides)

    def run() -> None:
        if line.flags.cfg:
            flags = line.flags
            app.show_cfg(line.config_name, words, flags.cfg, flags.package, flags.resolve)
        elif line.sweeps or _asks_for_a_sweep(app, line.config_name, words):
            app.multirun(line.config_name, task, words)
        else:
            app.run(line.config_name, task, words)

    run_and_report(run)


def _asks_for_a_sweep(app: Hydra, config_name: str, words: list[str]) -> bool:
    """Whether the user's primary config sets ``hydra.mode``, where the command line does not."""
    composed = app.compose_config(config_name, words, RunMode.RUN, from_shell=False)
    return bool(composed.hydra.mode == RunMode.MULTIRUN)


def ask_hydra(line: CommandLine, arguments: list[str], task: Task) -> None:
    """Hand the command line to Hydra as it is: it prints help or information, or runs a job again.

    Args:
        line: the command line.
        arguments: the same, as it was written.
        task: runs one job.
    """
    flags = [word for word in arguments if word not in line.flags.overrides]
    words = line.flags.overrides if line.errors else line.overrides  # these know where installed recipes lie
    app = hydra.main(
        version_base="1.3",
        config_path=str(schema.config_dir()),
        config_name=overrides.CONFIG_NAME,
    )(task)
    before = sys.argv
    sys.argv = ["rlsync train", *flags, *words]
    try:
        with schema.alone():
            app()
    finally:
        sys.argv = before

"""One run that is about to start: its config, checked once, and its environment, looked at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torchrl.trainers import Trainer

from rlsync.cli.compose.written import written
from rlsync.cli.resume import Change, change_errors, changes, checkpoint_in, config_beside, require_fit
from rlsync.core.errors import ConfigError, RlsyncError
from rlsync.recipes import checks
from rlsync.recipes.bounds import refuse
from rlsync.recipes.evaluating import require_screen
from rlsync.recipes.registry import Recipe, recipe_of
from rlsync.recipes.run import learner_device
from rlsync.recipes.run_files import RECEIPTS
from rlsync.recipes.settings import Config

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """A checked config with all that the check found out, so that nothing has to be looked up twice.

    Args:
        config: of the run.
        recipe: that it names.
        spaces: what the recipe's probe found the environment to be.
        checkpoint: to resume from; None starts anew.
        changes: what the config has changed since the run that is resumed; None if that run's is not known.
        told: where the settings come from, what is played and when the run ends, in words.
    """

    config: Config
    recipe: Recipe
    spaces: Any
    checkpoint: Path | None
    changes: list[Change] | None = None
    told: Mapping[str, str] = field(default_factory=dict)

    def build(self) -> Trainer:
        """The trainer, its workers started; nothing is checked or probed again.

        Raises:
            ConfigError: the recipe does not train where ``learner.device`` says.
        """
        trainer = self.recipe.build(self.config, self.spaces)
        device = learner_device(self.config)
        elsewhere = {str(p.device) for p in trainer.loss_module.parameters() if p.device != device}
        if elsewhere:
            trainer.shutdown()
            raise ConfigError(
                f"the recipe {self.recipe.name!r} trains on {', '.join(elsewhere)}, not on {device}",
                "learner.device",
                "let its build() move the networks to learner_device(config) before it makes the loss",
            )
        return trainer

    def continues_in(self, run_dir: Path) -> bool:
        """Whether the run goes on in the folder that it resumes from."""
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == run_dir.resolve()

    def placed(self, run_dir: str, config_dir: Path | None) -> Job:
        """The same job with the folder it writes to (the config's own wins) and that of ``--config-dir``."""
        own = self.config.config_dir if config_dir is None else str(config_dir)
        return replace(
            self, config=replace(self.config, run_dir=self.config.run_dir or run_dir, config_dir=own)
        )


def examined(config: Config) -> tuple[Job | None, list[RlsyncError]]:
    """Check a config without starting a worker: its values, its recipe, its environment, its checkpoint.

    Returns:
        The job, or None if something is wrong; and all that is wrong.
    """
    errors = list(checks.errors(config))

    def tried(look: Callable[[], T]) -> T | None:
        try:
            return look()
        except RlsyncError as error:
            errors.append(error)
            return None

    recipe = tried(lambda: recipe_of(config))
    spaces, checkpoint, before = None, None, None
    if recipe is not None and config.env.id:
        spaces = tried(lambda: recipe.probe(config.env))
        if spaces is not None and not errors:
            tried(lambda: require_screen(config))
    if config.resume is not None:
        checkpoint = tried(lambda: checkpoint_in(str(config.resume)))
        before = tried(lambda: config_before(Path(str(config.resume))))
        if before is not None:
            errors += change_errors(before, config)
    if recipe is None or errors:
        return None, errors
    changed = None if before is None else changes(before, config)
    if checkpoint is not None:
        tried(lambda: require_fit(recipe, config, spaces, checkpoint, changed or []))
    job = Job(config, recipe, spaces, checkpoint, changed)
    tried(lambda: require_free_folder(job))
    return (None if errors else job), errors


def require_free_folder(job: Job) -> None:
    """Refuse a ``run_dir`` that another run has written to: its curves and receipts would be mixed.

    Raises:
        ConfigError: one has, and it is not the run that is resumed.
    """
    run_dir = job.config.run_dir
    if run_dir is None or job.continues_in(Path(run_dir)) or not (Path(run_dir) / RECEIPTS).is_file():
        return
    raise ConfigError(
        f"the folder {run_dir!r} holds another run",
        f"run_dir={run_dir}",
        f"give another folder, or resume={run_dir} to go on with that run",
    )


def config_before(folder: Path) -> Config | None:
    """The config of the run whose checkpoint lies in a folder; None if the checkpoint was taken elsewhere.

    Raises:
        ConfigError: it is unreadable.
    """
    file = config_beside(folder)
    return None if file is None else written(file)


def checked(config: Config) -> Job:
    """The job of a config.

    Raises:
        ConfigError: the first thing that is wrong with it.
    """
    job, errors = examined(config)
    refuse(errors)
    assert job is not None
    return job

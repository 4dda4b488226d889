"""The run that ``resume=`` names: its checkpoint, its config, and how the config of this run builds on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchrl.checkpoint import Checkpoint

from rlsync.cli.compose.shipped import RECIPE, TUNED, look_beside
from rlsync.core.errors import ConfigError, first_line
from rlsync.recipes.env_settings import settings_with
from rlsync.recipes.registry import recipe_named
from rlsync.recipes.run_files import CHECKPOINT, RESOLVED
from rlsync.recipes.settings import Config

#: Keys that belong to one run alone: a run that resumes it has its own.
OF_ONE_RUN = ("resume", "run_dir", "config_dir")

#: The option that a config group has when a run is resumed: what the run before had. A user cannot choose it.
BEFORE = "_resumed_run_"

#: The key that tells which option of a group a config has. To choose that option again sets nothing.
_TOLD_BY = {"env": "id", "collector": "kind", "cluster": "kind", "logger": "kind", "sync": "map"}

#: Makes settings an option: group, name, settings, package.
Store = Callable[[str, str, Any, str | None], None]


def checkpoint_at(folder: Path) -> Path | None:
    """The checkpoint that a folder is, or that lies in it as in a run's; None if there is none.

    A process that is killed while TorchRL replaces a checkpoint may leave only the one before, under a name
    that begins with a dot.
    """
    interrupted = sorted(folder.glob(f".{CHECKPOINT}.backup-*"))
    places = (folder, folder / CHECKPOINT, *interrupted)
    return next((at for at in places if Checkpoint.is_checkpoint(at)), None)


def config_before(folder: Path) -> Config | None:
    """The config of the run whose checkpoint lies in a folder; None if the checkpoint was taken elsewhere."""
    checkpoint = checkpoint_at(folder)
    file = None if checkpoint is None else checkpoint.parent / RESOLVED
    return written(file) if file is not None and file.is_file() else None


def on_top_of(
    before: Config, base: DictConfig, choices: Mapping[str, Any], overrides: Sequence[Override], store: Store
) -> list[str]:
    """The overrides that let Hydra compose this run's config on top of that of the run before.

    Every group that the command line does not name gets the option ``_resumed_run_``. What belongs to no
    group comes in by one more option, the last one that Hydra merges. Overrides of keys come after it, so a
    key has the value of the run before unless the command line gives another. An option of a group
    (``logger=none``) sets all keys of its file that a resumed run can change, unless the run has that option
    already. So a recipe or an environment that is named again changes nothing.

    ``base`` is composed from the options of groups alone, which ``choices`` has; ``store`` makes settings an
    option of a group.
    """
    had = writable(before)
    chosen = {str(word.key_or_group): word for word in overrides if isinstance(word.value(), str)}
    if RECIPE in chosen and _variant(base) != before.recipe.variant():
        return []  # the check of the job refuses another recipe
    if TUNED in chosen and base.recipe != had.recipe:
        line = str(chosen[TUNED].input_line)
        raise ConfigError(
            "a resumed run takes its settings from the run before it, and a tuned config would replace them",
            f"override {line}",
            f"leave {line} out, and give the keys that you want to change",
        )
    for word in overrides:  # Hydra adds no key that is there already
        if word.is_add() and (key := str(word.key_or_group)).startswith("env.kwargs."):
            had.env.kwargs.pop(key.removeprefix("env.kwargs."), None)
    last = {name: had[name] for name in had if name not in (*OF_ONE_RUN, RECIPE, *_TOLD_BY)}
    last["config_dir"] = before.config_dir  # where its recipe lies; --config-dir may name another folder
    words = []
    for group in (RECIPE, *_TOLD_BY):
        if group not in chosen:
            store(group, BEFORE, had[group], None)
            sign = "" if group in choices else "+"  # a primary config of the user's may lack the group
            words.append(f"{sign}{group}={BEFORE}")
        same = group not in chosen or group == RECIPE
        if same or base[group][_TOLD_BY[group]] in ("", had[group][_TOLD_BY[group]]):
            last[group] = had[group]  # once more: a recipe's file sets keys of other groups, too
        else:
            last[group] = {name: had[group][name] for name in _kept(had[group])}
    store(BEFORE, BEFORE, OmegaConf.create(last), "_global_")
    return [*words, f"+{BEFORE}={BEFORE}"]


def _kept(section: DictConfig) -> list[str]:
    """The keys of a section that no resumed run can change."""
    settings: Any = OmegaConf.get_type(section)
    return [spec.name for spec in fields(settings) if "kept" in spec.metadata]


def _variant(base: DictConfig) -> str:
    recipe: Any = OmegaConf.to_object(base.recipe)
    return str(recipe.variant())


def written(file: Path) -> Config:
    """The config in a run's ``config.yaml``. Keys that are newer than the run get their defaults.

    A key that rlsync no longer has is left out where the run had null for it. Values are not checked against
    their bounds. A recipe that lies beside a folder of the user's is imported from there; the run has noted
    where.
    """
    try:
        found = OmegaConf.load(file)
        own, at = (OmegaConf.select(found, key) for key in ("config_dir", "recipe._recipe_"))
        if own is not None and at is not None:
            look_beside(Path(own))
        name = str(OmegaConf.select(found, "recipe.name"))
        recipe = recipe_named(name, f"{file}, recipe.name", at)
        settings = recipe.settings()
        of_its_kind = settings_with(OmegaConf.select(found, "env", default={}))
        known = writable(Config(env=of_its_kind, recipe=settings))
        _leave_out_what_has_gone(found, known)
        config = OmegaConf.to_object(OmegaConf.merge(known, found))
    except (OmegaConfBaseException, OSError) as error:
        what = f"cannot read the run's configuration: {first_line(error)}"
        raise ConfigError(what, str(file), "use the rlsync that wrote it") from error
    assert isinstance(config, Config)
    return config


def _leave_out_what_has_gone(found: Any, known: Any) -> None:
    if not isinstance(found, DictConfig) or not isinstance(known, DictConfig):
        return
    for key in list(found):
        if key in known:
            _leave_out_what_has_gone(found[key], known[key])
        elif found[key] is None and is_dataclass(OmegaConf.get_type(known)):
            del found[key]


def writable(settings: Any) -> DictConfig:
    """A structured config whose keys may be overridden, also those of frozen dataclasses.

    OmegaConf makes the node of a frozen dataclass read-only. A config that is being composed must not be; the
    dataclass that comes out of it in the end is frozen all the same.
    """
    node = OmegaConf.structured(settings)
    _unlock(node)
    assert isinstance(node, DictConfig)
    return node


def _unlock(node: Container) -> None:
    if OmegaConf.is_readonly(node):
        OmegaConf.set_readonly(node, None)
    for key in node if isinstance(node, DictConfig) else range(len(node)):  # type: ignore[arg-type]
        if not OmegaConf.is_missing(node, key) and isinstance(below := node[key], Container):
            _unlock(below)

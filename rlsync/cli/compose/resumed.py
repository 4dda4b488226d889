"""The config of a resumed run: that of the run before, and on top of it what this command line says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rlsync.cli.compose.written import writable, written
from rlsync.cli.resume import OF_ONE_RUN, config_beside
from rlsync.core.errors import ConfigError
from rlsync.recipes.settings import RecipeConfig

#: The key that tells which option of a group a config has. To choose that option again sets nothing.
_TOLD_BY = {"env": "id", "collector": "kind", "cluster": "kind", "logger": "kind", "sync": "map"}


def resumed(composed: DictConfig, words: list[Override]) -> DictConfig:
    """Put the config of the run that ``resume=`` names in the place of what was composed.

    Overrides of keys are applied afterwards, by Hydra. An option of a group (``logger=none``) sets all keys
    of its file that a resume can change, unless the run has that option already. So a recipe or an
    environment that is named again changes nothing.

    Args:
        composed: from the defaults and the options of groups, before any override of a key.
        words: all overrides.

    Returns:
        The config; ``composed`` itself where nothing is resumed, or where no config lies beside the
        checkpoint.

    Raises:
        ConfigError: the run's config cannot be read, or ``tuned=`` would set other values than it has.
    """
    file = _config_before(composed, words)
    if file is None:
        return composed
    before = writable(written(file))
    chosen = {str(word.key_or_group): word for word in words if isinstance(word.value(), str)}
    if "recipe" in chosen and _variant(composed) != _variant(before):
        return composed  # the check of the job refuses another recipe
    for group, key in _TOLD_BY.items():
        told = composed[group][key]
        if group in chosen and told not in ("", before[group][key]):
            before[group] = _with_kept(composed[group], before[group])
    for word in words:  # Hydra adds no key that is there already
        if word.is_add() and (key := str(word.key_or_group)).startswith("env.kwargs."):
            before.env.kwargs.pop(key.removeprefix("env.kwargs."), None)
    _refuse_tuned(chosen, composed, before)
    with read_write(composed), open_dict(composed):
        for name in before:
            if name not in OF_ONE_RUN:
                composed[name] = before[name]
        composed.config_dir = before.config_dir  # where its recipe lies; --config-dir may name another folder
    return composed


def _with_kept(option: DictConfig, before: DictConfig) -> DictConfig:
    """What an option's file says, besides the keys that no resumed run can change."""
    settings: Any = OmegaConf.get_type(before)
    kept = [spec.name for spec in fields(settings) if "kept" in spec.metadata]
    merged = OmegaConf.merge(option, {name: before[name] for name in kept})
    assert isinstance(merged, DictConfig)
    return merged


def _config_before(composed: DictConfig, words: list[Override]) -> Path | None:
    given = [word.value() for word in words if word.key_or_group == "resume" and not word.is_sweep_override()]
    resume = given[-1] if given else OmegaConf.select(composed, "resume")
    return config_beside(Path(resume)) if isinstance(resume, str) else None


def _variant(config: DictConfig) -> str:
    recipe = OmegaConf.to_object(config.recipe)
    assert isinstance(recipe, RecipeConfig)
    return recipe.variant()


def _refuse_tuned(chosen: dict[str, Override], composed: DictConfig, before: DictConfig) -> None:
    if "tuned" in chosen and composed.recipe != before.recipe:
        line = str(chosen["tuned"].input_line)
        raise ConfigError(
            "a resumed run takes its settings from the run before it, and a tuned config would replace them",
            f"override {line}",
            f"leave {line} out, and give the keys that you want to change",
        )

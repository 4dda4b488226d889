"""Hydra's loader of configs, which composes no config twice, and knows what a resumed run goes on from."""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlsync.cli.compose.resumed import resumed
from rlsync.cli.compose.shipped import ENV, TUNED
from rlsync.cli.compose.tuned import fitting, is_chosen

_HYDRAS_DIR = "hydra.run.dir="


class ComposeOnce(ConfigLoaderImpl):
    """Composes a config when it is first asked for, and hands out copies of it from then on.

    rlsync checks the config of every job before the first one starts. Hydra then sets the jobs up and asks
    for the same configs again: it gets what was checked. Unless the user has chosen tuned settings, it gets
    those that fit the environment; see :func:`rlsync.cli.compose.tuned.fitting`.

    A config with ``resume=`` is composed on top of that of the run before; see :func:`resumed`. Whatever
    shows or records it (``--cfg job``, Hydra's own files) shows what the run does.

    Args:
        config_search_path: where the files are looked for.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path=config_search_path)
        self._composed: dict[tuple[str | None, tuple[str, ...], RunMode], DictConfig] = {}
        self._overrides: list[str] = []

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """See Hydra's ConfigLoader; ``from_shell`` only changes the words of its errors."""
        key = (config_name, tuple(overrides), run_mode)
        if key not in self._composed:
            self._overrides = overrides
            composed = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
            if run_mode == RunMode.RUN and not is_chosen(overrides):
                words = self._with_tuned(composed, config_name, overrides)
                if words != overrides:
                    composed = super().load_configuration(config_name, words, run_mode, from_shell)
            self._composed[key] = _in_one_folder(composed, overrides)
        return copy.deepcopy(self._composed[key])

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        composed = super()._compose_config_from_defaults_list(defaults, repo)
        return resumed(composed, OverridesParser.create().parse_overrides(self._overrides))

    def _with_tuned(self, composed: DictConfig, config_name: str | None, overrides: list[str]) -> list[str]:
        """The overrides, with the tuned settings that fit where the defaults list names others.

        A defaults list knows the names of config files only. What fits depends on the keys of ``env``.
        """
        choices = composed.hydra.runtime.choices
        if TUNED not in choices or ENV not in composed:
            return overrides  # the user's primary config is another one
        _, files = self._parse_overrides_and_create_caching_repo(config_name, overrides)

        def id_of(env: str) -> Any:
            found = files.load_config(f"{ENV}/{env}")
            return None if found is None else OmegaConf.select(found.config, "id")

        options = self.get_group_options(TUNED, ObjectType.CONFIG, config_name, overrides)
        fits = fitting(composed, options, id_of)
        if fits == (choices[TUNED] if choices[TUNED] in options else None):
            return overrides
        return [*overrides, f"~{TUNED}" if fits is None else f"{TUNED}={fits}"]


def _in_one_folder(composed: DictConfig, overrides: list[str]) -> DictConfig:
    """Let Hydra write to ``run_dir`` too, where that is given: a run has one folder."""
    if OmegaConf.select(composed, "run_dir") and not any(o.startswith(_HYDRAS_DIR) for o in overrides):
        composed.hydra.run.dir = "${run_dir}"
    return composed

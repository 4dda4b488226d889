"""rlsync in TorchRL's own config system: hooks and the scheme, in its ConfigStore groups.

TorchRL builds trainers from YAML with Hydra (``torchrl.trainers.algorithms.configs``). After
:func:`register`, a defaults list may name rlsync's parts like its own::

    defaults:
      - trainer: ppo
      - collector: multi_sync
      - weight_sync_scheme@scheme: board
      - hook@sync: sync_weights
      - _self_

``examples/torchrl_config`` is a complete one that trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from rlsync import SyncWeights
from rlsync.runs.recipes.settings import CollectorConfig, RouteConfig, SyncConfig, WhenConfig
from rlsync.runs.recipes.sync_settings import sync_map, trigger
from rlsync.seams import UNCHANGED_PUBLISHES, extensions

PROVIDER = "rlsync"


@dataclass
class SyncWeightsConfig:
    """``hook: sync_weights``, a :class:`rlsync.SyncWeights`; ``map`` is a list of {destination, source}."""

    map: list[RouteConfig] = field(default_factory=lambda: SyncConfig().map)
    when: WhenConfig = field(default_factory=WhenConfig)
    history: int = SyncConfig.history
    receipts_file: str | None = None
    versions_file: str | None = None
    finite: bool = False
    background: bool = False
    max_unchanged_publishes: int | None = UNCHANGED_PUBLISHES
    _target_: str = "rlsync.runs.config.torchrl_configs.make_sync_weights"
    _convert_: str = "object"


@dataclass
class WatchWorkersConfig:
    """``hook: watch_workers``, a :class:`rlsync.WatchWorkers`; the key is its argument."""

    silent_timeout_s: float | None = CollectorConfig.silent_timeout_s
    _target_: str = "rlsync.WatchWorkers"


@dataclass
class BoardSchemeConfig:
    """``weight_sync_scheme: board``, a :class:`rlsync.BoardScheme`; the keys are its arguments."""

    adopt: str = CollectorConfig.adopt
    adopt_at: str = "rollout"
    prove: bool = True
    start_timeout_s: float | None = 300.0
    silent_timeout_s: float | None = CollectorConfig.silent_timeout_s
    transport: str = extensions.BOARD
    _target_: str = "rlsync.BoardScheme"


def make_sync_weights(map: list[RouteConfig], when: WhenConfig, **options: Any) -> SyncWeights:
    """The hook of a :class:`SyncWeightsConfig`; ConfigError if map or trigger say nothing, or not all."""
    return SyncWeights(sync_map(SyncConfig(map=map)), trigger(when), **options)


def register() -> None:
    """Put rlsync's hooks and scheme beside TorchRL's own configs; call it before Hydra composes."""
    import torchrl.trainers.algorithms.configs  # noqa: F401 - registers TorchRL's own, at import

    store = ConfigStore.instance()
    store.store(group="hook", name="sync_weights", node=SyncWeightsConfig, provider=PROVIDER)
    store.store(group="hook", name="watch_workers", node=WatchWorkersConfig, provider=PROVIDER)
    store.store(group="weight_sync_scheme", name="board", node=BoardSchemeConfig, provider=PROVIDER)

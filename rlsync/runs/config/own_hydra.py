"""rlsync's use of Hydra: types and folders, keys, and jobs to hand over.

What Hydra 1.3 does not document stands here alone: the repo of its ConfigStore, how it applies overrides to a
config that it has merged, that its main object runs what its loader returns, and where sweepers get their
launcher. A Hydra that runs a config which is composed already, and sets its keys, would let most of it go.
"""

from __future__ import annotations

import copy
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, lru_cache, wraps
from pathlib import Path
from typing import Any

import hydra
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlsync import ConfigError, RlsyncError
from rlsync.runs.config import refusals
from rlsync.runs.config.shipped import config_dir, look_beside
from rlsync.runs.recipes import registry, settings
from rlsync.seams import first_line

CONFIG_NAME = "train"

SCHEMA = "schema"  #: config group in which the types are kept; not a choice for users

#: The types of a run's parts besides the recipe, by the names of their schemas.
PARTS = {
    "env": settings.EnvConfig,
    "atari": settings.AtariConfig,
    "rendered": settings.RenderedConfig,
    "collector": settings.CollectorConfig,
    "cluster": settings.ClusterConfig,
    "sync": settings.SyncConfig,
    "logger": settings.LoggerConfig,
}

#: The key that says where a recipe lies, as ``module:OBJECT``; beside ``name``, in the recipe's YAML.
KEY = "_recipe_"

#: Hydra's own groups: who runs the jobs of a sweep, and who decides which jobs there are.
LAUNCHER = "hydra/launcher"
SWEEPER = "hydra/sweeper"

#: The options of theirs that are Hydra's own: one job after the other in this process, and every combination.
BASIC = (None, "basic")

_VERSION = "1.3"
_PACKAGE = "pkg://"

_FULL_ERROR = "HYDRA_FULL_ERROR"

#: What of Hydra's ConfigStore is Hydra's own, with its plugins.
_HYDRAS = {"hydra", "_dummy_empty_config_.yaml"}


class _Nodes(dict[str, Any]):
    """rlsync's part of the ConfigStore. Hydra copies it nine times a composition and changes no copy."""

    def __deepcopy__(self, memo: object) -> _Nodes:
        return self  # which saves a quarter of the time


_nodes = _Nodes()  #: what Hydra knows


def register(own: Path | None = None) -> dict[str, ConfigError]:
    """Put the settings of runs and recipes, also of ``own``, under ``schema/``; returns errors by file."""
    wanted: dict[str, tuple[str, str | None]] = {name: (name, None) for name in registry.names()}
    if own is not None:
        look_beside(own)
        wanted |= named_in(own)
    kinds = {}
    errors = {}
    for file, (name, at) in wanted.items():
        try:
            kind: type = registry.recipe_named(name, at=at).settings
            _of_type(kind)
            kinds[name] = kind
        except ConfigError as error:
            errors[file] = error
        except OmegaConfBaseException as error:
            where = f"recipe {name!r}, {kind.__module__}.{kind.__qualname__}, key {error.full_key}"
            cure = "give each key a type that Hydra knows and a default of that type"
            errors[file] = ConfigError(
                f"settings that Hydra does not take: {first_line(error)}", where, cure
            )
    stored = _stored(tuple(kinds.items()))
    _nodes.clear()  # also of what a resumed run brought in
    _nodes.update(_copied(stored))
    return errors


def register_in_process_of_launcher(own: Path | None) -> None:
    """Register where nobody has: a launcher has started this process, which read no command line."""
    if SCHEMA not in _nodes:
        register(own)


@lru_cache(maxsize=1)
def _stored(recipes: tuple[tuple[str, type], ...]) -> dict[str, Any]:
    """What the settings of runs and of these recipes are in the ConfigStore."""
    _nodes.clear()
    # The base class of the recipes, so that any of them may take its place.
    store(SCHEMA, "config", settings.Config(recipe=settings.RecipeConfig()), package="_global_")
    for name, node in PARTS.items():
        store(SCHEMA, name, node)
    for name, of_recipe in recipes:
        store(f"{SCHEMA}/recipe", name, of_recipe)
    return _copied(_nodes)


def _copied(nodes: dict[str, Any]) -> dict[str, Any]:
    """The same nodes in groups that may be changed."""
    copies = {}
    for name, node in nodes.items():
        if isinstance(node, dict):
            node = _copied(node)
        copies[name] = node
    return copies


def named_in(folder: Path) -> dict[str, tuple[str, str]]:
    """The recipes that the YAML files in ``folder/recipe`` name by ``_recipe_``: file -> (name, place)."""
    recipes = {}
    for file in sorted((folder / "recipe").glob("*.yaml")):
        content = OmegaConf.load(file)
        if not isinstance(content, DictConfig):
            continue
        # With the header "@package _global_" the keys stand under "recipe"; without it they do not.
        for prefix in ("recipe.", ""):
            at = OmegaConf.select(content, prefix + KEY)
            if isinstance(at, str):
                recipes[file.stem] = (
                    str(OmegaConf.select(content, prefix + "name") or file.stem),
                    at,
                )
    return recipes


def store(group: str, name: str, node: Any, package: str | None = None) -> None:
    """Make settings an option of a group, of which Hydra knows from now on inside :func:`alone`."""
    with alone():
        if isinstance(node, type):
            settings_node = _of_type(node)
        else:
            settings_node = writable(node)
        ConfigStore.instance().store(
            name, settings_node, group=group, package=package, provider="rlsync"
        )


def writable(settings: Any) -> DictConfig:
    """A structured config whose keys may be overridden, also those of frozen dataclasses."""
    node = OmegaConf.structured(settings)
    _unlock(node)
    assert isinstance(node, DictConfig)
    return node


_of_type = cache(writable)  # for the ConfigStore alone, which gives copies away


def _unlock(node: DictConfig | ListConfig) -> None:
    if OmegaConf.is_readonly(node):
        OmegaConf.set_readonly(node, None)
    for key in refusals.names_in(node):
        if OmegaConf.is_missing(node, key):
            continue
        below = node[key]
        if isinstance(below, DictConfig | ListConfig):
            _unlock(below)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, Hydra knows rlsync's configs and its own alone: it would merge TorchRL's of the same name."""
    everybodys = ConfigStore.instance()
    everything = everybodys.repo
    if everything is not _nodes:
        for name in everything.keys() & _HYDRAS:
            _nodes[name] = everything[name]
    everybodys.repo = _nodes
    try:
        yield
    finally:
        everybodys.repo = everything


@contextmanager
def _in_place() -> Iterator[None]:
    """Afterwards the working directory is what it was before, if an environment has changed it inside."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _apart() -> Iterator[None]:
    """While entered, Hydra is not initialised, although a program that calls rlsync may use Hydra itself."""
    outside = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with alone(), _in_place():
            yield
    except Exception as error:
        refusals.raise_interrupt(error)
        raise
    finally:
        restore_gh_from_backup(outside)


@contextmanager
def initialised(config_path: str | None = None) -> Iterator[None]:
    """While entered, configs can be composed; ``pkg://PACKAGE`` too may be the path of the primary config."""
    with ExitStack() as stack:
        stack.enter_context(_apart())
        if config_path is not None and config_path.startswith(_PACKAGE):
            module = config_path.removeprefix(_PACKAGE).replace("/", ".")
            stack.enter_context(initialize_config_module(module, CONFIG_NAME, _VERSION))
        else:
            folder = str(Path(config_path or config_dir()).resolve())
            stack.enter_context(initialize_config_dir(folder, CONFIG_NAME, _VERSION))
        yield


def group_names() -> list[str]:
    return sorted(folder.name for folder in config_dir().iterdir() if folder.is_dir())


def options(group: str, config_name: str, words: Sequence[str]) -> list[str]:
    """What a group offers, or ``""``, all groups: in folders on the search path that these words set, too."""
    loader = GlobalHydra.instance().config_loader()
    kind = ObjectType.CONFIG if group else ObjectType.GROUP
    return loader.get_group_options(group, kind, config_name, list(words))


@contextmanager
def stumbles(over: str = "this") -> Iterator[None]:
    """Around what Hydra and OmegaConf do by themselves: whatever they raise is HydraException.

    They check some words by assertions, and stumble over others.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError):
        raise
    except Exception as error:
        problem = f"Hydra cannot compose {over}: {type(error).__name__}: {first_line(error)}"
        raise HydraException(problem) from error


def composed(config_name: str, words: Sequence[str]) -> DictConfig:
    """What Hydra composes of these overrides, with Hydra's own part."""
    with stumbles():
        return compose(config_name, list(words), return_hydra_config=True)


def job_part(config: DictConfig) -> DictConfig:
    """A copy of a composed config without Hydra's own part, as Hydra gives it to a job."""
    part = copy.deepcopy(config)
    with read_write(part), open_dict(part):
        del part["hydra"]
    return part


def set_keys(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Set, add and leave out keys of a composed config, as Hydra does once it has merged the files."""
    for override in overrides:
        with stumbles(str(override.input_line)):
            ConfigLoaderImpl._apply_overrides_to_config([override], config)


def record(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Note all overrides in Hydra's part: some were set after Hydra had composed, and it knows nothing of them."""
    task = [override for override in overrides if not override.is_hydra_override()]
    hydras = [override for override in overrides if override.is_hydra_override()]
    config.hydra.overrides.task = list(map(refusals.word_of, task))
    config.hydra.overrides.hydra = list(map(refusals.word_of, hydras))
    job = config.hydra.job
    job.override_dirname = get_overrides_dirname(
        overrides=task,
        exclude_keys=job.config.override_dirname.exclude_keys,
        item_sep=job.config.override_dirname.item_sep,
        kv_sep=job.config.override_dirname.kv_sep,
    )


def asks_for_sweep(config: DictConfig) -> bool:
    """Whether a composed config is one of a sweep, also without ``-m``: its files may say so."""
    return bool(config.hydra.mode == RunMode.MULTIRUN)


def foreign_sweeper(hydras: Any) -> str:
    """The sweeper that Hydra's part of a config names, if it is not Hydra's own; it may go by results."""
    name = hydras.runtime.choices.get(SWEEPER)
    if name not in BASIC:
        return str(name)
    target = hydras.sweeper.get("_target_")
    if target in (None, BasicSweeperConf._target_):
        return ""
    return str(target)


def run(
    flags: Namespace, config: DictConfig, words: Sequence[str], task: Callable[[DictConfig], object]
) -> None:
    """Let Hydra run one job, composed already, in a folder of its own; or print what ``--cfg`` asks for."""
    with _handed(words, task) as noted, initialised(flags.config_path):
        main = GlobalHydra.instance().hydra
        assert main is not None
        # a copy, wherever Hydra would compose once more
        main.config_loader.load_configuration = lambda **_: copy.deepcopy(config)  # type: ignore[method-assign]
        name = config.hydra.job.config_name
        if flags.cfg is None:
            main.run(name, noted, list(words))
        else:
            main.show_cfg(name, list(words), flags.cfg, flags.package, flags.resolve)


def hand_over(
    flags: Sequence[str],
    words: Sequence[str],
    task: Callable[[DictConfig], object],
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Let Hydra read a command line: it runs a sweep, or prints what the flags ask for.

    Once the sweep ``is_stopped``, it ends with the error of a job that was stopped.
    """
    words_before = sys.argv
    shown_before = os.environ.get(_FULL_ERROR)
    sys.argv = ["rlsync train", *flags, *words]
    os.environ[_FULL_ERROR] = "1"  # else Hydra prints errors by itself, with a traceback, and exits
    try:
        with _handed(words, task) as noted, _apart(), _watched_launches(is_stopped):
            main = hydra.main(
                version_base=_VERSION, config_path=str(config_dir()), config_name=CONFIG_NAME
            )
            main(noted)()
    finally:
        sys.argv = words_before
        del os.environ[_FULL_ERROR]
        if shown_before is not None:
            os.environ[_FULL_ERROR] = shown_before


class _Watched(Launcher):
    """A launcher that raises the error of a job of a stopped sweep. A sweeper may take it for a failed trial."""

    def __init__(self, launcher: Launcher, is_stopped: Callable[[], bool]) -> None:
        self._launcher = launcher
        self._is_stopped = is_stopped

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Do nothing: the launcher behind it is set up."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        jobs = self._launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        if self._is_stopped():
            for job in jobs:
                job.return_value  # noqa: B018  # raises what the job has raised
        return jobs


@contextmanager
def _watched_launches(is_stopped: Callable[[], bool]) -> Iterator[None]:
    """Inside, sweepers get launchers that end a stopped sweep."""
    instantiate = Plugins.instantiate_launcher

    def watched(
        plugins: Plugins,
        hydra_context: HydraContext,
        task_function: TaskFunction,
        config: DictConfig,
    ) -> Launcher:
        launcher = instantiate(plugins, hydra_context, task_function, config)
        return _Watched(launcher, is_stopped)

    # Of the class: launchers pickle the one instance for their processes.
    Plugins.instantiate_launcher = watched  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = instantiate  # type: ignore[method-assign]


@contextmanager
def _handed(
    words: Sequence[str], task: Callable[[DictConfig], object]
) -> Iterator[Callable[[DictConfig], object]]:
    """The task as Hydra is to call it. An error before that is one of these words; after it, the task's own."""
    begun: list[DictConfig] = []

    @wraps(task)  # Hydra names jobs by its module
    def noted(config: DictConfig) -> object:
        begun.append(config)
        with _in_place():  # Hydra takes the folder of a sweep's next job from the working directory
            return task(config)

    try:
        yield noted
    except Exception as error:
        if begun or isinstance(error, RlsyncError | OSError):
            raise
        raise refusals.of_composition(error, words) from error

"""Composes one job's config: options of groups, tuned settings, the run that is resumed, and keys on top."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlsync import ConfigError
from rlsync.runs.config import own_hydra, refusals, shipped, trust
from rlsync.runs.config.command_line import CommandLine
from rlsync.runs.config.refusals import SEE_ALL, key_of, parsed, word_of
from rlsync.runs.config.shipped import ENV, RECIPE, TUNED, look_beside
from rlsync.runs.recipes.checkpoints import AboutRun, checkpoint_at
from rlsync.runs.recipes.env_settings import settings_with
from rlsync.runs.recipes.lag import collector_of_now
from rlsync.runs.recipes.registry import recipe_named
from rlsync.runs.recipes.run_files import (
    AGENTS,
    CHECKPOINT,
    LIFE_END,
    OF_ONE_RUN,
    PATHS,
    RESOLVED,
)
from rlsync.runs.recipes.settings import (
    BFLOAT16,
    Config,
    EnvConfig,
    RenderedConfig,
)
from rlsync.seams import first_line

#: The option that a config group has when a run is resumed: what the run before had. A user cannot choose it.
BEFORE = "_resumed_run_"

#: The key that tells which option of a group a config has. To choose that option again sets nothing.
_TOLD_BY = {"env": "id", "collector": "lag", "cluster": "kind", "logger": "kind", "sync": "map"}

#: Resumes from the run's own folder, if it has a checkpoint, else begins there.
AUTO = "auto"

Choices = Mapping[str, Any]  #: the option that was chosen in each config group


@dataclass(frozen=True, slots=True)
class Composition:
    config: Config  # typed; its values are not checked against their bounds
    composed: DictConfig  # what it was made of, with Hydra's own part: a job that Hydra can run
    # what rlsync adds to the user's overrides, so that Hydra composes the same
    added: tuple[str, ...]
    auto: bool = False  # whether resume=auto was given

    @property
    def choices(self) -> Choices:
        return choices_of(self.composed)


def choices_of(composed: DictConfig) -> Choices:
    return dict(composed.hydra.runtime.choices)


def composition(
    line: CommandLine, words: Sequence[str]
) -> tuple[Composition | None, list[ConfigError]]:
    """What a job's overrides make, without those that name no key; None if Hydra refuses. And all errors."""
    composing = _Composing(line, words)
    try:
        return composing.composed(), composing.errors
    except ConfigError as error:
        return None, [*composing.errors, error]
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        return None, [*composing.errors, refusals.of_composition(error, words, line.config_dir)]


class _Composing:
    """A job's overrides on their way to a config, in four steps: options, what fits, keys, types."""

    def __init__(self, line: CommandLine, words: Sequence[str]) -> None:
        self.errors: list[ConfigError] = []
        self._line = line
        self._groups = own_hydra.group_names()
        self._overrides = list(map(parsed, words))
        self._hydras: list[str] = []  #: the words for Hydra itself
        self._options: list[Override] = []  #: choose an option of a group
        self._resume: list[str] = []  #: the words that name the run that is resumed
        self._keys: list[Override] = []  #: all others, which set keys
        self._auto = False
        for override in self._overrides:
            if override.is_hydra_override():
                self._hydras.append(word_of(override))
            elif key_of(override) in self._groups:
                self._options.append(override)
            elif key_of(override) == "resume":
                self._resume.append(word_of(override))
            else:
                self._keys.append(override)
        if self._resume == [f"resume={AUTO}"]:
            self._resume = self._as_auto_means()

    def _as_auto_means(self) -> list[str]:
        """The word that resumes what the run's own folder has, from where a life begins; none: it begins."""
        folders = [override.value() for override in self._keys if key_of(override) == "run_dir"]
        if self._line.sweeps or not folders or not isinstance(folders[-1], str):
            cure = (
                "give run_dir=FOLDER: the run goes on there if it has a checkpoint, else it begins"
            )
            if self._line.sweeps:
                cure = "start its jobs one by one, each with its run_dir"
            self.errors.append(
                ConfigError("resume=auto has no folder", "override resume=auto", cure)
            )
            return []
        self._auto = True
        folder = self._line.folder / folders[-1]
        place = folder
        newest = checkpoint_at(folder)
        if newest is not None and AboutRun.of(newest).within_a_life:
            place = folder / LIFE_END
        if checkpoint_at(place) is None:
            return []
        return [f"resume='{place}'"]

    def composed(self) -> Composition | None:
        """The config; None if an option is wrong, for then nobody knows what the keys are."""
        self._check_options()
        if self.errors:
            return None
        # options, and the run that is resumed, decide which keys there are
        words = [*self._hydras, *map(word_of, self._options), *self._resume]
        config = self._hydra_composes(words)
        added = self._what_fits(config)
        if added:
            # Which environment and which run these are is known only now. What fits them goes below what is
            # merged already, so Hydra begins anew.
            words += added
            config = self._hydra_composes(words)
        config = self._with_keys(config, words)
        typed = _typed(own_hydra.job_part(config), self._line.folder)
        self._record(config, typed, added)
        return Composition(typed, config, tuple(added), self._auto)

    def _hydra_composes(self, words: list[str]) -> DictConfig:
        return own_hydra.composed(self._line.config_name, words)

    def _options_of(self, group: str) -> list[str]:
        return own_hydra.options(group, self._line.config_name, self._hydras)

    def _check_options(self) -> None:
        for option in self._options:
            options = self._options_of(key_of(option))
            self.errors += refusals.of_option(option, options, self._line.unusable)

    def _what_fits(self, base: DictConfig) -> list[str]:
        """The overrides that bring in the run that is resumed, or else what is tuned for the environment."""
        file = None
        resume = OmegaConf.select(base, "resume")
        if resume is not None:
            run = self._line.folder / str(resume)
            file = file_before(run)
            if resume and file is None and checkpoint_at(run) is None:
                # and the keys of the run's recipe are not known
                self.errors.append(nothing_in(str(run)))
        if file is None:
            return self._tuned(base)

        before = written(file, trusted=self._line.trusted, config_dir=self._line.config_dir)
        if before.recipe.name in _ENDED_WITH_0_1 and is_of_0_1(file):
            name = before.recipe.name
            problem = f"a run of {name} by rlsync 0.1 cannot go on: its losses are others now"
            cure = "start anew, without resume; rlsync eval plays the run as it is"
            raise ConfigError(problem, str(file), cure)
        replaced = set(map(key_of, self._overrides))
        keys = [key for key in trust.CODE if replaced.isdisjoint((key, key.partition(".")[0]))]
        trust.check_code(before, keys, file, self._line.trusted)
        return _on_top_of(before, base, self._overrides)

    def _tuned(self, base: DictConfig) -> list[str]:
        """The override that chooses what is tuned for the environment, if Hydra has not chosen it."""
        choices = choices_of(base)
        if TUNED not in choices or TUNED in map(key_of, self._overrides):
            return []  # the user's primary config is another one, or the user has chosen
        options = self._options_of(TUNED)
        env_id = base.env.id
        make = base.env.make
        for override in self._overrides:
            if key_of(override) == "env.id":
                env_id = str(override.value())
            if key_of(override) == "env.make":
                make = override.value()
        if make is not None:
            env_id = ""  # it is not read
        fits = _fitting(choices, base.env, env_id, options, self._line.config_dir)
        chosen = choices[TUNED]
        if fits == chosen or (fits is None and chosen not in options):
            return []
        if fits is None:
            return [f"~{TUNED}"]
        return [f"{TUNED}={fits}"]

    def _with_keys(self, config: DictConfig, words: list[str]) -> DictConfig:
        """The config with the keys that the overrides set; those that name no key are errors."""
        known = list(refusals.keys_of(own_hydra.job_part(config)))
        keys = []
        outermost = set()
        for override in self._keys:
            wrong = list(refusals.of_key(override, known, self._groups))
            self.errors += wrong
            if not wrong:
                keys.append(override)
                if "." not in key_of(override):
                    outermost.add(key_of(override))

        if outermost and not outermost.isdisjoint(self._options_of("")):
            # A folder of the user's makes a group of a key: its files are for Hydra to merge.
            config = self._hydra_composes([*words, *map(word_of, keys)])
        else:
            own_hydra.set_keys(config, keys)
        return config

    def _record(self, config: DictConfig, typed: Config, added: list[str]) -> None:
        """Note all overrides in the config, and let Hydra write to the run's folder: a run has one."""
        overrides = [*self._overrides, *map(parsed, added)]
        has_folder = "hydra.run.dir" in map(key_of, overrides)
        if typed.run_dir and not self._line.sweeps and not has_folder:
            folder = parsed("hydra.run.dir=${run_dir}")
            own_hydra.set_keys(config, [folder])
            overrides.append(folder)
        own_hydra.record(config, overrides)


def _typed(config: DictConfig, folder: Path) -> Config:
    """The config as a dataclass, in which the run's own folders are absolute paths, seen from ``folder``."""
    try:
        for key in PATHS:
            if (path := OmegaConf.select(config, key)) is not None:
                config[key] = str(folder / str(path))
        with own_hydra.stumbles():
            typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        where = error.full_key or "the configuration"
        raise ConfigError(first_line(error), where, SEE_ALL) from error
    assert isinstance(typed, Config)
    return typed


def _fitting(
    choices: Choices,
    env: DictConfig,
    env_id: str,
    options: Collection[str],
    config_dir: Path | None,
) -> str | None:
    """The tuned settings that fit, or None.

    They are named ``RECIPE_ENV`` where the id is that of the file ``env/ENV``, else ``RECIPE_KIND`` by
    :attr:`EnvConfig.kind`. An environment and its picture have one id, and are different tasks: files for
    pictures have names that begin with ``rendered``.
    """
    files = {file.name: file.path for file in shipped.groups(config_dir).get(ENV, [])}

    def id_of(name: str) -> str:
        if name in files:
            return str(OmegaConf.select(OmegaConf.load(files[name]), "id", default=""))
        return ""

    recipe = choices.get(RECIPE)
    chosen = choices.get(ENV)
    if chosen and f"{recipe}_{chosen}" in options and id_of(chosen) in ("", env_id):
        return f"{recipe}_{chosen}"
    settings = OmegaConf.get_type(env)
    if isinstance(settings, type) and issubclass(settings, EnvConfig):
        kind = settings.kind
    else:
        kind = ""
    for option in options:
        name = option.removeprefix(f"{recipe}_")
        alike = name.startswith(RenderedConfig.kind) == (kind == RenderedConfig.kind)
        if name != option and env_id and alike and id_of(name) == env_id:
            return option
    general = f"{recipe}_{kind}"
    if general in options:
        return general
    return None


def told(choices: Choices, config: Config, config_dir: Path | None) -> dict[str, str]:
    """Where the settings of a run come from, what it plays, who acts, and when it ends."""
    recipe = config.recipe
    files = {file.name: file for file in shipped.groups(config_dir).get(TUNED, [])}
    tuned = files.get(str(choices.get(TUNED)))
    origin = f"{RECIPE}/{choices.get(RECIPE)}"
    if config.resume is not None:
        origin = f"those of the run that is resumed, recipe {recipe.variant()}"
    elif tuned is None:
        origin += f" alone: general settings, not tuned for {config.env.name}"
    else:
        origin += f" with {tuned}"
        if about := tuned.description():
            origin += f" ({about})"

    goal = recipe.goal()
    ends = f"after {recipe.total_frames:,} frames"
    if goal:
        ends = f"{goal}, or {ends}"
    else:
        ends += "; no target return is set"

    if config.in_process:
        workers = "none"
    elif config.cluster.here:
        workers = str(config.workers_per_node)
    else:
        workers = f"{config.workers_per_node} on each node"
    return {
        "settings": origin,
        "plays": config.env.facts(),
        "workers": f"{workers}; {config.lag_facts()}",
        "ends": ends,
    }


def _on_top_of(before: Config, base: DictConfig, overrides: list[Override]) -> list[str]:
    """The overrides with which Hydra composes on top of the run before.

    Groups that the line does not name get the option ``_resumed_run_``, and one more brings in what belongs
    to no group, and what can change.
    """
    had = own_hydra.writable(before)
    chosen = {key_of(o): word_of(o) for o in overrides if isinstance(o.value(), str)}
    recipe: Any = before.recipe
    if RECIPE in chosen:
        recipe = OmegaConf.to_object(base.recipe)
    if recipe.variant() != before.recipe.variant():
        return []  # the check of the job refuses another recipe
    if TUNED in chosen and base.recipe != had.recipe:
        line = chosen[TUNED]
        raise ConfigError(
            "a resumed run takes its settings from the run before it, and a tuned config would replace them",
            f"override {line}",
            f"leave {line} out, and give the keys that you want to change",
        )
    for override in overrides:  # Hydra adds no key that is there already
        if override.is_add() and (key := key_of(override)).startswith("env.kwargs."):
            had.env.kwargs.pop(key.removeprefix("env.kwargs."), None)

    last = {name: had[name] for name in had if name not in (*OF_ONE_RUN, RECIPE, *_TOLD_BY)}
    # where its recipe lies; --config-dir may name another folder
    last["config_dir"] = before.config_dir
    choices = choices_of(base)
    words = []
    for group in (RECIPE, *_TOLD_BY):
        if group not in chosen:
            own_hydra.store(group, BEFORE, had[group])
            # a primary config of the user's may lack the group
            if group in choices:
                words.append(f"{group}={BEFORE}")
            else:
                words.append(f"+{group}={BEFORE}")
        same = group not in chosen or group == RECIPE
        if same or base[group][_TOLD_BY[group]] in ("", had[group][_TOLD_BY[group]]):
            last[group] = had[group]  # once more: a recipe's file sets keys of other groups, too
        else:
            settings: Any = OmegaConf.get_type(had[group])
            unchangeable = [spec.name for spec in fields(settings) if "kept" in spec.metadata]
            last[group] = {name: had[group][name] for name in unchangeable}
    own_hydra.store(BEFORE, BEFORE, OmegaConf.create(last), package="_global_")
    return [*words, f"+{BEFORE}={BEFORE}"]


def nothing_in(folder: str) -> ConfigError:
    """The error for a folder without a checkpoint, which a run cannot resume."""
    if Path(folder).is_dir():
        problem = f"cannot resume: {folder!r} holds no checkpoint"
    else:
        problem = f"cannot resume: {folder!r} does not exist"
    cure = f"give a run folder that has a {CHECKPOINT}/ in it, or the checkpoint folder itself"
    return ConfigError(problem, f"resume={folder}", cure)


def file_before(folder: Path) -> Path | None:
    """The config beside the checkpoint in a folder, or of the population there; None if there is none."""
    if (folder / AGENTS).is_dir():
        file = folder / RESOLVED
    elif (checkpoint := checkpoint_at(folder)) is not None:
        file = checkpoint.parent / RESOLVED
    else:
        return None
    if file.is_file():
        return file
    return None


def written(file: Path, *, trusted: bool = False, config_dir: Path | None = None) -> Config:
    """The config in a run's ``config.yaml``; keys newer than the run get their defaults.

    Bounds are not checked. What an earlier rlsync called the kind of its collector is a lag now; ConfigError
    where a run cannot go on as it was. A recipe that lies beside a folder of the user's is imported from
    there: if this user did not start the run, it must lie beside ``config_dir``, or the run be ``trusted``.
    """
    config = trust.config_in(file)
    try:
        before = OmegaConf.select(config, "config_dir")
        place = OmegaConf.select(config, "recipe._recipe_")
        name = OmegaConf.select(config, "recipe.name")
        if not isinstance(name, str):
            raise trust.unreadable("it names no recipe, so it was cut or changed", file)
        named_here = (
            config_dir is not None and (name, place) in own_hydra.named_in(config_dir).values()
        )
        if place is not None and not named_here:
            if not trusted and not trust.is_mine(file.parent):
                trust.refuse(f"its recipe is the code of {place}", file)
            if before is not None:
                look_beside(Path(before))
        settings = recipe_named(name, f"{file}, recipe.name", place).settings()
        of_its_kind = settings_with(OmegaConf.select(config, "env", default={}))
        known = own_hydra.writable(Config(env=of_its_kind, recipe=settings))
        _take_keys_that_left_model(config, known)
        _take_lag_for_kind(config, file)
        _require_map_of_now(config, file)
        _take_names_for_those_of_0_1(config, Config(recipe=settings))
        _leave_out_what_has_gone(config, known)
        typed = OmegaConf.to_object(OmegaConf.merge(known, config))
    except (OmegaConfBaseException, OSError) as error:
        raise trust.unreadable(first_line(error), file) from error
    assert isinstance(typed, Config)
    return typed


#: What configs of earlier runs have, and changed nothing that was learned: agents that outlived a killed
#: learner, and looks at what a Dreamer imagined.
_CHANGED_NOTHING = ("keep_agents", "learner_timeout_s", "open_loop")

#: Recipes whose runs by 0.1 are evaluated, and not resumed.
_ENDED_WITH_0_1 = ("dreamer_v1",)


def is_of_0_1(file: Path) -> bool:
    """Whether rlsync 0.1 wrote the ``config.yaml`` of a run: its collectors had a kind."""
    return file.is_file() and OmegaConf.select(trust.config_in(file), "collector.kind") is not None


def _take_keys_that_left_model(config: DictConfig, known: DictConfig) -> None:
    """Say by the keys of now what earlier ones said in ``recipe.model``.

    That is ``bfloat16`` of 0.1, and ``normalize`` of 0.2.0, of pixels in impala and laser.
    """
    model = OmegaConf.select(config, "recipe.model", default={})
    model_now = OmegaConf.select(known, "recipe.model", default={})
    if not isinstance(model, DictConfig):
        return
    if "bfloat16" not in model_now and model.pop("bfloat16", False):
        config.recipe.update_dtype = BFLOAT16
    if "normalize" not in model_now and model.pop("normalize", False):
        config.recipe.normalize = {"observations": True, "clip": 5.0}


def _take_lag_for_kind(config: DictConfig, file: Path) -> None:
    """Say in keys of now what an earlier rlsync said by ``collector.kind`` and ``collector.transport``."""
    collector = OmegaConf.select(config, "collector")
    if not isinstance(collector, DictConfig):
        return
    transport = collector.pop("transport", None)
    if transport not in (None, "board"):
        problem = f"workers of a recipe get their weights from a board, and no more by {transport}"
        cure = "start anew, without collector.transport; collectors of your own take any WeightSyncScheme"
        raise ConfigError(problem, f"{file}, collector.transport", cure)
    config.collector = collector_of_now({str(key): collector[key] for key in collector})


def _take_names_for_those_of_0_1(config: Any, settings: Any) -> None:
    """Say by its name of now what 0.1 called otherwise, such as a torso."""
    if not isinstance(config, DictConfig):
        return
    for spec in fields(settings):
        value = config.get(spec.name)
        below = getattr(settings, spec.name)
        if is_dataclass(below):
            _take_names_for_those_of_0_1(value, below)
        elif "bound" in spec.metadata:
            name = spec.metadata["bound"].of_0_1.get(str(value))
            if name is not None:
                config[spec.name] = name


def _require_map_of_now(config: DictConfig, file: Path) -> None:
    """Refuse the sync map of an earlier td3, whose workers had a module with the noise around the actor."""
    routes = OmegaConf.select(config, "sync.map", default=[])
    destinations = [str(OmegaConf.select(route, "destination")) for route in routes]
    if OmegaConf.select(config, "recipe.name") == "td3" and "policy.module[0]" in destinations:
        problem = (
            "the workers of td3 have the actor as 'policy' now, and no more as 'policy.module[0]'"
        )
        cure = "start anew: a run of an earlier rlsync cannot go on; or let the rlsync that wrote it do so"
        raise ConfigError(problem, f"{file}, sync.map", cure)


def _leave_out_what_has_gone(config: Any, known: Any) -> None:
    if not isinstance(config, DictConfig) or not isinstance(known, DictConfig):
        return
    for key in list(config):
        if key in known:
            _leave_out_what_has_gone(config[key], known[key])
        elif is_dataclass(OmegaConf.get_type(known)) and (
            config[key] is None or key in _CHANGED_NOTHING
        ):
            del config[key]

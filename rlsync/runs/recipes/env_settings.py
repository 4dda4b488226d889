"""The settings of environments: any id of gymnasium's or a function, a picture, an Atari game by protocol."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.envs.made import MadeEnvs
from rlsync.runs.actors.envs.specs import AtariEnvs, GymnasiumEnvs, RenderedEnvs
from rlsync.runs.actors.envs.wrapping import NamedWrapper, parts_of
from rlsync.runs.recipes.bounds import (
    above_zero,
    fraction,
    names_of,
    not_below_zero,
    one_of,
    refuse,
    values_for,
)

_V5 = re.compile(r"ALE/\w+-v5")
_OTHER = re.compile(r"(?:ALE/)?(?P<game>\w+?)(?:NoFrameskip|Deterministic)?-(?P<version>v[045])")
_LIMIT = "max_episode_steps"
_ANY_GAME = AtariEnvs("")
_ANY_PICTURE = RenderedEnvs("")


@dataclass
class EnvConfig:
    """The environments of every worker: an id of gymnasium's, or a function that makes them; and its arguments.

    ``kind`` names the tuned settings for environments of this kind: ``tuned/RECIPE_KIND``.
    """

    kind: ClassVar[str] = "vectors"
    #: The id of the environment in gymnasium.
    id: str = "CartPole-v1"
    #: Environments in each worker, stepped as one batch. Default: one. With more, the policy is called less
    #: often, on larger batches.
    num_envs: int = above_zero(1)
    #: Arguments for gymnasium.make, or for env.make; those that are not given have its defaults. Add one with a
    #: plus: +env.kwargs.goal_velocity=0.1
    kwargs: dict[str, Any] = field(default_factory=dict)
    #: Whether bytes from 0 to 255 in the form of a picture are one, for convolutions. false: they are numbers.
    pictures: bool = True
    #: Which actions there are, where they are choices, and not all can be taken at every step. observation: a
    #: part action_mask of the observation says it, if there is one; info: the info does, under that key; none:
    #: every action can be taken.
    action_mask: str = one_of("observation", "info", "none")

    #: A function of yours that makes environments, as module:function, in the place of env.id, which is not
    #: read then. It is called with env.kwargs and, if it has an argument num_envs, with their number. It returns
    #: a gymnasium environment, a gymnasium vector environment (of num_envs) or TorchRL's EnvBase.
    make: str | None = None
    #: Wrappers of each environment, the innermost first, as module.Class or module:Class; with arguments as a
    #: mapping, for example [{name: gymnasium.wrappers.TimeLimit, max_episode_steps: 100}]. rlsync's own come
    #: after them.
    wrappers: list[Any] = field(default_factory=list)
    #: An episode is truncated after this many steps. Default: as the environment has it.
    max_episode_steps: int | None = above_zero(None)
    #: Number of newest observations in one that is seen: vectors are joined, pictures along their channels.
    frame_stack: int = above_zero(1)
    #: Whether the learner gets rewards clipped to [-1, 1]. Returns that are reported, logged and evaluated stay
    #: those of the environment.
    clip_reward: bool = False

    @property
    def name(self) -> str:
        """What errors and a run's first lines call the environment: its id, or the function that makes it."""
        return self.make or self.id

    @property
    def word(self) -> str:
        """The override that names the environment."""
        if self.make is not None:
            return f"env.make={self.make}"
        return f"env.id={self.id}"

    @property
    def names_module(self) -> bool:
        """Whether it names code to import: in its id, as in ``my_module:MyEnv-v0``, or beside it."""
        return ":" in self.id or self.make is not None or bool(self.wrappers)

    def errors(self) -> Iterator[RlsyncError]:
        """What is wrong with these settings beyond their bounds."""
        yield from self._errors("for example env.id=Acrobot-v1")

    def _errors(self, example: str) -> Iterator[RlsyncError]:
        """What is wrong with the keys that all environments have."""
        if not self.name:
            yield ConfigError("no environment is named", "env.id", example)
        if self.make is not None and not (":" in self.make and all(parts_of(self.make))):
            problem = f"{self.make!r} does not say where the function lies"
            cure = "write env.make=module:function, of a module that Python finds (PYTHONPATH)"
            yield ConfigError(problem, "env.make", cure)
        for number, entry in enumerate(self.wrappers):
            if _wrapper(entry) is None:
                problem = f"a wrapper cannot be {entry!r}"
                cure = "write module.Class, module:Class, or {name: module.Class, ARGUMENT: VALUE}"
                yield ConfigError(problem, f"env.wrappers, number {number + 1}", cure)
        if self.max_episode_steps is not None and _LIMIT in self.kwargs:
            cure = "leave out env.kwargs.max_episode_steps (~env.kwargs.max_episode_steps)"
            yield ConfigError(f"{_LIMIT} is given twice", f"env.{_LIMIT}", cure)

    def facts(self) -> str:
        """The environment in a few words, for the first lines of a run."""
        return self.name + self._changes()

    def _changes(self) -> str:
        """What is done to the environment, in words that follow its name."""
        words = []
        if self.wrappers:
            words.append(f"in {', '.join(map(str, self._wrappers()))}")
        if self.max_episode_steps is not None:
            words.append(f"at most {self.max_episode_steps:,} steps an episode")
        if self.frame_stack > 1:
            words.append(f"{self.frame_stack} newest observations at once")
        if self.clip_reward:
            words.append("the learner's rewards are clipped to [-1, 1], returns are not")
        return "".join(f"; {word}" for word in words)

    def _wrappers(self) -> tuple[NamedWrapper, ...]:
        wrappers = map(_wrapper, self.wrappers)
        return tuple(wrapper for wrapper in wrappers if wrapper is not None)

    def frames_shown(self, channels: int) -> int:
        """How many frames a picture with so many channels shows, as far as the keys tell."""
        if channels % self._newest():
            return 1  # what a wrapper made of a stack
        return self._newest()

    def _newest(self) -> int:
        """Number of newest pictures in an observation."""
        return self.frame_stack

    def spec(self) -> GymnasiumEnvs | AtariEnvs:
        """What the workers of the actor-learner step; a ConfigError if :meth:`errors` has one."""
        refuse(self.errors())
        kind = GymnasiumEnvs
        if self.make is not None:
            kind = MadeEnvs
        return kind(
            self.name,
            self.kwargs,
            wrappers=self._wrappers(),
            max_episode_steps=self.max_episode_steps,
            frame_stack=self.frame_stack,
            pictures=self.pictures,
            action_mask=self.action_mask,
        )


def _wrapper(entry: object) -> NamedWrapper | None:
    """The wrapper that an entry of ``env.wrappers`` names; None if it names none."""
    match entry:
        case str() if entry:
            return NamedWrapper(entry)
        case {"name": str(name), **arguments} if name:
            return NamedWrapper(name, {str(key): value for key, value in arguments.items()})
    return None


#: The keys of EnvConfig that ale-py's vector has no place for, and what an Atari game has instead.
_NOT_OF_ATARI = {
    "make": "give env=gymnasium with env.make",
    "wrappers": "leave them out: the keys of env=atari say what they would do; or give env=gymnasium with "
    "env.make, a function that returns the game in its wrappers",
    "max_episode_steps": "give env.max_episode_frames, in frames of the game",
    "frame_stack": "give env.stack_num",
}


@dataclass
class AtariConfig(EnvConfig):
    """A game from pixels, by the v5 protocol; the keys are those of AtariEnvs, ``kwargs`` its ``options``."""

    kind: ClassVar[str] = "pixels"
    #: The id of the game, as ALE/<Game>-v5. You must give it.
    id: str = ""
    #: Environments in each worker, stepped as one vector. recipe.batch_size must be a multiple of it. By
    #: default the policy sees eight observations at once.
    num_envs: int = above_zero(8)
    #: Sticky actions: the probability that a frame of the game repeats the action of the frame before. 0.25
    #: as in v5; 0.0 as in XNoFrameskip-v4.
    repeat_action_probability: float = fraction(0.25)
    #: Frames of the game in one step. rlsync counts steps: total_frames=10000000 is 40 million frames of a
    #: game.
    frameskip: int = above_zero(_ANY_GAME.frameskip)
    #: Whether a picture is the maximum of the last two frames of a step. Some games draw things in every
    #: other frame.
    maxpool: bool = _ANY_GAME.maxpool
    #: A game begins with a random number of frames without an action, at most this many.
    noop_max: int = not_below_zero(_ANY_GAME.noop_max)
    #: Whether a game that waits for FIRE begins with it.
    use_fire_reset: bool = _ANY_GAME.use_fire_reset
    #: Whether the learner's episode ends, as terminated, when a life is lost. The game goes on, and reported
    #: returns and lengths are still those of whole games.
    life_loss_ends_episode: bool = _ANY_GAME.life_loss_ends_episode
    #: All 18 actions instead of those that the game uses.
    full_action_space: bool = _ANY_GAME.full_action_space
    #: A game is truncated after this many of its frames; 108000 are 30 minutes.
    max_episode_frames: int = above_zero(_ANY_GAME.max_episode_frames)
    #: Size of the grey pictures, in pixels.
    img_height: int = above_zero(_ANY_GAME.img_height)
    img_width: int = above_zero(_ANY_GAME.img_width)
    #: Number of newest pictures in an observation.
    stack_num: int = above_zero(_ANY_GAME.stack_num)
    #: Threads that step the environments of one worker.
    threads: int = above_zero(_ANY_GAME.threads)

    def errors(self) -> Iterator[RlsyncError]:
        for name, cure in _NOT_OF_ATARI.items():
            if getattr(self, name) != getattr(_ANY_ENV, name):
                problem = f"ale-py's vector of games takes no env.{name}"
                yield ConfigError(problem, f"env.{name}", cure)
        if not self.id:
            yield ConfigError("no game is named", "env.id", "for example env.id=ALE/Breakout-v5")
        elif not _V5.fullmatch(self.id):
            yield ConfigError(
                f"{self.id!r} is not the id of an Atari game's v5", "env.id", _cure(self.id)
            )
        for name, default in (("pictures", True), ("action_mask", "observation")):
            if getattr(self, name) != default:
                problem = (
                    "an Atari game gives pictures, and takes each of its actions at every step"
                )
                yield ConfigError(problem, f"env.{name}", f"leave env.{name} out")
        for name in self.kwargs.keys() & names_of(self):
            cure = f"write env.{name}={self.kwargs[name]}"
            yield ConfigError(f"{name} has a key of its own", f"env.kwargs.{name}", cure)

    def facts(self) -> str:
        sticky = self.repeat_action_probability
        if sticky:
            actions = f"sticky actions {sticky:g}"
        else:
            actions = "no sticky actions"
        if self.life_loss_ends_episode:
            lives = "; a lost life ends the learner's episode"
        else:
            lives = ""
        return (
            f"{self.id}: {actions}, {self.frameskip} frames a step, up to {self.noop_max} no-ops, at most "
            f"{self.max_episode_frames:,} frames a game{lives}; returns are of whole games, not clipped"
            f"{self._changes()}"
        )

    def _newest(self) -> int:
        return self.stack_num

    def spec(self) -> AtariEnvs:
        """What makes the environments; a ConfigError if :meth:`errors` has one."""
        refuse(self.errors())
        game = self.id.removeprefix("ALE/").removesuffix("-v5")
        rom = re.sub(r"(?<=[a-z])(?=[A-Z]|\d[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", game).lower()
        return AtariEnvs(rom, options=self.kwargs, **values_for(_ANY_GAME, self))


@dataclass
class RenderedConfig(EnvConfig):
    """An id seen as its ``rgb_array``; the keys are those of RenderedEnvs, ``kwargs`` its ``options``."""

    kind: ClassVar[str] = "rendered"
    #: The id of the environment in gymnasium. You must give it.
    id: str = ""
    #: Size of the pictures that are seen, in pixels.
    img_height: int = above_zero(_ANY_PICTURE.img_height)
    img_width: int = above_zero(_ANY_PICTURE.img_width)
    #: The part of the rendering that is seen, as [top,bottom,left,right] in pixels of the rendering; []: all
    #: of it.
    crop: list[int] = field(default_factory=list)
    #: Steps of the environment for each action. Their rewards are added up, and the last one is drawn. rlsync
    #: counts actions: frames and lengths of episodes are numbers of actions.
    frameskip: int = above_zero(_ANY_PICTURE.frameskip)

    def errors(self) -> Iterator[RlsyncError]:
        yield from self._errors("for example env.id=CartPole-v1")
        if self.make is not None:
            problem = "env=rendered draws an id of gymnasium's, and env.make is none"
            cure = "let the function put gymnasium.wrappers.AddRenderObservation around it; env=gymnasium"
            yield ConfigError(problem, "env.make", cure)
        if len(self.crop) not in (0, 4):
            cure = "give [top,bottom,left,right] in pixels of the rendering, or [] for all of it"
            yield ConfigError(f"env.crop cannot be {list(self.crop)}", "env.crop", cure)
        if "render_mode" in self.kwargs:
            problem = "a picture is always rendered as rgb_array"
            yield ConfigError(problem, "env.kwargs.render_mode", "leave it out")

    def facts(self) -> str:
        if self.crop:
            part = f" of the part {list(self.crop)} of its rendering"
        else:
            part = " of its rendering"
        if self.frameskip > 1:
            steps = f", {self.frameskip} steps for each action"
        else:
            steps = ""
        return f"{self.id} from pixels: {self.img_height} x {self.img_width}{part}{steps}{self._changes()}"

    def spec(self) -> RenderedEnvs:
        refuse(self.errors())
        keys = values_for(_ANY_PICTURE, self) | {"crop": tuple(self.crop)}
        keys["wrappers"] = self._wrappers()
        if self.max_episode_steps is not None:  # rlsync counts actions, and gymnasium steps
            keys[_LIMIT] = self.max_episode_steps * self.frameskip
        return RenderedEnvs(options=self.kwargs, **keys)


_ANY_ENV = EnvConfig()


def _cure(name: str) -> str:
    game = _OTHER.fullmatch(name)
    if game is None:
        return "for example env.id=ALE/Breakout-v5"
    if game["version"] == "v4":
        sticky = 0.0
    else:
        sticky = AtariConfig.repeat_action_probability
    words = f"env.id=ALE/{game['game']}-v5 env.repeat_action_probability={sticky}"
    return f"give {words}, as {game['version']} has it"


def refuse_unsaid_protocol(env: EnvConfig) -> None:
    """Raise ConfigError for an Atari game that is named as any id: nothing would say how it is played."""
    game = _OTHER.fullmatch(env.id)
    if game is None or env.make is not None or isinstance(env, AtariConfig):
        return
    if env.id.startswith("ALE/") or "NoFrameskip" in env.id or "Deterministic" in env.id:
        problem = f"{env.id!r} is an Atari game, and nothing says by which protocol it is played"
        cure = f"give env=atari env.id=ALE/{game['game']}-v5; AtariConfig in Python; /schema/atari in a file"
        raise ConfigError(problem, "env", cure)


def settings_with(keys: Collection[str]) -> EnvConfig:
    """The defaults of the settings that have these keys, as a run's config has written them."""
    for kind in (EnvConfig, AtariConfig, RenderedConfig):
        if names_of(kind).issuperset(keys):
            return kind()
    return EnvConfig()


def ending_after(env: EnvConfig, steps: int) -> EnvConfig:
    """The same environment, whose episodes are truncated after so many steps of the policy."""
    if isinstance(env, AtariConfig):
        problem = "games end after env.max_episode_frames, which the run's config gives"
        raise ConfigError(problem, f"--max-episode-steps {steps}", "leave it out")
    kwargs = {name: value for name, value in env.kwargs.items() if name != _LIMIT}
    return replace(env, max_episode_steps=steps, kwargs=kwargs)

"""Which environments workers step: gymnasium's, as they are or as pictures, ale-py's own, or TorchRL's.

All behave alike: an episode that has ended is reset in the same step. See :mod:`rlsync.runs.actors.frames`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, Space
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import AddRenderObservation, TransformObservation

from rlsync import ConfigError
from rlsync.runs.actors.envs.actions import actions_of
from rlsync.runs.actors.envs.answers import CheckedEnv, CheckedVectorEnv, InRows, VectorInRows
from rlsync.runs.actors.envs.observations import Observations, observations_of
from rlsync.runs.actors.envs.vectors import AleEnvs, Envs, ListedEnvs, VectorEnvs
from rlsync.runs.actors.envs.wrapping import AnyEnv, AnyVector, Wrap, require_numbers, stacked
from rlsync.seams import first_line

if TYPE_CHECKING:  # at run time torchrl is imported only where its environments are made
    from torchrl.envs import EnvBase


_AUTORESET = "autoreset_mode"


@dataclass(frozen=True, slots=True)
class GymnasiumEnvs:
    """Any gymnasium id, as ``gymnasium.make_vec`` makes it; ``"module:Id-v0"`` imports the module first.

    Example:
        >>> GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 200}).id
        'CartPole-v1'
    """

    id: str  #: the id
    #: keyword arguments for the environment
    options: Mapping[str, Any] = field(default_factory=dict)
    #: True uses the id's own vector environment; False steps one environment after the other. A vector
    #: environment that does not reset in the step that ends an episode is refused. Those of ale-py do so with
    #: ``options={"autoreset_mode": "SameStep"}``. Those that gymnasium ships do not, and take no such option.
    vectorized: bool = False
    #: What is put around each environment, the first one innermost; picklable where workers are spawned.
    wrappers: tuple[Wrap, ...] = ()
    #: An episode is truncated after so many steps of the environment; None: as the id has it.
    max_episode_steps: int | None = None
    #: An observation is the so many newest ones: vectors are joined, and pictures along their channels.
    frame_stack: int = 1
    #: Whether bytes from 0 to 255 in the form of a picture are one; False: they are numbers, as any.
    pictures: bool = True
    #: Where a mask of the actions is: ``"observation"``, under the key ``action_mask`` if the space has it;
    #: ``"info"``, under that key; or ``"none"``: every action can be chosen, and that key has numbers as any.
    action_mask: str = "observation"

    def envs(self, num_envs: int) -> Envs:
        """These environments, as they step together.

        Args:
            num_envs: their number.

        Raises:
            ConfigError: the id has no vector environment, it does not take the options, or does not reset in
                the step that ends an episode; or players cannot act in such spaces.
        """
        if self.vectorized:
            return VectorEnvs(self._checked_vector(self._own_vector(num_envs)), self.id)
        return ListedEnvs(self.make, num_envs, self.id)

    def make(self, watch: Wrap | None = None) -> CheckedEnv:
        """One of these environments; its answers are read as :mod:`rlsync.runs.actors.envs.answers` says.

        Args:
            watch: put around it before its answers are read.

        Raises:
            ConfigError: it is told how to reset, which is an option of some vector environments; or a wrapper
                cannot be put around it.
        """
        return self._checked(self._one(), watch)

    def _checked(self, env: AnyEnv, watch: Wrap | None = None) -> CheckedEnv:
        """An environment in its wrappers, as it is stepped."""
        if watch is not None:
            env = watch(env)
        stacks = self.frame_stack > 1
        if stacks and isinstance(env.observation_space, Box):
            env = stacked(CheckedEnv(env, self.id), self.frame_stack, self.id)
        observations = self._rows_of(env.observation_space, env.action_space)
        if observations is not None:
            env = InRows(CheckedEnv(env, self.id), self.id, observations)
        if stacks and observations is not None and observations.nested:
            env = stacked(env, self.frame_stack, self.id)
        return CheckedEnv(env, self.id)

    def _checked_vector(self, envs: AnyVector) -> CheckedVectorEnv:
        """A vector environment in its wrappers, as it is stepped."""
        observations = self._rows_of(envs.single_observation_space, envs.single_action_space)
        if observations is None:
            return CheckedVectorEnv(envs, self.id)
        return VectorInRows(envs, self.id, observations)

    def _rows_of(self, observed: Space[Any], acted: Space[Any]) -> Observations | None:
        """What players see of one of them; None for an array whose space alone tells what it is."""
        require_numbers(observed, self.id)
        choices: tuple[int, ...] = ()
        if self.action_mask != "none":
            choices = actions_of(acted, self.id).choices
        mask_in_info = self.action_mask == "info"
        if mask_in_info and not choices:
            problem = f"{self.id!r} takes actions of {acted}, which no mask can forbid"
            cure = "give env.action_mask=none, or an environment whose actions are choices"
            raise ConfigError(problem, "env.action_mask=info", cure)
        if mask_in_info and self.vectorized:
            problem = "the masks in the infos of a vector environment are not read"
            cure = "leave vectorized=False, so that gymnasium steps one environment after the other"
            raise ConfigError(problem, "GymnasiumEnvs(vectorized=True, action_mask='info')", cure)
        observations = observations_of(
            observed,
            self.id,
            pictures=self.pictures,
            choices=choices,
            mask_in_info=mask_in_info,
        )
        if not observations.nested and observations == observations_of(observed, self.id):
            return None
        return observations

    def _one(self) -> AnyEnv:
        """An environment in its wrappers."""
        return self._wrapped(self._bare(self._arguments()))

    def _wrapped(self, env: AnyEnv) -> AnyEnv:
        for wrap in self.wrappers:
            env = wrap(env)
        return env

    def _arguments(self) -> dict[str, Any]:
        """Those of ``gymnasium.make``."""
        # its own checker looks at the first answers only
        arguments = {"disable_env_checker": True, **self.options}
        if self.max_episode_steps is not None:
            arguments["max_episode_steps"] = self.max_episode_steps
        return arguments

    def _bare(self, options: dict[str, Any]) -> AnyEnv:
        try:
            return gymnasium.make(self.id, **options)
        except TypeError as error:
            if f"'{_AUTORESET}'" not in str(error):
                raise
            problem = f"{self.id!r} takes no {_AUTORESET}: each environment is reset when its episode ends"
            cure = f"leave {_AUTORESET} out; it is an option of some vector environments (vectorized=True)"
            raise ConfigError(problem, f"GymnasiumEnvs(options={self.options})", cure) from error

    def _own_vector(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        self._require_bare("vectorized=True", "leave vectorized=False")
        try:
            return gymnasium.make_vec(self.id, num_envs, "vector_entry_point", **self.options)
        except (TypeError, gymnasium.error.Error) as error:
            problem = f"cannot make the vector environment of {self.id!r}: {first_line(error)}"
            cure = "leave vectorized=False, so that gymnasium steps one environment after the other"
            raise ConfigError(
                problem, f"GymnasiumEnvs(vectorized=True), options={self.options}", cure
            ) from error

    def _require_bare(self, why: str, cure: str, *, wrappers: bool = False) -> None:
        """Refuse what is put around single environments; with ``wrappers``, they may stay."""
        around = {
            "wrappers": bool(self.wrappers) and not wrappers,
            "max_episode_steps": self.max_episode_steps is not None,
            "frame_stack": self.frame_stack > 1,
        }
        for name, is_set in around.items():
            if is_set:
                problem = f"env.{name} is for single environments of gymnasium's, and {self.id!r} is none: {why}"
                raise ConfigError(problem, f"env.{name}", cure)


@dataclass(frozen=True, slots=True)
class RenderedEnvs(GymnasiumEnvs):
    """Any gymnasium id that renders ``rgb_array``: an observation is its picture, made smaller.

    The picture is that of :class:`gymnasium.wrappers.AddRenderObservation`, as uint8 ``[3, img_height,
    img_width]``: channels first, as torch's convolutions take it. What the environment itself would give as
    its observation is dropped; ``wrappers`` are around what is drawn. ``make`` raises a ConfigError if the
    environment cannot be drawn, or has nothing where the crop is.
    """

    img_height: int = 64
    img_width: int = 64
    # the part that is seen: (top, bottom, left, right) in pixels of the rendering; empty: all
    crop: tuple[int, ...] = ()
    # steps for each action; their rewards are added up, and the last one is drawn
    frameskip: int = 1

    def envs(self, num_envs: int) -> Envs:
        return ListedEnvs(self.make, num_envs, self.id)

    def _one(self) -> AnyEnv:
        draw_into_memory()
        env = self._wrapped(self._drawn(self._arguments()))
        if self.frameskip > 1:  # rewards are read before they are added up
            env = Repeat(CheckedEnv(env, self.id, observed=False), self.frameskip)
        try:
            return self._small(AddRenderObservation(env, render_only=True))
        except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
            cure = "pip install 'rlsync[video]', which has pygame, or what the first line names"
            raise ConfigError(
                f"{self.id!r} cannot be drawn: {first_line(error)}", "env.id", cure
            ) from error

    def _drawn(self, options: dict[str, Any]) -> AnyEnv:
        options["render_mode"] = "rgb_array"
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*render_mode")  # told below, as an error
                env = gymnasium.make(self.id, **options)
        except TypeError as error:
            if "'render_mode'" not in str(error):
                raise
            raise self._no_picture("it takes no render_mode") from error
        modes = env.metadata.get("render_modes") or []
        if "rgb_array" not in modes:
            env.close()
            raise self._no_picture(f"its render modes are {', '.join(modes) or 'none'}")
        return env

    def _small(self, env: AnyEnv) -> AnyEnv:
        drawn = env.observation_space.shape
        if drawn is None or len(drawn) != 3 or drawn[-1] != 3:
            raise self._no_picture(f"it renders arrays of shape {drawn}")
        top, bottom, left, right = self.crop or (0, drawn[0], 0, drawn[1])
        if not (0 <= top < bottom <= drawn[0] and 0 <= left < right <= drawn[1]):
            picture = f"a picture of {drawn[0]} rows, {drawn[1]} columns"
            cure = "give [top,bottom,left,right] within the picture, or [] for all of it"
            raise ConfigError(
                f"the crop {list(self.crop)} is no part of {picture}", "env.crop", cure
            )
        size = (self.img_height, self.img_width)
        box = Box(0, 255, (3, *size), np.uint8)
        return TransformObservation(
            env, lambda picture: shrunk(picture[top:bottom, left:right], size), box
        )

    def _no_picture(self, why: str) -> ConfigError:
        cure = "give an environment that renders, like CartPole-v1, or observe it as it is: env=gymnasium"
        return ConfigError(f"{self.id!r} has no picture: {why}, not rgb_array", "env.id", cure)


#: Options of ale-py's vector environment that would make reported returns something else than those of games,
#: and what to do in their place.
_NOT_OF_GAMES = {
    "reward_clipping": "leave it out: the loss clips rewards (recipe.reward_clipping=clip), returns are not "
    "clipped",
    "episodic_life": "give life_loss_ends_episode=True: it ends the learner's episodes, and games go on",
    "life_loss_info": "give life_loss_ends_episode=True: it ends the learner's episodes, and games go on",
}
#: What ale-py calls fields of AtariEnvs otherwise, and which of them it is not told.
_ALES = {"threads": "num_threads", "max_episode_frames": "max_num_frames_per_episode"}
_NOT_ALES = ("game", "options", "life_loss_ends_episode")


@dataclass(frozen=True, slots=True)
class AtariEnvs:
    """An Atari game on ale-py's C++ vector environment: grey pixels [stack_num, img_height, img_width].

    Args:
        img_height, img_width: size of a picture in pixels.

    Rewards are not clipped here: the loss does that.

    Raises:
        ConfigError: an option would clip the rewards, or end games with a lost life.

    Example:
        >>> AtariEnvs("pong", repeat_action_probability=0.25).game
        'pong'
    """

    game: str  #: the rom's name in snake_case: ``"pong"``, ``"space_invaders"``
    #: Probability that a frame of the game repeats the last action ("sticky actions").
    repeat_action_probability: float = 0.0
    full_action_space: bool = False  #: all 18 actions instead of the game's own
    #: a game is truncated after this many frames; a step has ``frameskip``
    max_episode_frames: int = 108_000
    threads: int = 1  #: how many threads step the copies of one vector environment
    #: More arguments of ``ale_py.vector_env.AtariVectorEnv``; they win over the others here.
    options: Mapping[str, Any] = field(default_factory=dict)
    frameskip: int = 4  #: frames of the game in one step
    #: a picture is the maximum of the last two frames of a step, against flicker
    maxpool: bool = True
    #: a game begins with a random number of frames without an action, at most this many
    noop_max: int = 30
    use_fire_reset: bool = True  #: a game that waits for FIRE begins with it
    #: The learner's episode ends, as terminated, when a life is lost. The game goes on, and reported returns
    #: and lengths are those of whole games.
    life_loss_ends_episode: bool = False
    img_height: int = 84
    img_width: int = 84
    stack_num: int = 4  #: number of newest pictures in an observation

    def __post_init__(self) -> None:
        for name, cure in _NOT_OF_GAMES.items():
            if self.options.get(name):
                problem = f"with the option {name!r} of ale-py, returns would not be those of games"
                raise ConfigError(problem, f"AtariEnvs({self.game!r})", cure)

    def ale_options(self) -> dict[str, Any]:
        """The arguments of ``ale_py.vector_env.AtariVectorEnv``."""
        arguments: dict[str, Any] = {}
        for setting in fields(self):
            if setting.name not in _NOT_ALES:
                name = _ALES.get(setting.name, setting.name)
                arguments[name] = getattr(self, setting.name)
        return {**arguments, "reward_clipping": False, **self.options}


@dataclass(frozen=True, slots=True)
class TorchRLEnvs:
    """TorchRL environments, one after the other.

    Example:
        >>> from functools import partial
        >>> from torchrl.envs import GymEnv
        >>> TorchRLEnvs(partial(GymEnv, "CartPole-v1")).observation
        'observation'
    """

    #: makes one without a batch size; picklable where workers are spawned
    make: Callable[[], EnvBase]
    observation: str = "observation"  #: the key of what the player sees


class OwnEnvs(Protocol):
    """Environments of a kind of your own, so many that step as one; picklable where workers are spawned."""

    def envs(self, num_envs: int) -> Envs: ...


EnvSpec = GymnasiumEnvs | AtariEnvs | TorchRLEnvs | OwnEnvs


def make_venv(spec: EnvSpec, num_envs: int, seed: int | None = None) -> Envs:
    """Make the environments of a spec.

    Args:
        spec: which environments.
        num_envs: how many of them step as one vector.
        seed: reset them once; the i-th one gets ``seed + i``. None does not reset them.

    Raises:
        ConfigError: they cannot be made, or do not behave as :mod:`rlsync.runs.actors.frames` needs it.

    Example:
        >>> envs = make_venv(GymnasiumEnvs("CartPole-v1"), 3, seed=0)
        >>> envs.observation_shape, envs.actions.n, envs.reset(0).shape
        ((4,), 2, torch.Size([3, 4]))
        >>> envs.close()
    """
    match spec:
        case AtariEnvs():
            envs: Envs = AleEnvs(
                spec.game, num_envs, spec.ale_options(), spec.life_loss_ends_episode
            )
        case TorchRLEnvs():
            from rlsync.runs.actors.envs.serial import SerialEnvs

            envs = SerialEnvs(spec.make, num_envs, spec.observation)
        case _:
            envs = spec.envs(num_envs)
    if seed is not None:
        envs.reset(seed)
    return envs


def check_resets(spec: EnvSpec) -> None:
    """Make an environment whose resets depend on its options, and close it: ConfigError if no worker can."""
    if isinstance(spec, GymnasiumEnvs) and (spec.vectorized or _AUTORESET in spec.options):
        make_venv(spec, 1).close()


def draw_into_memory() -> None:
    """Let pygame draw without a display, unless the user has named one of its drivers."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


class Repeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats actions until an episode ends, and adds rewards up: RepeatAction of gymnasium 1.3 on."""

    def __init__(self, env: AnyEnv, times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self._times):
            observation, reward, terminated, truncated, info = super().step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def shrunk(picture: np.ndarray[Any, Any], size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """A picture ``[height, width, channels]``, uint8, as ``[channels, *size]``.

    A pixel is the weighted mean of those that it covers, so that movements of less than a pixel still show.
    """
    whole = torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1).unsqueeze(0)
    # gymnasium's ResizeObservation needs opencv; torch is there in any case, and as fast.
    small = F.interpolate(whole, size, mode="bilinear", antialias=True)
    return small.squeeze(0).contiguous().numpy()

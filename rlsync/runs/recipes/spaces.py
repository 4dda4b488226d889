"""Which observations and actions a recipe takes, and the check of an environment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import gymnasium
import numpy as np
import torch
from torchrl.data import Bounded, MultiCategorical, OneHot, TensorSpec
from torchrl.modules import AdditiveGaussianModule

from rlsync import AdoptionTimeout, ConfigError, WorkerLost
from rlsync.runs.actors.envs.actions import (
    ActionSpec,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
)
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.envs.vectors import EnvStep
from rlsync.runs.actors.worker import seed_all
from rlsync.runs.evaluation.try_out import random_steps
from rlsync.runs.recipes.env_settings import EnvConfig, refuse_unsaid_protocol
from rlsync.seams import digest, first_line


@dataclass(frozen=True, slots=True)
class Spaces:
    """What networks must know of an environment."""

    observations: Observations
    # how many there are to choose from, in all choices of an action together, or numbers in one of them
    actions: int
    action_spec: TensorSpec  # TorchRL's, of one environment

    @property
    def features(self) -> int:
        """Numbers in one observation, without pictures and a mask."""
        return self.observations.features

    @property
    def picture(self) -> tuple[int, int, int] | None:
        """(channels, height, width) of uint8; None: an observation is something else than one picture."""
        if not self.observations.are_pictures:
            return None
        channels, height, width = self.observations.shape
        return (channels, height, width)

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return self.observations.shape

    @property
    def observation_dtype(self) -> torch.dtype:
        return self.observations.dtype

    @property
    def choices(self) -> tuple[int, ...]:
        """How many there are to choose from, for each choice that an action makes; empty: it is numbers."""
        if isinstance(self.action_spec, MultiCategorical):
            return tuple(self.action_spec.nvec.tolist())
        if isinstance(self.action_spec, OneHot):
            return (self.actions,)
        return ()

    @property
    def discrete(self) -> bool:
        """Whether an action is one choice or several."""
        return bool(self.choices)

    def player_actions(self) -> ActionSpec:
        """The actions as players see them."""
        if isinstance(self.action_spec, MultiCategorical):
            return MultiDiscreteActions(self.choices)
        if self.discrete:
            return DiscreteActions(self.actions)
        low, high = self.bounds()
        return BoxActions(self.actions, tuple(low.tolist()), tuple(high.tolist()))

    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest and the highest value of each number in an action, ``[actions]`` float32."""
        space = self.action_spec.space
        return space.low.to(torch.float32), space.high.to(torch.float32)

    def half_ranges(self) -> torch.Tensor:
        """Half of the range of each number in an action, or of all at once; papers have 1."""
        low, high = self.bounds()
        halves = (high - low) / 2
        if bool((halves == halves[0]).all()):
            return halves[0]
        return halves

    def noise(self, sigma: float) -> AdditiveGaussianModule:
        """What workers add to actions all the time, in halves of the range of each number."""
        std = self.half_ranges().tolist()
        return AdditiveGaussianModule(
            spec=self.action_spec, sigma_init=sigma, sigma_end=sigma, std=std
        )


#: The recipes that can leave out the actions which a mask forbids; a test compares them with what these say.
MASKING = "ppo, dqn, impala or laser"


@dataclass(frozen=True, slots=True)
class Takes:
    """The environments that a recipe can learn: kinds of observations and of actions.

    Observations of every kind are parts in a row: see :mod:`rlsync.runs.actors.envs.observations`.

    Example:
        >>> from rlsync.runs.recipes.env_settings import EnvConfig
        >>> Takes("discrete", "CartPole-v1").probe(EnvConfig("CartPole-v1")).features
        4
        >>> Takes("box", "Pendulum-v1").probe(EnvConfig("CartPole-v1"))
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: this recipe cannot learn 'CartPole-v1': its action is one of 2
          where  env.id
          cure   give one with an observation without pictures and bounded continuous actions, like Pendulum-v1
    """

    # a choice of n; numbers with finite bounds; either of the two, or several choices at once
    actions: Literal["discrete", "box", "any"]
    examples: str  # ids of some of them, for the cure of an error
    pictures: bool = False  # whether an observation may be a picture, or have some among its parts
    # whether numbers of an action may lack bounds: a policy that draws them from a normal distribution
    unbounded: bool = False
    masks: bool = False  # whether it can leave out the actions that a mask forbids

    def __str__(self) -> str:
        observation = "any observation" if self.pictures else "an observation without pictures"
        bounds = "" if self.unbounded else "bounded "
        actions = {
            "discrete": "one discrete action",
            "box": f"{bounds}continuous actions",
            "any": f"discrete actions, one or several at once, or {bounds}continuous ones",
        }
        return f"{observation} and {actions[self.actions]}"

    def cells(self) -> dict[str, str]:
        """A row of the table of recipes: what it takes, by kind; empty where it takes none."""
        box = "yes" if self.unbounded else "bounded"
        return {
            "vectors, choices, Dict": "yes",
            "pictures": "yes" if self.pictures else "",
            "Discrete": "" if self.actions == "box" else "yes",
            "Box": "" if self.actions == "discrete" else box,
            "several choices": "yes" if self.actions == "any" else "",
            "mask": "yes" if self.masks else "",
        }

    def probe(self, config: EnvConfig) -> Spaces:
        """Look at one environment, made in this process; a ConfigError if the recipe cannot take it."""
        with making(config):
            refuse_unsaid_protocol(config)
            envs = make_venv(config.spec(), 1)
        envs.close()
        observations = envs.observations
        actions = envs.actions
        if observations.pictures and not self.pictures:
            raise self._refused(config.name, "it gives pixels")
        why = self._why_not(actions)
        if why is not None:
            raise self._refused(config.name, why)
        if observations.mask is not None and not self.masks:
            problem = (
                f"this recipe cannot leave out actions, and {config.name!r} has a mask of them"
            )
            cure = f"give env.action_mask=none, or a recipe that can: {MASKING}"
            raise ConfigError(problem, "env.action_mask", cure)
        if isinstance(actions, DiscreteActions):
            return Spaces(observations, actions.n, OneHot(actions.n, dtype=torch.int64))
        if isinstance(actions, MultiDiscreteActions):
            spec = MultiCategorical(actions.nvec)
            return Spaces(observations, sum(actions.nvec), spec)
        low = torch.tensor(actions.low, device="cpu")
        high = torch.tensor(actions.high, device="cpu")
        return Spaces(observations, actions.size, Bounded(low, high))

    def _why_not(self, actions: ActionSpec) -> str | None:
        """Why this recipe cannot choose such actions; None: it can."""
        if isinstance(actions, DiscreteActions):
            if self.actions == "box":
                return f"its action is one of {actions.n}"
            return None
        if isinstance(actions, MultiDiscreteActions):
            if self.actions != "any":
                return f"its action is {len(actions.nvec)} choices at once"
            return None
        if self.actions == "discrete":
            return f"its action is a vector, of size {actions.size}"
        for number, (low, high) in enumerate(zip(actions.low, actions.high, strict=True)):
            with np.errstate(over="ignore", invalid="ignore"):
                # networks and updates compute with float32
                span = np.float32(high) - np.float32(low)
            if not (self.unbounded or np.isfinite(span)):
                return f"number {number} of its action goes from {low:g} to {high:g}, no finite range in float32"
            if span == 0:
                return f"number {number} of its action can only be {low:g}"
        return None

    def _refused(self, name: str, why: str) -> ConfigError:
        cure = f"give one with {self}, like {self.examples}"
        return ConfigError(f"this recipe cannot learn {name!r}: {why}", "env.id", cure)


#: What recipes take that are written after DQN's example.
DISCRETE = Takes("discrete", "CartPole-v1, Acrobot-v1 or LunarLander-v3")

#: What DQN takes.
CHOICES = replace(DISCRETE, pictures=True, masks=True)

#: What recipes take that are written after SAC's example.
BOX = Takes("box", "Pendulum-v1, Hopper-v5 or HalfCheetah-v5")

NUMBERS = replace(BOX, pictures=True)  #: what SAC, TD3 and CrossQ take

#: what PPO takes
ON_POLICY = Takes(
    "any",
    "CartPole-v1, Pendulum-v1 or HalfCheetah-v5",
    pictures=True,
    unbounded=True,
    masks=True,
)

#: what dreamer_v3 takes
ANY = Takes("any", "CartPole-v1, Acrobot-v1 or Pendulum-v1", pictures=True)


#: The spaces of an environment with a flat observation and discrete actions; ConfigError if it has others.
probe = DISCRETE.probe


@contextmanager
def making(config: EnvConfig, more: str = "") -> Iterator[None]:
    """Turn the errors of making an environment inside into a ConfigError; ``more`` is added to its cure."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # it is foreign code, which may raise anything
        known = isinstance(error, (gymnasium.error.Error, TypeError, ValueError, ImportError))
        reason = first_line(error)
        if not known:
            reason = f"{type(error).__name__}: {reason}"
        problem = f"cannot make the environment {config.name!r}: {reason}"
        cure = (
            "give an installed gymnasium id, for example env.id=CartPole-v1, or my_package:MyEnv-v0"
        )
        cure += more
        # its message names the package
        if isinstance(error, gymnasium.error.DependencyNotInstalled):
            cure = "install the package that the first line names, or give another env.id"
        elif isinstance(error, ModuleNotFoundError) and config.names_module:
            cure = "correct its name, install that package, or name the folder that holds it in PYTHONPATH"
        elif isinstance(error, TypeError):
            cure = "env.kwargs has its arguments: +env.kwargs.NAME=VALUE adds one, ~env.kwargs.NAME drops it"
        raise ConfigError(problem, "env.id and env.kwargs", cure) from error


@contextmanager
def naming_env(config: EnvConfig) -> Iterator[None]:
    """Add the environment to a WorkerLost or AdoptionTimeout inside.

    Workers that do not start know only what makes it. What a worker raised becomes the WorkerLost that it was
    raised from.
    """
    try:
        yield
    except Exception as error:
        lost: BaseException | None = error
        if not isinstance(error, (WorkerLost, AdoptionTimeout)):
            lost = error.__cause__
        if not isinstance(lost, (WorkerLost, AdoptionTimeout)):
            raise
        cure = lost.cure
        if isinstance(lost, AdoptionTimeout):
            cure += "; in a config it is collector.start_timeout_s"
        raise type(lost)(lost.what, f"{lost.where}; {config.word}", cure) from error


# of a play: resets with a seed, and steps after each
_RESETS = 3
_STEPS = 400


def played(config: EnvConfig, seed: int, elsewhere: int) -> Iterator[tuple[str, dict[str, int]]]:
    """Play as ``seed`` decides, and yield digests of answers; ``elsewhere`` seeds the global generators."""
    seed_all(elsewhere)
    generator = torch.Generator().manual_seed(seed)
    with closing(make_venv(config.spec(), config.num_envs)) as envs:
        for each in range(seed, seed + _RESETS):
            first = envs.reset(each)
            yield f"reset(seed={each})", {"observation": digest([first])}
            steps = random_steps(envs, generator, _STEPS, first)
            yield from digested(steps, f"reset(seed={each})")


def digested(steps: Iterable[EnvStep], after: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Digests of what environments answer to each step, which are numbered ``after`` something."""
    for step, answer in enumerate(steps, 1):
        digests = {}
        for key, value in answer._asdict().items():
            if torch.is_tensor(value):
                digests[key] = digest([value])
        digests["final observation"] = digest([last for _, last in answer.finals])
        yield f"step {step} after {after}", digests


def first_difference(
    one: Sequence[tuple[str, dict[str, int]]], other: Sequence[tuple[str, dict[str, int]]]
) -> tuple[str, str] | None:
    """Which answer differs first in two such plays, and when; None: none does."""
    for (moment, ours), (_, theirs) in zip(one, other, strict=False):
        for key, ours_of_it in ours.items():
            if ours_of_it != theirs[key]:
                return key, moment
    return None

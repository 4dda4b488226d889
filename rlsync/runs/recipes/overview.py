"""What the networks of a run see and give, read from what is built: for ``rlsync check``."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from tensordict.nn import ProbabilisticTensorDictModule
from torch import nn
from torchrl.modules import QValueModule, TanhModule

from rlsync import RlsyncWarning
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import ActionSpec, BoxActions, MultiDiscreteActions
from rlsync.runs.actors.envs.observations import WHOLE, Part
from rlsync.runs.actors.player import Player
from rlsync.runs.recipes.encoder import Encoder, Pixels, convolutions_in
from rlsync.runs.recipes.impala.heads import PolicyHead
from rlsync.runs.recipes.impala.network import ImpalaNet
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.normalize import Standardize, Standardized
from rlsync.runs.recipes.replay.frames import places_for
from rlsync.runs.recipes.replay.settings import OffPolicyConfig, ReplayConfig
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.spaces import Spaces
from rlsync.seams import machine, warn


@dataclass(frozen=True, slots=True)
class SeenPart:
    """A part of an observation, as networks see it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    made_of: str  #: what the environment gives, in words
    seen_by: str  #: what of the networks sees it, in words
    normalized: bool  #: whether its numbers lose their mean, and are divided by their deviation

    def __str__(self) -> str:
        words = f"{list(self.shape)} {self.dtype}: {self.made_of}; {self.seen_by}"
        if self.name != WHOLE:
            words = f"{self.name} {words}"
        if self.normalized:
            return f"{words}, normalised"
        return words


@dataclass(frozen=True, slots=True)
class ReplayMemory:
    """The memory of a replay, once it is full: that of its observations, which are nearly all of it."""

    frames: int  #: how many it holds then
    frame_bytes: int  #: of the observations of one frame
    total_bytes: int
    key: str  #: which setting says how many frames there are

    def __str__(self) -> str:
        observations = f"{self.frame_bytes:,} bytes of observations each"
        return f"{self.frames:,} frames, {observations}: {in_units(self.total_bytes)}"


@dataclass(frozen=True, slots=True)
class Overview:
    """What the networks of a run see and give, and how large they are."""

    observation: tuple[SeenPart, ...]
    action: str  #: what is chosen, in words
    head: str  #: what of the networks chooses it
    acting_parameters: int  #: of the networks that a worker acts with
    trained_parameters: int  #: of all networks that are trained
    replay: ReplayMemory | None  #: None: what is learned from is not kept

    @classmethod
    def of(cls, config: Config, spaces: Any, player: Player, loss: nn.Module) -> Overview:
        """Look at what was built.

        Args:
            config: of the run.
            spaces: what the recipe's probe returned.
            player: what acts.
            loss: holds what is trained.
        """
        player = player.by_weights()
        actions = player.actions
        if isinstance(spaces, Spaces):  # a player need not know the bounds
            actions = spaces.player_actions()
        trained = {p for p in loss.parameters() if p.requires_grad}
        acting = {p for module in player.modules.values() for p in module.parameters()}
        return cls(
            tuple(_seen(part, player) for part in player.observations.parts),
            _in_words(actions),
            _head(player),
            sum(parameter.numel() for parameter in acting),
            sum(parameter.numel() for parameter in trained),
            _replay(config, spaces, player),
        )

    def __str__(self) -> str:
        acting = f"{self.acting_parameters:,} of what acts"
        rows = [("observation", str(part)) for part in self.observation]
        rows += [
            ("action", f"{self.action}; {self.head}"),
            ("parameters", f"{acting}, {self.trained_parameters:,} are trained"),
        ]
        if self.replay is not None:
            rows.append(("replay", str(self.replay)))
        wide = max(len(name) for name, _ in rows) + 4
        return "\n".join(f"  {name:<{wide}}{text}" for name, text in rows)


def _modules(player: Player) -> Iterator[nn.Module]:
    """All parts of the networks that act."""
    for module in player.modules.values():
        yield from module.modules()


def _seen(part: Part, player: Player) -> SeenPart:
    modules = list(_modules(player))
    normalized = False
    if part.kind == "mask":
        seen_by = "leaves out what it forbids"
    elif part.kind == "picture":
        seen_by = _convolutions(part, modules)
        normalized = any(isinstance(each, Pixels) and each.normalizes for each in modules)
    else:
        seen_by = _layers(modules)
        normalized = any(isinstance(each, Standardize) for each in modules)
    dtype = str(part.dtype).removeprefix("torch.")
    return SeenPart(part.name, part.shape, dtype, _made_of(part), seen_by, normalized)


def _convolutions(part: Part, modules: list[nn.Module]) -> str:
    """What sees a picture."""
    names = set()
    for each in modules:
        if isinstance(each, Encoder):
            eyes = zip(each.observations.pictures, each.torsos, strict=True)
            names |= {
                convolutions_in(torso) for picture, torso in eyes if picture.path == part.path
            }
    if not names:
        names = {convolutions_in(module) for module in modules}
    names -= {""}
    if not names:
        return "convolutions"
    return f"convolutions ({', '.join(sorted(names))})"


def _layers(modules: list[nn.Module]) -> str:
    """What sees numbers."""
    for each in modules:
        if isinstance(each, Encoder) and each.torsos:
            layers = each.numbers
            if isinstance(layers, Standardized):
                layers = layers.net
            if isinstance(layers, nn.Identity):
                return "features as they are"
    return "mlp"


def _made_of(part: Part) -> str:
    """What the environment gives, in words."""
    if part.kind == "mask":
        place = "in the info" if part.is_in_info else "in the observation"
        return f"a mask of the actions, {place}"
    match part.space:
        case Discrete(n=n):
            return f"one-hot of a choice of {n}"
        case MultiDiscrete(nvec=nvec):
            return f"one-hot of each of {nvec.size} choices"
        case MultiBinary():
            return "zeros and ones"
        case Box(shape=shape) if part.kind == "picture":
            if part.channels_last:
                return f"a picture, given as {list(shape)}"
            return "a picture"
        case Box(shape=shape) if part.is_flattened:
            return f"a box of {list(shape)}, flattened to {part.size} numbers"
    return "numbers"


def _in_words(actions: ActionSpec) -> str:
    match actions:
        case MultiDiscreteActions(nvec=nvec):
            return f"{len(nvec)} choices at once, of {', '.join(map(str, nvec))}"
        case BoxActions(size=size, low=low, high=high):
            numbers = "1 number" if size == 1 else f"{size} numbers"
            spans = {*zip(low, high, strict=True)}
            if len(spans) > 1:
                return f"{numbers}, each within its bounds"
            ((least, most),) = spans
            if math.isinf(least) and math.isinf(most):
                return f"{numbers} without bounds"
            return f"{numbers} from {least:g} to {most:g}"
    return f"one of {actions.n}"


def _head(player: Player) -> str:
    """What chooses an action: a distribution, by its class, or the largest value."""
    for module in _modules(player):
        match module:
            case ImpalaNet(head=head):
                return type(head).__name__
            case QValueModule():
                return "the largest value"
            case ProbabilisticTensorDictModule() if "action" in module.out_keys:
                head = module.distribution_kwargs.get("head")
                if isinstance(head, PolicyHead):
                    return type(head).__name__
                return str(module.distribution_class.__name__)
            case TanhModule():
                return "tanh"
    return type(player).__name__


def _replay(config: Config, spaces: Any, player: Player) -> ReplayMemory | None:
    recipe = config.recipe
    row_bytes = math.prod(player.observation_shape) * player.observation_dtype.itemsize
    picture = None
    if isinstance(spaces, Spaces):
        picture = spaces.picture
    match recipe:
        case OffPolicyConfig() if picture is not None:
            frames = min(recipe.buffer_frames, recipe.total_frames)
            shown = config.env.frames_shown(picture[0])
            frame_bytes = math.ceil(row_bytes * places_for(frames) / shown / frames)
            key = "recipe.buffer_frames"
        case ReplayConfig():
            frames = min(recipe.buffer_frames, recipe.total_frames)
            frame_bytes = row_bytes * recipe.stored_observations
            key = "recipe.buffer_frames"
        case ImpalaConfig() if recipe.replay.ratio and recipe.replay.path is None:
            frames = min(recipe.replay.capacity_steps, recipe.total_frames)
            # An unroll has the observation after its last step, too.
            frame_bytes = math.ceil(row_bytes * (1 + 1 / recipe.unroll_length))
            key = "recipe.replay.capacity_steps"
        case _:
            return None
    return ReplayMemory(frames, frame_bytes, frames * frame_bytes, key)


def warn_of_memory(config: Config, replay: ReplayMemory | None) -> None:
    """Warn of a replay that this machine's memory does not hold."""
    memory = machine.memory_bytes()
    is_here = Run(config).device == CPU
    if replay is None or memory is None or not is_here or replay.total_bytes <= memory:
        return
    problem = (
        f"a replay of {replay.frames:,} frames takes {in_units(replay.total_bytes)} when it is full, and this "
        f"machine has {in_units(memory)}"
    )
    # Half of it: the learner, the workers and the rollouts need some.
    fits = memory // 2 // replay.frame_bytes
    cure = f"give {replay.key}={fits}, or smaller pictures"
    if isinstance(config.recipe, ImpalaConfig):
        cure += "; or a folder on a disk, recipe.replay.path"
    warn(RlsyncWarning(problem, replay.key, cure))


def warn_of_disk(config: Config, replay: ReplayMemory | None, folder: Path) -> None:
    """Warn of a replay whose checkpoint does not fit on the disk of a run's folder, made yet or not."""
    recipe = config.recipe
    if replay is None or not (isinstance(recipe, ReplayConfig) and recipe.buffer_checkpointed):
        return
    free_bytes = shutil.disk_usage(machine.existing_folder(folder)).free
    if replay.total_bytes <= free_bytes:
        return
    problem = (
        f"a checkpoint has a replay of {in_units(replay.total_bytes)} when that is full, and the disk has room "
        f"for {in_units(free_bytes)}"
    )
    cure = f"give a run_dir on another disk, a smaller {replay.key}, or recipe.buffer_checkpointed=false"
    warn(RlsyncWarning(problem, str(folder), cure))


def in_units(count: int) -> str:
    """So many bytes, in words.

    Example:
        >>> in_units(900), in_units(5_645_000_000)
        ('900 bytes', '5.6 GB')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"

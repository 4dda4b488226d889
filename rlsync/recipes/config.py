"""What a recipe can be told, as plain dataclasses.

The launcher fills them from configs/*.yaml and the command line; in Python they are built directly.
The defaults are those of the first recipe, PPO on CartPole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlsync.core.errors import ConfigError
from rlsync.core.path import nearest_name
from rlsync.core.plan import Source
from rlsync.core.trigger import Every, LagAbove, Trigger
from rlsync.recipes.bounds import above_zero, check_bounds, fraction, not_below_zero, one_of

#: What weights may be cast to on their way.
WIRE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class EnvConfig:
    """The environments of every worker: an id that gymnasium knows, and arguments for it."""

    id: str = "CartPole-v1"
    num_envs: int = above_zero(1)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class CollectorConfig:
    """The worker processes, and how they adopt weights from the board."""

    kind: str = one_of("sync", "async")
    num_workers: int = above_zero(2)
    frames_per_batch: int = above_zero(2048)
    adopt: str = one_of("alias", "copy")
    silent_timeout_s: float | None = above_zero(300.0)


@dataclass
class RouteConfig:
    """One entry of the sync map; with a ``dtype`` the workers' network computes, and receives, in it."""

    destination: str = ""
    source: str = ""
    dtype: str | None = None


@dataclass
class WhenConfig:
    """When to publish: every so many units, when the learner is ahead, or whichever is first."""

    every: int | float | None = 1
    unit: str = "batches"
    lag_above: int | None = None


@dataclass
class SyncConfig:
    """What goes where, and when; ``history`` is the number of receipts kept in memory."""

    map: list[RouteConfig] = field(
        default_factory=lambda: [RouteConfig("policy", "loss_module.actor_network")]
    )
    when: WhenConfig = field(default_factory=WhenConfig)
    history: int = above_zero(1000)


@dataclass
class LoggerConfig:
    """Where metrics go, and how many frames lie between two points of a curve at least."""

    kind: str = one_of("csv", "tensorboard", "none")
    every_frames: int = above_zero(1)


@dataclass
class RecipeConfig:
    """What all recipes share. ``target_return`` ends the run early; None never does."""

    name: str = "ppo"
    total_frames: int = above_zero(150_000)
    target_return: float | None = 475.0
    target_episodes: int = above_zero(20)
    lr: float = above_zero(2e-3)
    anneal_lr: bool = True
    gamma: float = fraction(0.99)
    batch_size: int = above_zero(128)
    clip_norm: float = above_zero(0.5)


@dataclass
class PPOConfig(RecipeConfig):
    """Proximal policy optimisation (Schulman et al. 2017)."""

    hidden: list[int] = field(default_factory=lambda: [64, 64])
    num_epochs: int = above_zero(4)
    gae_lambda: float = fraction(0.95)
    clip_epsilon: float = above_zero(0.2)
    entropy_coeff: float = not_below_zero(0.0)
    critic_coeff: float = not_below_zero(0.5)


@dataclass
class DQNConfig(RecipeConfig):
    """Deep Q-learning with a double target (Mnih et al. 2015, van Hasselt et al. 2016)."""

    name: str = "dqn"
    total_frames: int = above_zero(25_000)
    hidden: list[int] = field(default_factory=lambda: [128, 128])
    lr: float = above_zero(5e-4)
    batch_size: int = above_zero(256)
    clip_norm: float = above_zero(10.0)
    optim_steps_per_batch: int = above_zero(32)
    buffer_frames: int = above_zero(50_000)
    target_update_steps: int = above_zero(100)
    epsilon_start: float = fraction(1.0)
    epsilon_end: float = fraction(0.02)
    epsilon_frames: int = above_zero(10_000)


@dataclass
class Config:
    """One run.

    ``run_dir`` is the folder that receives receipts, metrics and the checkpoint; without one the
    run writes nothing. ``resume`` is a run folder or a checkpoint folder to go on from.
    """

    seed: int = not_below_zero(0)
    resume: str | None = None
    run_dir: str | None = None
    checkpoint_every_frames: int = above_zero(50_000)
    env: EnvConfig = field(default_factory=EnvConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    recipe: RecipeConfig = field(default_factory=PPOConfig)


def trigger(when: WhenConfig) -> Trigger:
    """The trigger that a config describes.

    Raises:
        ConfigError: it describes none, or a number or the unit is wrong.

    Example:
        >>> str(trigger(WhenConfig(every=10, unit="seconds", lag_above=50)))
        '(every 10 seconds | lag above 50 optim_steps)'
    """
    parts: list[Trigger] = []
    try:
        if when.every is not None:
            parts.append(Every(when.every, when.unit))  # type: ignore[arg-type]
        if when.lag_above is not None:
            parts.append(LagAbove(when.lag_above))
    except ConfigError as error:
        raise ConfigError(error.what, f"sync.when: {error.where}", error.cure) from None
    if not parts:
        raise ConfigError(
            "nothing says when to publish",
            "sync.when: every and lag_above are both null",
            "give one of them, for example sync.when.every=1",
        )
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


def sync_map(sync: SyncConfig) -> dict[str, str | Source]:
    """The map ``{destination: source}`` that a config lists.

    Raises:
        ConfigError: the list is empty, an entry lacks a side or declares what is no floating dtype, or two
            entries share a destination.
    """
    found: dict[str, str | Source] = {}
    for entry, route in enumerate(sync.map):
        where = f"sync.map[{entry}]"
        if not route.destination or not route.source:
            lacking = "source" if route.destination else "destination"
            raise ConfigError(
                f"an entry of the sync map has no {lacking}",
                where,
                "write {destination: policy, source: loss_module.actor_network}",
            )
        if route.destination in found:
            raise ConfigError(f"two entries of the sync map go to {route.destination!r}", where, "drop one")
        if route.dtype not in (None, *WIRE_DTYPES):
            near = nearest_name(str(route.dtype), WIRE_DTYPES)
            raise ConfigError(
                f"no dtype {route.dtype!r}",
                f"{where}.dtype",
                (f"did you mean {near!r}? " if near else "") + f"give one of {', '.join(WIRE_DTYPES)}",
            )
        found[route.destination] = Source(route.source, dtype=route.dtype) if route.dtype else route.source
    if not found:
        raise ConfigError(
            "the sync map is empty",
            "sync.map",
            "write sync.map=[{destination:policy,source:loss_module.actor_network}]",
        )
    return found


def check_widths(key: str, layers: list[int]) -> None:
    """Refuse layers that are none, or without units.

    Raises:
        ConfigError: names the key.
    """
    if not layers or min(layers) < 1:
        raise ConfigError(f"{key} cannot be {list(layers)}", key, "give widths, like [64,64]")


def check(config: Config) -> Config:
    """Refuse values that cannot work, before any process is started.

    Returns:
        The same config.

    Raises:
        ConfigError: names the key, its value and what it accepts.
    """
    check_bounds(config)
    trigger(config.sync.when)
    sync_map(config.sync)
    if not config.env.id:
        raise ConfigError("no environment is named", "env.id", "for example env.id=Acrobot-v1")
    match config.recipe:
        case PPOConfig(hidden=layers) | DQNConfig(hidden=layers):
            check_widths("recipe.hidden", layers)
    collector, steps = config.collector, config.collector.num_workers * config.env.num_envs
    if collector.frames_per_batch < steps:
        raise ConfigError(
            f"a batch of {collector.frames_per_batch} frames leaves some environments idle",
            "collector.frames_per_batch",
            f"give at least collector.num_workers x env.num_envs = {steps}",
        )
    return config

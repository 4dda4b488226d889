"""The recipes impala and laser: workers that act all the time, and a learner that never waits for them.

Source: IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583; torchrl.trainers.Trainer runs the loop.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch import optim
from torchrl.trainers import LRSchedulerHook, Trainer

from rlsync import LogPolicyLag
from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.checks import check
from rlsync.recipes.env_settings import refuse_unsaid_protocol
from rlsync.recipes.evaluating import make_evaluator
from rlsync.recipes.hooks import MixReplayed, UnrollReturns
from rlsync.recipes.impala.config import ImpalaConfig, settings_of
from rlsync.recipes.impala.heads import PolicyHead, head_for
from rlsync.recipes.impala.loss import ImpalaLoss
from rlsync.recipes.impala.network import ImpalaNet
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device, worker_devices
from rlsync.recipes.settings import Config, EnvConfig
from rlsync.tensors.device import bfloat16_instructions
from rlsync.workers.collector import UnrollCollector
from rlsync.workers.envs.specs import EnvSpec, make_venv
from rlsync.workers.replay.mixing import ReplayMix
from rlsync.workers.replay.unrolls import UnrollReplay
from rlsync.workers.rollout_collector import RolloutCollector
from rlsync.workers.supervision import Restarts


@dataclass(frozen=True, slots=True)
class VectorSpaces:
    """What an ImpalaNet must know of environments: the observation's shape, and the head for the actions."""

    observation_shape: tuple[int, ...]
    head: PolicyHead


def build(config: Config, spaces: VectorSpaces | None = None) -> Trainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is an :class:`ImpalaConfig`.
        spaces: of the environment, from :func:`probe`, if the config has been checked already. None: check
            the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.

    Example:
        >>> trainer = build(Config(recipe=ImpalaConfig()))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    if spaces is None:
        check(config)
    recipe = settings_of(config)
    parts.seed_everything(config.seed)
    spec = env_spec(config.env)
    network = make_network(recipe, config.env, spaces)
    loss = make_loss(recipe, network).to(learner_device(config))
    optimizer = make_optimizer(recipe, loss)
    settings = parts.trainer_settings(config)
    collector = make_collector(config, recipe, spec, network)
    try:
        trainer = Trainer(
            **settings,
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            optim_steps_per_batch=1,
        )
        scheduler = parts.annealing(config, optimizer)
        if scheduler is not None:
            LRSchedulerHook(scheduler).register(trainer)
        register_hooks(trainer, config, recipe, collector)
    except BaseException:
        collector.shutdown()
        raise
    return trainer


def env_spec(config: EnvConfig) -> EnvSpec:
    """Which environments a config means: an :class:`AtariConfig` runs on ale-py's vector environment.

    Raises:
        ConfigError: the id is not one, or that of an Atari game whose protocol is not said.

    Example:
        >>> from rlsync.recipes.settings import AtariConfig
        >>> env_spec(AtariConfig("ALE/SpaceInvaders-v5")).game
        'space_invaders'
    """
    refuse_unsaid_protocol(config)
    return config.spec()


def probe(config: EnvConfig) -> VectorSpaces:
    """Make one environment in this process, look at it, and close it.

    Raises:
        ConfigError: it cannot be made.
    """
    with parts.making(config, "; for Atari env=atari env.id=ALE/Pong-v5, with 'rlsync[atari]'"):
        envs = make_venv(env_spec(config), 1)
    try:
        return VectorSpaces(envs.observation_shape, head_for(envs.actions))
    finally:
        envs.close()


def make_network(recipe: ImpalaConfig, env: EnvConfig, spaces: VectorSpaces | None = None) -> ImpalaNet:
    """The network that a recipe describes, for these environments.

    Args:
        recipe: its key ``model``.
        env: the environments.
        spaces: what :func:`probe` returned of them; None: probe here.

    Raises:
        ConfigError: the environment cannot be made.
    """
    spaces = spaces or probe(env)
    model, pixels = recipe.model, len(spaces.observation_shape) == 3
    if model.bfloat16 and bfloat16_instructions() == []:
        warnings.warn("this processor emulates bfloat16: recipe.model.bfloat16=false is faster", stacklevel=2)
    usual = "shallow" if pixels else "mlp"
    return ImpalaNet(
        spaces.observation_shape,
        spaces.head,
        torso=usual if model.torso == "auto" else model.torso,
        hidden=model.hidden,
        lstm=model.lstm,
        last_action=model.last_action,
        last_reward=model.last_reward,
        channels_last=model.channels_last,
        bfloat16=model.bfloat16,
        torso_threads=model.torso_threads,
    )


def make_loss(recipe: ImpalaConfig, network: ImpalaNet) -> ImpalaLoss:
    """The loss that a recipe describes, for this network."""
    return ImpalaLoss(network, **vars(recipe.loss_settings()))


def make_optimizer(recipe: ImpalaConfig, loss: ImpalaLoss) -> optim.Optimizer:
    """RMSProp as in IMPALA, or Adam."""
    if recipe.optimizer == "adam":
        return optim.Adam(loss.parameters(), lr=recipe.lr, eps=recipe.adam_eps)
    return optim.RMSprop(loss.parameters(), lr=recipe.lr, alpha=recipe.rms_alpha, eps=recipe.rms_eps)


def make_collector(
    config: Config, recipe: ImpalaConfig, spec: EnvSpec, network: ImpalaNet
) -> RolloutCollector:
    """The workers, on this machine or on the nodes of a cluster."""
    shared: dict[str, Any] = {
        "steps": recipe.unroll_length,
        "envs_per_worker": config.env.num_envs,
        "overlap": recipe.overlap,
        "rollouts_per_batch": recipe.batch_size // config.env.num_envs,
        "slots": recipe.slots,
        "store_params": recipe.loss_settings().trust_region is not None,
        "dtype": parts.workers_dtype(config),
        "adopt": config.collector.adopt,
        "storing_device": learner_device(config),
        "seed": config.seed,
        "restarts": Restarts(recipe.max_restarts),
        "silent_timeout_s": config.collector.silent_timeout_s or float("inf"),
    }
    if config.cluster.here:
        devices, workers = worker_devices(config), config.collector.num_workers
        when_full: Any = ImpalaConfig.of(config).when_full
        with parts.naming_env(config.env):
            return UnrollCollector(
                network,
                spec,
                num_workers=workers,
                policy_device=devices,
                when_full=when_full,
                start_timeout_s=config.collector.start_timeout_s,
                **shared,
            )
    from rlsync.recipes.on_cluster import cluster_collector  # which needs ray

    return cluster_collector(config, spec, network, shared)


def register_hooks(
    trainer: Trainer, config: Config, recipe: ImpalaConfig, collector: RolloutCollector
) -> None:
    """What publishes, what mixes replayed unrolls in, and what is logged."""
    sync = parts.register_sync(trainer, config, collector.counters)
    LogPolicyLag(sync).register(trainer)
    replay = recipe.replay
    if replay.ratio:
        held = UnrollReplay(replay.capacity_steps, path=replay.path, seed=config.seed)
        mix = ReplayMix(held, replay.ratio, min_steps=replay.min_steps)
        MixReplayed(mix, keep_contents=replay.checkpointed).register(trainer)
    UnrollReturns(recipe.target_return, recipe.target_episodes).register(trainer)
    if config.run_dir is not None and recipe.evaluation.every_frames:
        make_evaluator(config, collector, collector.worker_player).register(trainer)
    if not config.cluster.here:
        from rlsync.recipes.on_cluster import tell_nodes  # which needs ray

        tell_nodes(trainer, config, collector)


def player(config: Config, spaces: VectorSpaces, deterministic: bool) -> CheckpointPlayer:
    """The network of a run's config, for ``rlsync eval``."""
    network = make_network(settings_of(config), config.env, spaces)
    return CheckpointPlayer(network, network.player(deterministic=deterministic), env_spec(config.env))


RECIPE = Recipe("impala", ImpalaConfig, probe, build, player)

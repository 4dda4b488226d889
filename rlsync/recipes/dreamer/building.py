"""What the Dreamer recipes have in common: their environments, their workers and their trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from tensordict.nn import TensorDictModuleBase
from torch import optim
from torchrl.collectors import BaseCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase, InitTracker, TensorDictPrimer
from torchrl.envs.model_based import DreamerEnv
from torchrl.modules import WorldModelWrapper
from torchrl.objectives import LossModule
from torchrl.trainers import OptimizationStepper, Trainer

from rlsync import DreamerPlayer
from rlsync.recipes import parts
from rlsync.recipes.dreamer.config import DreamerConfig
from rlsync.recipes.dreamer.open_loop import OpenLoop
from rlsync.recipes.dreamer.sequences import NumberRows, SequenceMemory, Sequences
from rlsync.recipes.replay.building import paced_trainer, replay_buffer
from rlsync.recipes.run import Run
from rlsync.recipes.settings import EnvConfig
from rlsync.recipes.spaces import Spaces, make_env
from rlsync.torchrl_plugin.dreamer.map import parts_of_losses


def make_player_env(primer: TensorDictPrimer, config: EnvConfig) -> EnvBase:
    """An environment, or a batch of them, that carries the state of a player and numbers its rows."""
    env = make_env(config)
    for transform in (InitTracker(), primer.clone(), NumberRows()):
        env.append_transform(transform)
    return env


def started_collector(run: Run[Any], acting: DreamerPlayer) -> AbstractContextManager[BaseCollector]:
    """See :func:`rlsync.recipes.parts.started_collector`; the prefill is of random actions."""
    maker = partial(make_player_env, acting.primer())
    return parts.started_collector(run, acting, random_frames=run.recipe.pace.prefill, maker=maker)


def make_trainer(
    run: Run[Any],
    collector: BaseCollector,
    loss: LossModule,
    optimizer: optim.Optimizer,
    acting: DreamerPlayer,
    stepper: OptimizationStepper | None = None,
    *,
    within_episodes: bool = False,
) -> Trainer:
    """A trainer that stores every batch's rows, and learns from sequences at the config's pace; the hooks
    that publish are not registered yet.
    """
    recipe: DreamerConfig = run.recipe
    sequences = Sequences(recipe.sequence_length, within_episodes=within_episodes)
    state = {key: acting.begins()[key].numel() for key in ("state", "belief")}
    memory = SequenceMemory(replay_buffer(run, sequences), sequences, state)
    trainer = paced_trainer(run, collector, loss, memory, optimizer, stepper)
    if recipe.open_loop.every_frames:
        prior = parts_of_losses({"": loss}).rollout.module.rssm_prior.module
        model = loss.model_loss.world_model
        OpenLoop(recipe.open_loop, model, prior, memory.some, run.folder).register(trainer)
    return trainer


def imagined_env(
    transition: TensorDictModuleBase,
    reward: TensorDictModuleBase,
    state: int,
    recipe: DreamerConfig,
    spaces: Spaces,
) -> DreamerEnv:
    """The environment in which an actor's steps are imagined; ``state`` is the width of what is drawn."""
    world = WorldModelWrapper(transition, reward)
    env = DreamerEnv(world, prior_shape=(state,), belief_shape=(recipe.belief,))
    env.observation_spec = Composite(state=Unbounded(state), belief=Unbounded(recipe.belief))
    env.state_spec = env.observation_spec.clone()
    env.action_spec, env.reward_spec = spaces.action_spec, Unbounded((1,))
    return env


def let_act(loss: LossModule, policy: TensorDictModuleBase, recipe: DreamerConfig) -> None:
    """Let a loss have a player, made of its own parts, as ``actor_network``, which TorchRL saves."""
    on_adoption: Any = recipe.on_adoption
    vars(loss)["actor_network"] = DreamerPlayer(policy, on_adoption=on_adoption, window=recipe.window)

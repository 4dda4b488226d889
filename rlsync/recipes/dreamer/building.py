"""What the Dreamer recipes have in common: their environments, their workers and their trainer."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import optim
from torchrl.collectors import BaseCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import EnvBase, InitTracker, TensorDictPrimer
from torchrl.objectives import LossModule
from torchrl.trainers import OptimizationStepper, Trainer

from rlsync import DreamerPlayer
from rlsync.recipes import parts
from rlsync.recipes.dreamer.config import DreamerConfig
from rlsync.recipes.dreamer.open_loop import OpenLoop
from rlsync.recipes.dreamer.rows import NumberRows, as_rows
from rlsync.recipes.dreamer.sequences import Sequences
from rlsync.recipes.replay import building
from rlsync.recipes.run import Run
from rlsync.recipes.settings import EnvConfig
from rlsync.recipes.spaces import make_env
from rlsync.torchrl_plugin.dreamer.map import parts_of_losses


class SequenceMemory:
    """Puts the rows of every batch into a replay buffer, and draws the sequences of each optimizer step.

    A sequence begins without a state, as an episode does: the recurrent model reads no action in its first
    row, and makes the state, whose widths are ``state``, from the observations that follow.
    """

    def __init__(self, buffer: TensorDictReplayBuffer, sequences: Sequences, state: dict[str, int]) -> None:
        self.buffer = buffer
        self._sequences = sequences
        self._state = state

    def register(self, trainer: Trainer) -> None:
        """Store and draw in this trainer, which has the buffer as its ``replay_buffer``, for checkpoints."""
        trainer.register_op("batch_process", self.store)
        trainer.register_op("process_optim_batch", self.draw)

    def store(self, batch: TensorDictBase) -> TensorDictBase:
        """Keep the rows of a batch, which itself is not changed."""
        self.buffer.extend(as_rows(batch))
        return batch

    def draw(self, batch: Any) -> TensorDictBase:
        """The sequences ``[sequences, length]`` of the next optimizer step."""
        return self._begun(self.buffer.sample().reshape(-1, self._sequences.length))

    def some(self, count: int, length: int) -> TensorDictBase:
        """So many other sequences, of any length, to look at."""
        storage = self.buffer.storage
        return self._begun(storage[self._sequences.find(storage, count, length)])

    def _begun(self, drawn: TensorDictBase) -> TensorDictBase:
        drawn["is_init"][:, 0] = True
        for key, width in self._state.items():
            drawn[key] = torch.zeros(*drawn.shape, width, device=drawn.device)
        return drawn


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
    """A trainer that stores the rows of every batch, and learns from sequences at the pace of the config.

    The loss is on the learner's device, and the rate of ``optimizer`` may be lowered. The hooks that publish
    are not registered yet. With ``within_episodes`` no sequence crosses the end of an episode.
    """
    recipe: DreamerConfig = run.recipe
    sequences = Sequences(recipe.sequence_length, within_episodes=within_episodes)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(recipe.buffer_frames, device=run.device),
        sampler=sequences,
        batch_size=recipe.frames_in_an_update(),
    )
    trainer = building.empty_trainer(run, buffer, collector, loss, optimizer, stepper)
    state = {key: acting.begins()[key].numel() for key in ("state", "belief")}
    memory = SequenceMemory(buffer, sequences, state)
    memory.register(trainer)
    building.hold_pace(trainer, run, optimizer)
    if recipe.open_loop.every_frames:
        prior = parts_of_losses({"": loss}).rollout.module.rssm_prior.module
        model = loss.model_loss.world_model
        OpenLoop(recipe.open_loop, model, prior, memory.some, run.folder).register(trainer)
    return trainer

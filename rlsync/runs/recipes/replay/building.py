"""What the recipes with a replay buffer have in common: their trainer, their pace, their critics."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torchrl.collectors import BaseCollector
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.modules import ValueOperator
from torchrl.objectives import LossModule
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import LRSchedulerHook, OptimizationStepper, TargetNetUpdaterHook, Trainer

from rlsync.runs.compat.replay import RowBuffer
from rlsync.runs.evaluation.checkpoint import Component
from rlsync.runs.recipes.hooks.steering import KeepPace
from rlsync.runs.recipes.networks import Sight, mlp
from rlsync.runs.recipes.normalize import Normalize
from rlsync.runs.recipes.replay.frames import Frames
from rlsync.runs.recipes.replay.memory import Memory, PrioritizedRows, StepMemory
from rlsync.runs.recipes.replay.row_segments import RowSegments
from rlsync.runs.recipes.replay.settings import ActorCriticConfig, OffPolicyConfig, ReplayConfig
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.spaces import Spaces
from rlsync.runs.recipes.trainer import annealing, trainer_settings
from rlsync.seams import trainers


def replay_buffer(run: Run[ReplayConfig], sampler: Sampler) -> RowBuffer:
    """The replay buffer that the config describes, on the learner's device: frames move there."""
    recipe = run.recipe
    storage = LazyTensorStorage(recipe.buffer_frames, device=run.device)
    return RowBuffer(storage=storage, sampler=sampler, batch_size=recipe.frames_in_an_update())


def step_memory(run: Run[OffPolicyConfig], *, squared_errors: bool = True) -> StepMemory:
    """The memory that the config describes, with frames of their own where observations are pictures."""
    recipe = run.recipe
    sampler: Sampler = RandomSampler()
    if recipe.prioritized:
        sampler = PrioritizedRows(recipe.buffer_frames, recipe.priority_alpha, recipe.priority_beta)
    frames = None
    picture = run.spaces.picture
    if picture is not None:
        stack = run.config.env.frames_shown(picture[0])
        frames = Frames(recipe.buffer_frames, stack, picture, run.device)
    return StepMemory(
        replay_buffer(run, sampler),
        recipe.gamma,
        recipe.n_step,
        frames=frames,
        squared_errors=squared_errors,
    )


def paced_trainer(
    run: Run[ReplayConfig],
    collector: BaseCollector,
    loss: LossModule,
    memory: Memory,
    *,
    optimizer: optim.Optimizer | None = None,
    stepper: OptimizationStepper | None = None,
    target: TargetNetUpdater | None = None,
) -> Trainer:
    """A trainer that stores and draws by ``memory``; the recipe registers the hooks that publish."""
    recipe = run.recipe
    trainer = Trainer(
        **trainer_settings(run),
        collector=collector,
        loss_module=loss,
        optimizer=optimizer,
        optimization_stepper=stepper,
        replay_buffer=memory.buffer,
        target_net_updater=target,
        optim_steps_per_batch=0,  # the pace sets it
    )
    if recipe.buffer_checkpointed:
        memory.buffer.storage.checkpointer = RowSegments(memory.buffer, memory.frames)
    elif trainer.checkpoint is not None:
        trainers.replace_component(trainer.checkpoint, "replay_buffer", Component())
    memory.register(trainer)
    KeepPace(recipe.pace.pace(), refills=not recipe.buffer_checkpointed).register(trainer)
    if optimizer is not None:
        scheduler = annealing(run, optimizer)
        if scheduler is not None:
            LRSchedulerHook(scheduler).register(trainer)
    return trainer


def make_trainer(
    run: Run[OffPolicyConfig],
    collector: BaseCollector,
    loss: LossModule,
    target: TargetNetUpdater | None,
    optimizer: optim.Optimizer | None = None,
    *,
    stepper: OptimizationStepper | None = None,
    squared_errors: bool = True,
    moved_by_recipe: bool = False,
) -> Trainer:
    """A :func:`paced_trainer` of a :class:`StepMemory`. Call ``register_with_evaluations`` last."""
    recipe = run.recipe
    memory = step_memory(run, squared_errors=squared_errors)
    trainer = paced_trainer(
        run, collector, loss, memory, optimizer=optimizer, stepper=stepper, target=target
    )
    prioritized = memory.buffer.sampler
    if isinstance(prioritized, PrioritizedRows):
        memory.prioritize(trainer, prioritized, (recipe.priority_beta, recipe.priority_beta_end))
    if recipe.normalize.observations or recipe.normalize.rewards:
        Normalize(recipe.normalize, run.spaces.observations).register(trainer)
    if target is not None and not moved_by_recipe:
        trainer.register_op("post_optim", TargetNetUpdaterHook(target))
    return trainer


def relu_mlp(
    recipe: ActorCriticConfig,
    features: int,
    outputs: int,
    *,
    last_gain: float = 1.0,
    layer_class: type[nn.Module] = nn.Linear,
) -> nn.Module:
    """The network of these recipes: ReLU, with the initial weights that the config asks for."""
    return mlp(
        features,
        outputs,
        recipe.hidden,
        last_gain=last_gain,
        activation=nn.ReLU,
        layer_class=layer_class,
        initial_weights=recipe.initial_weights,
    )


def twin_critics(
    recipe: ActorCriticConfig,
    spaces: Spaces,
    device: torch.device,
    *,
    layer_class: type[nn.Module] = nn.Linear,
) -> list[ValueOperator]:
    """Two critics with initial weights of their own: a loss that doubles one widens their distribution."""
    critics = []
    for _ in range(2):
        sight = Sight.of(recipe, spaces)
        net = relu_mlp(recipe, sight.features + spaces.actions, 1, layer_class=layer_class)
        critic = ValueOperator(sight.behind(net), in_keys=["observation", "action"])
        critics.append(critic.to(device))
    return critics


#: What TorchRL's losses of an actor and two critics are told.
TWO_CRITICS: dict[str, Any] = {
    "num_qvalue_nets": 2,
    "loss_function": "l2",
    "deactivate_vmap": True,  # two critics are faster one after the other
}

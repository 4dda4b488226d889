"""What the recipes with a replay buffer have in common: their trainer, their evaluation, their end."""

from __future__ import annotations

import torch
from torch import nn, optim
from torchrl.collectors import BaseCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.modules import ValueOperator
from torchrl.objectives import LossModule
from torchrl.objectives.utils import TargetNetUpdater
from torchrl.trainers import OptimizationStepper, TargetNetUpdaterHook, Trainer

from rlsync.recipes import parts
from rlsync.recipes.networks import MixedMLP
from rlsync.recipes.off_policy.config import ActorCriticConfig, OffPolicyConfig
from rlsync.recipes.off_policy.memory import Memory
from rlsync.recipes.off_policy.normalize import Normalize, Standardized
from rlsync.recipes.off_policy.prioritized import PrioritizedRows
from rlsync.recipes.replay import building
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import Spaces


def relu_mlp(recipe: ActorCriticConfig, features: int, outputs: int, *, last_gain: float = 1.0) -> nn.Module:
    """The network of these recipes: ReLU, with the initial weights that the config asks for."""
    if recipe.initial_weights == "torch":
        return MixedMLP(features, outputs, num_cells=recipe.hidden, activation_class=nn.ReLU)
    return parts.mlp(features, outputs, recipe.hidden, last_gain=last_gain, activation=nn.ReLU)


def twin_critics(recipe: ActorCriticConfig, spaces: Spaces, device: torch.device) -> list[ValueOperator]:
    """Two critics of an observation and an action, each with initial weights of its own, on a device.

    A loss that is given one critic to double draws the weights of both anew, each uniformly between the
    smallest and the largest weight of its tensor. That widens every distribution but a uniform one.
    """
    return [
        ValueOperator(
            seeing(recipe, spaces, relu_mlp(recipe, spaces.features + spaces.actions, 1)),
            in_keys=["observation", "action"],
        ).to(device)
        for _ in range(2)
    ]


def seeing(recipe: OffPolicyConfig, spaces: Spaces, net: nn.Module) -> nn.Module:
    """A network that takes an observation first, behind the normalisation that the config asks for."""
    if not recipe.normalize.observations:
        return net
    return Standardized(net, spaces.features, recipe.normalize.clip)


def make_trainer(
    config: Config,
    recipe: OffPolicyConfig,
    spaces: Spaces,
    collector: BaseCollector,
    loss: LossModule,
    target: TargetNetUpdater,
    optimizer: optim.Optimizer | None = None,
    stepper: OptimizationStepper | None = None,
    *,
    n_step: int = 1,
    squared_errors: bool = True,
) -> Trainer:
    """A trainer that stores every batch, learns at the pace of the config, and moves the target networks.

    The hooks that publish are not registered yet: a recipe may have more sources for its sync map, and more
    hooks that come before them. Call
    :func:`~rlsync.recipes.evaluating.register_with_evaluations` last.

    Args:
        config: the run.
        recipe: its settings.
        spaces: of the environment.
        collector: with its workers started.
        loss: on the learner's device.
        target: moves the target networks after every step.
        optimizer: of all parameters; None where a stepper has its own.
        stepper: see ``torchrl.trainers.OptimizationStepper``.
        n_step: returns of so many steps.
        squared_errors: see :class:`~rlsync.recipes.off_policy.memory.Memory`.
    """
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(recipe.buffer_frames, device=learner_device(config)),  # frames move there
        sampler=_sampler(recipe),
        batch_size=recipe.batch_size,
    )
    trainer = building.make_trainer(config, recipe, buffer, collector, loss, optimizer, stepper, target)
    memory = Memory(buffer, recipe.gamma, n_step, squared_errors=squared_errors)
    memory.register(trainer)
    if recipe.prioritized:
        memory.prioritize(trainer)
    if recipe.normalize.observations or recipe.normalize.rewards:
        Normalize(recipe.normalize, spaces.features).register(trainer)
    building.hold_pace(trainer, config, recipe, optimizer)
    trainer.register_op("post_optim", TargetNetUpdaterHook(target))
    return trainer


def _sampler(recipe: OffPolicyConfig) -> Sampler:
    if not recipe.prioritized:
        return RandomSampler()
    return PrioritizedRows(recipe.buffer_frames, recipe.priority_alpha, recipe.priority_beta)

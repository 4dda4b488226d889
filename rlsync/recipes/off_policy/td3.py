"""TD3 with worker processes on a board: TorchRL's trainer, collector, loss and stepper.

Source: Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477; torchrl.objectives.TD3Loss.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn, optim
from torchrl.modules import AdditiveGaussianModule, TanhModule
from torchrl.objectives import SoftUpdate, TD3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.evaluating import register_with_evaluations
from rlsync.recipes.off_policy.building import make_trainer, relu_mlp, seeing, twin_critics
from rlsync.recipes.off_policy.config import TD3Config
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import BOX, Spaces
from rlsync.workers.devices import CPU


def build(config: Config, spaces: Spaces | None = None) -> Trainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`TD3Config`. Workers hold the actor as
            ``policy.module[0]`` and the noise as ``policy.module[1]``.
        spaces: of the environment, from the recipe's probe, if the config has been checked already. None:
            check the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.
    """
    recipe, spaces = BOX.checked(config, TD3Config, spaces)
    parts.seed_everything(config.seed)
    device = learner_device(config)
    loss = make_loss(recipe, spaces, device)
    acting = TensorDictSequential(loss.actor_network, make_noise(recipe, spaces).to(device))
    with parts.started_collector(
        config, acting, random_frames=recipe.pace.prefill, spaces=spaces
    ) as collector:
        trainer = make_trainer(
            config,
            recipe,
            spaces,
            collector,
            loss,
            SoftUpdate(loss, tau=recipe.tau),
            stepper=TD3OptimizationStepper(
                _adam(loss.actor_network_params, recipe.lr),
                _adam(loss.qvalue_network_params, recipe.lr),
                policy_update_delay=recipe.actor_every,
            ),
        )
        register_with_evaluations(trainer, config, acting, spaces, learned="module.0.")
    return trainer


def _adam(params: TensorDictBase, lr: float) -> optim.Adam:
    return optim.Adam(
        [p for p in params.values(True, True) if isinstance(p, nn.Parameter)], lr=lr, fused=True
    )


def make_noise(recipe: TD3Config, spaces: Spaces) -> AdditiveGaussianModule:
    """What workers add to the actor's actions. It does not change during a run."""
    return AdditiveGaussianModule(
        spec=spaces.action_spec,
        sigma_init=recipe.exploration_noise,
        sigma_end=recipe.exploration_noise,
        std=spaces.half_range(),
    )


def make_loss(recipe: TD3Config, spaces: Spaces, device: torch.device = CPU) -> TD3Loss:
    """The loss of an actor and two critics, on a device."""
    net = relu_mlp(recipe, spaces.features, spaces.actions, last_gain=0.01)
    actor = TensorDictSequential(
        TensorDictModule(seeing(recipe, spaces, net), in_keys=["observation"], out_keys=["param"]),
        TanhModule(in_keys=["param"], out_keys=["action"], spec=spaces.action_spec),
    )
    loss = TD3Loss(
        actor.to(device),
        twin_critics(recipe, spaces, device),
        num_qvalue_nets=2,
        action_spec=spaces.action_spec,
        policy_noise=recipe.target_noise * spaces.half_range(),
        noise_clip=recipe.target_noise_clip * spaces.half_range(),
        loss_function="l2",
        deactivate_vmap=True,  # two critics are faster one after the other
    )
    loss.make_value_estimator(gamma=recipe.gamma)
    return loss.to(device)


def player(config: Config, spaces: Spaces, deterministic: bool) -> CheckpointPlayer:
    """The actor of a run's config, for ``rlsync eval``. It draws nothing either way."""
    actor = make_loss(TD3Config.of(config), spaces).actor_network
    return parts.policy_player(config, actor, spaces, deterministic=deterministic)


RECIPE = Recipe("td3", TD3Config, BOX.probe, build, player)

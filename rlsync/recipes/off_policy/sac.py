"""SAC with worker processes on a board: TorchRL's trainer, collector and loss.

Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905; torchrl.objectives.SACLoss.
"""

from __future__ import annotations

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn, optim
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import SACLoss, SoftUpdate
from torchrl.trainers import Trainer

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.evaluating import register_with_evaluations
from rlsync.recipes.off_policy.building import make_trainer, relu_mlp, seeing, twin_critics
from rlsync.recipes.off_policy.config import SACConfig
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import BOX, Spaces
from rlsync.workers.devices import CPU


def build(config: Config, spaces: Spaces | None = None) -> Trainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`SACConfig`.
        spaces: of the environment, from the recipe's probe, if the config has been checked already. None:
            check the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.
    """
    recipe, spaces = BOX.checked(config, SACConfig, spaces)
    parts.seed_everything(config.seed)
    loss = make_loss(recipe, spaces, learner_device(config))
    acting = loss.actor_network
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
            optim.Adam(loss.parameters(), lr=recipe.lr, fused=True),  # the losses share no parameter
            squared_errors=False,
        )
        register_with_evaluations(trainer, config, acting, spaces)
    return trainer


def make_loss(recipe: SACConfig, spaces: Spaces, device: torch.device = CPU) -> SACLoss:
    """The loss of an actor, two critics and a temperature, on a device."""
    low, high = spaces.bounds()
    net = nn.Sequential(
        relu_mlp(recipe, spaces.features, 2 * spaces.actions, last_gain=0.01), NormalParamExtractor()
    )
    actor = ProbabilisticActor(
        TensorDictModule(seeing(recipe, spaces, net), in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": low, "high": high, "tanh_loc": False},
    )
    loss = SACLoss(
        actor.to(device),
        twin_critics(recipe, spaces, device),
        num_qvalue_nets=2,
        alpha_init=recipe.alpha_init,
        action_spec=spaces.action_spec,
        loss_function="l2",
        deactivate_vmap=True,  # two critics are faster one after the other
    )
    loss.make_value_estimator(gamma=recipe.gamma)
    return loss.to(device)


def player(config: Config, spaces: Spaces, deterministic: bool) -> CheckpointPlayer:
    """The actor of a run's config, for ``rlsync eval``."""
    actor = make_loss(SACConfig.of(config), spaces).actor_network
    return parts.policy_player(config, actor, spaces, deterministic=deterministic)


RECIPE = Recipe("sac", SACConfig, BOX.probe, build, player)

"""PPO with worker processes on a board: TorchRL's own PPOTrainer, collector and loss.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; torchrl.trainers.algorithms.
"""

from __future__ import annotations

import torch
from torch import optim
from torchrl.data import Composite, LazyTensorStorage
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.modules import OneHotCategorical, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers.algorithms import PPOTrainer

from rlsync.recipes import parts
from rlsync.recipes.hooks import ToLearner
from rlsync.recipes.networks import PlainActor, PlainDraw, PlainModule
from rlsync.recipes.settings import PPOConfig
from rlsync.torchrl_plugin.compat.replay import RowBuffer
from rlsync.workers.devices import CPU


def build(run: parts.Run[PPOConfig]) -> PPOTrainer:
    """See :class:`~rlsync.recipes.registry.Recipe`."""
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    settings = parts.trainer_settings(run)
    with parts.started_collector(run, loss.actor_network) as collector:
        optimizer = optim.Adam(loss.parameters(), lr=recipe.lr, eps=1e-5)
        trainer = PPOTrainer(
            **settings,
            enable_logging=False,  # EpisodeReturns and LogReceipts log what matters here
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            lr_scheduler=parts.annealing(run, optimizer),
            replay_buffer=RowBuffer(
                storage=LazyTensorStorage(collector.requested_frames_per_batch, device=run.device),
                sampler=SamplerWithoutReplacement(),
                batch_size=recipe.batch_size,
            ),
            num_epochs=recipe.num_epochs,
            optim_steps_per_batch=None,  # the whole batch; a number would skip every other epoch
            gamma=recipe.gamma,
            lmbda=recipe.gae_lambda,
            weight_update_map=run.place.update_map,  # SyncWeights replaces what it makes
        )
        # The advantages are computed before the replay buffer is filled.
        ToLearner(run.device).register(trainer)
        parts.register_with_evaluations(trainer, run, loss.actor_network)
    return trainer


def make_loss(recipe: PPOConfig, spaces: parts.Spaces, device: torch.device = CPU) -> ClipPPOLoss:
    """The loss of an actor and a critic that share no layer, on a device."""
    policy_net = parts.mlp(spaces.features, spaces.actions, recipe.hidden, last_gain=0.01)
    actor = PlainActor(
        PlainModule(policy_net, in_keys=["observation"], out_keys=["logits"]),
        PlainDraw(
            in_keys=["logits"],
            out_keys=["action"],
            spec=Composite(action=spaces.action_spec),
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        ),
    )
    critic = ValueOperator(
        parts.mlp(spaces.features, 1, recipe.hidden, last_gain=1.0), in_keys=["observation"]
    )
    loss = ClipPPOLoss(
        actor.to(device),  # before there is a loss: not all that it holds of them follows it later
        critic.to(device),
        clip_epsilon=recipe.clip_epsilon,
        entropy_bonus=recipe.entropy_coeff > 0,
        entropy_coeff=recipe.entropy_coeff,
        critic_coeff=recipe.critic_coeff,
    )
    return loss.to(device)


RECIPE = parts.Recipe(
    "ppo", PPOConfig, parts.probe, build, lambda run: make_loss(run.recipe, run.spaces).actor_network
)

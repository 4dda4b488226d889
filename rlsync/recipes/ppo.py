"""PPO with worker processes on a board: TorchRL's own PPOTrainer, collector and loss.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; torchrl.trainers.algorithms.
"""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import optim
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers.algorithms import PPOTrainer

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.evaluating import register_with_evaluations
from rlsync.recipes.hooks import ToLearner
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config, PPOConfig
from rlsync.recipes.spaces import DISCRETE
from rlsync.workers.devices import CPU


def build(config: Config, spaces: parts.Spaces | None = None) -> PPOTrainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`PPOConfig`.
        spaces: of the environment, from ``parts.probe``, if the config has been checked already. None: check
            the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.

    Example:
        >>> trainer = build(Config(seed=1))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    recipe, spaces = DISCRETE.checked(config, PPOConfig, spaces)
    parts.seed_everything(config.seed)
    device = learner_device(config)
    loss = make_loss(recipe, spaces, device)
    settings = parts.trainer_settings(config)
    # Collectors of TorchRL's with schemes require one, and others refuse it. SyncWeights replaces it.
    update_map = {"policy": "loss_module.actor_network"} if config.cluster.here else None
    with parts.started_collector(config, loss.actor_network, spaces=spaces) as collector:
        optimizer = optim.Adam(loss.parameters(), lr=recipe.lr, eps=1e-5)
        trainer = PPOTrainer(
            **settings,
            enable_logging=False,  # EpisodeReturns and LogReceipts log what matters here
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            lr_scheduler=parts.annealing(config, optimizer),
            replay_buffer=TensorDictReplayBuffer(
                storage=LazyTensorStorage(collector.requested_frames_per_batch, device=device),
                sampler=SamplerWithoutReplacement(),
                batch_size=recipe.batch_size,
            ),
            num_epochs=recipe.num_epochs,
            optim_steps_per_batch=None,  # the whole batch; a number would skip every other epoch
            gamma=recipe.gamma,
            lmbda=recipe.gae_lambda,
            weight_update_map=update_map,
        )
        ToLearner(device).register(trainer)  # the advantages are computed before the replay buffer is filled
        register_with_evaluations(trainer, config, loss.actor_network, spaces)
    return trainer


def make_loss(recipe: PPOConfig, spaces: parts.Spaces, device: torch.device = CPU) -> ClipPPOLoss:
    """The loss of an actor and a critic that share no layer, on a device."""
    policy_net = parts.mlp(spaces.features, spaces.actions, recipe.hidden, last_gain=0.01)
    actor = ProbabilisticActor(
        TensorDictModule(policy_net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        spec=spaces.action_spec,
        distribution_class=OneHotCategorical,
        return_log_prob=True,
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


def player(config: Config, spaces: parts.Spaces, deterministic: bool) -> CheckpointPlayer:
    """The actor of a run's config, for ``rlsync eval``."""
    actor = make_loss(PPOConfig.of(config), spaces).actor_network
    return parts.policy_player(config, actor, spaces, deterministic=deterministic)


RECIPE = Recipe("ppo", PPOConfig, parts.probe, build, player)

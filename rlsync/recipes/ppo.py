"""PPO with worker processes on a board: TorchRL's own PPOTrainer, collector and loss.

Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347; torchrl.trainers.algorithms.
"""

from __future__ import annotations

from tensordict.nn import TensorDictModule
from torch import optim
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers.algorithms import PPOTrainer

from rlsync.core.errors import ConfigError
from rlsync.recipes import parts
from rlsync.recipes.config import Config, PPOConfig, check


def build(config: Config) -> PPOTrainer:
    """A trainer that is ready to ``train()``, its workers started and its sync map resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`PPOConfig`.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.

    Example:
        >>> trainer = build(Config(seed=1))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """
    check(config)
    if not isinstance(config.recipe, PPOConfig):
        raise ConfigError(f"not a PPO recipe: {config.recipe}", "recipe", "give recipe=ppo")
    parts.seed_everything(config.seed)
    loss = make_loss(config.recipe, parts.probe(config.env))
    settings = parts.trainer_settings(config)
    with parts.started_collector(config, loss.actor_network) as collector:
        optimizer = optim.Adam(loss.parameters(), lr=config.recipe.lr, eps=1e-5)
        trainer = PPOTrainer(
            **settings,
            enable_logging=False,  # EpisodeReturns and SyncMetrics log what matters here
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            lr_scheduler=parts.annealing(config, optimizer),
            replay_buffer=TensorDictReplayBuffer(
                storage=LazyTensorStorage(config.collector.frames_per_batch),
                sampler=SamplerWithoutReplacement(),
                batch_size=config.recipe.batch_size,
            ),
            num_epochs=config.recipe.num_epochs,
            optim_steps_per_batch=None,  # the whole batch; a number would skip every other epoch
            gamma=config.recipe.gamma,
            lmbda=config.recipe.gae_lambda,
            weight_update_map={"policy": "loss_module.actor_network"},  # TorchRL insists; replaced
        )
        parts.register_hooks(trainer, config)
    return trainer


def make_loss(recipe: PPOConfig, spaces: parts.Spaces) -> ClipPPOLoss:
    """The loss, with an actor and a critic of their own networks."""
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
    return ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=recipe.clip_epsilon,
        entropy_bonus=recipe.entropy_coeff > 0,
        entropy_coeff=recipe.entropy_coeff,
        critic_coeff=recipe.critic_coeff,
    )

"""DQN with worker processes on a board: TorchRL's own DQNTrainer, collector and loss.

The stock trainer publishes after every batch, and to "policy" only. Here the Q network and the exploration
rate are two entries of a sync map, published when the config says.

Source: Mnih et al. 2015; van Hasselt et al. 2016; torchrl.trainers.algorithms.DQNTrainer.
"""

from __future__ import annotations

from tensordict.nn import TensorDictSequential
from torch import optim
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from torchrl.trainers import LRSchedulerHook
from torchrl.trainers.algorithms import DQNTrainer

from rlsync.recipes import parts
from rlsync.recipes.checkpoint_player import CheckpointPlayer
from rlsync.recipes.config import Config, DQNConfig, check
from rlsync.recipes.device_config import learner_device
from rlsync.recipes.hooks import EpsilonDecay
from rlsync.recipes.registry import Recipe


def build(config: Config, spaces: parts.Spaces | None = None) -> DQNTrainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`DQNConfig`. Workers hold the Q network
            as ``policy.module[0]`` and the epsilon-greedy module as ``policy.module[1]``.
        spaces: of the environment, from ``parts.probe``, if the config has been checked already. None: check
            the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.
    """
    recipe = DQNConfig.of(config)
    if spaces is None:
        check(config)
        spaces = parts.probe(config.env)
    parts.seed_everything(config.seed)
    device = learner_device(config)
    actor, greedy = (part.to(device) for part in make_policy(recipe, spaces))
    loss = DQNLoss(actor, action_space=spaces.action_spec, delay_value=True, double_dqn=True)
    loss.make_value_estimator(gamma=recipe.gamma)
    loss.to(device)
    optimizer = optim.Adam(loss.parameters(), lr=recipe.lr)
    settings = parts.trainer_settings(config)
    with parts.started_collector(config, TensorDictSequential(actor, greedy)) as collector:
        trainer = DQNTrainer(
            **settings,
            enable_logging=False,  # EpisodeReturns and LogReceipts log what matters here
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            replay_buffer=TensorDictReplayBuffer(
                storage=LazyTensorStorage(recipe.buffer_frames, device=device),  # frames move there
                batch_size=recipe.batch_size,
            ),
            optim_steps_per_batch=recipe.optim_steps_per_batch,
            target_net_updater=HardUpdate(loss, value_network_update_interval=recipe.target_update_steps),
        )
        scheduler = parts.annealing(config, optimizer)
        if scheduler is not None:
            LRSchedulerHook(scheduler).register(trainer)
        trainer.greedy_module = greedy  # a source for the sync map, and part of checkpoints
        EpsilonDecay(greedy).register(trainer)
        parts.register_hooks(trainer, config)
    return trainer


def make_policy(recipe: DQNConfig, spaces: parts.Spaces) -> tuple[QValueActor, EGreedyModule]:
    """The Q network, and the epsilon-greedy module that comes after it."""
    q_net = parts.mlp(spaces.features, spaces.actions, recipe.hidden, last_gain=1.0)
    actor = QValueActor(q_net, in_keys=["observation"], spec=spaces.action_spec)
    greedy = EGreedyModule(
        spec=spaces.action_spec,
        eps_init=recipe.epsilon_start,
        eps_end=recipe.epsilon_end,
        annealing_num_steps=recipe.epsilon_frames,
    )
    return actor, greedy


def player(config: Config, spaces: parts.Spaces, deterministic: bool) -> CheckpointPlayer:
    """The Q network of a run's config, for ``rlsync eval``: greedy either way, since it draws nothing."""
    actor, _ = make_policy(DQNConfig.of(config), spaces)
    return parts.policy_player(config, actor, spaces, deterministic=deterministic)


RECIPE = Recipe("dqn", DQNConfig, parts.probe, build, player)

"""DQN with worker processes on a board: TorchRL's trainer, collector and loss.

The Q network and the exploration rate are two entries of a sync map, published when the config says.

Source: Mnih et al. 2015; van Hasselt et al. 2016; torchrl.objectives.DQNLoss.
"""

from __future__ import annotations

from tensordict.nn import TensorDictSequential
from torch import nn, optim
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from torchrl.trainers import Trainer

from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.recipes import parts
from rlsync.recipes.evaluating import register_with_evaluations
from rlsync.recipes.hooks import EpsilonDecay
from rlsync.recipes.off_policy.building import make_trainer, seeing
from rlsync.recipes.off_policy.config import DQNConfig
from rlsync.recipes.off_policy.ladder import GreedyOnLadder
from rlsync.recipes.registry import Recipe
from rlsync.recipes.run import learner_device
from rlsync.recipes.settings import Config
from rlsync.recipes.spaces import DISCRETE, Spaces
from rlsync.workers.players.q import EpsilonLadder

_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


def build(config: Config, spaces: Spaces | None = None) -> Trainer:
    """A trainer that is ready to ``train()``: its workers run and its sync map is resolved.

    Args:
        config: what to train; ``config.recipe`` is a :class:`DQNConfig`. Workers hold the Q network
            as ``policy.module[0]`` and the epsilon-greedy module as ``policy.module[1]``.
        spaces: of the environment, from the recipe's probe, if the config has been checked already. None:
            check the config and probe the environment here.

    Raises:
        ConfigError: a value, the environment or the kind of recipe does not fit.
        SyncMapError: the sync map cannot be carried out.
    """
    recipe, spaces = DISCRETE.checked(config, DQNConfig, spaces)
    parts.seed_everything(config.seed)
    device = learner_device(config)
    actor, greedy = (part.to(device) for part in make_policy(recipe, spaces))
    loss = DQNLoss(actor, action_space=spaces.action_spec, delay_value=True, double_dqn=recipe.double)
    loss.make_value_estimator(gamma=recipe.gamma)
    loss.to(device)
    acting = TensorDictSequential(actor, greedy)
    workers, alpha = config.workers_per_node, recipe.ladder_alpha
    with parts.started_collector(
        config, acting, random_frames=recipe.pace.prefill, ladder_alpha=alpha, spaces=spaces
    ) as collector:
        trainer = make_trainer(
            config,
            recipe,
            spaces,
            collector,
            loss,
            HardUpdate(loss, value_network_update_interval=recipe.target_update_steps),
            optim.Adam(loss.parameters(), lr=recipe.lr),
            n_step=recipe.n_step,
        )
        trainer.greedy_module = greedy  # a source for the sync map, and part of checkpoints
        EpsilonDecay(greedy, EpsilonLadder(alpha=alpha).exponent(workers - 1, workers)).register(trainer)
        register_with_evaluations(trainer, config, acting, spaces, learned="module.0.")
    return trainer


def make_policy(recipe: DQNConfig, spaces: Spaces) -> tuple[QValueActor, EGreedyModule]:
    """The Q network, and the epsilon-greedy module that comes after it."""
    activation = _ACTIVATIONS[recipe.activation]
    q_net = parts.mlp(spaces.features, spaces.actions, recipe.hidden, last_gain=1.0, activation=activation)
    actor = QValueActor(seeing(recipe, spaces, q_net), in_keys=["observation"], spec=spaces.action_spec)
    greedy = (GreedyOnLadder if recipe.ladder_alpha else EGreedyModule)(
        spec=spaces.action_spec,
        eps_init=recipe.epsilon_start,
        eps_end=recipe.epsilon_end,
        annealing_num_steps=recipe.epsilon_frames,
    )
    return actor, greedy


def player(config: Config, spaces: Spaces, deterministic: bool) -> CheckpointPlayer:
    """The Q network of a run's config, for ``rlsync eval``: greedy either way, since it draws nothing."""
    actor, _ = make_policy(DQNConfig.of(config), spaces)
    return parts.policy_player(config, actor, spaces, deterministic=deterministic)


RECIPE = Recipe("dqn", DQNConfig, DISCRETE.probe, build, player)

"""DQN: TorchRL's trainer, replay and loss, with workers that adopt from a board.

Workers hold the Q network as ``policy.module[0]`` and the exploration rate as ``policy.module[1]``. With a
ladder each worker takes the one published rate to a power of its own.
Source: Mnih et al. 2015; van Hasselt et al. 2016; Ape-X, arXiv 1803.00933; torchrl.objectives.DQNLoss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn, optim
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.players.q import EpsilonGreedyPlayer, EpsilonLadder
from rlsync.runs.recipes import parts, pure
from rlsync.runs.recipes.bounds import (
    above_zero,
    fraction,
    kept,
    learning_rate,
    not_below_zero,
    one_of,
    same_as,
)
from rlsync.runs.recipes.hooks.steering import EpsilonDecay
from rlsync.runs.recipes.networks import ACTIVATIONS
from rlsync.runs.recipes.replay.building import make_trainer
from rlsync.runs.recipes.replay.settings import BUFFER, OffPolicyConfig, PaceConfig

#: Why a resumed run cannot change a field.
EXPLORATION = "the checkpoint has the exploration rate and its schedule"

GREEDY = EpsilonLadder(0.0)


@dataclass
class DQNConfig(OffPolicyConfig):
    """Deep Q-learning (Mnih et al. 2015), with a double target and returns of n steps."""

    name: str = "dqn"
    #: Frames to collect. At the latest, the batch that reaches them ends the run. The learning rate falls
    #: over as many.
    total_frames: int = above_zero(50_000)
    lr: float = learning_rate(1e-3)
    batch_size: int = above_zero(64)
    clip_norm: float = above_zero(10.0)
    #: What follows each hidden layer: relu or tanh.
    activation: str = one_of("relu", "tanh")
    buffer_frames: int = kept(above_zero(50_000), BUFFER)
    pace: PaceConfig = field(default_factory=lambda: PaceConfig(ratio=0.5))
    #: Optimizer steps between two copies of the Q network to the target network. With few copies in a run, Q
    #: values cannot grow to what a long episode is worth.
    target_update_steps: int = above_zero(128)
    #: Let the Q network choose the action whose value the target network says (double DQN).
    double: bool = True
    n_step: int = same_as(OffPolicyConfig, "n_step", 3)
    #: Exploration rate at the start. 1: every action is random.
    epsilon_start: float = kept(fraction(1.0), EXPLORATION)
    #: Exploration rate at the end.
    epsilon_end: float = kept(fraction(0.04), EXPLORATION)
    #: Number of frames over which the exploration rate falls linearly.
    epsilon_frames: int = kept(above_zero(10_000), EXPLORATION)
    #: Lets workers explore at rates of their own: worker i of N at epsilon ** (1 + ladder_alpha * i / (N -
    #: 1)). Ape-X has 7. 0: all alike.
    ladder_alpha: float = not_below_zero(0.0)
    #: With a ladder: epsilon at the end, in place of epsilon_end, whose powers are next to nothing. Ape-X has
    #: 0.4.
    ladder_base: float = kept(fraction(0.4), EXPLORATION)

    def errors(self, config: parts.Config) -> Iterator[RlsyncError]:
        yield from super().errors(config)
        if self.ladder_alpha and config.workers_per_node < 2:
            cure = "give 2 or more workers (on a cluster, on each node), or recipe.ladder_alpha=0"
            yield ConfigError(
                "one worker makes no ladder of exploration rates", "recipe.ladder_alpha", cure
            )
        if self.ladder_alpha and not 0 < self.ladder_base <= self.epsilon_start:
            problem = f"a ladder of exploration rates cannot end at powers of {self.ladder_base:g}"
            most = f"recipe.epsilon_start = {self.epsilon_start:g}"
            cure = f"give more than 0, and at most {most}; Ape-X has 0.4"
            yield ConfigError(problem, "recipe.ladder_base", cure)


def build(run: parts.Run[DQNConfig]) -> Trainer:
    recipe = run.recipe
    actor, greedy = make_policy(recipe, run.spaces)
    actor = actor.to(run.device)
    greedy = greedy.to(run.device)
    loss = make_loss(recipe, run.spaces, actor).to(run.device)
    policy = TensorDictSequential(actor, greedy)  # its leaves are those of the sync map
    network = actor[0].module
    workers = run.place.workers
    ladder = EpsilonLadder(alpha=recipe.ladder_alpha)
    explores = player_of(policy, network, run.spaces, ladder=ladder, rate=greedy)
    with parts.started_collector(run, explores, random_frames=recipe.pace.prefill) as collector:
        optimizer = optim.Adam(loss.parameters(), lr=recipe.lr, fused=True)
        target = CopyEvery(loss, value_network_update_interval=recipe.target_update_steps)
        trainer = make_trainer(run, collector, loss, target, optimizer)
        pure.PureStepper.of(run, lambda: pure_update(loss, optimizer)).register(trainer)
        trainer.greedy_module = greedy  # a source for the sync map, and part of checkpoints
        EpsilonDecay(greedy, ladder.exponent(workers - 1, workers)).register(trainer)
        parts.register_with_evaluations(
            trainer, run, player_of(policy, network, run.spaces), learned="module.0."
        )
    return trainer


def player_of(
    policy: nn.Module,
    network: nn.Module,
    spaces: parts.Spaces,
    *,
    ladder: EpsilonLadder = GREEDY,
    rate: EGreedyModule | None = None,
) -> EpsilonGreedyPlayer:
    """Acts by the Q values of ``network``, a part of ``policy``; greedily, unless there is a ``rate``."""
    return EpsilonGreedyPlayer(
        network,
        DiscreteActions(spaces.actions),
        spaces.observations,
        ladder=ladder,
        policy=policy,
        rate=rate,
        record_values=False,
    )


def make_policy(recipe: DQNConfig, spaces: parts.Spaces) -> tuple[QValueActor, EGreedyModule]:
    activation = ACTIVATIONS[recipe.activation]
    sight = parts.Sight.of(recipe, spaces)
    q_net = parts.mlp(
        sight.features, spaces.actions, sight.hidden, last_gain=1.0, activation=activation
    )
    network = sight.choosing(q_net)
    q_module = TensorDictModule(network, in_keys=["observation"], out_keys=["action_value"])
    actor = QValueActor(q_module, spec=spaces.action_spec)
    epsilon_end = recipe.epsilon_end
    if recipe.ladder_alpha:
        epsilon_end = recipe.ladder_base
    greedy = EGreedyModule(
        spec=spaces.action_spec,
        eps_init=recipe.epsilon_start,
        eps_end=epsilon_end,
        annealing_num_steps=recipe.epsilon_frames,
    )
    return actor, greedy


def make_loss(recipe: DQNConfig, spaces: parts.Spaces, actor: QValueActor) -> DQNLoss:
    """The loss of a Q network, and of a target network that is a copy of it now."""
    loss = DQNLoss(
        actor, action_space=spaces.action_spec, delay_value=True, double_dqn=recipe.double
    )
    loss.make_value_estimator(gamma=recipe.gamma)
    return loss


def pure_update(loss: DQNLoss, optimizer: optim.Adam) -> pure.Update:
    """The update as a function of tensors: Mnih et al. 2015; double: van Hasselt et al. 2016."""
    q, (trained, target) = pure.network(
        loss.value_network, loss.value_network_params, loss.target_value_network_params
    )
    gamma = loss.value_estimator.gamma
    double = loss.double_dqn

    def losses(b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        # Q(s, a) is to be r + gamma Q'(s', argmax Q'(s', .)); double: argmax Q(s', .)
        with torch.no_grad():
            values = q(target, b["next_observation"])
            chooser = values
            if double:
                chooser = q(trained, b["next_observation"])
            choice = chooser.argmax(-1, keepdim=True)
            goal = pure.goal(b, gamma, values.gather(-1, choice).squeeze(-1))
        errors = ((q(trained, b["observation"]) * b["action"]).sum(-1) - goal).square()
        return {"loss": pure.mean(b, errors), "td_error": errors.unsqueeze(-1)}

    return pure.Update((loss.value_network,), (pure.Phase(optimizer, losses),))


class CopyEvery(HardUpdate):
    """Copies at every ``value_network_update_interval``-th step; HardUpdate compares before it counts."""

    counter: int

    def step(self) -> None:
        if self.counter >= self.value_network_update_interval - 1:
            self.counter = self.value_network_update_interval
            super().step()
        else:  # which would look at each network first
            self.counter += 1


def acting(run: parts.Run[DQNConfig], deterministic: bool) -> parts.Acting:
    """What acts with a checkpoint is greedy in any case: it has no exploration rate."""
    actor, _ = make_policy(run.recipe, run.spaces)
    return parts.Acting(actor, player_of(actor, actor[0].module, run.spaces))


RECIPE = parts.Recipe("dqn", DQNConfig, parts.CHOICES.probe, build, acting)

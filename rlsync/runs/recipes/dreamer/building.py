"""What the Dreamer recipes have in common: their trainer, the imagined environment, and what acts."""

from __future__ import annotations

from collections.abc import Mapping

from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import optim
from torchrl.data import Composite, MultiOneHot, Unbounded
from torchrl.envs.model_based import DreamerEnv
from torchrl.modules import WorldModelWrapper
from torchrl.objectives import LossModule
from torchrl.trainers import OptimizationStepper, Trainer

from rlsync.runs.actors.envs.actions import MultiDiscreteActions
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.dreamer.config import DreamerConfig
from rlsync.runs.recipes.dreamer.player import ActingNetwork
from rlsync.runs.recipes.dreamer.sequences import SequenceMemory, Sequences
from rlsync.runs.recipes.impala.heads import MultiCategorical, head_for
from rlsync.runs.recipes.replay.building import paced_trainer, replay_buffer


def make_trainer(
    run: parts.Run[DreamerConfig],
    collector: RolloutCollector,
    loss: LossModule,
    optimizer: optim.Optimizer,
    *,
    widths: Mapping[str, int],
    stepper: OptimizationStepper | None = None,
    within_episodes: bool = False,
) -> Trainer:
    """A trainer of sequences of all rows, at the config's pace; it has no hook that publishes yet.

    ``widths`` are those of the state that a sequence begins with.
    """
    recipe = run.recipe
    sequences = Sequences(recipe.sequence_length, within_episodes=within_episodes)
    buffer = replay_buffer(run, sequences)
    head = head_for(run.spaces.player_actions())
    choices = head if isinstance(head, MultiCategorical) else None
    memory = SequenceMemory(buffer, sequences, widths, lambda: collector.last_rollouts, choices)
    return paced_trainer(run, collector, loss, memory, optimizer=optimizer, stepper=stepper)


def imagined_env(
    transition: TensorDictModuleBase,
    reward: TensorDictModuleBase,
    state: int,
    recipe: DreamerConfig,
    spaces: parts.Spaces,
) -> DreamerEnv:
    """The environment in which an actor's steps are imagined; ``state`` is the width of what is drawn."""
    world = WorldModelWrapper(transition, reward)
    env = DreamerEnv(world, prior_shape=(state,), belief_shape=(recipe.belief,))
    env.observation_spec = Composite(state=Unbounded(state), belief=Unbounded(recipe.belief))
    env.state_spec = env.observation_spec.clone()
    env.action_spec = spaces.action_spec
    # Several choices are one-hot in the model, one behind the other.
    if isinstance(spaces.player_actions(), MultiDiscreteActions):
        env.action_spec = MultiOneHot(spaces.choices)
    env.reward_spec = Unbounded((1,))
    return env


def let_act(loss: LossModule, policy: TensorDictSequential) -> None:
    """Let a loss have what acts, made of its own parts, as ``actor_network``, which TorchRL saves."""
    vars(loss)["actor_network"] = ActingNetwork(policy)

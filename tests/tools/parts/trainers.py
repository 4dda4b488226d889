"""Losses and stock trainers, as small as they go."""

from __future__ import annotations

import torch
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.data import Bounded, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.modules import ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    DQNLoss,
    HardUpdate,
    LossModule,
    SACLoss,
    SoftUpdate,
)
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import A2CTrainer, DQNTrainer, PPOTrainer, SACTrainer

from tests.tools.parts.policies import (
    StateActionValue,
    make_continuous_policy,
    make_critic,
    make_policy,
    make_q_policy,
)
from tests.tools.parts.sizes import FRAMES_PER_BATCH


class Sender:
    """What LLM trainers push through; it counts."""

    def __init__(self) -> None:
        self.sent = 0

    def update_weights(self) -> None:
        self.sent += 1


def make_ppo_loss(actor: nn.Module | None = None) -> ClipPPOLoss:
    return ClipPPOLoss(actor or make_policy(), make_critic())


def make_a2c_loss(actor: nn.Module | None = None) -> A2CLoss:
    return A2CLoss(actor or make_policy(), make_critic())


def make_dqn_loss(actor: nn.Module | None = None) -> DQNLoss:
    return DQNLoss(actor or make_q_policy(), action_space="one_hot", delay_value=True)


def make_sac_loss(actor: nn.Module | None = None) -> SACLoss:
    qvalue = ValueOperator(StateActionValue(), in_keys=["observation", "action"])
    return SACLoss(actor or make_continuous_policy(), qvalue, action_spec=Bounded(-1.0, 1.0, shape=(1,)))


def make_ppo_trainer(
    collector: BaseCollector,
    actor: nn.Module | None = None,
    *,
    total_frames: int = 2 * FRAMES_PER_BATCH,
    weight_update_map: dict[str, str] | None = None,
) -> PPOTrainer:
    """A stock PPOTrainer; with process collectors TorchRL demands a `weight_update_map`."""
    return _make_on_policy(PPOTrainer, collector, make_ppo_loss(actor), total_frames, weight_update_map)


def make_a2c_trainer(
    collector: BaseCollector,
    actor: nn.Module | None = None,
    *,
    total_frames: int = 2 * FRAMES_PER_BATCH,
    weight_update_map: dict[str, str] | None = None,
) -> A2CTrainer:
    """A stock A2CTrainer; with process collectors TorchRL demands a `weight_update_map`."""
    return _make_on_policy(A2CTrainer, collector, make_a2c_loss(actor), total_frames, weight_update_map)


def make_dqn_trainer(
    collector: BaseCollector,
    actor: nn.Module | None = None,
    *,
    total_frames: int = 2 * FRAMES_PER_BATCH,
) -> DQNTrainer:
    """A stock DQNTrainer, 2 optimizer steps a batch."""
    loss = make_dqn_loss(actor)
    updater = HardUpdate(loss, value_network_update_interval=10)
    return _make_off_policy(DQNTrainer, collector, loss, updater, total_frames)


def make_sac_trainer(
    collector: BaseCollector,
    actor: nn.Module | None = None,
    *,
    total_frames: int = 2 * FRAMES_PER_BATCH,
) -> SACTrainer:
    """A stock SACTrainer, 2 optimizer steps a batch, on `make_continuous_env`."""
    loss = make_sac_loss(actor)
    return _make_off_policy(SACTrainer, collector, loss, SoftUpdate(loss, eps=0.99), total_frames)


def make_free_sac_trainer(
    collector: BaseCollector,
    actor: nn.Module,
    buffer: TensorDictReplayBuffer,
    *,
    total_frames: int,
) -> SACTrainer:
    """The same with `async_collection`, on the buffer that its collector fills meanwhile."""
    loss = make_sac_loss(actor)
    updater = SoftUpdate(loss, eps=0.99)
    return _make_off_policy(SACTrainer, collector, loss, updater, total_frames, buffer)


def _make_on_policy(
    kind: type[Trainer],
    collector: BaseCollector,
    loss: LossModule,
    total_frames: int,
    weight_update_map: dict[str, str] | None,
) -> Trainer:
    return kind(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        # All minibatches. With their exact number (2) TorchRL 0.14.1 skips every other batch:
        # the end of one epoch is only noticed, and charged, at the first step of the next.
        optim_steps_per_batch=None,
        num_epochs=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        replay_buffer=TensorDictReplayBuffer(
            storage=LazyTensorStorage(FRAMES_PER_BATCH),
            sampler=SamplerWithoutReplacement(),
            batch_size=FRAMES_PER_BATCH // 2,
        ),
        weight_update_map=weight_update_map,
        progress_bar=False,
        enable_logging=False,
        auto_log_optim_steps=False,
    )


def _make_off_policy(
    kind: type[Trainer],
    collector: BaseCollector,
    loss: LossModule,
    updater: SoftUpdate | HardUpdate,
    total_frames: int,
    filled_meanwhile: TensorDictReplayBuffer | None = None,
) -> Trainer:
    buffer = filled_meanwhile
    if buffer is None:
        storage = LazyTensorStorage(1000)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=RandomSampler(), batch_size=10)
    return kind(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        optim_steps_per_batch=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        replay_buffer=buffer,
        async_collection=filled_meanwhile is not None,
        target_net_updater=updater,
        progress_bar=False,
        enable_logging=False,
        auto_log_optim_steps=False,
    )

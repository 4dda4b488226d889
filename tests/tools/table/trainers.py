"""Each trainer of TorchRL, on each kind of collector: does every frame name the weights that acted?"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torchrl.modules
import torchrl.objectives
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import AsyncBatchedCollector, BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import (
    Bounded,
    LazyTensorStorage,
    OfflineToOnlineReplayBuffer,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement
from torchrl.modules import Actor, ValueOperator
from torchrl.objectives import (
    A2CLoss,
    ClipPPOLoss,
    CQLLoss,
    DDPGLoss,
    DQNLoss,
    HardUpdate,
    IQLLoss,
    LossModule,
    ReinforceLoss,
    SACLoss,
    SoftUpdate,
    TD3Loss,
)
from torchrl.trainers import ReplayBufferTrainer, Trainer, algorithms

from rlsync import BoardScheme, RlsyncError, SyncWeights
from rlsync.core.errors import first_line
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    OBSERVATIONS,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_counting_env,
    make_critic,
    make_mlp,
    make_policy,
    make_q_policy,
    make_workers,
)
from tests.tools.parts.policies import StateActionValue
from tests.tools.parts.servers import make_async_batched
from tests.tools.running import running
from tests.tools.table.row import Cells, Row

BATCHES = 8
EXACT = "exact"


def digest(module: nn.Module) -> int:
    """The sum of the bits of all parameters, which no order of adding changes."""
    bits = [p.detach().contiguous().view(torch.int32).long().sum() for p in module.parameters()]
    return int(sum(bits))  # a loss calls networks whose parameters it has taken out


def write_what_acts(module: nn.Module, _: object, output: object) -> None:
    """A forward hook: the digest of the weights that act becomes an output of the policy."""
    if isinstance(output, TensorDictBase):
        output.set("acted", torch.full(output.batch_size, digest(module), dtype=torch.int64))


def tells(actor: nn.Module) -> nn.Module:
    """``actor``, whose outputs say which weights made them."""
    actor.register_forward_hook(write_what_acts)
    return actor


def make_deterministic_policy() -> nn.Module:
    return Actor(nn.Sequential(make_mlp(1), nn.Tanh()), in_keys=["observation"], out_keys=["action"])


def make_state_action_value() -> ValueOperator:
    return ValueOperator(StateActionValue(), in_keys=["observation", "action"])


_ACTIONS = Bounded(-1.0, 1.0, shape=(1,))


def _recorded() -> ReplayBuffer:
    """Frames as of another collector: without versions, and without what collectors add."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000), batch_size=10)
    collector = make_collector(tells(make_continuous_policy()), env=make_continuous_env)
    for batch in collector:
        buffer.extend(batch.exclude("policy_version", ("next", "policy_version"), "collector"))
        break
    collector.shutdown()
    return buffer


@dataclass(frozen=True)
class TrainerRow:
    """A trainer of TorchRL: how to make its loss from an actor, and what else it takes."""

    kind: type[Trainer]
    make_actor: Callable[[], nn.Module]
    make_loss: Callable[[Any], LossModule]
    source: str = "loss_module.actor_network"
    on_policy: bool = False
    target: Callable[[LossModule], object] | None = None
    options: Callable[[LossModule], dict[str, Any]] = field(default=lambda _: {})

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def make_env(self) -> Callable[[], Any]:
        discrete = self.make_actor in (make_policy, make_q_policy)
        return make_counting_env if discrete else make_continuous_env

    def build(self, collector: BaseCollector, actor: nn.Module, schemes: bool) -> Trainer:
        loss = self.make_loss(actor)
        given: dict[str, Any] = {
            "collector": collector,
            "total_frames": BATCHES * FRAMES_PER_BATCH,
            "frame_skip": 1,
            "optim_steps_per_batch": None if self.on_policy else 2,
            "loss_module": loss,
            "optimizer": torch.optim.Adam(loss.parameters(), lr=1e-2),
            "progress_bar": False,
        }
        if self.kind is algorithms.GRPOTrainer:
            given |= {"log_rewards": False, "log_kl": False}  # of language models
        elif self.kind not in (Trainer, *_NEXT):
            given |= {"enable_logging": False}
        if self.kind in _NEXT:
            for theirs in ("frame_skip", "optim_steps_per_batch"):
                del given[theirs]
        sampler = SamplerWithoutReplacement() if self.on_policy else RandomSampler()
        room = FRAMES_PER_BATCH if self.on_policy else 1000
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(room), sampler=sampler, batch_size=10)
        if self.on_policy:
            given |= {"num_epochs": 1, "replay_buffer": buffer}
            given |= {"weight_update_map": {"policy": self.source}} if schemes else {}
        elif self.kind is not Trainer:
            given |= {"replay_buffer": buffer}
        if self.target is not None:
            given["target_net_updater"] = self.target(loss)
        given |= self.options(loss)
        trainer = self.kind(**given)
        if self.kind is Trainer:
            ReplayBufferTrainer(buffer, batch_size=10).register(trainer)
        return trainer


#: The trainers that TorchRL has from 0.15 on.
_NEXT: tuple[type[Trainer], ...] = tuple(
    kind for kind in [getattr(algorithms, "FQLTrainer", None)] if kind is not None
)


def make_one_step_policy() -> nn.Module:
    return torchrl.modules.OneStepPolicy(nn.Linear(OBSERVATIONS + 1, 1), action_dim=1)


def make_fql_loss(actor: nn.Module) -> LossModule:
    flow = torchrl.modules.FlowMatchingPolicy(nn.Linear(OBSERVATIONS + 2, 1), action_dim=1)
    return torchrl.objectives.FQLLoss(flow, actor, make_state_action_value())


def _soft(loss: LossModule) -> SoftUpdate:
    return SoftUpdate(loss, eps=0.99)


def _td3_steppers(loss: LossModule) -> dict[str, Any]:
    from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

    actor = torch.optim.Adam(loss.actor_network_params.flatten_keys().values(), lr=1e-2)
    critic = torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values(), lr=1e-2)
    return {"optimizer": None, "optimization_stepper": TD3OptimizationStepper(actor, critic)}


def _offline_to_online(_: LossModule) -> dict[str, Any]:
    buffer = OfflineToOnlineReplayBuffer(_recorded(), online_capacity=1000, batch_size=10)
    return {"replay_buffer": buffer, "batch_size": 10}


TRAINERS = (
    TrainerRow(
        Trainer,
        make_q_policy,
        lambda actor: DQNLoss(actor, action_space="one_hot", delay_value=False),
        "loss_module.value_network",
    ),
    TrainerRow(algorithms.PPOTrainer, make_policy, lambda a: ClipPPOLoss(a, make_critic()), on_policy=True),
    TrainerRow(algorithms.A2CTrainer, make_policy, lambda a: A2CLoss(a, make_critic()), on_policy=True),
    TrainerRow(
        algorithms.ReinforceTrainer, make_policy, lambda a: ReinforceLoss(a, make_critic()), on_policy=True
    ),
    TrainerRow(algorithms.GRPOTrainer, make_policy, lambda a: ClipPPOLoss(a, make_critic())),
    TrainerRow(
        algorithms.DQNTrainer,
        make_q_policy,
        lambda actor: DQNLoss(actor, action_space="one_hot", delay_value=True),
        "loss_module.value_network",
        target=lambda loss: HardUpdate(loss, value_network_update_interval=10),
    ),
    TrainerRow(
        algorithms.SACTrainer,
        make_continuous_policy,
        lambda a: SACLoss(a, make_state_action_value(), action_spec=_ACTIONS),
        target=_soft,
    ),
    TrainerRow(
        algorithms.OfflineToOnlineTrainer,
        make_continuous_policy,
        lambda a: SACLoss(a, make_state_action_value(), action_spec=_ACTIONS),
        target=_soft,
        options=_offline_to_online,
    ),
    TrainerRow(
        algorithms.DDPGTrainer,
        make_deterministic_policy,
        lambda a: DDPGLoss(a, make_state_action_value(), delay_actor=True, delay_value=True),
        target=_soft,
    ),
    TrainerRow(
        algorithms.TD3Trainer,
        make_deterministic_policy,
        lambda a: TD3Loss(a, make_state_action_value(), action_spec=_ACTIONS),
        target=_soft,
        options=_td3_steppers,
    ),
    TrainerRow(
        algorithms.CQLTrainer,
        make_continuous_policy,
        lambda a: CQLLoss(a, make_state_action_value(), action_spec=_ACTIONS),
        target=_soft,
    ),
    TrainerRow(
        algorithms.IQLTrainer,
        make_continuous_policy,
        lambda a: IQLLoss(a, make_state_action_value(), make_critic()),
        target=_soft,
    ),
)

#: Of TorchRL 0.15, if that is installed.
NEXT_TRAINERS = tuple(
    TrainerRow(
        kind, make_one_step_policy, make_fql_loss, target=_soft, options=lambda _: {"offline_steps": 0}
    )
    for kind in _NEXT
)

PLACES: dict[str, type[BaseCollector] | None] = {
    "Collector": None,
    "MultiSyncCollector, BoardScheme": MultiSyncCollector,
    "MultiAsyncCollector, BoardScheme": MultiAsyncCollector,
    "AsyncBatchedCollector, BoardScheme": AsyncBatchedCollector,
}


@contextmanager
def _acting(row: TrainerRow, place: str, policy: nn.Module) -> Iterator[BaseCollector]:
    kind = PLACES[place]
    if kind is None:
        collector = make_collector(policy, env=row.make_env)
    elif kind is AsyncBatchedCollector:
        collector = make_async_batched("thread", BoardScheme(), policy=policy, env=row.make_env)
    else:
        board = {"policy": BoardScheme()}
        collector = make_workers(kind, policy, schemes=board, workers=1, env=row.make_env)
    with running(collector):
        yield collector


def _everywhere(row: TrainerRow) -> Cells:
    return {place: observed(row, place) for place in PLACES}


def observed(row: TrainerRow, place: str) -> str:
    """Train for some batches; say whether each frame named the weights that made it."""
    actor = tells(row.make_actor())
    with _acting(row, place, copy.deepcopy(actor)) as collector:
        trainer = row.build(collector, actor, schemes=PLACES[place] is not None)
        hook = SyncWeights({"policy": row.source})
        try:
            hook.register(trainer)
        except RlsyncError as error:
            return f"refused: {first_line(error)}"
        learner = operator.attrgetter(row.source)
        published: dict[int, int] = {}
        batches: list[TensorDictBase] = []
        for stage in ("setup", "post_steps"):
            trainer.register_op(stage, lambda: published.setdefault(hook.version, digest(learner(trainer))))
        trainer.register_op("batch_process", lambda batch: batches.append(batch.clone()) or batch)
        trainer.train()
    return agree(batches, published)


def agree(batches: list[TensorDictBase], published: dict[int, int]) -> str:
    """``EXACT`` if all frames were made by the weights that were published under their stamps."""
    wrong, versions = 0, set()
    for batch in batches:
        stamps = batch["policy_version"].flatten().tolist()
        after = batch["next", "policy_version"].flatten().tolist()
        for stamp, again, acted in zip(stamps, after, batch["acted"].flatten().tolist(), strict=True):
            wrong += stamp != again or published.get(int(stamp)) != acted
            versions.add(stamp)
    if wrong:
        return f"wrong: {wrong} frames"
    return EXACT if len(versions) > 1 else f"never synced: {versions}"


ROWS = tuple(
    Row(table, (f"`{row.name}`",), partial(_everywhere, row))
    for table, rows in (("trainers", TRAINERS), ("next trainers", NEXT_TRAINERS))
    for row in rows
)

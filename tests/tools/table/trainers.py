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
from torchrl.data.replay_buffers.samplers import RandomSampler, SamplerWithoutReplacement, SliceSampler
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
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
    options: Callable[[LossModule, Any], dict[str, Any]] = field(default=lambda loss, actor: {})
    #: arguments of the other trainers that this one does not have
    lacks: tuple[str, ...] = ()
    #: whether it refuses a collector whose policy is not the learner's own module
    same_module: bool = False

    @property
    def name(self) -> str:
        return self.kind.__name__

    @property
    def make_env(self) -> Callable[[], Any]:
        if self.make_actor is make_planner:
            return make_planned_env
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
            "enable_logging": False,
        }
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
        given |= self.options(loss, actor)
        for argument in self.lacks:
            del given[argument]
        trainer = self.kind(**given)
        if self.kind is Trainer:
            ReplayBufferTrainer(buffer, batch_size=10).register(trainer)
        return trainer


def make_one_step_policy() -> nn.Module:
    return torchrl.modules.OneStepPolicy(nn.Linear(OBSERVATIONS + 1, 1), action_dim=1)


def make_fql_loss(actor: nn.Module) -> LossModule:
    flow = torchrl.modules.FlowMatchingPolicy(nn.Linear(OBSERVATIONS + 2, 1), action_dim=1)
    return torchrl.objectives.FQLLoss(flow, actor, make_state_action_value())


#: Of the parts of a TD-MPC2, all as small as can be.
LATENT = 8
HORIZON = 3


def make_planner() -> nn.Module:
    """A TdMpc2Planner: world model, policy prior and Q ensemble act together."""
    from torchrl.trainers.algorithms.configs import modules

    sizes = {"action_dim": 1, "latent_dim": LATENT, "mlp_dim": 8}
    return torchrl.modules.TdMpc2Planner(
        modules._make_tdmpc2_world_model(observation_dim=OBSERVATIONS, encoder_dim=8, num_bins=11, **sizes),
        modules._make_tdmpc2_policy_prior(**sizes),
        modules._make_tdmpc2_q_ensemble(num_bins=11, **sizes),
        horizon=HORIZON,
        num_samples=16,
        num_elites=4,
        num_pi_trajs=4,
        iterations=2,
    )


def make_planned_env() -> EnvBase:
    """A continuous environment that carries the mean of a plan to the next step."""
    return TransformedEnv(
        make_continuous_env(), Compose(InitTracker(), make_planner().make_tensordict_primer())
    )


def make_planner_loss(planner: Any) -> LossModule:
    parts = (planner.world_model, planner.policy_prior, planner.q_ensemble)
    return torchrl.objectives.TdMpc2Loss(*parts, horizon=HORIZON)


def _planned(loss: LossModule, planner: Any) -> dict[str, Any]:
    model = [*planner.world_model.parameters(), *planner.q_ensemble.q_params.parameters()]
    sampler = SliceSampler(
        slice_len=HORIZON,
        traj_key=("collector", "traj_ids"),
        output_layout="batch_time",
        strict_length=True,
    )
    return {
        "planner": planner,
        "optimizer_model": torch.optim.Adam(model, lr=1e-2),
        "optimizer_actor": torch.optim.Adam(planner.policy_prior.parameters(), lr=1e-2),
        "replay_buffer": TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler),
        "batch_size": 4,
    }


def _soft(loss: LossModule) -> SoftUpdate:
    return SoftUpdate(loss, eps=0.99)


def _td3_steppers(loss: LossModule, _: nn.Module) -> dict[str, Any]:
    from torchrl.trainers.algorithms.td3 import TD3OptimizationStepper

    actor = torch.optim.Adam(loss.actor_network_params.flatten_keys().values(), lr=1e-2)
    critic = torch.optim.Adam(loss.qvalue_network_params.flatten_keys().values(), lr=1e-2)
    return {"optimizer": None, "optimization_stepper": TD3OptimizationStepper(actor, critic)}


def _offline_to_online(loss: LossModule, _: nn.Module) -> dict[str, Any]:
    buffer = OfflineToOnlineReplayBuffer(_recorded(), online_capacity=1000, batch_size=10)
    return {"replay_buffer": buffer, "batch_size": 10}


TRAINERS = (
    TrainerRow(
        Trainer,
        make_q_policy,
        lambda actor: DQNLoss(actor, action_space="one_hot", delay_value=False),
        "loss_module.value_network",
        lacks=("enable_logging",),
    ),
    TrainerRow(algorithms.PPOTrainer, make_policy, lambda a: ClipPPOLoss(a, make_critic()), on_policy=True),
    TrainerRow(algorithms.A2CTrainer, make_policy, lambda a: A2CLoss(a, make_critic()), on_policy=True),
    TrainerRow(
        algorithms.ReinforceTrainer, make_policy, lambda a: ReinforceLoss(a, make_critic()), on_policy=True
    ),
    TrainerRow(
        algorithms.GRPOTrainer,
        make_policy,
        lambda a: ClipPPOLoss(a, make_critic()),
        options=lambda loss, actor: {"log_rewards": False, "log_kl": False},  # of language models
        lacks=("enable_logging",),
    ),
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


def _next_trainers() -> Iterator[TrainerRow]:
    """Those of TorchRL 0.15, if that is installed."""
    if hasattr(algorithms, "FQLTrainer"):
        yield TrainerRow(
            algorithms.FQLTrainer,
            make_one_step_policy,
            make_fql_loss,
            target=_soft,
            options=lambda loss, actor: {"offline_steps": 0},
            lacks=("frame_skip", "optim_steps_per_batch", "enable_logging"),
        )
    if hasattr(algorithms, "TdMpc2Trainer"):
        yield TrainerRow(
            algorithms.TdMpc2Trainer,
            make_planner,
            make_planner_loss,
            "planner",
            options=_planned,
            lacks=("optimizer", "enable_logging"),
            same_module=True,
        )


NEXT_TRAINERS = tuple(_next_trainers())

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
    policy = actor if row.same_module else copy.deepcopy(actor)
    with _acting(row, place, policy) as collector:
        return trained(row.build(collector, actor, schemes=PLACES[place] is not None), row.source)


def from_env() -> Cells:
    """`PPOTrainer.from_env`, which makes a Collector of its own."""
    trainer = algorithms.PPOTrainer.from_env(
        make_counting_env(),
        actor=tells(make_policy()),
        critic=make_critic(),
        total_frames=BATCHES * FRAMES_PER_BATCH,
        frames_per_batch=FRAMES_PER_BATCH,
        minibatch_size=10,
        collector_kwargs={"track_policy_version": True},
        enable_logging=False,
        progress_bar=False,
    )
    with running(trainer.collector):
        return {"Collector": trained(trainer, "loss_module.actor_network")}


def trained(trainer: Trainer, source: str) -> str:
    """Train with a hook; say whether each frame named the weights that made it."""
    hook = SyncWeights({"policy": source})
    try:
        hook.register(trainer)
    except RlsyncError as error:
        return f"refused: {first_line(error)}"
    learner = operator.attrgetter(source)
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
if hasattr(algorithms.PPOTrainer, "from_env"):
    ROWS += (Row("next trainers", ("`PPOTrainer.from_env`",), from_env),)

"""A registration that is refused leaves the trainer and its collector as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.llm import LLMCollector
from torchrl.envs import AsyncEnvPool
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

from rlsync import (
    BoardScheme,
    BoundStaleness,
    Every,
    LogPolicyLag,
    LogReceipts,
    RlsyncError,
    Source,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
)
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes.hooks.finite import StopIfNotFinite
from rlsync.runs.recipes.hooks.measuring import StalenessHistogram
from rlsync.runs.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet
from tests.tools.parts import (
    make_a2c_trainer,
    make_collector,
    make_counting_env,
    make_policy,
    make_ppo_trainer,
    make_workers,
)
from tests.tools.running import ACTOR, in_three_lines

pytestmark = [pytest.mark.usefixtures("fork_workers"), pytest.mark.filterwarnings("ignore::rlsync.NoBoard")]


def in_process() -> Trainer:
    actor = make_policy()
    return make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)


def unstamped() -> Trainer:
    actor = make_policy()
    collector = Collector(make_counting_env, copy.deepcopy(actor), frames_per_batch=20, total_frames=-1)
    return make_ppo_trainer(collector, actor)


def kept_in_a_checkpoint() -> Trainer:
    trainer = in_process()
    trainer.checkpoint = Checkpoint()
    StockUpdateWeights(trainer.collector, 1).register(trainer)
    return trainer


def that_collects_meanwhile() -> Trainer:
    trainer = in_process()
    trainer.async_collection = True
    return trainer


def on_ray() -> Trainer:
    trainer = in_process()
    trainer.learner_backend = "ray"
    return trainer


def acting_ahead() -> Trainer:
    pool = AsyncEnvPool([make_counting_env] * 2, backend="threading")
    actor = make_policy()
    collector = LLMCollector(pool, policy=copy.deepcopy(actor), yield_completed_trajectories=True)
    return make_ppo_trainer(collector, actor)


def on_a_board() -> Trainer:
    actor = make_policy()
    workers = make_workers(MultiSyncCollector, actor, schemes={"policy": BoardScheme()})
    return make_ppo_trainer(workers, actor, weight_update_map=ACTOR)


def on_a_free_board() -> Trainer:
    actor = make_policy()
    workers = make_workers(MultiAsyncCollector, actor, schemes={"policy": BoardScheme()})
    return make_a2c_trainer(workers, actor, weight_update_map=ACTOR)


def on_stock_schemes() -> Trainer:
    actor = make_policy()
    workers = make_workers(MultiSyncCollector, actor, schemes={"policy": SharedMemWeightSyncScheme()})
    return make_ppo_trainer(workers, actor, weight_update_map=ACTOR)


def with_stock(trainer: Trainer) -> Trainer:
    trainer.collector._weight_sync_schemes["postproc"] = MultiProcessWeightSyncScheme()
    return trainer


@dataclass(frozen=True)
class Refusal:
    """A registration that is refused.

    Args:
        register: is refused with the trainer, and with what `before` returned.
        make: makes the trainer.
        before: registers what must be there before.
    """

    register: Callable[[Trainer, SyncWeights], object]
    make: Callable[[], Trainer] = in_process
    before: Callable[[Trainer], SyncWeights] = lambda trainer: SyncWeights(ACTOR)


def without_optimizer(make: Callable[[], Trainer]) -> Trainer:
    trainer = make()
    trainer.optimizer = None
    trainer._optimizer_ops.clear()
    del trainer._modules["optimizer"]
    return trainer


def that_watches_by_itself() -> Trainer:
    actor = make_policy()
    env = GymnasiumEnvs("CartPole-v1")
    network = ImpalaNet((4,), Categorical(2))
    settings = CollectSettings(steps=4, envs_per_worker=1, start_method="fork")
    workers = UnrollCollector(network, env, settings)
    return make_ppo_trainer(workers, actor)


def mapped(sync_map: object, **options: object) -> Callable[[Trainer, SyncWeights], object]:
    return lambda trainer, _: SyncWeights(sync_map, **options).register(trainer)


def bound(trainer: Trainer) -> SyncWeights:
    sync = SyncWeights(ACTOR)
    sync.register(trainer)
    return sync


def bound_elsewhere(trainer: Trainer) -> SyncWeights:
    return bound(in_process())


def bound_to_another_collector(trainer: Trainer) -> SyncWeights:
    sync = SyncWeights(ACTOR, collector=make_collector(make_policy()))
    sync.register(trainer)
    return sync


def with_hook(make: Callable[[SyncWeights], object]) -> Callable[[Trainer], SyncWeights]:
    def registered(trainer: Trainer) -> SyncWeights:
        sync = bound(trainer)
        make(sync).register(trainer)
        return sync

    return registered


def hook(make: Callable[[SyncWeights], object]) -> Callable[[Trainer, SyncWeights], object]:
    return lambda trainer, sync: make(sync).register(trainer)


def not_finite(trainer: Trainer, _: SyncWeights) -> None:
    with torch.no_grad():
        next(trainer.loss_module.actor_network.parameters()).fill_(torch.nan)
    SyncWeights(ACTOR, finite=True).register(trainer)


def drop_in(**options: object) -> Callable[[Trainer, SyncWeights], object]:
    return lambda trainer, _: UpdateWeights(trainer.collector, 1, trainer=trainer, **options)


def watch(trainer: Trainer, _: object = None) -> SyncWeights:
    WatchWorkers().register(trainer)
    return SyncWeights(ACTOR)


def wait_at_0(sync: SyncWeights) -> BoundStaleness:
    return BoundStaleness(sync, 0, "wait")


def bound_1(sync: SyncWeights) -> BoundStaleness:
    return BoundStaleness(sync, 1)


REFUSED: dict[str, Refusal] = {
    "SyncWeights: a path that cannot be read": Refusal(mapped({"policy": "__class__"})),
    "SyncWeights: no such source": Refusal(mapped({"policy": "loss_module.actor"})),
    "SyncWeights: no such destination": Refusal(mapped({"polcy": "loss_module.actor_network"})),
    "SyncWeights: leaves that do not fit": Refusal(mapped({"policy": "loss_module.critic_network"})),
    "SyncWeights: one destination twice": Refusal(
        mapped(
            {"policy": "loss_module.actor_network", "policy.module[0]": "loss_module.actor_network.module[0]"}
        )
    ),
    "SyncWeights: an empty map": Refusal(mapped({})),
    "SyncWeights: no map": Refusal(mapped([("policy", "loss_module.actor_network")])),
    "SyncWeights: no floating dtype": Refusal(
        mapped({"policy": Source("loss_module.actor_network", dtype="int8")})
    ),
    "SyncWeights: in the background of a collector without a board": Refusal(mapped(ACTOR, background=True)),
    "SyncWeights: in the background of no optimizer": Refusal(
        mapped(ACTOR, background=True), lambda: without_optimizer(on_a_board)
    ),
    "SyncWeights: a second hook": Refusal(mapped(ACTOR), before=bound),
    "SyncWeights: bound to another trainer": Refusal(hook(lambda sync: sync), before=bound_elsewhere),
    "SyncWeights: a learner elsewhere": Refusal(mapped(ACTOR), on_ray),
    "SyncWeights: a collector that acts ahead": Refusal(mapped(ACTOR), acting_ahead),
    "SyncWeights: weights that are not finite, published at once": Refusal(
        not_finite, that_collects_meanwhile
    ),
    "SyncWeights: no such source, with a Checkpoint": Refusal(
        mapped({"policy": "loss"}), kept_in_a_checkpoint
    ),
    "SyncWeights: boards and other schemes": Refusal(mapped(ACTOR), lambda: with_stock(on_a_board())),
    "SyncWeights: no such destination on a board": Refusal(mapped({"polcy": "loss_module"}), on_a_board),
    "SyncWeights: a destination on which TorchRL hangs": Refusal(
        mapped({"postproc": "loss_module.actor_network"}), lambda: with_stock(on_stock_schemes())
    ),
    "UpdateWeights: no such source": Refusal(drop_in(weight_update_map={"policy": "loss"})),
    "UpdateWeights: a second hook": Refusal(drop_in(weight_update_map=ACTOR), before=bound),
    "UpdateWeights: a second hook, with a getter": Refusal(
        drop_in(policy_weights_getter=make_policy), before=bound
    ),
    "UpdateWeights: a learner elsewhere": Refusal(drop_in(weight_update_map=ACTOR), on_ray),
    "LogPolicyLag: no SyncWeights": Refusal(hook(LogPolicyLag)),
    "LogPolicyLag: no stamps": Refusal(hook(LogPolicyLag), unstamped, bound),
    "LogPolicyLag: of another collector": Refusal(hook(LogPolicyLag), before=bound_to_another_collector),
    "LogPolicyLag: a second one": Refusal(hook(LogPolicyLag), before=with_hook(LogPolicyLag)),
    "BoundStaleness: no SyncWeights": Refusal(hook(bound_1)),
    "BoundStaleness: no stamps": Refusal(hook(bound_1), unstamped, bound),
    "BoundStaleness: of another collector": Refusal(hook(bound_1), before=bound_to_another_collector),
    "BoundStaleness: a second one": Refusal(hook(bound_1), before=with_hook(bound_1)),
    "BoundStaleness: waiting for what cannot come": Refusal(hook(wait_at_0), on_a_free_board, bound),
    "LogReceipts: no SyncWeights": Refusal(hook(LogReceipts)),
    "LogReceipts: a second one": Refusal(hook(LogReceipts), before=with_hook(LogReceipts)),
    "StalenessHistogram: no stamps": Refusal(hook(StalenessHistogram), unstamped, bound),
    "StalenessHistogram: of another collector": Refusal(
        hook(StalenessHistogram), before=bound_to_another_collector
    ),
    "VerifySync: no SyncWeights": Refusal(hook(VerifySync)),
    "VerifySync: workers that cannot be asked": Refusal(hook(VerifySync), on_stock_schemes, bound),
    "VerifySync: a second one": Refusal(hook(VerifySync), before=with_hook(VerifySync)),
    "VerifySync: a second one under another prefix": Refusal(
        hook(lambda sync: VerifySync(sync, prefix="again")), before=with_hook(VerifySync)
    ),
    "WatchWorkers: no workers": Refusal(watch),
    "WatchWorkers: workers that are watched": Refusal(watch, that_watches_by_itself),
    "WatchWorkers: a second one": Refusal(watch, on_a_board, before=watch),
    "StopIfNotFinite: no optimizer": Refusal(
        hook(lambda _: StopIfNotFinite()), lambda: without_optimizer(in_process)
    ),
}


def state_of(trainer: Trainer) -> list[dict[str, object]]:
    """What a trainer and its collector hold, each object by its identity, and what lists and dicts hold."""
    checkpoint = trainer.checkpoint or Checkpoint()
    held = [vars(trainer), vars(trainer.collector), trainer._modules, checkpoint.components]
    lists = {name: [id(op) for op, _ in ops] for name, ops in vars(trainer).items() if name.endswith("_ops")}
    seen = [
        {name: id(value) for name, value in found.items() if name not in ("_modules", "_components")}
        for found in held
    ]
    return [*seen, lists, dict(vars(trainer.collector).get("_weight_sync_schemes") or {})]


@pytest.fixture(params=REFUSED)
def refusal(request: pytest.FixtureRequest) -> Iterator[tuple[Refusal, Trainer]]:
    found = REFUSED[request.param]
    trainer = found.make()
    yield found, trainer
    trainer.collector.shutdown()


def test_a_refused_registration_changes_nothing(refusal: tuple[Refusal, Trainer]) -> None:
    how, trainer = refusal
    sync = how.before(trainer)
    before = state_of(trainer)
    with pytest.raises(RlsyncError) as refused:
        how.register(trainer, sync)
    assert in_three_lines(refused.value)
    assert state_of(trainer) == before


def test_a_hook_that_was_refused_can_be_registered_when_the_cause_is_gone() -> None:
    trainer = in_process()
    hook = SyncWeights({"policy": "my_actor"}, when=Every(1))
    with pytest.raises(RlsyncError):
        hook.register(trainer)
    trainer.my_actor = trainer.loss_module.actor_network
    hook.register(trainer)
    trainer.train()
    assert [receipt.version for receipt in hook.receipts] == [1, 2, 3]

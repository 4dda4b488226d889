"""Hooks that are registered in a wrong way say so at their first call: none does nothing in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
from torchrl.modules import EGreedyModule
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import (
    BoundStaleness,
    ConfigError,
    LogPolicyLag,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
)
from rlsync.recipes.hooks import (
    EpisodeReturns,
    EpsilonDecay,
    StalenessHistogram,
    StopIfNotFinite,
    SyncMetrics,
)
from tests.parts import make_collector, make_policy, make_ppo_trainer
from tests.parts.envs import make_counting_env

MAP = {"policy": "loss_module.actor_network"}


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """A PPO trainer whose in-process collector acts with a copy of the policy."""
    actor = make_policy()
    made = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    yield made
    made.collector.shutdown()


def unbound_sync() -> SyncWeights:
    return SyncWeights(MAP)


def make_epsilon_decay() -> EpsilonDecay:
    return EpsilonDecay(EGreedyModule(spec=make_counting_env().action_spec))


#: Every hook, unbound, and a stage at which a user might register it with register_op.
UNBOUND: dict[str, tuple[str, Callable[[], TrainerHookBase]]] = {
    "SyncWeights": ("post_steps", unbound_sync),
    "VerifySync": ("post_steps", lambda: VerifySync(unbound_sync())),
    "LogPolicyLag": ("process_optim_batch", lambda: LogPolicyLag(unbound_sync())),
    "BoundStaleness": ("process_optim_batch", lambda: BoundStaleness(unbound_sync(), 1)),
    "WatchWorkers": ("post_steps", WatchWorkers),
    "EpisodeReturns": ("post_steps_log", EpisodeReturns),
    "EpsilonDecay": ("post_steps", make_epsilon_decay),
    "StalenessHistogram": ("process_optim_batch", lambda: StalenessHistogram(unbound_sync())),
    "SyncMetrics": ("post_steps_log", lambda: SyncMetrics(unbound_sync())),
    "StopIfNotFinite": ("post_optim", StopIfNotFinite),
}


def test_a_forgotten_trainer_ends_the_training_at_the_first_call_with_the_cure(trainer: Trainer) -> None:
    s = SyncWeights({"policy": "loss_module.actor_netwrk_TYPO"})
    trainer.register_op("post_steps", s)
    with pytest.raises(ConfigError) as refused:
        trainer.train()
    assert refused.value.what == "this SyncWeights has no trainer yet, so it can do nothing"
    assert "pass trainer=trainer to SyncWeights, or call hook.register(trainer)" in refused.value.cure


@pytest.mark.parametrize("name", UNBOUND)
def test_every_hook_that_has_no_trainer_names_register_as_the_cure(trainer: Trainer, name: str) -> None:
    stage, make = UNBOUND[name]
    trainer.register_op(stage, make())
    with pytest.raises(ConfigError, match=f"{name}|this SyncWeights has no trainer yet") as refused:
        trainer.train()
    assert "register(trainer)" in refused.value.cure


@pytest.mark.parametrize(
    "make", [LogPolicyLag, lambda sync: BoundStaleness(sync, 1), VerifySync, SyncMetrics]
)
def test_a_hook_that_is_registered_before_its_sync_weights_is_refused(
    trainer: Trainer, make: Callable[[SyncWeights], TrainerHookBase]
) -> None:
    with pytest.raises(ConfigError, match="this SyncWeights is not bound to that trainer"):
        make(unbound_sync()).register(trainer)


def bound(kind: str, trainer: Trainer) -> TrainerHookBase:
    match kind:
        case "SyncWeights":
            return SyncWeights(MAP, trainer=trainer)
        case "UpdateWeights":
            return UpdateWeights(trainer.collector, 1, weight_update_map=MAP, trainer=trainer)
    sync = SyncWeights(MAP)
    sync.register(trainer)
    hook = VerifySync(sync) if kind == "VerifySync" else make_epsilon_decay()
    hook.register(trainer)
    return hook


@pytest.mark.parametrize("kind", ["SyncWeights", "UpdateWeights", "VerifySync", "EpsilonDecay"])
@pytest.mark.parametrize("stage", ["post_steps_log", "batch_process", "post_optim_complete_log"])
def test_a_stage_that_passes_arguments_is_refused_with_those_that_do_not(
    trainer: Trainer, kind: str, stage: str
) -> None:
    trainer.register_op(stage, bound(kind, trainer))
    with pytest.raises(ConfigError, match=f"this {kind} takes no arguments, and was called with") as refused:
        trainer.train()
    assert "post_steps, post_optim or post_epoch" in refused.value.cure


def test_update_weights_without_a_trainer_still_publishes() -> None:
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor)
    hook = UpdateWeights(trainer.collector, policy_weights_getter=lambda: actor)
    trainer.register_op("post_steps", hook)
    trainer.train()
    assert [receipt.version for receipt in hook.receipts] == [1, 2]

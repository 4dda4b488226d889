"""Hooks that are registered in a wrong way say so at their first call: none does nothing in silence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
from torchrl.modules import EGreedyModule
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync import (
    BoundStaleness,
    ConfigError,
    Every,
    LogPolicyLag,
    LogReceipts,
    NothingPublished,
    RlsyncWarning,
    StepsAhead,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
)
from rlsync.core.trigger import Trigger
from rlsync.recipes.hooks import EpisodeReturns, EpsilonDecay, StalenessHistogram, StopIfNotFinite
from tests.tools.parts import FRAMES_PER_BATCH, make_collector, make_policy, make_ppo_trainer
from tests.tools.parts.envs import make_counting_env

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
    "LogReceipts": ("post_steps_log", lambda: LogReceipts(unbound_sync())),
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
    "make", [LogPolicyLag, lambda sync: BoundStaleness(sync, 1), VerifySync, LogReceipts]
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


# ----------------------------------------------------------- bound, and not called by that trainer


def about_us(run: Callable[[], object]) -> list[RlsyncWarning]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RlsyncWarning)
        run()
    return [warning.message for warning in told if isinstance(warning.message, RlsyncWarning)]


def make_trainer(batches: int = 12) -> Trainer:
    actor = make_policy()
    return make_ppo_trainer(
        make_collector(copy.deepcopy(actor)), actor, total_frames=batches * FRAMES_PER_BATCH
    )


@pytest.mark.parametrize("kind", ["SyncWeights", "UpdateWeights"])
@pytest.mark.parametrize("stage", [None, "setup", "post_steps", "post_optim", "post_epoch"])
def test_a_bound_hook_that_its_trainer_does_not_call_is_told_of_once(kind: str, stage: str | None) -> None:
    trainer = make_trainer()
    hook = bound(kind, trainer)
    if stage is not None:
        trainer.register_op(stage, hook)
    told = about_us(trainer.train)
    if stage in (None, "setup"):
        (warning,) = told
        assert isinstance(warning, NothingPublished)
        assert warning.what == f"this {kind} is bound to the trainer, which does not call it"
        assert "trainer.register_op('post_steps', hook)" in warning.cure
    else:
        assert told == []


def test_publishing_by_hand_is_no_mistake() -> None:
    trainer = make_trainer()
    hook = SyncWeights(MAP, trainer=trainer)
    trainer.register_op("post_steps", lambda: hook.publish() and None)
    assert about_us(trainer.train) == []


def test_batches_without_optimizer_steps_are_no_mistake() -> None:
    trainer = make_trainer()
    trainer.collector.init_random_frames = 100 * FRAMES_PER_BATCH
    SyncWeights(MAP, when=Every(1, "optim_steps")).register(trainer)
    assert about_us(trainer.train) == []


@pytest.mark.parametrize("when", [Every(1, "batches"), StepsAhead(1), Every(0.001, "seconds")], ids=str)
def test_a_hook_that_another_trainer_calls_is_told_of_once(when: Trigger) -> None:
    bound_to, calls = make_trainer(), make_trainer()
    hook = SyncWeights(MAP, when, trainer=bound_to)
    calls.register_op("post_steps", hook)
    told = about_us(calls.train)
    bound_to.collector.shutdown()
    if "seconds" in when.units():
        assert told == []
        assert len(hook.receipts) > 1
    else:
        (warning,) = told
        assert isinstance(warning, NothingPublished)
        assert warning.what == "this SyncWeights is called, but not by the trainer to which it is bound"
        assert "hook.publish()" in warning.cure

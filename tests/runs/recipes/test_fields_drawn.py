"""An update draws the fields that it and the hooks read; whoever may read another one gets all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tensordict import NestedKey, TensorDictBase
from torchrl.trainers import OptimizationStepper, Trainer

from rlsync import LogPolicyLag
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.settings import NormalizeConfig
from rlsync.torchrl_plugin.compat.stamps import STAMP
from tests.runs.recipes.test_off_policy import built, tiny
from tests.runs.recipes.test_recipes import hook_of, small_ppo, trained

pytestmark = pytest.mark.usefixtures("fork_workers")

STEP = {"observation", "action", ("next", "observation"), ("next", "reward"), ("next", "terminated")}
OTHERS = {STAMP, "index"}  #: what StalenessHistogram reads, and what the buffer adds
READ: dict[str, set[NestedKey]] = {
    "dqn": {*STEP, *OTHERS, "steps_to_next_obs"},
    "sac": {*STEP, *OTHERS},
    "td3": {*STEP, *OTHERS},
    "ppo": {"observation", "action", "action_log_prob", "advantage", "value_target", *OTHERS},
}
#: Some that no update reads.
UNREAD = {"is_init", ("next", "done"), ("next", "truncated")}


def trainer_of(name: str, **keys: Any) -> Trainer:
    return ppo.RECIPE.build(small_ppo(workers=1)) if name == "ppo" else built(tiny(name, **keys))


def fields_of(trainer: Trainer) -> list[set[NestedKey]]:
    """Where the fields of each batch are noted that an update is made of."""
    noted: list[set[NestedKey]] = []
    step = trainer.optimization_stepper.step

    def look(trainer: Trainer, batch: TensorDictBase) -> TensorDictBase:
        noted.append(set(batch.keys(True, True)))
        return step(trainer, batch)

    trainer.optimization_stepper.step = look
    return noted


@pytest.mark.parametrize("name", READ)
def test_an_update_draws_what_it_reads_and_no_more(name: str) -> None:
    trainer = trainer_of(name)
    noted = fields_of(trainer)
    trained(trainer)
    assert noted
    assert all(fields == READ[name] for fields in noted)


def test_what_priorities_and_statistics_of_rewards_need_is_drawn_too() -> None:
    trainer = trainer_of("dqn", prioritized=True, normalize=NormalizeConfig(rewards=True))
    noted = fields_of(trainer)
    LogPolicyLag(hook_of(trainer)).register(trainer)
    trained(trainer)
    assert noted
    assert all(fields == {*READ["dqn"], "priority_weight"} for fields in noted)


def hook_on_the_gradient(trainer: Trainer) -> None:
    next(trainer.loss_module.parameters()).register_hook(lambda grad: grad)


class Around(OptimizationStepper):
    """Somebody's stepper, which calls the one that was there."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        return self.inner.step(trainer, sub_batch)


def stepper_around(trainer: Trainer) -> None:
    trainer.optimization_stepper = Around(trainer.optimization_stepper)


#: What somebody may do that may read any field.
FOREIGN: dict[str, Callable[[Trainer], None]] = {
    "process_optim_batch": lambda t: t.register_op("process_optim_batch", lambda batch: batch),
    "post_optim_log": lambda t: t.register_op("post_optim_log", lambda batch: None),
    "a hook on a gradient": hook_on_the_gradient,
    "a stepper around it": stepper_around,
}


@pytest.mark.parametrize("what", FOREIGN)
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_whoever_may_read_any_field_gets_all_that_are_stored(name: str, what: str) -> None:
    trainer = trainer_of(name)
    noted = fields_of(trainer)
    FOREIGN[what](trainer)
    trained(trainer)
    assert noted
    assert all(fields > READ[name] | UNREAD for fields in noted)


def test_a_hook_that_comes_during_the_run_gets_all_from_the_next_batch_on() -> None:
    trainer = trainer_of("dqn")
    seen: list[set[NestedKey]] = []

    def look(batch: TensorDictBase) -> TensorDictBase:
        seen.append(set(batch.keys(True, True)))
        return batch

    def come() -> None:
        if trainer._optim_count and not seen:
            trainer.register_op("process_optim_batch", look)

    trainer.register_op("post_steps", come)
    trained(trainer)
    assert seen
    assert all(fields > UNREAD for fields in seen)


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_whoever_draws_for_another_purpose_gets_all_fields(name: str) -> None:
    trainer = trainer_of(name)
    drawn: list[set[NestedKey]] = []

    def draw() -> None:
        drawn.append(set(trainer.replay_buffer.sample().keys(True, True)))

    trainer.register_op("post_optim", draw)
    noted = fields_of(trainer)
    trained(trainer)
    assert len(drawn) == len(noted) > 0
    assert all(fields == READ[name] for fields in noted)
    assert all(fields > READ[name] | UNREAD for fields in drawn)

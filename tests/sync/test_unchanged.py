"""Does what is published change? A map or an optimizer on a copy is told of; what may stand still is not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import DefaultOptimizationStepper, Trainer

from rlsync import ConfigError, Every, NothingChanged, SyncWeights, UpdateWeights
from rlsync.runs.recipes import dqn, ppo
from rlsync.runs.recipes.impala import recipe as impala_recipe
from rlsync.runs.recipes.settings import WhenConfig
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes.test_impala_recipe import LASER
from tests.runs.recipes.test_impala_recipe import small as small_impala
from tests.runs.recipes.test_recipes import small_dqn, small_ppo
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    make_a2c_trainer,
    make_collector,
    make_continuous_env,
    make_continuous_policy,
    make_critic,
    make_dqn_trainer,
    make_policy,
    make_ppo_trainer,
    make_q_policy,
    make_sac_trainer,
)

ACTOR = "loss_module.actor_network"


def told(run: Callable[[], object]) -> list[NothingChanged]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always", NothingChanged)
        run()
    return [warning.message for warning in shown if isinstance(warning.message, NothingChanged)]


def make_trainer(batches: int = 12, loss: ClipPPOLoss | None = None) -> Trainer:
    """PPO, two optimizer steps a batch, on a collector that acts with a copy of the policy."""
    actor = make_policy()
    trainer = make_ppo_trainer(
        make_collector(copy.deepcopy(actor)), actor, total_frames=batches * FRAMES_PER_BATCH
    )
    trainer.clip_norm = 1.0
    if loss is not None:
        trainer.loss_module = loss
    return trainer


def step_with(trainer: Trainer, optimizer: torch.optim.Optimizer) -> None:
    """Let the trainer make its steps with this optimizer, and forget the one that it was built with."""
    trainer.optimizer = registered_modules(trainer)[0].optimizer = optimizer


def adam(parameters: Any, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam(parameters, lr=1e-2, **options)


# ---------------------------------------------------------------------------------- what is told of


@pytest.mark.seconds
def test_a_map_on_a_copy_is_told_of_once_with_the_tenth_publish_and_what_the_optimizer_moves() -> None:
    trainer, counts = make_trainer(batches=21), []
    trainer.my_policy = copy.deepcopy(trainer.loss_module.actor_network)
    hook = SyncWeights({"policy": "my_policy"})
    hook.register(trainer)
    trainer.register_op("post_steps_log", lambda batch: counts.append(len(shown)))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", NothingChanged)
        trainer.train()
    assert counts == [0] * 9 + [1] * 12
    warning = shown[0].message
    assert warning.what.startswith("10 publishes in a row sent the same weights")
    assert "policy <- my_policy" in warning.where
    moved = "loss_module.actor_network_params.module.0.module.0.weight and 7 more"
    assert f"the optimizers move {moved}" in warning.where
    assert "name the module that is trained" in warning.cure
    assert len(hook.receipts) == 22, "it is a warning: the training goes on"


@pytest.mark.seconds
def test_an_optimizer_on_a_copy_is_told_of() -> None:
    trainer = make_trainer()
    step_with(trainer, adam(copy.deepcopy(trainer.loss_module).parameters()))
    SyncWeights({"policy": ACTOR}).register(trainer)
    (warning,) = told(trainer.train)
    assert "the optimizers move nothing" in warning.where
    gets = "loss_module.actor_network_params.module.0.module.0.weight and 7 more, which gets gradients"
    assert f"no optimizer holds {gets}" in warning.where


@pytest.mark.seconds
def test_a_loss_on_a_copy_of_the_policy_is_told_of_although_the_critic_learns() -> None:
    actor, critic = make_policy(), make_critic()
    trainer = make_trainer(loss=ClipPPOLoss(copy.deepcopy(actor), critic))
    trainer.my_policy = actor
    step_with(trainer, adam([*actor.parameters(), *critic.parameters()]))
    SyncWeights({"policy": "my_policy"}).register(trainer)
    (warning,) = told(trainer.train)
    assert "the optimizers move loss_module.critic_network_params" in warning.where
    assert "no optimizer holds loss_module.actor_network_params" in warning.where


@pytest.mark.seconds
def test_torchrls_arguments_get_the_warning_too() -> None:
    trainer = make_trainer()
    trainer.my_policy = copy.deepcopy(trainer.loss_module.actor_network)
    hook = UpdateWeights(trainer.collector, 1, weight_update_map={"policy": "my_policy"}, trainer=trainer)
    trainer.register_op("post_steps", hook)
    assert len(told(trainer.train)) == 1


@pytest.mark.one_case
@pytest.mark.parametrize(("limit", "warned"), [(2, 1), (5, 1), (None, 0)])
def test_the_limit_is_an_argument(limit: int | None, warned: int) -> None:
    trainer = make_trainer(batches=6)
    trainer.my_policy = copy.deepcopy(trainer.loss_module.actor_network)
    SyncWeights({"policy": "my_policy"}, max_unchanged_publishes=limit).register(trainer)
    assert len(told(trainer.train)) == warned


@pytest.mark.parametrize("limit", [0, 1, 2.5, True])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ConfigError, match="a whole number of at least 2"):
        SyncWeights({"policy": ACTOR}, max_unchanged_publishes=limit)


@pytest.mark.thorough
def test_it_warns_again_only_if_the_weights_moved_in_between() -> None:
    trainer = make_trainer(batches=14)
    trainer.my_policy = copy.deepcopy(trainer.loss_module.actor_network)
    SyncWeights({"policy": "my_policy"}, max_unchanged_publishes=3).register(trainer)
    batches = 0

    def move() -> None:
        nonlocal batches
        batches += 1
        if batches == 8:
            with torch.no_grad():
                next(trainer.my_policy.parameters()).add_(1)

    trainer.register_op("pre_optim_steps", move)
    assert len(told(trainer.train)) == 2


# ------------------------------------------------------------------------------- what is not told of


def by_fused_steps(trainer: Trainer) -> str:
    """Autograd's write counters do not see them."""
    step_with(trainer, adam(trainer.loss_module.parameters(), fused=True))
    return ACTOR


def by_writes_through_data(trainer: Trainer) -> str:
    """A slow copy, updated as many scripts do; autograd's write counters do not see it."""
    trainer.slow = copy.deepcopy(trainer.loss_module.actor_network)
    fast = trainer.loss_module.actor_network

    def follow() -> None:
        for mine, theirs in zip(trainer.slow.parameters(), fast.parameters(), strict=True):
            mine.data.mul_(0.9).add_(0.1 * theirs.data)

    trainer.register_op("post_optim", follow)
    return "slow"


def by_assigned_tensors(trainer: Trainer) -> str:
    """Other tensors in their place, with a write counter that begins at the same number."""
    trainer.slow = copy.deepcopy(trainer.loss_module.actor_network)
    fast = trainer.loss_module.actor_network
    held: list[object] = []

    def assign() -> None:
        held.append(list(trainer.slow.parameters()))  # so that no memory is used again
        state = {name: tensor.clone() for name, tensor in fast.state_dict().items()}
        trainer.slow.load_state_dict(state, assign=True)

    trainer.register_op("post_optim", assign)
    return "slow"


def by_a_learning_rate_of_zero(trainer: Trainer) -> str:
    """A step that changes no number is a step, as in the beginning of a warm-up."""
    optimizer = torch.optim.SGD(trainer.loss_module.parameters(), lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    step_with(trainer, optimizer)
    return ACTOR


def not_at_all_because_frozen(trainer: Trainer) -> str:
    trainer.slow = copy.deepcopy(trainer.loss_module.actor_network).requires_grad_(False)
    return "slow"


def not_at_all_because_only_the_critic_learns(trainer: Trainer) -> str:
    """The optimizer holds the policy, whose loss is left out for now."""
    trainer.optimization_stepper = DefaultOptimizationStepper(["loss_critic"])
    return ACTOR


def not_at_all_because_constant(trainer: Trainer) -> str:
    """Buffers, such as the statistics that normalise observations."""
    # TorchRL's hook feeds the policy: one that feeds something else may not replace it.
    trainers.remove_stock_update_weights(trainer, trainers.stock_update_weights(trainer))
    trainer.slow = nn.BatchNorm1d(4, affine=False)
    trainer.collector.norm = nn.BatchNorm1d(4, affine=False).eval()
    return "slow"


MEANT = [
    by_fused_steps,
    by_writes_through_data,
    by_assigned_tensors,
    by_a_learning_rate_of_zero,
    not_at_all_because_frozen,
    not_at_all_because_only_the_critic_learns,
    not_at_all_because_constant,
]


@pytest.mark.one_case
@pytest.mark.parametrize("moves", MEANT, ids=lambda moves: moves.__name__)
@pytest.mark.seconds
def test_nothing_is_told_of_weights_that_move(moves: Callable[[Trainer], str]) -> None:
    trainer = make_trainer(batches=9)
    source = moves(trainer)
    destination = "norm" if moves is not_at_all_because_constant else "policy"
    hook = SyncWeights({destination: source}, max_unchanged_publishes=2)
    hook.register(trainer)
    assert told(trainer.train) == []
    assert len(hook.receipts) == 10


def test_nothing_is_told_of_publishes_without_optimizer_steps_between_them() -> None:
    trainer = make_trainer()
    hook = SyncWeights({"policy": ACTOR}, max_unchanged_publishes=2)
    hook.register(trainer)
    assert told(lambda: [hook.publish() for _ in range(20)]) == []
    trainer.collector.init_random_frames = 100 * FRAMES_PER_BATCH
    assert told(trainer.train) == []
    assert len(hook.receipts) == 33


def test_nothing_is_told_of_a_target_network_that_is_updated_rarely() -> None:
    actor = make_q_policy()
    collector = make_collector(copy.deepcopy(actor))
    trainer = make_dqn_trainer(collector, actor, total_frames=8 * FRAMES_PER_BATCH)
    target = "loss_module.target_value_network_params"
    SyncWeights({"policy": target}, Every(1, "optim_steps"), max_unchanged_publishes=2).register(trainer)
    assert told(trainer.train) == []


STOCK = {
    "ppo": (make_ppo_trainer, make_policy, ACTOR, {}),
    "a2c": (make_a2c_trainer, make_policy, ACTOR, {}),
    "dqn": (make_dqn_trainer, make_q_policy, "loss_module.value_network", {}),
    "sac": (make_sac_trainer, make_continuous_policy, ACTOR, {"env": make_continuous_env}),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("when", [Every(1, "batches"), Every(1, "optim_steps")], ids=str)
@pytest.mark.parametrize("shared", [True, False])
def test_nothing_is_told_of_a_stock_trainer(name: str, when: Every, shared: bool) -> None:
    make, make_actor, source, env = STOCK[name]
    actor = make_actor()
    collector = make_collector(actor if shared else copy.deepcopy(actor), **env)
    trainer = make(collector, actor, total_frames=5 * FRAMES_PER_BATCH)
    hook = SyncWeights({"policy": source}, when, max_unchanged_publishes=2)
    hook.register(trainer)
    assert (hook.plan.unheld, hook.plan.unsent) == ((), ())
    assert told(trainer.train) == []
    assert len(hook.receipts) > 4


def make_small_ppo() -> Trainer:
    config = small_ppo()
    config.recipe.total_frames = 12 * config.collector.frames_per_batch
    return ppo.RECIPE.build(config)


def make_small_dqn() -> Trainer:
    config = small_dqn(WhenConfig(every=6, unit="optim_steps"))
    config.recipe.total_frames = 12 * config.collector.frames_per_batch
    return dqn.RECIPE.build(config)


def make_small_impala() -> Trainer:
    return impala_recipe.RECIPE.build(small_impala())


def make_small_laser() -> Trainer:
    return impala_recipe.RECIPE.build(small_impala(replay=LASER))


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("make", [make_small_ppo, make_small_dqn, make_small_impala, make_small_laser])
def test_nothing_is_told_of_a_recipe(make: Callable[[], Trainer]) -> None:
    trainer = make()
    try:
        (hook,) = (m for m in registered_modules(trainer) if isinstance(m, SyncWeights))
        assert (hook.plan.unheld, hook.plan.unsent) == ((), ())
        assert told(trainer.train) == []
        assert len(hook.receipts) > 10
    finally:
        trainer.shutdown()

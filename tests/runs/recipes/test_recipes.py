"""The recipes: stock trainers on a board, and the values they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.trainers import Trainer

from rlsync import SyncWeights
from rlsync.core.errors import ConfigError
from rlsync.core.plan import Verdict
from rlsync.runs.recipes import dqn, ppo
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.hooks.steering import EpisodeReturns
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    PPOConfig,
    RouteConfig,
    SyncConfig,
    WhenConfig,
)
from rlsync.runs.recipes.sync_settings import sync_map, trigger
from rlsync.torchrl_plugin.compat.trainers import registered_modules


def small_ppo(*, workers: int = 2, batch: int = 128, **changes: Any) -> Config:
    """Four batches."""
    recipe = PPOConfig(total_frames=4 * batch, batch_size=batch // 2, num_epochs=2, hidden=[16])
    collector = CollectorConfig(num_workers=workers, frames_per_batch=batch)
    return Config(recipe=recipe, collector=collector, **changes)


def small_dqn(when: WhenConfig, *, workers: int = 2, batch: int = 64, **changes: Any) -> Config:
    """Four batches, and six updates after each."""
    recipe = DQNConfig(
        total_frames=4 * batch,
        batch_size=32,
        pace=PaceConfig(ratio=6 / batch, prefill=0),
        epsilon_frames=4 * batch,
        hidden=[16],
    )
    routes = [
        RouteConfig("policy.module[0]", "loss_module.value_network"),
        RouteConfig("policy.module[1]", "greedy_module"),
    ]
    return Config(
        recipe=recipe,
        collector=CollectorConfig(num_workers=workers, frames_per_batch=batch),
        sync=SyncConfig(map=routes, when=when),
        **changes,
    )


def hook_of(trainer: Trainer) -> SyncWeights:
    (hook,) = (m for m in registered_modules(trainer) if isinstance(m, SyncWeights))
    return hook


def trained(trainer: Trainer, look: Callable[[TensorDict], None] | None = None) -> SyncWeights:
    """Train to the end, looking at every batch, and return the hook."""
    if look is not None:
        trainer.register_op("batch_process", look)
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    return hook_of(trainer)


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("section", "key", "value", "cure"),
    [
        ("recipe", "lr", 0.0, "give a finite number > 0"),
        ("recipe", "gamma", 1.5, "give a number >= 0 and <= 1"),
        ("recipe", "entropy_coeff", -0.1, "give a number >= 0"),
        ("recipe", "initial_log_scale", -6.0, "give a number >= -5 and <= 2"),
        ("collector", "num_workers", -1, "give a number >= 0 and <= 1000"),
        ("collector", "lag", -1, "give a number >= 0, or null"),
        ("collector", "adopt", "alais", "did you mean 'alias'? give one of alias, copy"),
        ("logger", "kind", "cvs", "did you mean 'csv'? give one of csv, tensorboard, wandb, none"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_key_and_what_it_accepts(
    section: str, key: str, value: object, cure: str
) -> None:
    config = Config()
    setattr(getattr(config, section), key, value)
    with pytest.raises(ConfigError) as refused:
        check(config)
    assert refused.value.where == f"{section}.{key}"
    assert refused.value.cure == cure
    assert repr(value) in refused.value.what


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (WhenConfig(every=None), "nothing says when"),
        (WhenConfig(every=1, unit="batchs"), "no unit 'batchs'"),
        (WhenConfig(every=0), "positive whole number"),
        (WhenConfig(every=1, steps_ahead=-1), "steps ahead"),
    ],
)
def test_a_trigger_that_cannot_be_is_refused_under_its_key(when: WhenConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        trigger(when)
    assert refused.value.where.startswith("sync.when")


def test_a_count_and_steps_ahead_make_a_trigger_that_fires_on_either() -> None:
    both = trigger(WhenConfig(every=10, unit="seconds", steps_ahead=50))
    assert both.units() == {"seconds", "optim_steps"}
    assert trigger(WhenConfig(every=None, steps_ahead=50)).units() == {"optim_steps"}


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ([], "empty"),
        ([RouteConfig("policy", "")], "no source"),
        ([RouteConfig("", "loss_module")], "no destination"),
        ([RouteConfig("policy", "a"), RouteConfig("policy", "b")], "two entries"),
        ([RouteConfig("policy", "a", "bfloat61")], "no dtype 'bfloat61'"),
    ],
)
def test_a_sync_map_that_says_nothing_or_too_much_is_refused(routes: list[RouteConfig], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sync_map(SyncConfig(map=routes))


def test_a_recipe_that_is_given_the_settings_of_another_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes the settings PPOConfig, got DQNConfig"):
        ppo.RECIPE.build(Config(recipe=DQNConfig()))
    with pytest.raises(ConfigError, match="takes the settings DQNConfig, got PPOConfig"):
        dqn.RECIPE.build(Config(recipe=PPOConfig()))


@pytest.mark.usefixtures("fork_workers")
def test_a_bad_sync_map_leaves_no_worker_behind() -> None:
    config = small_ppo()
    config.sync.map = [RouteConfig("polcy", "loss_module.actor_network")]
    with pytest.raises(Exception, match="no destination 'polcy'"):
        ppo.RECIPE.build(config)


# ------------------------------------------------------------------------------------- returns


def episode(*, ends: list[bool], sums: list[float]) -> TensorDict:
    """Steps, of which some end an episode, with its return."""
    told = {"episode_return": torch.tensor(sums), "episode_length": torch.tensor(ends).long()}
    return TensorDict({"collector": TensorDict(told, [len(ends)])}, [len(ends)])


class Stoppable:
    """As much of a trainer as EpisodeReturns needs."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def register_op(self, stage: str, op: object) -> None:
        assert stage == "post_steps_log"

    def register_module(self, name: str, module: object) -> None:
        assert name == "episode_returns"

    def request_stop(self, reason: str) -> None:
        self.reason = reason


def test_only_finished_episodes_make_the_mean_and_only_a_full_window_stops() -> None:
    returns, trainer = EpisodeReturns(target=100.0, episodes=2), Stoppable()
    returns.register(trainer)  # type: ignore[arg-type]
    assert returns(episode(ends=[False], sums=[999.0])) is None
    assert math.isnan(returns.mean)
    assert returns(episode(ends=[True, False], sums=[120.0, 999.0])) == {
        "return": 120.0,
        "episodes": 1,
    }
    assert trainer.reason is None, "one episode of two"
    returns(episode(ends=[True], sums=[90.0]))
    assert trainer.reason is not None
    assert returns.reached


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_return_that_is_not_a_number_reaches_no_target(odd: float) -> None:
    returns, trainer = EpisodeReturns(target=100.0, episodes=2), Stoppable()
    returns.register(trainer)  # type: ignore[arg-type]
    returns(episode(ends=[True, True], sums=[200.0, odd]))
    assert not math.isfinite(returns.mean)
    assert trainer.reason is None
    returns(episode(ends=[True, True], sums=[200.0, 200.0]))
    assert returns.reached, "it has left the window"


def test_the_newest_returns_survive_a_checkpoint() -> None:
    before, after = EpisodeReturns(episodes=2), EpisodeReturns(episodes=2)
    before.newest.extend([1.0, 3.0])
    before.finished = 7
    after.load_state_dict(before.state_dict())
    assert (after.mean, after.finished) == (2.0, 7)


# ------------------------------------------------------------------------------------ training


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("adopt", ["alias", "copy"])
@pytest.mark.one_case
def test_ppo_publishes_once_a_batch_and_in_lockstep_every_frame_is_made_by_the_newest_version(
    adopt: str,
) -> None:
    config = small_ppo(batch=32)
    config.collector.adopt, config.collector.lag = adopt, 0
    seen: list[set[int]] = []
    trainer = ppo.RECIPE.build(config)
    hook = hook_of(trainer)
    expected: list[int] = []

    def look(batch: TensorDict) -> None:
        seen.append(set(batch["policy_version"].flatten().tolist()))
        expected.append(hook.version)

    trained(trainer, look)
    assert seen == [{version} for version in expected]
    assert [r.reason for r in hook.receipts] == ["start", *["trigger"] * 4]
    assert all(r.copied_leaves == 4 for r in hook.receipts), "two layers, weight and bias"


@pytest.mark.usefixtures("fork_workers")
def test_dqn_sends_the_q_network_and_the_exploration_rate_at_the_configured_interval() -> None:
    trainer = dqn.RECIPE.build(small_dqn(WhenConfig(every=4, unit="optim_steps"), workers=1, batch=32))
    routes = {str(route) for route in hook_of(trainer).plan.routes}
    assert routes == {
        "policy.module[0] <- loss_module.value_network",
        "policy.module[1] <- greedy_module",
    }
    hook = trained(trainer)
    # 4 batches of 6 optimizer steps are 24 steps, a publish at every fourth.
    due = [r.optim_steps for r in hook.receipts if r.reason == "trigger"]
    assert due == [4, 8, 12, 16, 20, 24]


@pytest.mark.usefixtures("fork_workers")
def test_dqn_explores_less_and_less() -> None:
    trainer = dqn.RECIPE.build(small_dqn(WhenConfig(), workers=1, batch=32))
    before = float(trainer.greedy_module.eps)
    trained(trainer)
    assert before == 1.0
    assert float(trainer.greedy_module.eps) == pytest.approx(0.04, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.thorough
def test_dqn_learns_cartpole() -> None:
    config = small_dqn(WhenConfig(every=4, unit="optim_steps"))
    config.recipe = DQNConfig(total_frames=12_000, target_return=100.0)
    config.collector.frames_per_batch = 128
    trainer = dqn.RECIPE.build(config)
    trained(trainer)
    (returns,) = (m for m in registered_modules(trainer) if isinstance(m, EpisodeReturns))
    assert returns.mean >= 100, "a random policy gets 22"


@pytest.mark.processes
def test_a_checkpoint_brings_the_learners_random_numbers_back(tmp_path: Path) -> None:
    trained(ppo.RECIPE.build(small_ppo(run_dir=str(tmp_path), workers=1, batch=32)))
    drawn = torch.rand(8)
    assert not torch.equal(torch.rand(8), drawn)
    resumed = ppo.RECIPE.build(small_ppo(seed=1, workers=1, batch=32))
    try:
        resumed.load_from_file(tmp_path / CHECKPOINT)
        assert torch.equal(torch.rand(8), drawn)
    finally:
        resumed.shutdown()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("build", "routes"),
    [
        (
            lambda config: ppo.RECIPE.build(config),
            [RouteConfig("policy", "loss_module.actor_network", "bfloat16")],
        ),
        (
            dqn.RECIPE.build,
            [
                RouteConfig("policy.module[0]", "loss_module.value_network", "bfloat16"),
                RouteConfig("policy.module[1]", "greedy_module"),
            ],
        ),
    ],
    ids=["ppo", "dqn"],
)
@pytest.mark.one_case
def test_an_entry_with_a_dtype_makes_workers_act_and_receive_in_it(
    build: Callable[[Config], Trainer], routes: list[RouteConfig]
) -> None:
    few = {"workers": 1, "batch": 32}
    when = WhenConfig(every=3, unit="optim_steps")
    config = small_ppo(**few) if len(routes) == 1 else small_dqn(when, **few)
    trainer = build(config)
    full_bytes = hook_of(trainer).plan.payload_bytes
    trainer.shutdown()
    config.sync.map = routes
    trainer = build(config)
    cast = [row for row in hook_of(trainer).plan.rows if row.verdict is Verdict.CAST]
    greedy_bytes = sum(row.payload_bytes for row in hook_of(trainer).plan.rows if row not in cast)
    assert sum(row.payload_bytes for row in cast) == (full_bytes - greedy_bytes) // 2
    hook = trained(trainer)
    assert hook.version > 2
    assert hook.receipts[-1].cast_leaves == len(cast) > 3

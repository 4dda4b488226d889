"""One kind of worker for all recipes: with a lag a run is a function of its seed, and needs no process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer

from rlsync.record.schedule import Life, compared
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.ppo import PPOConfig
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.settings import Config
from rlsync.runs.recipes.spaces import DISCRETE
from rlsync.runs.recipes.sync_settings import WhenConfig
from tests.laws.test_rerun import forked, slowed, trained
from tests.runs.recipes.test_off_policy import parameters, small
from tests.runs.recipes.test_recipes import hook_of, small_ppo
from tests.tools.parts import undecided
from tests.tools.processes import child_pids

__all__ = ["forked"]  # a fixture

pytestmark = pytest.mark.processes

BATCH, BATCHES = 24, 6


def config_of(
    name: str, folder: Path, *, lag: int | None, workers: int = 2, seed: int = 1, **keys: Any
) -> Config:
    """Six batches from two environments of each worker; the first two are a prefill, if there is one."""
    if name.startswith("ppo"):
        config = small_ppo(workers=workers, batch=BATCH)
        config.recipe.model.lstm = 4 if name == "ppo-lstm" else 0
        config.recipe.total_frames, config.recipe.compile = BATCH * BATCHES, "off"
    else:
        options = {"pace": PaceConfig(ratio=0.25, prefill=2 * BATCH), "total_frames": BATCH * BATCHES, **keys}
        config = small(name, workers=workers, batch=BATCH, **options)
    config.env.num_envs, config.collector.lag, config.sync.digest_every = 2, lag, 1
    config.run_dir, config.seed = str(folder), seed
    return config


def life_of(config: Config, begun: Callable[[Trainer], object] = bool) -> Life:
    return trained(recipe_of(config), config, begun=begun)


def same(one: Life, other: Life) -> bool:
    """Whether both published the same weights, each time."""
    found = compared(one, other)
    assert len(one.digests) == len(other.digests) > BATCHES
    return found.unequal == 0 and found.equal == len(one.digests)


# ------------------------------------------------------------------------------------------- one lag


@pytest.mark.parametrize("name", ["ppo", "dqn"])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.one_case
def test_with_a_lag_a_run_is_a_function_of_its_seed_whichever_worker_is_slow(
    name: str, lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = life_of(config_of(name, tmp_path / "one", lag=lag))
    for slow in (0, 1):
        with monkeypatch.context() as patch:
            slowed(patch, slow)
            again = life_of(config_of(name, tmp_path / f"slow {slow}", lag=lag))
        assert same(one, again), f"worker {slow} is slow"
        acted = [[(r.worker, r.number, r.version) for r in life.rollouts] for life in (one, again)]
        assert acted[0] == acted[1]
    assert not same(one, life_of(config_of(name, tmp_path / "other", lag=lag, seed=2)))


@pytest.mark.parametrize("lag", [0, 1, 2, 9])
@pytest.mark.parametrize(
    "when", [WhenConfig(), WhenConfig(every=5, unit="optim_steps")], ids=["batches", "steps"]
)
@pytest.mark.one_case
def test_a_rollout_acts_with_what_was_the_newest_after_the_batch_that_its_lag_names(
    when: WhenConfig, lag: int, tmp_path: Path
) -> None:
    config = config_of("ppo", tmp_path, lag=lag)
    config.sync.when = when
    stamps: list[set[int]] = []
    newest: list[int] = []  # before the first batch, and after each

    def watch(trainer: Trainer) -> None:
        hook = hook_of(trainer)

        def look(batch: TensorDictBase) -> None:
            if not newest:
                newest.append(hook.version)
            stamps.append(set(batch["policy_version"].flatten().tolist()))

        trainer.register_op("batch_process", look)
        trainer.register_op("post_steps", lambda: newest.append(hook.version))

    life = life_of(config, watch)
    assert len(set(newest)) > 3
    assert stamps == [{newest[max(0, number - lag)]} for number in range(BATCHES)]
    order = [(rollout.number, rollout.worker) for rollout in life.rollouts]
    assert order == [(number, worker) for number in range(BATCHES) for worker in range(2)]


# -------------------------------------------------------------------------------- without a process


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ppo", {}),
        ("ppo-lstm", {}),
        ("dqn", {"prioritized": True, "n_step": 3}),
        ("sac", {}),
        ("td3", {}),
    ],
    ids=["ppo", "ppo-lstm", "dqn", "sac", "td3"],
)
@pytest.mark.one_case
def test_without_a_worker_process_a_run_is_that_of_one_worker_with_a_lag_of_0(
    name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    before, children = child_pids(), []

    def watch(trainer: Trainer) -> None:
        trainer.register_op("post_steps", lambda: children.append(child_pids()))

    alone = life_of(config_of(name, tmp_path / "0", lag=1, workers=0, **keys), watch)
    assert children == [before] * BATCHES
    assert same(alone, life_of(config_of(name, tmp_path / "1", lag=0, workers=1, **keys)))
    assert not same(alone, life_of(config_of(name, tmp_path / "2", lag=1, workers=1, **keys)))


def drawn() -> tuple[Any, ...]:
    """The next random numbers of Python, numpy and torch, which stay the next ones."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    numbers = random.random(), np.random.rand(), float(torch.rand(()))
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return numbers


def test_what_acts_in_the_learners_process_draws_numbers_of_its_own() -> None:
    """This environment's rewards are numpy's global random numbers, from its second episode on."""

    def rewards(draws: int, workers: int) -> list[float]:
        env = EnvConfig(f"{undecided.MODULE}:Global-v0").spec()
        player = UniformPlayer(DISCRETE.probe(EnvConfig("CartPole-v1")).player_actions(), (4,))
        settings = CollectSettings(steps=30, envs_per_worker=1, start_method="fork", transitions=True, seed=3)
        collector, found = UnrollCollector(player, env, settings, num_workers=workers), []
        try:
            for _, batch in zip(range(4), collector, strict=False):
                found += batch["next", "reward"].flatten().tolist()
                np.random.rand(draws)
        finally:
            collector.shutdown()
        return found

    before = drawn()
    alone = rewards(0, workers=0)
    assert drawn() == before
    assert len(set(alone)) > 50
    assert rewards(5, workers=0) == alone, "whatever the learner draws meanwhile"
    assert rewards(0, workers=1) == alone


# ---------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_advantages_of_one_pass_are_those_of_torchrls_two(num_envs: int) -> None:
    env, steps = EnvConfig("CartPole-v1", num_envs, {"max_episode_steps": 16}), 7
    spaces = DISCRETE.probe(env)
    torch.manual_seed(0)
    loss = ppo.make_loss(PPOConfig(hidden=[16]), spaces)
    critic = loss.critic_network
    gae = GAE(gamma=0.97, lmbda=0.8, value_network=critic, average_gae=False, shifted=False)
    ours = ppo.Advantages(critic, 0.97, 0.8)
    settings = CollectSettings(steps=steps, envs_per_worker=num_envs, seed=0, transitions=True)
    player = ppo.player_of(loss.actor_network, spaces)
    collector = UnrollCollector(player, env.spec(), settings, num_workers=0)
    ends: Counter[str] = Counter()
    try:
        for _, batch in zip(range(300), collector, strict=False):
            theirs = gae(batch.clone())
            found = ours(batch)
            for name in ("advantage", "value_target"):
                torch.testing.assert_close(found[name], theirs[name], rtol=1e-5, atol=1e-5)
            for kind in ("terminated", "truncated"):
                over = batch["next", kind].squeeze(-1)
                ends[f"{kind} in the middle"] += int(over[:, :-1].sum())
                ends[f"{kind} at the end"] += int(over[:, -1].sum())
            ends["goes on"] += int((~batch["next", "done"][:, -1]).sum())
    finally:
        collector.shutdown()
    assert len(ends) == 5
    assert min(ends.values()) > 0, ends


@pytest.mark.parametrize("name", ["ppo", "ppo-lstm"])
def test_each_pass_over_a_batch_has_the_same_value_targets(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path, lag=0, workers=0)
    targets: list[torch.Tensor] = []

    def watch(trainer: Trainer) -> None:
        trainer.register_op("process_optim_batch", keep)

    def keep(minibatch: TensorDictBase) -> TensorDictBase:
        targets.append(minibatch["value_target"].flatten())
        return minibatch

    life_of(config, watch)
    passes = torch.cat(targets).view(BATCHES, config.recipe.num_epochs, BATCH).sort(-1).values
    assert config.recipe.num_epochs > 1
    assert torch.equal(passes, passes[:, :1].expand_as(passes))


# --------------------------------------------------------------------------------- all that come together


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac", "td3", "crossq"])
@pytest.mark.parametrize("lag", [0, 1, None])
@pytest.mark.one_case
def test_a_recipe_trains_in_several_environments_with_limits_of_time_and_cast_weights(
    name: str, lag: int | None, tmp_path: Path
) -> None:
    """A truncated step leads to the last observation of its episode, and not to the first of the next one."""
    config = config_of(name, tmp_path, lag=lag)
    config.env.num_envs, config.env.kwargs = 3, {"max_episode_steps": 7}
    config.collector.frames_per_batch, config.recipe.total_frames = 60, 300
    config.sync.map = [replace(route, dtype="bfloat16") for route in config.sync.map[:1]] + config.sync.map[
        1:
    ]
    before: list[torch.Tensor] = []
    trainers: list[Trainer] = []
    limited = 0

    def watch(trainer: Trainer) -> None:
        trainers.append(trainer)
        before.extend(parameter.detach().clone() for parameter in trainer.loss_module.parameters())
        trainer.register_op("batch_process", look)

    def look(batch: TensorDictBase) -> None:
        nonlocal limited
        assert batch.batch_size == (6, 10)
        after, over = batch["next", "observation"][:, :-1], batch["next", "truncated"][:, :-1, 0]
        apart = (after != batch["observation"][:, 1:]).any(-1)
        assert torch.equal(apart, over)
        limited += int(over.sum())

    life_of(config, watch)
    (trainer,) = trainers
    assert limited >= 5 * 6 * 1
    assert trainer.collected_frames == 300
    trained_now = [
        not torch.equal(*pair) for pair in zip(before, trainer.loss_module.parameters(), strict=True)
    ]
    assert any(trained_now)
    assert hook_of(trainer).receipts[-1].cast_leaves > 3
    if name != "ppo":
        assert parameters(trainer, name).keys() != set()
        assert trainer.replay_buffer[:]["observation"].isfinite().all()

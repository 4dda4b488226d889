"""Observations and rewards in units of their spread: a version has the statistics it was published with."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from rlsync import VerifySync
from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.observations import like
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.intake import RolloutId
from rlsync.runs.evaluation.checkpoint import load, load_best
from rlsync.runs.evaluation.play import Score, play
from rlsync.runs.evaluation.process import best_in
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.evaluating import APART, acting_of
from rlsync.runs.recipes.normalize import Moments, Normalize, NormalizeOnPolicy, Standardize
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.run_files import BEST, CHECKPOINT, EVALUATIONS, RECEIPTS
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ModelConfig,
    NormalizeConfig,
    OnPolicyModelConfig,
    OnPolicyNormalizeConfig,
    PPOConfig,
)
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes import test_off_policy
from tests.runs.recipes.test_off_policy import built
from tests.runs.recipes.test_recipes import hook_of, trained
from tests.tools.parts import wait_until
from tests.tools.parts.space_envs import HINTED, PARTS

BOTH = NormalizeConfig(observations=True, rewards=True)
BOTH_ON_POLICY = OnPolicyNormalizeConfig(observations=True, rewards=True)
ON_POLICY = {"ppo": "CartPole-v1", "ppo, numbers": "Pendulum-v1"}
every_recipe = pytest.mark.parametrize("name", ["dqn", "sac", "td3", *ON_POLICY])
#: The part of each loss that the workers act with.
SOURCE: dict[str, Callable[[LossModule], torch.nn.Module]] = {
    "dqn": lambda loss: loss.value_network,
    "sac": lambda loss: loss.actor_network,
    "td3": lambda loss: loss.actor_network,
    **dict.fromkeys(ON_POLICY, lambda loss: loss.actor_network),
}


def small(
    name: str,
    *,
    workers: int = 2,
    batch: int = 64,
    lag: int | None = 1,
    num_envs: int = 1,
    run_dir: Path | None = None,
    **keys: Any,
) -> Config:
    """A recipe that normalises: four batches, of which the first is the prefill, if there is one."""
    if name not in ON_POLICY:
        sizes = {"workers": workers, "batch": batch, "lag": lag, "num_envs": num_envs, "run_dir": run_dir}
        return test_off_policy.small(name, **sizes, **{"normalize": BOTH, **keys})
    sizes = {"total_frames": 4 * batch, "batch_size": 16, "hidden": [16], "num_epochs": 2, "compile": "off"}
    return Config(
        env=EnvConfig(ON_POLICY[name], num_envs),
        recipe=PPOConfig(**{**sizes, "normalize": BOTH_ON_POLICY, **keys}),
        collector=CollectorConfig(workers, frames_per_batch=batch, lag=lag),
        run_dir=None if run_dir is None else str(run_dir),
    )


def tiny(name: str, **keys: Any) -> Config:
    return small(name, workers=1, batch=32, **keys)


def normalize_of(trainer: Trainer) -> Normalize | NormalizeOnPolicy:
    hooks = [m for m in registered_modules(trainer) if isinstance(m, (Normalize, NormalizeOnPolicy))]
    (hook,) = hooks
    return hook


def statistics_in(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every mean and spread that a module holds, by its full name."""
    named = module.state_dict().items()
    return {name: leaf.clone() for name, leaf in named if ".observations." in name or ".pixels." in name}


def test_moments_are_those_of_all_rows_however_they_were_split() -> None:
    rows = 1e4 + torch.randn(1000, 3, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1])
    seen = Moments(3)
    for part in rows.split([1, 400, 0, 599]):
        seen.add(part.reshape(1, -1, 3))
    assert seen.count == 1000
    torch.testing.assert_close(seen.mean, rows.mean(0))
    torch.testing.assert_close(seen.variance, rows.var(0, correction=0))
    again = Moments(3)
    again.load_state_dict(seen.state_dict())
    again.add(rows)
    torch.testing.assert_close(again.variance, rows.var(0, correction=0))


@pytest.mark.thorough
@every_recipe
@pytest.mark.usefixtures("fork_workers")
def test_every_network_of_the_learner_has_the_statistics_of_all_collected_frames(name: str) -> None:
    trainer = built(small(name))
    seen: list[torch.Tensor] = []
    trained(trainer, lambda batch: seen.append(batch["observation"].flatten(0, 1).clone()))
    rows = torch.cat(seen).double()
    held = statistics_in(trainer.loss_module)
    # actors, critics, and the targets of both
    networks = {"dqn": 2, "sac": 3, "td3": 4}.get(name, 2)
    assert len({key.split(".")[0] for key in held if "target" in key or "_params" in key}) >= networks
    for key, leaf in held.items():
        meant = rows.mean(0) if key.endswith("mean") else rows.std(0, correction=0)
        torch.testing.assert_close(leaf, meant.float().expand(leaf.shape))
    assert normalize_of(trainer).observations.count == 256


#: With these, workers do what the networks say.
WITHOUT_NOISE = {"dqn": {"epsilon_start": 0.0, "epsilon_end": 0.0}, "td3": {"exploration_noise": 0.0}}


@pytest.mark.parametrize(("name", "lag"), [("dqn", 0), ("dqn", 1), ("td3", 1)])
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_what_acts_has_the_statistics_of_the_version_that_it_is_stamped_with(name: str, lag: int) -> None:
    pace = PaceConfig(ratio=0.1, prefill=32)
    trainer = built(small(name, lag=lag, batch=32, pace=pace, **WITHOUT_NOISE[name]))
    hook, source = hook_of(trainer), SOURCE[name](trainer.loss_module)
    published: dict[int, torch.nn.Module] = {}
    random: set[int] = set()  # the versions with which actions are random

    def keep() -> None:
        published[hook.version] = copy.deepcopy(source)
        if trainer.collector.prefill.random:
            random.add(hook.version)

    trainer.register_op("setup", keep)
    trainer.register_op("post_steps", keep)
    batches: list[TensorDict] = []
    trained(trainer, lambda batch: batches.append(batch.clone()))
    frames = torch.cat([batch.reshape(-1) for batch in batches])
    stamps = frames["policy_version"]
    (first,) = random
    others = 0
    for of, module in published.items():
        with torch.no_grad():
            said = module(TensorDict({"observation": frames["observation"]}, frames.shape))["action"]
        equal = torch.isclose(said.float(), frames["action"].float(), rtol=1e-4, atol=1e-5).all(-1)
        acted = stamps > first
        assert bool(equal[acted & (stamps == of)].all())
        others += int((~equal[acted & (stamps != of)]).sum())
    assert len(set(stamps.tolist())) > 2
    assert others, "another version says something else, so the comparison can fail"


#: By the case: the recipe, what its environment shows, and how many of its networks hold statistics.
SIGHTED = {
    "ppo, a picture": ("ppo", PARTS["picture"], 1),
    "ppo, all": ("ppo", f"speed,{PARTS['picture and mask']}", 1),
    "dqn, a picture and numbers": ("dqn", PARTS["picture and numbers"], 2),
    "sac, a picture and numbers": ("sac", PARTS["picture and numbers"], 3),
}


def sighted(case: str, **sizes: Any) -> Config:
    """A recipe that normalises what an environment shows, pictures among it."""
    name, parts, _ = SIGHTED[case]
    model = (OnPolicyModelConfig if name == "ppo" else ModelConfig)(hidden=[8])
    config = small(name, model=model, **sizes)
    config.env = EnvConfig(HINTED, 2, {"parts": parts, "continuous": name == "sac"})
    return config


# ------------------------------------------------------------------------- batches that are learned from once


def log_probs(loss: LossModule, batch: TensorDict) -> torch.Tensor:
    """Of a batch's actions, by the loss as it is."""
    with torch.no_grad():
        return loss.actor_network.get_dist(batch.select("observation")).log_prob(batch["action"])


@pytest.mark.parametrize("name", [*ON_POLICY, *(case for case in SIGHTED if case.startswith("ppo"))])
@pytest.mark.usefixtures("fork_workers")
def test_without_a_lag_a_batch_is_scored_by_the_statistics_that_acted(name: str) -> None:
    """So the ratios of its first minibatch are one, but for rounding. Later versions would say otherwise."""
    make = sighted if name in SIGHTED else small
    trainer = built(make(name, lag=0, lr=0.01))
    loss = trainer.loss_module
    batches: list[TensorDict] = []
    means: list[torch.Tensor] = []

    def look(batch: TensorDict) -> None:
        held = statistics_in(loss.actor_network).items()
        of_parts = [leaf.flatten() for key, leaf in held if key.endswith("mean")]
        assert len(of_parts) == (2 if name == "ppo, all" else 1)
        before = torch.cat(of_parts)
        torch.testing.assert_close(log_probs(loss, batch), batch["action_log_prob"], rtol=1e-5, atol=1e-5)
        means.append(before)
        batches.append(batch.clone())

    trained(trainer, look)
    assert (len(batches), len({tuple(mean.tolist()) for mean in means})) == (4, 4)
    assert means[0].tolist() == [0.0] * len(means[0]), "the first version does not normalise"
    assert all((log_probs(loss, batch) - batch["action_log_prob"]).abs().max() > 1e-3 for batch in batches)


@pytest.mark.parametrize("lag", [0, 1, None])
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_frames_were_drawn_with_the_statistics_of_their_version_and_outputs_are_proven(
    lag: int | None,
) -> None:
    config = small("ppo, numbers", lag=lag, batch=32, total_frames=320, lr=0.01)
    config.sync.verify_every_s = 1e-6
    trainer = built(config)
    hook, source = hook_of(trainer), trainer.loss_module.actor_network
    (verify,) = (m for m in registered_modules(trainer) if isinstance(m, VerifySync))
    published: dict[int, torch.nn.Module] = {}
    batches: list[TensorDict] = []

    def keep() -> None:
        published[hook.version] = copy.deepcopy(source)

    trainer.register_op("setup", keep)
    trainer.register_op("post_steps", keep)
    trained(trainer, lambda batch: batches.append(batch.clone()))
    frames = torch.cat([batch.reshape(-1) for batch in batches])
    stamps = frames["policy_version"]
    others = 0
    for of, module in published.items():
        with torch.no_grad():
            said = module.get_dist(frames.select("observation")).log_prob(frames["action"])
        equal = torch.isclose(said, frames["action_log_prob"], rtol=1e-5, atol=1e-5)
        assert bool(equal[stamps == of].all())
        others += int((~equal[stamps != of]).sum())
    assert len(set(stamps.tolist())) > 2
    assert others, "another version says something else, so the comparison can fail"
    assert verify.deviations == []
    assert verify.behaviour_held is not None


def test_a_running_return_goes_on_in_the_next_rollout_of_its_worker_and_begins_with_an_episode() -> None:
    """Compared with a sum for each environment that is written down step by step."""
    dice, gamma, envs, steps = random.Random(0), 0.9, 2, 7
    hook = NormalizeOnPolicy(BOTH_ON_POLICY, like((1,)), gamma)
    lives, numbers = {0: 0, 1: 0}, {0: 0, 1: 0}
    sums = {worker: np.zeros(envs) for worker in lives}
    every: list[float] = []
    for batch in range(30):
        rollouts, rows, begins = [], [], []
        for worker in dice.sample([0, 1], 2):  # without a lag in any order
            init = np.array([[dice.random() < 0.2 for _ in range(steps)] for _ in range(envs)])
            if batch % 7 == 6 and worker:  # it was killed, and another one began
                lives[worker] += 1
                init[:, 0] = True
            if batch % 9 == 8:  # a rollout was dropped: what its rewards were is unknown
                numbers[worker] += 1
                sums[worker][:] = 0.0
            reward = np.array([[dice.uniform(-3, 1) for _ in range(steps)] for _ in range(envs)], np.float32)
            for step in range(steps):
                for env in range(envs):
                    before = 0.0 if init[env, step] else sums[worker][env]
                    sums[worker][env] = float(reward[env, step]) + gamma * before
                    every.append(sums[worker][env])
            rollouts.append(RolloutId(worker, lives[worker], numbers[worker]))
            numbers[worker] += 1
            rows.append(torch.from_numpy(reward))
            begins.append(torch.from_numpy(init))
        hook.returns.add(hook.running_returns(rollouts, torch.cat(rows), torch.cat(begins)))
    assert hook.returns.count == len(every) == 30 * 2 * envs * steps
    assert float(hook.returns.mean) == pytest.approx(np.mean(every))
    assert hook.reward_scale == pytest.approx(math.sqrt(np.var(every) + 1e-8))
    scaled = hook.scaled(torch.tensor([0.0, 1.0, -1e9]))
    assert scaled.tolist() == pytest.approx([0.0, 1 / hook.reward_scale, -10.0])


@pytest.mark.usefixtures("fork_workers")
def test_advantages_are_of_scaled_rewards_and_reported_returns_are_the_environments() -> None:
    """With next to no discount the value of a step is its reward."""
    config = small("ppo, numbers", gamma=1e-4, gae_lambda=0.5, num_envs=2)
    config.env.kwargs = {"max_episode_steps": 8}
    trainer = built(config)
    collected: list[torch.Tensor] = []
    returns: set[float] = set()
    looked = 0

    def look(batch: TensorDict) -> TensorDict:
        nonlocal looked
        collected.append(batch["next", "reward"].flatten().clone())
        returns.update(batch["collector", "episode_return"].flatten().tolist())
        spread = float(torch.cat(collected).std(correction=0))
        wanted = (batch["next", "reward"] / spread).clamp(-10, 10)
        torch.testing.assert_close(batch["value_target"], wanted, rtol=1e-3, atol=1e-3)
        assert torch.equal(batch["next", "reward"].flatten(), collected[-1])
        looked += 1
        return batch

    trainer.register_op("batch_process", look)
    trained(trainer)
    assert looked == 4
    assert min(returns) < -20, "of eight steps of Pendulum"


# --------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("case", SIGHTED)
@pytest.mark.usefixtures("fork_workers")
def test_pixels_are_normalised_by_every_eighth_step_and_numbers_beside_them_by_all(case: str) -> None:
    trainer = built(sighted(case))
    observations = trainer.collector.player.observations
    batches: list[torch.Tensor] = []
    trained(trainer, lambda batch: batches.append(batch["observation"].clone()))
    assert all(batch.shape[:2] == (4, 16) for batch in batches)
    rows = torch.cat(batches)
    parts = observations.split(rows)
    (camera,) = observations.pictures
    pixels = parts[camera.name][:, ::8].flatten(0, 1).double() / 255
    numbers = observations.numbers(rows).flatten(0, 1).double()
    expected = {
        "pixels.0.mean": pixels.mean(0),
        "pixels.0.variance": pixels.var(0, correction=0),
        "observations.mean": numbers.mean(0),
        "observations.std": numbers.std(0, correction=0),
    }
    compared: dict[str, set[int]] = {end: set() for end in expected}
    for name, leaf in trainer.loss_module.named_buffers():
        for end, value in expected.items():
            if name.endswith(f".{end}"):
                torch.testing.assert_close(leaf, value.float().expand(leaf.shape))
                compared[end].add(leaf.data_ptr())
    networks = SIGHTED[case][2]
    with_numbers = networks if numbers.numel() else 0
    assert list(map(len, compared.values())) == [networks, networks, with_numbers, with_numbers]


@pytest.mark.usefixtures("fork_workers")
def test_a_resumed_run_counts_pictures_on_and_a_policy_taken_out_sees_them_so(tmp_path: Path) -> None:
    config = sighted("ppo, all", workers=1, batch=32, run_dir=tmp_path)
    first = built(config)
    trained(first)
    loaded = acting_of(config, deterministic=True)
    load(tmp_path / CHECKPOINT, loaded)
    learned = statistics_in(SOURCE["ppo"](first.loss_module))
    acting = statistics_in(loaded.player.modules["policy"])
    assert learned.keys() == acting.keys()
    assert any(name.endswith("pixels.0.variance") for name in acting)
    assert all(torch.equal(leaf, learned[name]) for name, leaf in acting.items())

    again = built(sighted("ppo, all", workers=1, batch=32, total_frames=192))
    again.load_from_file(tmp_path / CHECKPOINT)
    before, after = (normalize_of(trainer).state_dict()["picture camera"] for trainer in (first, again))
    assert before["count"] == after["count"] == 128 / 8
    assert torch.equal(before["squares"], after["squares"])
    trained(again)
    assert normalize_of(again).state_dict()["picture camera"]["count"] == 192 / 8


# ------------------------------------------------------------------------------------------- replayed frames


@pytest.mark.usefixtures("fork_workers")
def test_rewards_are_learned_from_in_units_of_their_root_mean_square() -> None:
    trainer = built(tiny("sac", normalize=NormalizeConfig(rewards=True)))
    collected: list[torch.Tensor] = []
    drawn: list[tuple[float, float]] = []

    def look(batch: TensorDict) -> None:
        largest = max(float(rewards.abs().max()) for rewards in collected)
        scale = float(torch.cat(collected).square().mean().sqrt())
        drawn.append((float(batch["next", "reward"].abs().max()), largest / scale))

    trainer.register_op("process_optim_batch", look)
    trained(trainer, lambda batch: collected.append(batch["next", "reward"].flatten().clone()))
    assert drawn
    assert all(size <= most * 1.001 for size, most in drawn)
    assert max(size for size, _ in drawn) > 1.0
    stored = trainer.replay_buffer[:]["next", "reward"]
    assert float(stored.min()) == min(float(rewards.min()) for rewards in collected), "stored as they were"


def test_rewards_that_are_all_0_are_not_divided() -> None:
    hook = Normalize(NormalizeConfig(rewards=True), like((1,)))
    batch = TensorDict({"next": TensorDict({"reward": torch.zeros(4, 1)}, [4])}, [4])
    assert hook.scale(batch)["next", "reward"].tolist() == [[0.0]] * 4


@every_recipe
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_resumed_run_counts_on_and_an_evaluation_of_its_checkpoint_sees_the_same(
    name: str, tmp_path: Path
) -> None:
    config = tiny(name, run_dir=tmp_path)
    first = built(config)
    trained(first)
    loaded = acting_of(config, deterministic=True)
    load(tmp_path / CHECKPOINT, loaded)
    acting = loaded.player.modules["policy"]
    learned = statistics_in(SOURCE[name](first.loss_module))
    assert learned.keys() == statistics_in(acting).keys() != set()
    assert all(torch.equal(leaf, learned[key]) for key, leaf in statistics_in(acting).items())

    again = built(tiny(name, total_frames=192))
    again.load_from_file(tmp_path / CHECKPOINT)
    before, after = normalize_of(first), normalize_of(again)
    assert (after.observations.count, after.reward_scale) == (128, before.reward_scale)
    assert torch.equal(after.observations.variance, before.observations.variance)
    trained(again)
    assert after.observations.count == 192


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_statistics_in_half_precision_are_refused(name: str) -> None:
    config = small(name)
    config.sync.map = [replace(config.sync.map[0], dtype="bfloat16")]
    with pytest.raises(ConfigError, match="half precision would round"):
        check(config)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.one_case
@pytest.mark.parametrize("name", ["ppo, numbers", "sac"])
def test_the_evaluating_process_and_the_best_version_have_the_statistics(name: str, tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every_frames=32, episodes=2)
    config = tiny(
        name,
        run_dir=tmp_path,
        total_frames=100_000,
        target_return=-100_000.0,
        evaluation=evaluation,
    )
    trainer = built(config)
    # The learner is faster than the process starts: it waits for the first result, as long as that takes.
    trainer.register_op("post_steps", lambda: wait_until((tmp_path / EVALUATIONS).exists, 60.0))
    trained(trainer)
    kept = best_in(tmp_path / BEST)
    assert kept is not None
    assert any(".observations." in name for name in kept.weights)
    acting = acting_of(config, deterministic=True)
    load_best(tmp_path / BEST, tmp_path / RECEIPTS, acting)
    envs = make_venv(acting.env, 2)
    played = [episode for ended in play(acting.player, envs, 2, config.seed + APART) for episode in ended]
    envs.close()
    assert Score.of(played).return_mean == kept.return_mean, "these statistics made the best evaluation"


def test_an_observation_is_counted_in_spreads_from_its_mean_and_clipped() -> None:
    see = Standardize(2, clip=3.0)
    see.mean.copy_(torch.tensor([1.0, 0.0]))
    see.std.copy_(torch.tensor([2.0, 0.1]))
    assert see(torch.tensor([2.0, 5.0])).tolist() == [0.5, 3.0]

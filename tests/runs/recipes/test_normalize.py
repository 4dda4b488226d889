"""Observations and rewards in units of their spread: a version has the statistics it was published with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.evaluation.checkpoint import load, load_best
from rlsync.runs.evaluation.play import Score, play
from rlsync.runs.evaluation.process import best_in
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.evaluating import APART, acting_of
from rlsync.runs.recipes.replay.normalize import Moments, Normalize, NormalizeConfig, Standardize
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.run_files import BEST, CHECKPOINT, EVALUATIONS, RECEIPTS
from rlsync.runs.recipes.settings import EvaluationConfig
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes.test_off_policy import built, every_recipe, small, tiny
from tests.runs.recipes.test_recipes import hook_of, trained
from tests.tools.parts import wait_until

BOTH = NormalizeConfig(observations=True, rewards=True)
#: The part of each loss that the workers act with.
SOURCE: dict[str, Callable[[LossModule], torch.nn.Module]] = {
    "dqn": lambda loss: loss.value_network,
    "sac": lambda loss: loss.actor_network,
    "td3": lambda loss: loss.actor_network,
}


def normalize_of(trainer: Trainer) -> Normalize:
    (hook,) = (m for m in registered_modules(trainer) if isinstance(m, Normalize))
    return hook


def statistics_in(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every mean and spread that a module holds, by its full name."""
    return {name: leaf.clone() for name, leaf in module.state_dict().items() if ".observations." in name}


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
    trainer = built(small(name, normalize=BOTH))
    seen: list[torch.Tensor] = []
    trained(trainer, lambda batch: seen.append(batch["observation"].flatten(0, 1).clone()))
    rows = torch.cat(seen).double()
    held = statistics_in(trainer.loss_module)
    networks = {"dqn": 2, "sac": 3, "td3": 4}[name]  # actors, critics, and the targets of both
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
    trainer = built(small(name, lag=lag, batch=32, normalize=BOTH, pace=pace, **WITHOUT_NOISE[name]))
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
    hook = Normalize(NormalizeConfig(rewards=True), 1)
    batch = TensorDict({"next": TensorDict({"reward": torch.zeros(4, 1)}, [4])}, [4])
    assert hook.scale(batch)["next", "reward"].tolist() == [[0.0]] * 4


@every_recipe
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_resumed_run_counts_on_and_an_evaluation_of_its_checkpoint_sees_the_same(
    name: str, tmp_path: Path
) -> None:
    config = tiny(name, normalize=BOTH, run_dir=tmp_path)
    first = built(config)
    trained(first)
    loaded = acting_of(config, deterministic=True)
    load(tmp_path / CHECKPOINT, loaded)
    acting = loaded.player.modules["policy"]
    learned = statistics_in(SOURCE[name](first.loss_module))
    assert learned.keys() == statistics_in(acting).keys() != set()
    assert all(torch.equal(leaf, learned[key]) for key, leaf in statistics_in(acting).items())

    again = built(tiny(name, normalize=BOTH, total_frames=192))
    again.load_from_file(tmp_path / CHECKPOINT)
    before, after = normalize_of(first), normalize_of(again)
    assert (after.observations.count, after.reward_scale) == (128, before.reward_scale)
    assert torch.equal(after.observations.variance, before.observations.variance)
    trained(again)
    assert after.observations.count == 192


def test_statistics_in_half_precision_are_refused() -> None:
    config = small("sac", normalize=BOTH)
    config.sync.map = [replace(config.sync.map[0], dtype="bfloat16")]
    with pytest.raises(ConfigError, match="half precision would round"):
        check(config)


@pytest.mark.slow
@pytest.mark.processes
def test_the_evaluating_process_and_the_best_version_have_the_statistics(tmp_path: Path) -> None:
    evaluation = EvaluationConfig(every_frames=32, episodes=2)
    config = tiny(
        "sac",
        run_dir=tmp_path,
        total_frames=100_000,
        normalize=BOTH,
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

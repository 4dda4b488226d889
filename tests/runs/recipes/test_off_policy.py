"""The recipes with a replay buffer: what an update changes, what workers get, what is refused."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor
from torch.testing import assert_close
from torchrl.checkpoint import Checkpoint
from torchrl.data import Bounded, MultiStep
from torchrl.modules import TanhNormal
from torchrl.objectives import SoftUpdate
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError
from rlsync.core.plan import Verdict
from rlsync.runs.actors.envs.observations import like
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.player import Player
from rlsync.runs.evaluation.checkpoint import load_best
from rlsync.runs.evaluation.play import Score, play
from rlsync.runs.evaluation.process import best_in, read_evaluations
from rlsync.runs.life.resume import changes, load, schedulers
from rlsync.runs.life.state import begin
from rlsync.runs.recipes import sac, td3
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.encoder import Encoder
from rlsync.runs.recipes.evaluating import APART, acting_of
from rlsync.runs.recipes.hooks.steering import EpisodeReturns, KeepPace
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.replay.memory import with_n_step_returns
from rlsync.runs.recipes.replay.settings import OffPolicyConfig, PaceConfig
from rlsync.runs.recipes.run_files import BEST, CHECKPOINT, EVALUATIONS, RECEIPTS
from rlsync.runs.recipes.sac import CrossQConfig, SACConfig
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    RouteConfig,
    SyncConfig,
)
from rlsync.runs.recipes.spaces import BOX, DISCRETE, Spaces
from rlsync.runs.recipes.td3 import TD3Config
from rlsync.runs.recipes.timeline import Iteration, rounds
from rlsync.torchrl_plugin.compat.trainers import optimizers, registered_modules
from rlsync.torchrl_plugin.ending.last_checkpoint import save_before_the_end
from tests.runs.recipes.test_recipes import hook_of, trained
from tests.tools.parts import wait_until
from tests.tools.parts.configs import configs_of
from tests.tools.parts.space_envs import spaced

ROUTES = {
    "dqn": [
        RouteConfig("policy.module[0]", "loss_module.value_network"),
        RouteConfig("policy.module[1]", "greedy_module"),
    ],
    "sac": [RouteConfig("policy", "loss_module.actor_network")],
    "td3": [RouteConfig("policy", "loss_module.actor_network")],
    "crossq": [RouteConfig("policy", "loss_module.actor_network")],
}
SETTINGS: dict[str, type[OffPolicyConfig]] = {
    "dqn": DQNConfig,
    "sac": SACConfig,
    "td3": TD3Config,
    "crossq": CrossQConfig,
}
#: The parameters of each loss that an optimizer step changes.
TRAINED = {
    "dqn": ["value_network_params"],
    "sac": ["actor_network_params", "qvalue_network_params"],
    "td3": ["actor_network_params", "qvalue_network_params"],
    "crossq": ["actor_network_params", "qvalue_network_params"],
}

every_recipe = pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
and_crossq = pytest.mark.parametrize("name", ["dqn", "sac", "td3", "crossq"])


def small(
    name: str,
    *,
    lag: int | None = 1,
    num_envs: int = 1,
    run_dir: Path | None = None,
    workers: int = 2,
    batch: int = 64,
    **keys: Any,
) -> Config:
    """Four batches, of which the first is the prefill; 16 updates follow each of the others."""
    sizes = {"total_frames": 4 * batch, "batch_size": 16, "hidden": [16]}
    pace = PaceConfig(ratio=16 / batch, prefill=batch)
    settings = SETTINGS[name](**{**sizes, "pace": pace, "compile": "off", **keys})
    return Config(
        env=EnvConfig("CartPole-v1" if name == "dqn" else "Pendulum-v1", num_envs),
        recipe=settings,
        collector=CollectorConfig(workers, frames_per_batch=batch, lag=lag),
        sync=SyncConfig(map=ROUTES[name]),
        run_dir=None if run_dir is None else str(run_dir),
    )


#: What a run costs, its frames and its workers cost: half of each, where more of them prove nothing more.
tiny = partial(small, workers=1, batch=32)


def built(config: Config) -> Trainer:
    return recipe_of(config).build(config, None)


def pace_of(trainer: Trainer) -> KeepPace:
    (pace,) = (m for m in registered_modules(trainer) if isinstance(m, KeepPace))
    return pace


def acting(player: Player, observation: torch.Tensor) -> torch.Tensor:
    """The actions of a player in environments whose episodes begin with these observations."""
    count, generator = len(observation), torch.Generator().manual_seed(0)
    begins = torch.ones(count, dtype=torch.bool)
    state = player.begin(count, generator)
    with torch.inference_mode():
        return player.act(observation, begins, torch.zeros(count), state, generator).action


def parameters(trainer: Trainer, name: str) -> dict[str, torch.Tensor]:
    found = {}
    for part in TRAINED[name]:
        for key, value in getattr(trainer.loss_module, part).flatten_keys().items():
            if value.requires_grad:  # not the bounds of the actions
                found[f"{part}.{key}"] = value.detach().clone()
    return found


# -------------------------------------------------------------------------------- pictures


@pytest.mark.thorough
@pytest.mark.slow
def test_the_rate_that_is_tuned_for_pictures_leaves_the_convolutions_of_sacs_actor_on() -> None:
    pytest.importorskip("pygame")
    words = ("recipe=sac", "env=rendered_pendulum", "recipe.total_frames=500", "recipe.pace.prefill=200")
    here = ("collector.num_workers=0", "recipe.evaluation.every_frames=0", "logger=none")

    def share_on(*more: str) -> float:
        """Of the units of the first layer, those that are on in any picture of the run."""
        trainer = built(configs_of(*words, *here, *more)[0])
        trained(trainer)
        actor = trainer.loss_module.actor_network
        (encoder,) = (module for module in actor.modules() if isinstance(module, Encoder))
        pictures = trainer.replay_buffer[:]["observation"]
        with torch.no_grad():
            units = encoder.torsos[0][0](encoder.pixels[0](pictures))
        return float((units > 0).any(0).float().mean())

    assert share_on() > 0.4
    # A white background is 1 in each pixel, so the steps of all weights of a unit add up.
    assert share_on("recipe.lr=0.001") < 0.2


# -------------------------------------------------------------------------------- initial weights


@pytest.mark.parametrize("recipe", [sac, td3])
def test_two_critics_differ_and_each_has_the_orthogonal_weights_of_its_network(recipe: ModuleType) -> None:
    name = recipe.RECIPE.name
    settings = SETTINGS[name](hidden=[16, 16], initial_weights="orthogonal")
    loss = recipe.make_loss(settings, BOX.probe(EnvConfig("Pendulum-v1")))
    first, second = loss.qvalue_network_params["module", "2", "weight"].detach()
    for weight in (first, second):
        assert_close(weight @ weight.T, 2 * torch.eye(16))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("recipe", [sac, td3])
def test_the_initial_weights_are_torchs_own_in_all_layers(recipe: ModuleType) -> None:
    settings = SETTINGS[recipe.RECIPE.name](hidden=[64, 32])
    loss = recipe.make_loss(settings, BOX.probe(EnvConfig("Pendulum-v1")))
    found = {key: value.detach() for key, value in loss.named_parameters() if "network" in key}
    assert len(found) == 2 * (3 + 3)  # three layers; the critics' tensors are stacked
    for key, weight in found.items():
        if key.endswith("weight"):
            bound, bias = weight.shape[-1] ** -0.5, found[key.removesuffix("weight") + "bias"]
            assert 0.8 * bound < weight.abs().max() <= bound, key
            assert 0 < bias.abs().min() <= bias.abs().max() <= bound, key


@pytest.mark.usefixtures("fork_workers")
def test_the_targets_of_td3_move_when_the_actor_does_and_by_the_weights_of_after_that_step() -> None:
    trainer = built(tiny("td3", actor_every=3, tau=1.0))
    loss, copied = trainer.loss_module, []

    def look() -> None:
        pairs = [(loss.qvalue_network_params, loss.target_qvalue_network_params)]
        pairs += [(loss.actor_network_params, loss.target_actor_network_params)]
        copied.append([bool((now.data == target.data).all()) for now, target in pairs])

    trainer.register_op("post_optim", look)
    trained(trainer)
    # With a tau of 1 the targets become what was trained. The critics change at each update, the actor at
    # every third, so its target is always what it is.
    assert [critics for critics, _ in copied] == [False, False, True] * 16
    assert all(actors for _, actors in copied)


# ------------------------------------------------------------------------------- units of actions

#: Two numbers whose ranges differ: from -0.4 to 0.4, and from 0 to 20.
UNEVEN = Spaces(like((3,)), 2, Bounded(torch.tensor([-0.4, 0.0]), torch.tensor([0.4, 20.0])))


def test_where_all_ranges_are_equal_noise_has_one_unit_and_the_target_entropy_counts_each_number() -> None:
    spaces = Spaces(like((3,)), 17, Bounded(torch.full((17,), -0.4), torch.full((17,), 0.4)))
    assert spaces.half_ranges().shape == ()
    target = sac.make_loss(SACConfig(hidden=[8]), spaces).target_entropy
    assert float(target) == pytest.approx(17 * math.log(0.4) - 17)


def test_the_target_entropy_of_sac_is_minus_one_nat_a_number_of_an_action_from_minus_one_to_one() -> None:
    loss = sac.make_loss(SACConfig(hidden=[8]), UNEVEN)
    torch.manual_seed(0)
    acted = loss.actor_network(TensorDict({"observation": torch.randn(64, 3)}, [64]))
    in_paper = TanhNormal(acted["loc"], acted["scale"], low=-1.0, high=1.0, tanh_loc=False)
    scaled = (acted["action"] - torch.tensor([0.0, 10.0])) / torch.tensor([0.4, 10.0])
    log_prob = loss.actor_network.get_dist(acted).log_prob(acted["action"])
    assert_close(log_prob + loss.target_entropy, in_paper.log_prob(scaled) - 2, rtol=0, atol=1e-3)


def test_the_least_deviation_of_sacs_actor_leaves_the_target_entropy_within_reach() -> None:
    loss = sac.make_loss(SACConfig(hidden=[8]), UNEVEN)
    (normal,) = (part for part in loss.actor_network.modules() if isinstance(part, NormalParamExtractor))
    _, least = normal(torch.full((4,), -1e4))
    assert_close(least, torch.full((2,), 0.01))
    entropy = torch.distributions.Normal(0.0, least).entropy()
    assert bool((entropy < -3).all()), "the target is -1"


def test_the_noise_of_td3_is_in_halves_of_the_range_of_each_number() -> None:
    settings = TD3Config(hidden=[8], exploration_noise=0.1, target_noise=0.3, target_noise_clip=0.4)
    middle, half_ranges = torch.tensor([0.0, 10.0]), torch.tensor([0.4, 10.0])
    still = td3.make_loss(settings, UNEVEN).actor_network
    for parameter in still.parameters():
        parameter.data.zero_()  # this actor takes the middle of each range
    acted = acting(td3.player_of(still, UNEVEN, noise=settings.exploration_noise), torch.zeros(4000, 3))
    assert_close(acted.mean(0), middle, rtol=0, atol=0.3)
    assert_close(acted.std(0), 0.1 * half_ranges, rtol=0.05, atol=0)

    loss = td3.make_loss(settings, UNEVEN)
    loss.target_actor_network_params[
        "module", "0"
    ].data.zero_()  # the target's actor then takes the middle of each range
    seen: list[torch.Tensor] = []
    loss.qvalue_network.register_forward_pre_hook(lambda _, given: seen.append(given[0]["action"]))
    frames = rollout([False] * 4000)
    frames["observation"], frames["next", "observation"] = torch.zeros(2, 4000, 3)
    loss.value_loss(frames.set("action", middle.expand(4000, 2)))
    noise = (seen[0] - middle) / half_ranges
    assert_close(noise.abs().amax(0), torch.tensor([0.4, 0.4]))
    assert_close(noise.std(0), torch.tensor([0.252, 0.252]), rtol=0.05, atol=0)  # 0.3 before it is cut


# -------------------------------------------------------------------------------------- training


@and_crossq
@pytest.mark.parametrize("lag", [0, 1, None])
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_run_learns_at_the_pace_that_was_planned_for_it(name: str, lag: int | None) -> None:
    config = small(name, lag=lag, batch=32)
    trainer = built(config)
    pace, trace = pace_of(trainer), []
    trainer.register_op("post_steps", lambda: trace.append(Iteration(trainer.collected_frames, pace.updates)))
    before = parameters(trainer, name)
    trained(trainer)
    assert trace == list(rounds(config))
    assert trace[-1].updates == 48, "half of 96 frames"
    after = parameters(trainer, name)
    assert [key for key, old in before.items() if torch.equal(old, after[key])] == []
    assert len(trainer.replay_buffer) == 128, "the prefill is stored, too"


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("envs", [1, 2])
def test_an_environment_whose_observations_are_float64_as_mujocos_are_is_learned(envs: int) -> None:
    config = replace(tiny("sac"), env=EnvConfig("Hopper-v5", envs))
    seen: list[TensorDict] = []
    assert trained(built(config), seen.append).version > 1
    assert {batch["observation"].dtype for batch in seen} == {torch.float32}


@and_crossq
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_every_leaf_that_is_trained_reaches_the_workers(name: str) -> None:
    trainer = built(small(name, num_envs=2, batch=32))
    plan = hook_of(trainer).plan
    assert {str(row.verdict) for row in plan.rows} <= {str(Verdict.COPIED)}
    shapes: list[tuple[int, ...]] = []
    hook = trained(trainer, lambda batch: shapes.append(tuple(batch.shape)))
    assert shapes == [(4, 8)] * 4, "two environments of each of two workers, eight steps"
    assert [receipt.reason for receipt in hook.receipts] == ["start", *["trigger"] * 4]


# ---------------------------------------------------------------------------------- learning rates


def rates(optimizer: torch.optim.Optimizer, option: str = "lr") -> list[float]:
    return [group[option] for group in optimizer.param_groups]


def test_temperature_actor_and_critics_have_their_own_learning_rate_or_that_of_the_recipe() -> None:
    assert rates(sac.make_optimizer(SACConfig(), sac.make_loss(SACConfig(hidden=[8]), UNEVEN))) == [3e-4] * 3
    settings = SACConfig(hidden=[8], lr=1e-3, critic_lr=2e-3, alpha_lr=3e-3)
    loss = sac.make_loss(settings, UNEVEN)
    optimizer = sac.make_optimizer(settings, loss)
    assert rates(optimizer) == [3e-3, 1e-3, 2e-3]
    parts = [
        [loss.log_alpha],
        *(p.parameters() for p in (loss.actor_network_params, loss.qvalue_network_params)),
    ]
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, part)) for part in parts
    ]
    of_td3 = TD3Config(hidden=[8], lr=1e-3, critic_lr=2e-3)
    other = td3.make_loss(of_td3, UNEVEN)
    stepper = td3.make_stepper(of_td3, other, SoftUpdate(other, tau=0.1))
    assert (rates(stepper.optimizer_actor), rates(stepper.optimizer_critic)) == ([1e-3], [2e-3])


def test_the_moments_of_an_earlier_checkpoint_with_one_rate_go_to_the_parts() -> None:
    settings = SACConfig(hidden=[8], critic_lr=2e-3)
    loss = sac.make_loss(settings, UNEVEN)
    earlier = torch.optim.Adam(loss.parameters(), lr=5e-4, fused=True)
    for number, parameter in enumerate(loss.parameters()):
        parameter.grad = torch.full_like(parameter, float(number))
    earlier.step()
    now = sac.make_optimizer(settings, loss)
    now.load_state_dict(earlier.state_dict())
    assert rates(now) == [5e-4] * 3, "a resumed run then puts in those of its config"
    for parameter in loss.parameters():
        assert_close(now.state[parameter]["exp_avg"], earlier.state[parameter]["exp_avg"])


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_a_resumed_run_takes_new_learning_rates_into_its_schedule(tmp_path: Path) -> None:
    before = small("sac", run_dir=tmp_path, lr=1e-3, anneal_lr=True)
    trained(built(before))
    now = small("sac", total_frames=384, lr=1e-3, critic_lr=4e-3, anneal_lr=True)
    again = built(now)
    try:
        load(again, tmp_path / CHECKPOINT, changes(before, now))
        (optimizer,), (schedule,) = optimizers(again), schedulers(again)
        assert schedule.base_lrs == rates(optimizer, "initial_lr") == [1e-3, 1e-3, 4e-3]
        alpha, actor, critics = rates(optimizer)
        assert 0 < actor < 1e-3
        assert (alpha, critics) == (actor, pytest.approx(4 * actor))
    finally:
        again.collector.shutdown()


# ---------------------------------------------------------------------------------- n-step returns


def rollout(ends: list[bool]) -> TensorDict:
    steps = len(ends)
    done = torch.tensor(ends)[:, None]
    following = TensorDict(
        {
            "observation": torch.arange(1.0, steps + 1)[:, None],
            "reward": torch.ones(steps, 1),
            "done": done,
            "terminated": done.clone(),
        },
        [steps],
    )
    return TensorDict({"observation": torch.arange(float(steps))[:, None], "next": following}, [steps])


def test_a_sum_of_rewards_ends_with_its_episode_and_says_so() -> None:
    summed = with_n_step_returns(rollout([False, False, False, True, False, False]), gamma=0.5, n=3)
    assert summed["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.5, 1.0, 1.5, 1.0]
    assert summed["next", "observation"].flatten().tolist() == [3, 4, 4, 4, 6, 6]
    assert summed["next", "terminated"].flatten().tolist() == [False, True, True, True, False, False]
    assert summed["steps_to_next_obs"].flatten().tolist() == [3, 3, 2, 1, 2, 1]


def test_sums_of_several_environments_do_not_mix() -> None:
    both = torch.stack([rollout([False, True, False]), rollout([False, False, False])])
    summed = with_n_step_returns(both, gamma=1.0, n=2)
    assert summed["next", "reward"].squeeze(-1).tolist() == [[2, 1, 1], [2, 2, 1]]
    assert summed["next", "done"].squeeze(-1).tolist() == [[True, True, False], [False, False, False]]


@pytest.mark.parametrize("recipe", [sac, td3])
def test_critics_learn_returns_of_several_steps_that_end_where_episodes_and_batches_do(
    recipe: ModuleType,
) -> None:
    """Each row's loss is that of one step with the sum that is written out, and a discount to that power."""
    gamma, n, settings = 0.5, 3, SETTINGS[recipe.RECIPE.name](hidden=[8])
    loss = recipe.make_loss(settings, Spaces(like((1,)), 1, Bounded(-1.0, 1.0, (1,))))
    frames = rollout([False, False, False, True, False, False, True, False, False])
    frames["next", "terminated"][6] = False  # that end is a limit of time
    frames["next", "reward"] = reward = torch.randn(9, 1)
    frames.set("action", torch.rand(9, 1))
    rows, stock = with_n_step_returns(frames, gamma, n), MultiStep(gamma=gamma, n_steps=n)(frames)
    for key in ("steps_to_next_obs", ("next", "reward"), ("next", "observation")):
        assert_close(rows[key], stock[key])
    for row, steps in enumerate([3, 3, 2, 1, 3, 2, 1, 2, 1]):
        last = row + steps - 1
        by_hand = frames[row : row + 1].clone()
        by_hand["next"] = frames["next"][last : last + 1].clone()
        by_hand["next", "reward"] = sum(gamma**j * reward[[row + j]] for j in range(steps))
        found = []
        for discount, one in ((gamma, rows[row : row + 1]), (gamma**steps, by_hand)):
            loss.make_value_estimator(gamma=discount)
            torch.manual_seed(row)
            found.append(loss(one.clone())["loss_qvalue"])
        assert_close(*found)


@pytest.mark.usefixtures("fork_workers")
def test_a_run_stores_the_returns_of_as_many_steps_as_it_is_told() -> None:
    trainer = built(tiny("sac", n_step=3))
    trained(trainer)
    assert trainer.replay_buffer[:]["steps_to_next_obs"].unique().tolist() == [1, 2, 3]


def test_one_step_leaves_a_batch_alone() -> None:
    batch = rollout([False, True])
    assert with_n_step_returns(batch, gamma=0.9, n=1) is batch


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "env", "why"),
    [
        ("sac", "CartPole-v1", "its action is one of 2"),
        ("td3", "CartPole-v1", "its action is one of 2"),
        ("dqn", "Pendulum-v1", "its action is a vector, of size 1"),
    ],
)
def test_an_environment_with_other_actions_is_refused_with_examples(name: str, env: str, why: str) -> None:
    config = small(name)
    with pytest.raises(ConfigError, match=f"this recipe cannot learn '{env}': {why}") as refused:
        recipe_of(config).probe(EnvConfig(env))
    assert "-v" in refused.value.cure


@pytest.mark.parametrize(
    ("low", "high", "why"),
    [
        (0.0, 0.0, "number 1 of its action can only be 0"),
        (0.0, math.inf, "number 1 of its action goes from 0 to inf, no finite range in float32"),
        (-3.4e38, 3.4e38, "number 1 of its action goes from -3.4e[+]38 to 3.4e[+]38, no finite range"),
    ],
)
def test_a_number_of_an_action_whose_range_is_nothing_or_endless_is_refused(
    low: float, high: float, why: str
) -> None:
    action = Box(np.array([-1, low], np.float32), np.array([1, high], np.float32))
    with pytest.raises(ConfigError, match=why):
        recipe_of(small("sac")).probe(spaced(action=action))


def test_networks_get_whole_numbers_as_they_do_others() -> None:
    gymnasium.register("Counted-v0", lambda: Counted())
    try:
        config = EnvConfig("Counted-v0")
        assert DISCRETE.probe(config).observation_dtype is torch.float32
        envs = make_venv(config.spec(), 1)
        observation = envs.reset(0)
        envs.close()
        assert observation.tolist() == [[3.0, 4.0]]
        assert observation.dtype is torch.float32
    finally:
        del gymnasium.registry["Counted-v0"]


class Counted(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.int64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.array([3, 4]), {}


# --------------------------------------------------------------------------------------- resumed


@and_crossq
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_resumed_run_goes_on_at_the_same_pace_with_what_it_had(name: str, tmp_path: Path) -> None:
    first = built(tiny(name, run_dir=tmp_path))
    trained(first)
    learned = parameters(first, name)
    again = built(tiny(name, total_frames=192))
    again.load_from_file(tmp_path / CHECKPOINT)
    assert again.collector.init_random_frames == 0, "the prefill is over"
    kept = parameters(again, name)
    assert all(torch.equal(kept[key], value) for key, value in learned.items())
    assert (pace_of(again).updates, len(again.replay_buffer)) == (48, 128)
    trained(again)
    assert (again.collected_frames, pace_of(again).updates) == (192, 80)


@pytest.mark.thorough
@every_recipe
@pytest.mark.usefixtures("fork_workers")
def test_a_resumed_run_does_not_play_the_episodes_of_the_run_before_again(name: str, tmp_path: Path) -> None:
    trained(built(small(name, run_dir=tmp_path)))
    again = built(small(name, total_frames=384))
    load(again, tmp_path / CHECKPOINT)
    trained(again)
    seen = again.replay_buffer[:]["observation"]
    assert len(seen) == 384
    assert len(seen.unique(dim=0)) == 384, "an observation of a CartPole or a Pendulum never comes twice"


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_a_worker_that_is_killed_before_a_checkpoint_is_loaded_is_replaced(tmp_path: Path) -> None:
    trained(built(small("sac", run_dir=tmp_path)))
    again = built(small("sac", total_frames=384))
    try:
        os.kill(again.collector.procs[0].pid, signal.SIGKILL)
        load(again, tmp_path / CHECKPOINT)
        again.train()
        assert again.collected_frames == 384
        assert again.collector.restarted == 1
    finally:
        again.shutdown()


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_checkpoints_of_a_run_without_a_lag_cost_it_no_worker(tmp_path: Path) -> None:
    config = small("dqn", lag=None, run_dir=tmp_path, total_frames=640)
    config.checkpoint_every_frames = 64
    trainer = built(config)
    trained(trainer)
    assert trainer.collected_frames == 640


# ------------------------------------------------------------------------------------- evaluated


class Deadly:
    """Kills the process that saves it."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def saved_components(folder: Path) -> dict[str, Any]:
    return dict(Checkpoint.manifest(folder / CHECKPOINT)["components"])


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_without_the_buffer_in_the_checkpoint_a_resumed_run_fills_it_again_before_it_learns(
    tmp_path: Path,
) -> None:
    first = built(small("dqn", run_dir=tmp_path, buffer_checkpointed=False))
    trained(first)
    assert saved_components(tmp_path)["replay_buffer"]["adapter"] == "torchrl.state_dict"
    again = built(small("dqn", total_frames=448, buffer_checkpointed=False))
    again.load_from_file(tmp_path / CHECKPOINT)
    pace, trace = pace_of(again), []
    assert (pace.updates, len(again.replay_buffer)) == (48, 0)
    again.register_op("post_steps", lambda: trace.append(Iteration(again.collected_frames, pace.updates)))
    epsilon = float(again.greedy_module.eps)
    assert epsilon == float(first.greedy_module.eps)
    trained(again)
    # 64 frames are collected first, as in a prefill; then a quarter of the frames, as before.
    assert trace == [Iteration(320, 48), Iteration(384, 64), Iteration(448, 80)]


@pytest.mark.usefixtures("fork_workers")
def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    trainer = built(tiny("dqn", run_dir=tmp_path))
    try:
        trained(trainer)
        before = (tmp_path / CHECKPOINT / "manifest.json").read_bytes()
        pid = os.fork()
        if pid == 0:  # a learner that dies when a part of the checkpoint is written
            try:
                trainer.register_module("zz_deadly", Deadly())
                save_before_the_end(trainer)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    finally:
        trainer.shutdown()
    assert (tmp_path / CHECKPOINT / "manifest.json").read_bytes() == before
    assert list(tmp_path.glob(f".{CHECKPOINT}.stage-*")) != []
    begin(tmp_path)
    assert list(tmp_path.glob(f".{CHECKPOINT}.stage-*")) == [], "the next run there takes the half one away"
    again = built(tiny("dqn", total_frames=192))
    try:
        again.load_from_file(tmp_path / CHECKPOINT)
        assert len(again.replay_buffer) == 128
    finally:
        again.shutdown()


@and_crossq
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.one_case
def test_a_process_evaluates_greedily_and_its_result_ends_the_run(name: str, tmp_path: Path) -> None:
    goal = 1.0 if name == "dqn" else -100_000.0  # any evaluation reaches it
    config = tiny(
        name,
        run_dir=tmp_path,
        total_frames=100_000,
        target_return=goal,
        evaluation=EvaluationConfig(every_frames=32, episodes=2),
    )
    assert config.recipe.goal().endswith(" in a greedy evaluation over 2 episodes")
    trainer = built(config)
    file = tmp_path / EVALUATIONS
    # The learner is faster than the process starts: it waits for the first result, as long as that takes.
    trainer.register_op("post_steps", lambda: wait_until(file.exists, 60.0))
    trained(trainer)
    (returns,) = (m for m in registered_modules(trainer) if isinstance(m, EpisodeReturns))
    assert returns.reached
    assert trainer.collected_frames < 100_000
    assert read_evaluations(file)[0].episodes == 2

    kept = best_in(tmp_path / BEST)
    assert kept is not None
    acting = acting_of(config, deterministic=True)
    best = load_best(tmp_path / BEST, tmp_path / RECEIPTS, acting)
    assert best.version == kept.version
    envs = make_venv(acting.env, 2)
    played = [episode for ended in play(acting.player, envs, 2, config.seed + APART) for episode in ended]
    envs.close()
    assert Score.of(played).return_mean == kept.return_mean, "these weights made the best evaluation"

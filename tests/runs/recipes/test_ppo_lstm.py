"""ppo with an LSTM: it learns what PPO learns, through time, from the states that its workers recorded."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.trainers import Trainer

from rlsync import VerifySync
from rlsync.core.errors import ConfigError
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.checks import check, errors
from rlsync.runs.recipes.encoder import Pixels
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from rlsync.runs.recipes.impala.heads import HeadDistribution
from rlsync.runs.recipes.normalize import NormalizeUnrolls, Standardize
from rlsync.runs.recipes.ppo_unrolls import (
    UnrollAdvantages,
    UnrollPPOLoss,
    estimated_advantages,
    make_network,
)
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    OnPolicyModelConfig,
    OnPolicyNormalizeConfig,
    PPOConfig,
)
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes.test_recipes import hook_of, trained
from tests.tools.parts.space_envs import HINTED, PARTS, TOLD

STEPS, UNROLLS, FEATURES = 6, 8, 3
LSTM = OnPolicyModelConfig(lstm=8, hidden=[8])
#: Environments with episodes that end within unrolls, some by truncation.
ENVS = {
    "numbers": EnvConfig("CartPole-v1", UNROLLS, {"max_episode_steps": 9}),
    "box": EnvConfig("Pendulum-v1", UNROLLS, {"max_episode_steps": 9}),
    "several choices": EnvConfig(TOLD, UNROLLS),
    "numbers and mask": EnvConfig(HINTED, UNROLLS, {"parts": PARTS["mask"]}),
    "picture": EnvConfig(HINTED, UNROLLS, {"parts": PARTS["picture"]}),
    "picture, numbers and mask": EnvConfig(HINTED, UNROLLS, {"parts": f"speed,{PARTS['picture and mask']}"}),
}


def config_of(env: str = "numbers", *, workers: int = 0, batches: int = 3, **recipe: Any) -> Config:
    """Batches of eight unrolls of six steps, in minibatches of two unrolls."""
    frames = STEPS * UNROLLS
    options = {"total_frames": batches * frames, "batch_size": 2 * STEPS, "num_epochs": 2, "hidden": [8]}
    settings = ENVS[env]
    if workers:
        settings = replace(settings, num_envs=UNROLLS // workers)
    return Config(
        env=settings,
        collector=CollectorConfig(workers, frames_per_batch=frames, lag=0),
        recipe=PPOConfig(**{**options, "model": LSTM, **recipe}),
    )


def network_of(**options: Any) -> ImpalaNet:
    torch.manual_seed(0)
    network = ImpalaNet((FEATURES,), Categorical(3), hidden=(8,), **options)
    with torch.no_grad():
        network.policy.weight *= 100
    return network


def minibatch(network: ImpalaNet, steps: int = STEPS) -> TensorDict:
    """What a policy that is not the network's did; no episode begins within it."""
    action, log_prob = network.head.act(torch.randn(steps, UNROLLS, network.head.width))
    return TensorDict(
        {
            "observation": torch.randn(steps, UNROLLS, FEATURES),
            "is_init": torch.zeros(steps, UNROLLS, dtype=torch.bool),
            "action": action,
            "behaviour_log_prob": log_prob,
            "recurrent_state": torch.randn(UNROLLS, *network.state_shape),
            "advantage": torch.randn(steps, UNROLLS),
            "value_target": torch.randn(steps, UNROLLS),
        }
    )


# ------------------------------------------------------------------------------------------- the loss


class Part(nn.Module):
    """The policy's parameters, or the value, that a network without a memory computes of rows."""

    def __init__(self, network: ImpalaNet, place: int) -> None:
        super().__init__()
        self.network = network
        self.place = place

    def forward(self, observation: Tensor) -> Tensor:
        is_init = torch.zeros(len(observation), dtype=torch.bool)
        params, value, _ = self.network.lean_step(observation, is_init, None, None, None)
        return (params, value.unsqueeze(-1))[self.place]


@pytest.mark.parametrize("critic_loss", ["smooth_l1", "l2"])
@pytest.mark.parametrize("normalize", [False, True])
def test_without_a_memory_a_minibatch_of_single_steps_has_torchrls_loss(
    critic_loss: str, normalize: bool
) -> None:
    network = network_of()
    recipe = PPOConfig(critic_loss=critic_loss, normalize_advantage=normalize, entropy_coeff=0.1)
    batch = minibatch(network, steps=1)
    ours = UnrollPPOLoss(network, recipe)(batch)

    actor = ProbabilisticActor(
        TensorDictModule(Part(network, 0), ["observation"], ["params"]),
        in_keys=["params"],
        distribution_class=HeadDistribution,
        distribution_kwargs={"head": network.head},
    )
    critic = ValueOperator(Part(network, 1), in_keys=["observation"])
    torchrls = ClipPPOLoss(
        actor, critic, clip_epsilon=recipe.clip_epsilon, entropy_coeff=0.1, critic_coeff=recipe.critic_coeff,
        loss_critic_type=critic_loss, normalize_advantage=normalize,
    )  # fmt: skip
    torchrls.set_keys(sample_log_prob="action_log_prob")
    rows = TensorDict(
        {
            "observation": batch["observation"][0],
            "action": batch["action"][0],
            "action_log_prob": batch["behaviour_log_prob"][0],
            "advantage": batch["advantage"][0].unsqueeze(-1),
            "value_target": batch["value_target"][0].unsqueeze(-1),
        },
        [UNROLLS],
    )
    theirs = torchrls(rows)
    for name in ("loss_objective", "loss_entropy", "entropy", "kl_approx", "clip_fraction"):
        torch.testing.assert_close(ours[name], theirs[name].squeeze())
    torch.testing.assert_close(ours["loss_critic"], theirs["loss_critic"].mean())
    assert 0 < ours["clip_fraction"] < 1
    assert {*ours.keys()} == {*UnrollPPOLoss(network, recipe).out_keys}


def reach(begins: int | None) -> Tensor:
    """How much the last step's loss depends on each step's observation, ``[T]``."""
    network = network_of(lstm=4)
    batch = minibatch(network)
    if begins is not None:
        batch["is_init"][begins] = True
    only_last = torch.zeros(STEPS, UNROLLS)
    only_last[-1] = 1.0
    batch["advantage"] *= only_last
    batch["observation"].requires_grad_()
    # the values of earlier steps would depend on their own observations
    out = UnrollPPOLoss(network, PPOConfig(critic_coeff=0.0, clip_epsilon=1e9))(batch)
    (grad,) = torch.autograd.grad(out["loss_objective"], batch["observation"])
    return grad.abs().sum((1, 2))


def test_gradients_go_back_to_the_beginning_of_an_unroll_and_not_beyond_that_of_an_episode() -> None:
    assert bool((reach(None) > 0).all())
    assert (reach(3) > 0).tolist() == [False] * 3 + [True] * 3


def test_a_minibatch_begins_with_the_recorded_state() -> None:
    network = network_of(lstm=4)
    loss = UnrollPPOLoss(network, PPOConfig())
    batch = minibatch(network)
    other = batch.clone()
    other["recurrent_state"] += 1.0
    assert loss(batch)["loss_objective"] != loss(other)["loss_objective"]
    for each in (batch, other):
        each["is_init"][0] = True
    assert loss(batch)["loss_objective"] == loss(other)["loss_objective"]


# ----------------------------------------------------------------------------- batches and minibatches


def gae_by_hand(batch: TensorDictBase, network: ImpalaNet, gamma: float, lmbda: float) -> Tensor:
    """Advantages ``[T, B]``, environment by environment and step by step, as the network acts."""
    advantages = torch.zeros_like(batch["reward"])
    finals = {
        tuple(place): number for number, place in enumerate(batch.get("final_index", torch.empty(0)).tolist())
    }
    for env in range(UNROLLS):
        state = batch["recurrent_state"][env : env + 1]
        values, after_truncation = [], {}
        for t in range(STEPS + 1):
            observation, begins = batch["observation"][t, env], batch["is_init"][t, env]
            out = network.step(observation[None], begins[None], state)
            values.append(out.value.item())
            state = out.state
            if (t, env) in finals:
                last = batch["final_observation"][finals[t, env]]
                after = network.step(last[None], torch.tensor([False]), state)
                after_truncation[t] = after.value.item()
        following = 0.0
        for t in reversed(range(STEPS)):
            ends = bool(batch["terminated"][t, env] | batch["truncated"][t, env])
            bootstrap = 0.0 if batch["terminated"][t, env] else after_truncation.get(t, values[t + 1])
            delta = batch["reward"][t, env].item() + gamma * bootstrap - values[t]
            following = delta + gamma * lmbda * following * (not ends)
            advantages[t, env] = following
    return advantages


@pytest.mark.parametrize(("gamma", "lmbda"), [(0.99, 0.0), (0.0, 0.95), (0.0, 0.0)])
def test_without_what_follows_an_advantage_is_the_temporal_difference(gamma: float, lmbda: float) -> None:
    value, following, reward = torch.randn(3, UNROLLS, STEPS, 1)
    terminated = torch.rand(UNROLLS, STEPS, 1) < 0.3
    advantage, target = estimated_advantages(gamma, lmbda, value, following, reward, terminated, terminated)
    wanted = reward + gamma * following * ~terminated - value
    torch.testing.assert_close(advantage, wanted)
    torch.testing.assert_close(target, wanted + value)


@pytest.mark.parametrize("env", ENVS)
def test_batches_have_the_advantages_of_what_acted_and_ratios_begin_at_one(env: str) -> None:
    trainer = ppo.RECIPE.build(config_of(env))
    loss = trainer.loss_module
    batches: list[TensorDictBase] = []
    minibatches: list[TensorDictBase] = []
    ends = 0

    def look(batch: TensorDictBase) -> None:
        nonlocal ends
        by_hand = gae_by_hand(batch, loss.actor_network, 0.99, 0.95)
        torch.testing.assert_close(batch["advantage"], by_hand, rtol=1e-4, atol=1e-4)
        ends += len(batch.get("final_index", ()))
        batches.append(batch)

    def look_at_minibatch(part: TensorDictBase) -> None:
        if len(minibatches) % 8 == 0:  # nothing was learned from this batch
            log_prob = part["behaviour_log_prob"]
            with torch.no_grad():
                out = loss.actor_network(part["observation"], part["is_init"], part["recurrent_state"])
            scored = loss.actor_network.head.score(out.params, part["action"])[0]
            torch.testing.assert_close(scored, log_prob, rtol=1e-5, atol=1e-5)
            assert loss(part)["clip_fraction"] == 0
        minibatches.append(part)

    trainer.register_op("process_optim_batch", look_at_minibatch)
    sync = trained(trainer, look)
    assert (len(batches), len(minibatches)) == (3, 3 * 2 * 4)
    assert sync.counters().optim_steps == len(minibatches)
    assert ends > 0 or env == "several choices", "whose episodes are never truncated"
    for number, batch in enumerate(batches):
        for one_pass in (minibatches[8 * number :][:4], minibatches[8 * number + 4 :][:4]):
            rewards = torch.cat([part["advantage"] for part in one_pass], 1)
            assert [part["advantage"].shape for part in one_pass] == [(STEPS, 2)] * 4
            torch.testing.assert_close(rewards.sum(1), batch["advantage"].sum(1))


def test_scaled_rewards_are_learned_from_and_the_batch_has_the_environments() -> None:
    config = config_of(normalize=OnPolicyNormalizeConfig(rewards=True))
    trainer = ppo.RECIPE.build(config)
    (normalize,) = (m for m in registered_modules(trainer) if isinstance(m, NormalizeUnrolls))
    sums = torch.zeros(UNROLLS, dtype=torch.float64)
    every: list[Tensor] = []

    def look(batch: TensorDictBase) -> None:
        nonlocal sums
        for reward, begins in zip(batch["reward"], batch["is_init"], strict=False):
            sums = reward + 0.99 * sums * ~begins
            every.append(sums)
        deviation = torch.cat(every).std(correction=0)
        assert normalize.reward_scale == pytest.approx(float(deviation), rel=1e-3)
        network = trainer.loss_module.actor_network
        scaled = batch.clone().set("reward", batch["reward"] / normalize.reward_scale)
        again = UnrollAdvantages(network, 0.99, 0.95)(scaled.clone())
        torch.testing.assert_close(batch["advantage"], again["advantage"])

    trained(trainer, look)


@pytest.mark.parametrize("env", ["numbers", "numbers and mask", "picture", "picture, numbers and mask"])
def test_a_version_normalises_by_the_statistics_of_the_frames_before_it(env: str) -> None:
    config = config_of(env, normalize=OnPolicyNormalizeConfig(observations=True))
    trainer = ppo.RECIPE.build(config)
    network = trainer.loss_module.actor_network
    layers = [module for module in network.modules() if isinstance(module, Standardize)]
    eyes = [module for module in network.modules() if isinstance(module, Pixels)]
    numbers: list[Tensor] = []
    pixels: list[Tensor] = []

    def look(batch: TensorDictBase) -> None:
        with torch.no_grad():
            out = network(batch["observation"], batch["is_init"], batch["recurrent_state"])
            log_prob = network.head.score(out.params[:-1], batch["action"])[0]
        torch.testing.assert_close(log_prob, batch["behaviour_log_prob"], rtol=1e-5, atol=1e-5)
        for layer in layers:
            before = torch.cat([torch.zeros(1, network.observations.features), *numbers])
            mean = before[len(numbers) > 0 :].mean(0)
            torch.testing.assert_close(layer.mean, mean, rtol=1e-4, atol=1e-5)
        rows = batch["observation"][:-1]
        numbers.append(network.observations.numbers(rows).flatten(0, 1).float().clone())
        for picture in network.observations.pictures:
            # six steps, of which every eighth is the first
            pixels.append(network.observations.split(rows)[picture.name][0].double() / 255)

    trained(trainer, look)
    assert (len(layers), len(eyes)) == (env != "picture", "picture" in env)
    for layer in layers:
        std = torch.cat(numbers).std(0, correction=0).clamp_min(1e-6)
        torch.testing.assert_close(layer.std, std, rtol=1e-4, atol=1e-5)
    for eye in eyes:
        torch.testing.assert_close(eye.mean.double(), torch.cat(pixels).mean(0))
        torch.testing.assert_close(eye.variance.double(), torch.cat(pixels).var(0, correction=0))


# -------------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        ({"compile": "on"}, "give recipe.compile=auto or off; or recipe.model.lstm=0"),
        ({"update_dtype": "bfloat16"}, "give recipe.update_dtype=float32; or recipe.model.lstm=0"),
        ({"activation": "relu"}, "give recipe.activation=tanh; or recipe.model.lstm=0"),
        ({"initial_weights": "torch"}, "give recipe.initial_weights=orthogonal; or recipe.model.lstm=0"),
        ({"batch_size": 16}, "give a multiple of 6, like 12"),
        ({"batch_size": 4}, "give a multiple of 6, like 6"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_an_lstm_cannot_serve_is_refused_before_a_run(change: dict[str, Any], cure: str) -> None:
    config = config_of(**change)
    refused = [error for error in errors(config) if "recipe.model.lstm=8" in error.where]
    assert [cure in error.cure for error in refused] == [True]
    with pytest.raises(ConfigError):
        check(config)
    assert not [*errors(replace(config, recipe=replace(config.recipe, model=OnPolicyModelConfig())))] or (
        "compile" in change or "update_dtype" in change
    )


def test_the_network_is_made_as_the_keys_say() -> None:
    config = config_of("picture, numbers and mask", hidden=[5, 7], model=OnPolicyModelConfig("impala", [9]))
    network = make_network(config.recipe, ppo.RECIPE.probe(config.env))
    widths = [layer.out_features for layer in network.torso.modules() if isinstance(layer, nn.Linear)]
    assert widths == [5, 7, 9]
    config = config_of("box", hidden=[5, 7], initial_log_scale=-1.5)
    network = make_network(config.recipe, ppo.RECIPE.probe(config.env))
    widths = [layer.out_features for layer in network.torso.modules() if isinstance(layer, nn.Linear)]
    assert widths == [5, 7]
    assert network.policy.bias[1].item() == -1.5


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_run_goes_on_without_a_worker_that_was_killed_and_proves_what_acts(tmp_path: Path) -> None:
    config = config_of(workers=2, batches=12)
    config.collector.lag = None
    config.sync.verify_every_s = 1e-6
    config.run_dir = str(tmp_path)
    trainer: Trainer = ppo.RECIPE.build(config)
    (verify,) = (m for m in registered_modules(trainer) if isinstance(m, VerifySync))
    stamps: list[Tensor] = []

    def look(batch: TensorDictBase) -> None:
        stamps.append(batch["policy_version"].clone())
        if len(stamps) == 3:
            os.kill(trainer.collector.procs[0].pid, signal.SIGKILL)

    sync = trained(trainer, look)
    assert len(stamps) == 12
    assert hook_of(trainer) is sync
    assert int(torch.cat(stamps).max()) > 8
    assert verify.deviations == []
    assert verify.behaviour_held is not None

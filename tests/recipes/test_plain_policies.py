"""What workers act with does what TorchRL's classes do, draw for draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor, QValueActor

from rlsync.recipes import dqn, ppo, sac, td3
from rlsync.recipes.dqn import DQNConfig
from rlsync.recipes.networks import PlainActor, PlainModule, PlainQActor, PlainSequential
from rlsync.recipes.sac import SACConfig
from rlsync.recipes.settings import EnvConfig, PPOConfig
from rlsync.recipes.spaces import BOX, DISCRETE, Spaces
from rlsync.recipes.td3 import TD3Config

CARTPOLE, PENDULUM = DISCRETE.probe(EnvConfig("CartPole-v1")), BOX.probe(EnvConfig("Pendulum-v1"))


def _td3(recipe: TD3Config) -> TensorDictModuleBase:
    actor = td3.make_loss(recipe, PENDULUM).actor_network
    return PlainSequential(actor, PENDULUM.noise(recipe.exploration_noise))


POLICIES: dict[str, tuple[Spaces, Any]] = {
    "ppo": (CARTPOLE, lambda: ppo.make_loss(PPOConfig(), CARTPOLE).actor_network),
    "dqn": (CARTPOLE, lambda: PlainSequential(*dqn.make_policy(DQNConfig(epsilon_start=0.5), CARTPOLE))),
    "sac": (PENDULUM, lambda: sac.make_loss(SACConfig(), PENDULUM).actor_network),
    "td3": (PENDULUM, lambda: _td3(TD3Config())),
}


def stock(policy: Any) -> Any:
    """The same leaves in TorchRL's own classes."""
    match policy:
        case PlainModule():
            return TensorDictModule(policy.module, in_keys=policy.in_keys, out_keys=policy.out_keys)
        case PlainActor():
            net, draw = policy.module
            return ProbabilisticActor(
                stock(net),
                in_keys=draw.in_keys,
                out_keys=["action"],
                distribution_class=draw.distribution_class,
                distribution_kwargs=draw.distribution_kwargs,
                return_log_prob=draw.return_log_prob,
            )
        case PlainQActor():
            return QValueActor(stock(policy.module[0]), spec=CARTPOLE.action_spec)
        case PlainSequential():
            return TensorDictSequential(*map(stock, policy.module))
    return policy


@pytest.mark.parametrize("name", POLICIES)
def test_a_plain_policy_has_the_leaves_the_outputs_and_the_draws_of_torchrls(name: str) -> None:
    spaces, made = POLICIES[name]
    plain = made()
    twin = stock(plain)
    assert list(plain.state_dict()) == list(twin.state_dict())
    assert (plain.in_keys, plain.out_keys) == (twin.in_keys, twin.out_keys)
    for exploration in (ExplorationType.RANDOM, ExplorationType.DETERMINISTIC):
        for shape in ([], [8]):
            seen = TensorDict({"observation": torch.randn(*shape, spaces.features)}, shape)
            acted = []
            for policy in (plain, twin):
                torch.manual_seed(1)
                with torch.no_grad(), set_exploration_type(exploration):
                    acted.append(policy(seen.clone()))
            assert set(acted[0].keys()) == set(acted[1].keys())
            for key, value in acted[1].items():
                assert torch.equal(acted[0][key], value), (key, exploration, shape)
                assert acted[0][key].dtype is value.dtype


def test_hooks_on_the_parts_of_a_plain_policy_are_called() -> None:
    called: list[str] = []
    policy = POLICIES["ppo"][1]()
    for name, part in policy.named_modules():
        part.register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        policy(TensorDict({"observation": torch.zeros(8, 4)}, [8]))
    assert set(called) >= {"", "module.0", "module.0.module", "module.1"}

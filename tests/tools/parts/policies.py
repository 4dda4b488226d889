"""Small actors, critics and Q-functions."""

from __future__ import annotations

import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.data import Bounded
from torchrl.modules import (
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)

from tests.tools.parts.sizes import ACTIONS, HIDDEN, OBSERVATIONS


def make_mlp(outputs: int, inputs: int = OBSERVATIONS) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


class Greedy(nn.Module):
    """An MLP whose largest output is the (one-hot) action."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp(ACTIONS)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(self.net(observation).argmax(-1), ACTIONS)


def make_plain_policy() -> TensorDictModule:
    """A TensorDictModule without a distribution."""
    return TensorDictModule(Greedy(), in_keys=["observation"], out_keys=["action"])


def make_policy() -> ProbabilisticActor:
    """The discrete actor of PPO and A2C."""
    return ProbabilisticActor(
        TensorDictModule(make_mlp(ACTIONS), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def make_critic() -> ValueOperator:
    return ValueOperator(make_mlp(1), in_keys=["observation"])


def make_q_policy() -> QValueActor:
    """The greedy actor of DQN."""
    return QValueActor(make_mlp(ACTIONS), in_keys=["observation"], action_space="one_hot")


def make_continuous_policy() -> ProbabilisticActor:
    """The actor of SAC."""
    net = nn.Sequential(make_mlp(2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        spec=Bounded(-1.0, 1.0, shape=(1,)),
        distribution_class=TanhNormal,
        return_log_prob=False,
    )


class StateActionValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_mlp(1, inputs=OBSERVATIONS + 1)

    def forward(self, observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([observation, action], -1))

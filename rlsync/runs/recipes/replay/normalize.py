"""Observations and rewards in units of their own spread.

The statistics of observations are buffers of every network that sees them, so a version acts with its own.
Source: Chan, Golub and LeVeque 1979 (merging of moments).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torchrl.trainers import Trainer

from rlsync.runs.recipes.bounds import above_zero, kept
from rlsync.seams import misuse, trainers

#: The child of a network that holds the statistics; leaf names of the sync map have it.
OBSERVATIONS = "observations"

_LEAST = 1e-6  #: the smallest spread that is divided by: a number that never changes becomes 0


@dataclass
class NormalizeConfig:
    """What is brought to unit spread, and how far a number may then lie from its mean."""

    #: Subtract the mean of all collected observations, and divide by their standard deviation.
    observations: bool = kept(False, "the checkpoint has networks that see observations so, or not")
    #: Divide rewards by the root of the mean of their squares.
    rewards: bool = kept(False, "the checkpoint has Q values of rewards that are scaled so, or not")
    #: Largest distance from 0 of a normalised observation.
    clip: float = above_zero(10.0)


class Moments:
    """Number, mean and variance of the rows seen, in float64, however they are batched, but for rounding."""

    def __init__(self, features: int) -> None:
        self.count = 0
        self.mean = torch.zeros(features, dtype=torch.float64, device="cpu")
        # Of the distances from the mean, summed.
        self._squares = torch.zeros(features, dtype=torch.float64, device="cpu")

    def add(self, rows: Tensor) -> None:
        rows = rows.detach().to("cpu", torch.float64).reshape(-1, len(self.mean))
        if not len(rows):
            return
        mean = rows.mean(0)
        before = self.count
        self.count += len(rows)
        apart = mean - self.mean
        self._squares += (rows - mean).square().sum(0) + apart.square() * before * len(
            rows
        ) / self.count
        self.mean += apart * len(rows) / self.count

    @property
    def variance(self) -> Tensor:
        """``[features]`` float64: the mean squared distance from the mean; 0 before the first row."""
        return self._squares / max(self.count, 1)

    def state_dict(self) -> dict[str, int | Tensor]:
        return {"count": self.count, "mean": self.mean.clone(), "squares": self._squares.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = int(state_dict["count"])
        self.mean.copy_(state_dict["mean"])
        self._squares.copy_(state_dict["squares"])


class Standardize(nn.Module):
    """Subtracts ``mean`` and divides by ``std``, buffers ``[features]``, and clips the result at ``clip``."""

    mean: Tensor
    std: Tensor

    def __init__(self, features: int, clip: float) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    def forward(self, observation: Tensor) -> Tensor:
        return ((observation - self.mean) / self.std).clamp(-self.clip, self.clip)


class Standardized(nn.Module):
    """A network behind a :class:`Standardize`: it takes an observation, and whatever else follows it."""

    def __init__(self, net: nn.Module, features: int, clip: float) -> None:
        super().__init__()
        self.observations = Standardize(features, clip)
        self.net = net

    def forward(self, observation: Tensor, *others: Tensor) -> Any:
        return self.net(self.observations(observation), *others)


class Normalize(misuse.RegistersItself, trainers.Reader):
    """Counts every frame, writes statistics into the loss, and scales drawn rewards of any age alike."""

    reads = (("next", "reward"),)

    def __init__(self, config: NormalizeConfig, features: int) -> None:
        self._config = config
        self.observations = Moments(features)
        self.rewards = Moments(1)

    def register(self, trainer: Trainer, name: str = "normalize") -> None:
        """Count every batch; register after what draws from the replay buffer."""
        trainer.register_op("batch_process", partial(self._count, trainer.loss_module))
        if self._config.rewards:
            trainer.register_op("process_optim_batch", self.scale)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _count(self, loss: nn.Module, batch: TensorDictBase) -> TensorDictBase:
        self.observations.add(batch.get("observation"))
        self.rewards.add(batch.get(("next", "reward")))
        if self._config.observations:
            mean = self.observations.mean
            std = self.observations.variance.sqrt().clamp_min(_LEAST)
            write_statistics(loss, mean, std)
        return batch

    def scale(self, batch: TensorDictBase) -> TensorDictBase:
        """A drawn batch, with rewards (or sums of them) in units of their root mean square."""
        key = ("next", "reward")
        return batch.set(key, batch.get(key) / self.reward_scale)

    @property
    def reward_scale(self) -> float:
        """What rewards are divided by; 1 while all of them are 0."""
        return float((self.rewards.variance + self.rewards.mean.square()).sqrt()) or 1.0

    def state_dict(self) -> dict[str, dict[str, int | Tensor]]:
        """The moments. The networks' statistics are in the checkpoint of the loss."""
        return {
            "observations": self.observations.state_dict(),
            "rewards": self.rewards.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.observations.load_state_dict(state_dict["observations"])
        self.rewards.load_state_dict(state_dict["rewards"])

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, float]:
        if self._config.rewards:
            scale = {"normalize/reward_scale": self.reward_scale}
        else:
            scale = {}
        return {"normalize/frames": self.observations.count, **scale}


def write_statistics(loss: nn.Module, mean: Tensor, std: Tensor) -> None:
    """Write a mean and a spread into every :class:`Standardize` of a loss, several critics' in one leaf."""
    values = {"mean": mean, "std": std}
    for params in loss.children():
        if isinstance(params, TensorDictParams):
            for key, leaf in params.items(True, True):
                if isinstance(key, tuple) and key[-2:-1] == (OBSERVATIONS,):
                    leaf.data.copy_(values[key[-1]].expand(leaf.shape))

"""Observations and rewards in units of their own spread.

The statistics of observations, numbers and pixels, are buffers of every network that sees them, so a version
acts with its own.
Source: Chan, Golub and LeVeque 1979 (merging of moments); Engstrom et al. 2020, https://arxiv.org/abs/2005.12729,
and Stable-Baselines3's VecNormalize (rewards of on-policy recipes).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.trainers import Trainer

from rlsync.runs.actors.envs.observations import Observations, Part
from rlsync.runs.actors.intake import RolloutId
from rlsync.runs.recipes.settings import NormalizeConfig
from rlsync.seams import misuse, trainers

#: Pictures are counted of one step in so many, as neighbours are much alike.
PICTURES_EVERY = 8

_LEAST = 1e-6  #: the smallest spread that is divided by: a number that never changes becomes 0
_LEAST_VARIANCE = 1e-8  #: is added to the variance of returns, as VecNormalize does


class Moments:
    """Number, mean and variance of the rows seen, in float64, however they are batched, but for rounding."""

    def __init__(self, features: int) -> None:
        self.count = 0
        self.mean = torch.zeros(features, dtype=torch.float64, device="cpu")
        # Of the distances from the mean, summed.
        self._squares = torch.zeros(features, dtype=torch.float64, device="cpu")

    def add(self, rows: Tensor) -> None:
        """Count rows ``[..., features]``."""
        features = len(self.mean)
        if not rows.numel():
            return
        rows = rows.detach().to("cpu", torch.float64).reshape(-1, features)
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

    @property
    def std(self) -> Tensor:
        """``[features]`` float64: the spread that is divided by."""
        return self.variance.sqrt().clamp_min(_LEAST)

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


class Statistics(misuse.RegistersItself, ABC):
    """What observations and rewards are brought to unit spread by; moments by name, as checkpoints have them.

    Without ``pictures`` it leaves these to the networks, which then count what they learn from.
    """

    def __init__(
        self,
        config: NormalizeConfig,
        observations: Observations,
        earned: str,
        *,
        pictures: bool = True,
    ) -> None:
        self._config = config
        self._seen_as = observations
        self.observations = Moments(observations.features)
        self._moments = {"observations": self.observations, earned: Moments(1)}
        self._pictures: list[tuple[Part, Moments]] = []
        if config.observations and pictures:
            for part in observations.pictures:
                moments = Moments(part.size)
                self._pictures.append((part, moments))
                self._moments[f"picture {part.name}"] = moments

    @property
    @abstractmethod
    def reward_scale(self) -> float:
        """What rewards are divided by."""

    def _count_observations(self, rows: Tensor) -> None:
        """Count rows ``[B, T, *shape]``, of pictures every eighth step."""
        self.observations.add(self._seen_as.numbers(rows))
        if self._pictures:
            parts = self._seen_as.split(rows[:, ::PICTURES_EVERY])
            for part, moments in self._pictures:
                moments.add(parts[part.name].flatten(2))

    def _write(self, loss: nn.Module) -> None:
        """Write mean and spread of all observations so far into every network of a loss."""
        numbers = self.observations
        values = {"observations.mean": numbers.mean, "observations.std": numbers.std}
        for number, (part, moments) in enumerate(self._pictures):
            # Networks see bytes as their 255th.
            values[f"pixels.{number}.mean"] = moments.mean.view(part.shape) / 255
            values[f"pixels.{number}.variance"] = moments.variance.view(part.shape) / 255**2
        write_statistics(loss, values)

    def state_dict(self) -> dict[str, dict[str, int | Tensor]]:
        """The moments. The networks' statistics are in the checkpoint of the loss."""
        return {name: moments.state_dict() for name, moments in self._moments.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, moments in self._moments.items():
            moments.load_state_dict(state_dict[name])

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, float]:
        scale = {}
        if self._config.rewards:
            scale["normalize/reward_scale"] = self.reward_scale
        frames = max(moments.count for moments in self._moments.values())
        return {"normalize/frames": frames, **scale}


class Normalize(Statistics, trainers.Reader):
    """Of replayed frames: counts all, writes statistics into the loss, scales drawn rewards of any age alike."""

    reads = (("next", "reward"),)

    def __init__(self, config: NormalizeConfig, observations: Observations) -> None:
        super().__init__(config, observations, "rewards")
        self.rewards = self._moments["rewards"]

    def register(self, trainer: Trainer, name: str = "normalize") -> None:
        """Count every batch; register after what draws from the replay buffer."""
        trainer.register_op("batch_process", partial(self._count, trainer.loss_module))
        if self._config.rewards:
            trainer.register_op("process_optim_batch", self.scale)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _count(self, loss: nn.Module, batch: TensorDictBase) -> TensorDictBase:
        self._count_observations(batch.get("observation"))
        self.rewards.add(batch.get(("next", "reward")))
        if self._config.observations:
            self._write(loss)
        return batch

    def scale(self, batch: TensorDictBase) -> TensorDictBase:
        """A drawn batch, with rewards (or sums of them) in units of their root mean square."""
        key = ("next", "reward")
        return batch.set(key, batch.get(key) / self.reward_scale)

    @property
    def reward_scale(self) -> float:
        """What rewards are divided by; 1 while all of them are 0."""
        return float((self.rewards.variance + self.rewards.mean.square()).sqrt()) or 1.0


class NormalizeOnPolicy(Statistics):
    """For batches that are learned from once: writes statistics into the loss, and scales rewards by returns.

    **Observations.** A batch is counted when it arrives, and its statistics are written when it has been
    learned from, before the next publish. So a batch is scored by the statistics that acted: with a lag of 0 the
    probability ratios of its first minibatch are one, as in Stable-Baselines3, whose buffer has the
    observations as they were normalised when they were seen. Statistics that are written before would count
    as a change of the policy, and clip ratios. With a lag, statistics are as many versions newer as the
    weights are, and ratios say both. The first version does not normalise.

    **Rewards** are divided by the standard deviation of all running returns so far, those of this batch
    included, and clipped. The running return of an environment is R = r + gamma R, which begins anew with each
    episode. It goes on from the worker's rollout before; after a rollout that was dropped it begins at 0. The
    batch itself has the environment's rewards.
    """

    def __init__(
        self,
        config: NormalizeConfig,
        observations: Observations,
        gamma: float,
        *,
        pictures: bool = True,
    ) -> None:
        super().__init__(config, observations, "returns", pictures=pictures)
        self._gamma = gamma
        self.returns = self._moments["returns"]
        # Of each worker: its newest rollout, and the running returns [N] of its environments after it. No
        # checkpoint has them: with a lag they begin at 0 in each life of a worker, without one all episodes do.
        self._running: dict[int, tuple[RolloutId, NDArray[np.float64]]] = {}

    def register(self, trainer: Trainer, name: str = "normalize") -> None:
        """Count every batch; register before the hook that publishes."""
        trainer.register_op("batch_process", partial(self._count, trainer))
        if self._config.observations:
            trainer.register_op("post_steps", partial(self._write, trainer.loss_module))
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _count(self, trainer: Trainer, batch: TensorDictBase) -> TensorDictBase:
        observation, reward, is_init = self._steps(batch)
        self._count_observations(observation)
        if self._config.rewards:
            rollouts = trainer.collector.last_rollouts
            self.returns.add(self.running_returns(rollouts, reward, is_init))
        return batch

    def _steps(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """The observations of a batch, rewards and whether an episode begins, each ``[B, T, ...]``."""
        reward = batch.get(("next", "reward")).squeeze(-1)
        return batch.get("observation"), reward, batch.get("is_init").squeeze(-1)

    def running_returns(
        self, rollouts: Sequence[RolloutId], reward: Tensor, is_init: Tensor
    ) -> Tensor:
        """The running returns ``[B, T]`` float64 after each step of a batch's rollouts.

        Args:
            rollouts: which they are, in the order of their rows; each has equally many.
            reward: ``[B, T]``.
            is_init: ``[B, T]``: the step is the first of its episode.
        """
        rewards = reward.cpu().numpy().T.astype(np.float64)
        factors = self._gamma * ~is_init.cpu().numpy().T
        envs = len(reward) // len(rollouts)
        running = np.concatenate([self._before(rollout, envs) for rollout in rollouts])
        after = np.empty_like(rewards)
        for step in range(len(rewards)):
            running = running * factors[step] + rewards[step]
            after[step] = running
        for rollout, last in zip(rollouts, np.split(running, len(rollouts)), strict=True):
            self._running[rollout.worker] = rollout, last
        return torch.from_numpy(after.T)

    def _before(self, rollout: RolloutId, envs: int) -> NDArray[np.float64]:
        """The running returns ``[envs]`` where a rollout begins."""
        before, running = self._running.get(rollout.worker, (None, None))
        if running is None or before != rollout._replace(number=rollout.number - 1):
            return np.zeros(envs)
        return running

    @property
    def reward_scale(self) -> float:
        """What rewards are divided by."""
        return math.sqrt(float(self.returns.variance) + _LEAST_VARIANCE)

    def scaled(self, reward: Tensor) -> Tensor:
        """Rewards of any shape in units of the spread of returns, clipped; as they are, if none is asked for."""
        if not self._config.rewards:
            return reward
        most = self._config.clip
        return (reward / self.reward_scale).clamp(-most, most)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._running.clear()


class NormalizeUnrolls(NormalizeOnPolicy):
    """The same for batches of unrolls, where time comes first."""

    def _steps(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        # the last observation is the first one of the next rollout
        observation = batch.get("observation")[:-1].transpose(0, 1)
        return observation, batch.get("reward").t(), batch.get("is_init")[:-1].t()


def write_statistics(loss: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Write into all networks of a loss, those of several critics in one leaf.

    Args:
        loss: holds the networks, or their parameters.
        values: by the ends of the names of buffers, as ``observations.mean`` or ``pixels.0.mean``. A network
            of one picture may have it under no number.
    """
    for name, leaf in loss.named_buffers():
        for end, value in values.items():
            if name.endswith((f".{end}", f".{end.replace('.0.', '.')}")):
                leaf.data.copy_(value.expand(leaf.shape))

"""What tests of faults share: collectors that end with the block, three-line errors, a witness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, MultiSyncCollector
from torchrl.data import OneHot
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.trainers import Trainer

from rlsync import BoardScheme, RlsyncError, SyncWeights
from tests.tools.parts import ACTIONS, CanaryPostproc, CanaryTransform, CountingEnv, make_workers

ACTOR = {"policy": "loss_module.actor_network"}


@contextmanager
def running(collector: BaseCollector) -> Iterator[BaseCollector]:
    """A collector that is shut down with the block, also when a worker of it is dead."""
    try:
        yield collector
    finally:
        collector.shutdown(timeout=2, raise_on_error=False)


def make_buffered_env() -> EnvBase:
    """A counting environment with a canary transform, for replay buffers: whole-number actions.

    TorchRL lays a buffer out by the environment's specs, and canaries act with int64.
    """
    env = CountingEnv()
    env.action_spec = OneHot(ACTIONS, dtype=torch.int64)
    return TransformedEnv(env, Compose(CanaryTransform()))


class ObservedPostproc(CanaryPostproc):
    """Shows its weights in the observation: a buffer has room for the environment's keys only."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        low, high = self.net.low_high()
        tensordict["observation"][..., 0] = low
        tensordict["observation"][..., 1] = high
        return tensordict


@contextmanager
def on_a_board(
    policy: nn.Module | None = None,
    kind: type[BaseCollector] = MultiSyncCollector,
    *,
    adopt: str = "alias",
    **options: Any,
) -> Iterator[BaseCollector]:
    """Workers of a stock process collector whose policy comes through a board."""
    with running(make_workers(kind, policy, schemes={"policy": BoardScheme(adopt)}, **options)) as collector:
        yield collector


def values(batch: TensorDictBase, *key: str) -> set[float]:
    """The different values of one entry."""
    return set(batch.get(key).flatten().tolist())


def acted(batch: TensorDictBase) -> set[float]:
    """Which canary weights acted in a batch; a torn read shows as a second value."""
    return values(batch, "canary_min") | values(batch, "canary_max")


def in_three_lines(error: RlsyncError) -> bool:
    """What, where, cure."""
    lines = str(error).splitlines()
    starts = len(lines) == 3 and (lines[1].strip(), lines[2].strip())
    return bool(starts) and starts[0].startswith("where ") and starts[1].startswith("cure ")


class Witness:
    """Recomputes every batch of a training with the weights that were published under its stamps.

    Args:
        trainer: a trainer that `hook` is registered with already.
        hook: what publishes.
        fresh: makes a policy as the learner's.
        key: an output of the policy that the frames carry.
    """

    def __init__(self, trainer: Trainer, hook: SyncWeights, fresh: Callable[[], nn.Module], key: str) -> None:
        self.trainer = trainer
        self.hook = hook
        self.fresh = fresh
        self.key = key
        self.batches: list[TensorDictBase] = []
        self.published: dict[int, nn.Module] = {}
        for stage in ("setup", "post_optim", "post_steps"):
            trainer.register_op(stage, self._remember)
        trainer.register_op("batch_process", self._see)

    def _remember(self) -> None:
        if self.hook.version not in self.published:
            policy = self.fresh()
            policy.load_state_dict(self._learner().state_dict())
            self.published[self.hook.version] = policy

    def _learner(self) -> nn.Module:
        loss = self.trainer.loss_module
        return loss.value_network if self.key == "action_value" else loss.actor_network

    def _see(self, batch: TensorDictBase) -> TensorDictBase:
        self.batches.append(batch.clone())
        return batch

    def stamps(self) -> list[set[float]]:
        """The versions that each batch says acted."""
        return [values(batch, "policy_version") for batch in self.batches]

    def agrees(self) -> bool:
        """Whether each frame was made by the weights that it names, at the root and under next."""
        return all(self._agrees(batch) for batch in self.batches)

    @torch.no_grad()
    def _agrees(self, batch: TensorDictBase) -> bool:
        stamps = batch["policy_version"]
        if not torch.equal(stamps, batch["next", "policy_version"]):
            return False
        for version in values(batch, "policy_version"):
            frames = batch[(stamps == version).reshape(batch.shape)]
            again = self.published[int(version)](frames.select("observation"))
            if not torch.allclose(again[self.key], frames[self.key], atol=1e-6):
                return False
        return True

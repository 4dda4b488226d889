"""What benchmarks of publishes share: networks of any size, workers that act with them, and medians."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.envs import GymEnv
from torchrl.trainers import Trainer
from torchrl.weight_update import WeightSyncScheme

from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target
from rlsync.transport.board.reader import BoardReader
from rlsync.transport.board.writer import BoardWriter

#: name: (number of tensors, floats in each)
MODELS = {
    "mlp": (12, 1_700),
    "resnet": (34, 46_000),
    "100mb": (300, 83_333),
    "400mb": (150, 666_667),
    "many": (1_000, 1_000),
}
MAP = {"policy": "loss_module.actor_network"}
WARM_UP = 5


class BulkPolicy(TensorDictModuleBase):
    """A policy with any number of parameters. It reads one of them to choose between two actions."""

    def __init__(self, tensors: int, floats: int) -> None:
        super().__init__()
        self.in_keys, self.out_keys = ["observation"], ["action"]
        self.weights = nn.ParameterList(torch.zeros(floats) for _ in range(tensors))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = torch.zeros(*tensordict.batch_size, 2, dtype=torch.int64, device="cpu")
        action[..., int(self.weights[0][0] > 1e9)] = 1
        return tensordict.set("action", action)


def make_workers(
    kind: type[BaseCollector],
    policy: nn.Module,
    scheme: WeightSyncScheme,
    frames: int,
    workers: int = 2,
) -> BaseCollector:
    """Worker processes that act with ``policy`` on CartPole, one thread each."""
    return kind(
        [partial(GymEnv, "CartPole-v1")] * workers,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
        num_sub_threads=1,
    )


def make_trainer(
    collector: BaseCollector, policy: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Trainer:
    """A trainer whose ``loss_module.actor_network`` is ``policy``. It does not train."""
    return Trainer(
        collector=collector,
        total_frames=1,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=nn.ModuleDict({"actor_network": policy}),
        optimizer=optimizer,
        progress_bar=False,
    )


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def hold(publish: Callable[[], object], policy: nn.Module, trials: int) -> tuple[float, float]:
    """Median seconds of a publish, and of one contiguous copy of the same bytes, timed alternately."""
    floats = sum(p.numel() for p in policy.parameters())
    source, target = torch.ones(floats, device="cpu"), torch.zeros(floats, device="cpu")
    publishes, copies = [], []
    for _ in range(WARM_UP + trials):
        copies.append(timed(lambda: target.copy_(source)))
        publishes.append(timed(publish))
    return statistics.median(publishes[WARM_UP:]), statistics.median(copies[WARM_UP:])


def adoption_s(policy: BulkPolicy, trials: int) -> dict[str, float]:
    """Median seconds in which a worker adopts a version that is ready, by alias and by copy.

    The policy itself adopts what is published from its memory, so that a large one need not be copied before.
    """
    return {mode: _adoption_s(policy, mode, trials) for mode in ("alias", "copy")}


def _adoption_s(policy: BulkPolicy, mode: str, trials: int) -> float:
    leaves = Leaves(policy, "policy")
    specs = leaves.specs()
    own = [tensor.detach() for tensor in leaves.tensors()]
    apply = partial(_apply, Target(policy, "policy", specs), mode)
    samples = []
    with contextlib.closing(BoardWriter()) as board:
        board.lay_out(Layout.build({"policy": specs}))
        with contextlib.closing(BoardReader(board.handle, apply)) as reader:
            for version in range(1, WARM_UP + trials + 1):
                board.publish(own, stamp=Stamp(1, version))
                samples.append(timed(reader.adopt))
    for parameter, tensor in zip(leaves.tensors(), own, strict=True):
        parameter.data = tensor
    return statistics.median(samples[WARM_UP:])


def _apply(
    target: Target, mode: str, version: int, layout: Layout, views: Sequence[Tensor]
) -> bool:
    (target.alias if mode == "alias" else target.copy)(views)
    return mode == "alias"

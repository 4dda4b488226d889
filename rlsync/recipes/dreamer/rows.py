"""The rows of an episode as Dreamer's recurrent model reads them, and what numbers them in the workers.

A row is what a step brought, with the action that led to it. An episode of n steps has n + 1 rows: the first
one has no action, and the first observation. TorchRL's collectors give a frame for each step, so the first
row is made from what the first frame began with.
"""

from __future__ import annotations

import secrets

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, TensorSpec, Unbounded

from rlsync.torchrl_plugin.compat.replay import OwnTransform
from rlsync.torchrl_plugin.compat.stamps import STAMP

#: Which environment a row is of, and its number there.
STREAM, ROW = "stream", "row"


class NumberRows(OwnTransform):
    """Writes a number on each observation of an environment, which grows by one from row to row.

    Sequences are found by these numbers, in whatever order frames arrive: rows follow each other if their
    stream is the same and their numbers do. A rollout that is lost leaves a gap, over which no sequence goes.
    Each environment has a stream of its own, whose id is drawn at random, so those of a resumed run are new.

    Example:
        >>> from torchrl.envs import GymEnv, TransformedEnv
        >>> frames = TransformedEnv(GymEnv("CartPole-v1"), NumberRows()).rollout(3)
        >>> frames["row"].flatten().tolist(), frames["next", "row"].flatten().tolist()
        ([0, 1, 2], [1, 2, 3])
    """

    def __init__(self) -> None:
        super().__init__()
        self._streams: Tensor | None = None
        self._rows = torch.empty(0, dtype=torch.int64)

    def at_reset(self, first: TensorDictBase, begins: Tensor | None) -> TensorDictBase:
        """The rows that begin now have the next numbers."""
        shape = (*first.batch_size, 1)
        if self._streams is None:
            count = max(1, first.numel())
            self._streams = torch.tensor([secrets.randbits(62) for _ in range(count)]).reshape(shape)
            self._rows = torch.full(shape, -1)
        self._rows += 1 if begins is None else begins.reshape(shape).to(torch.int64)
        return self._numbered(first)

    def at_step(self, after: TensorDictBase) -> TensorDictBase:
        self._rows += 1
        return self._numbered(after)

    def _numbered(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert self._streams is not None
        return tensordict.set(STREAM, self._streams.clone()).set(ROW, self._rows.clone())

    def transform_observation_spec(self, observation_spec: TensorSpec) -> TensorSpec:
        assert isinstance(observation_spec, Composite)
        for key in (STREAM, ROW):
            observation_spec[key] = Unbounded((*observation_spec.shape, 1), dtype=torch.int64)
        return observation_spec


def as_rows(batch: TensorDictBase) -> TensorDictBase:
    """The rows ``[rows]`` that frames bring, from environments with :class:`NumberRows` and ``InitTracker``.

    They have ``action``, ``is_init``, ``stream``, ``row``, ``policy_version`` and, under ``next``, what the
    action led to: ``observation``, ``reward``, ``done`` and ``terminated``. The first row of an episode has
    an action of zeros, and the version that chose the second one's.
    """
    frames = batch.reshape(-1)
    after = frames.get("next")
    flags = {name: after.get(name).reshape(-1, 1) for name in ("done", "terminated")}
    steps = TensorDict(
        {
            "action": frames.get("action").to(torch.float32),
            "is_init": torch.zeros_like(flags["done"]),
            STREAM: after.get(STREAM),
            ROW: after.get(ROW),
            "next": {
                "observation": after.get("observation"),
                "reward": after.get("reward").reshape(-1, 1),
                **flags,
            },
        },
        frames.batch_size,
    )
    begins = frames.get("is_init").reshape(-1)
    first = frames[begins]
    begun = steps[begins].apply(torch.zeros_like)
    begun["is_init"] = torch.ones_like(begun["is_init"])
    begun[STREAM], begun[ROW] = first.get(STREAM), first.get(ROW)
    begun["next", "observation"] = first.get("observation")
    if STAMP in frames:
        steps[STAMP], begun[STAMP] = frames.get(STAMP), first.get(STAMP)
    return torch.cat([begun, steps])

"""The version on each frame."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data import ReplayBuffer
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from rlsync.core.errors import ConfigError

STAMP = "policy_version"


def turn_on_stamps(collector: MultiCollector) -> None:
    """Make the workers write ``policy_version`` on every frame.

    Call this while the collector is being constructed, before its workers start. The workers track versions
    if the learner's collector has a tracker.
    """
    if collector.policy_version_tracker is None:
        collector.policy_version_tracker = PolicyVersion()
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer):
        laid_out = getattr(buffer._storage, "_storage", None)
        if isinstance(laid_out, TensorDictBase):
            _make_room_for_stamps(laid_out)
            buffer._storage._storage_keys = None  # TorchRL's cache of the keys that the storage keeps


def _make_room_for_stamps(laid_out: TensorDictBase) -> None:
    """Add the fields for the stamps to the storage of a replay buffer.

    MultiCollector lays out a lazy storage from an environment without the tracker. The storage then drops
    the root's stamp without an error. Remove this when TorchRL lays out what the workers write.
    """
    missing = [key for key in (STAMP, ("next", STAMP)) if key not in laid_out.keys(True, True)]
    like = laid_out.get(("collector", "traj_ids"), None)
    if missing and like is None:
        raise ConfigError(
            f"the replay buffer is laid out without room for {missing[0]!r}",
            "replay_buffer of the collector",
            "pass an empty lazy storage, or give it int64 fields for the stamps",
        )
    is_memmap = laid_out.is_memmap()  # ask now: after unlocking, it says no
    for key in missing:
        if is_memmap:
            laid_out.make_memmap(key, shape=like.shape, dtype=torch.int64)
        else:
            with laid_out.unlock_():
                laid_out.set(key, torch.zeros(like.shape, dtype=torch.int64).share_memory_())


def announce_version(collector: object, version: int) -> None:
    """Set ``collector.policy_version`` in the learner's process to the newest published version."""
    tracker = getattr(collector, "policy_version_tracker", None)
    if isinstance(tracker, PolicyVersion):
        tracker.version = version


def stamp(collector: Collector, version: int) -> None:
    """Make all frames of the next rollout carry ``version``, including the root of the first frame.

    The tracker writes only ``("next", "policy_version")``. The root of a batch's first frame was written with
    the last frame of the batch before. So it still holds the version that acted then. An LLMCollector keeps
    that root in its shuttle.
    """
    tracker = collector.policy_version_tracker
    if not isinstance(tracker, PolicyVersion):
        return
    tracker.version = version
    roots = (collector._carrier, getattr(collector, "_shuttle", None))
    for root in (held for held in roots if isinstance(held, TensorDictBase)):
        written = root.get(STAMP, None)
        if isinstance(written, torch.Tensor):
            root.set(STAMP, torch.full_like(written, version))


def is_stamped(collector: object) -> bool:
    """Whether the frames of this collector carry ``policy_version``."""
    return isinstance(getattr(collector, "policy_version_tracker", None), PolicyVersion)

"""The version on each frame."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import Collector, _single
from torchrl.collectors._multi_base import MultiCollector
from torchrl.data import Composite, ReplayBuffer
from torchrl.envs import TransformedEnv, utils
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from rlsync.core.errors import ConfigError
from rlsync.torchrl_plugin.compat import around_calls

STAMP = "policy_version"


def turn_on_stamps(collector: MultiCollector) -> None:
    """Let workers write ``policy_version`` on every frame; call it before they start."""
    if collector.policy_version_tracker is None:
        collector.policy_version_tracker = PolicyVersion()
    buffer = collector.replay_buffer
    if isinstance(buffer, ReplayBuffer):
        laid_out = getattr(buffer._storage, "_storage", None)
        if isinstance(laid_out, TensorDictBase):
            _make_room_for_stamps(laid_out)
            # TorchRL's cache of the keys that the storage keeps
            buffer._storage._storage_keys = None


def _make_room_for_stamps(laid_out: TensorDictBase) -> None:
    """Add stamps to a lazy storage. Until TorchRL lays out what the workers write, the tracker included."""
    keys = laid_out.keys(True, True)
    missing = [key for key in (STAMP, ("next", STAMP)) if key not in keys]
    like = laid_out.get(("collector", "traj_ids"), None)
    if missing and like is None:
        raise ConfigError(
            f"the replay buffer is laid out without room for {', '.join(map(repr, missing))}",
            "replay_buffer of the collector",
            f"pass an empty lazy storage, or lay it out with int64 entries {STAMP!r} and {('next', STAMP)!r}",
        )
    is_memmap = laid_out.is_memmap()  # ask now: after unlocking, it says no
    for key in missing:
        if is_memmap:
            laid_out.make_memmap(key, shape=like.shape, dtype=torch.int64)
        else:
            with laid_out.unlock_():
                laid_out.set(
                    key, torch.zeros(like.shape, dtype=torch.int64, device="cpu").share_memory_()
                )


def announce_version(collector: object, version: int) -> None:
    """Set ``collector.policy_version`` in the learner's process to the newest published version."""
    tracker = getattr(collector, "policy_version_tracker", None)
    if isinstance(tracker, PolicyVersion):
        tracker.version = version
        # From 0.15 on a MultiCollector shows this in place of the tracker's version.
        if hasattr(collector, "_acknowledged_policy_version"):
            collector._acknowledged_policy_version = version


def keep_announced(
    collector: object, newest: Callable[[], int], acting: Callable[[], dict[int, int]]
) -> None:
    """Let ``policy_version`` be ``newest()`` also after an update that was refused, or a loaded state.

    TorchRL 0.15 forgets the version before it sends, and takes over the one of a state that it loads.
    ``collector.worker_policy_versions()``, which asks the workers, returns ``acting()``. That is its own
    promise, and costs no rollout. 0.14 has no such method.
    """
    here = weakref.ref(collector)

    @contextmanager
    def announced() -> Iterator[None]:
        try:
            yield
        finally:
            announce_version(here(), newest())

    if isinstance(collector, MultiCollector):
        for method in ("update_policy_weights_", "load_state_dict"):
            around_calls(collector, method, announced)
    collector.worker_policy_versions = acting  # type: ignore[attr-defined]


def stamp(collector: Collector, version: int) -> None:
    """Make all frames of the next rollout carry ``version``, the root of the first one too.

    The tracker wrote that with the last frame of the batch before. An LLMCollector keeps it in its shuttle.
    """
    tracker = collector.policy_version_tracker
    if not isinstance(tracker, PolicyVersion):
        return
    tracker.version = version
    for root in (collector._carrier, getattr(collector, "_shuttle", None)):
        if not isinstance(root, TensorDictBase):
            continue
        written = root.get(STAMP, None)
        if isinstance(written, torch.Tensor):
            root.set(STAMP, torch.full_like(written, version))


def is_stamped(collector: object) -> bool:
    """Whether the frames of this collector carry ``policy_version``."""
    return isinstance(getattr(collector, "policy_version_tracker", None), PolicyVersion)


_stock_tracking = Collector._setup_policy_version_tracking


def make_room_for_the_stamp() -> None:
    """Let a collector of this process carry stamps with any policy and environment.

    Call it in a worker, before the policy is wrapped. It changes TorchRL itself, once: there is no object of
    ours yet to wrap.
    """
    if Collector._setup_policy_version_tracking is _stock_tracking:
        _call_policies_without_the_stamp()
        _track_versions_of_batched_envs()


def _call_policies_without_the_stamp() -> None:
    """Call no policy with a stamp that its ``forward`` does not name. Until TorchRL reads its signature."""
    stock = utils._make_compatible_policy

    @functools.wraps(stock)
    def without_the_stamp(
        policy: object, observation_spec: object, *args: Any, **kwargs: Any
    ) -> object:
        if isinstance(policy, nn.Module):
            takes_it = STAMP in inspect.signature(policy.forward).parameters
        else:
            takes_it = False
        if isinstance(observation_spec, Composite) and not takes_it:
            shape = observation_spec.shape
            device = observation_spec.device
            named = dict(observation_spec.items())
            named.pop(STAMP, None)
            observation_spec = Composite(named, shape=shape, device=device)
        return stock(policy, observation_spec, *args, **kwargs)

    _single._make_compatible_policy = without_the_stamp


def _track_versions_of_batched_envs() -> None:
    """Wrap a ParallelEnv or a SerialEnv in a TransformedEnv. Until TorchRL tracks versions on them, too."""

    @functools.wraps(_stock_tracking)
    def track(self: Collector, track_policy_version: bool | PolicyVersion) -> None:
        if track_policy_version and isinstance(self.env, BatchedEnvBase):
            self.env = TransformedEnv(self.env)
        _stock_tracking(self, track_policy_version)

    Collector._setup_policy_version_tracking = track

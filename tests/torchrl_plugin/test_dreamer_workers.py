"""Decoupled Dreamer players: workers on a board, all modules of one version, and no lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase

from rlsync import (
    BoardScheme,
    DreamerPlayer,
    SyncWeights,
    dreamer_map,
)
from tests.tools.dreamer_canary import ShowingPlayer, fill, make_canary
from tests.tools.dreamer_parts import (
    Dreamer,
    make_dreamer_env,
    make_trainer,
)
from tests.tools.running import running, values
from tests.torchrl_plugin.test_dreamer_map import as_trainer, losses_of
from tests.torchrl_plugin.test_dreamer_state import expected

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("fork_workers"),
    pytest.mark.filterwarnings("ignore::rlsync.IdleLeaves"),  # of canaries, which show their weights
]

WORKERS, ROLLOUT = 2, 8
kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@contextmanager
def playing(
    player: DreamerPlayer,
    kind: type[BaseCollector],
    scheme: BoardScheme | None = None,
    *,
    version: int = 3,
    envs: Sequence[Callable[[], EnvBase]] | None = None,
) -> Iterator[BaseCollector]:
    """Two workers that act with a player."""
    frames = ROLLOUT * WORKERS if kind is MultiSyncCollector else ROLLOUT
    collector = kind(
        envs or [partial(make_dreamer_env, player, version=version)] * WORKERS,
        player,
        frames_per_batch=frames,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme or BoardScheme()},
    )
    with running(collector):
        yield collector


def hooked(collector: BaseCollector, dreamer: Dreamer, player: DreamerPlayer) -> SyncWeights:
    """The hook of a learner that publishes by hand."""
    hook = SyncWeights(dreamer_map(losses_of(dreamer), player))
    hook.register(as_trainer(make_trainer(dreamer, collector)))
    return hook


def publish(dreamer: Dreamer, hook: SyncWeights) -> None:
    """The number of the version is in all weights of it."""
    fill(dreamer.player, hook.version + 1)
    hook.publish()


def check_frames(frames: TensorDictBase) -> None:
    """All modules acted with the stamped version."""
    after_the_first = frames[frames["policy_version"] > 1]
    stamps = after_the_first["policy_version"].float()
    assert torch.equal(after_the_first["canary_min"], stamps)
    assert torch.equal(after_the_first["canary_max"], stamps)


@kinds
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.one_case
def test_all_modules_of_a_player_act_with_one_version(kind: type[BaseCollector], version: int) -> None:
    dreamer = make_canary(version)
    player = ShowingPlayer(dreamer.copied())
    with playing(player, kind, version=version) as collector:
        hook, seen = hooked(collector, dreamer, player), set()
        publish(dreamer, hook)
        for batch in collector:
            check_frames(batch.reshape(-1))
            seen |= values(batch, "policy_version")
            publish(dreamer, hook)
            if len(seen) > 5:
                break


@pytest.mark.parametrize("on_adoption", ["keep", "reset", "recompute"])
@pytest.mark.one_case
def test_workers_do_to_the_state_what_was_declared(on_adoption: str) -> None:
    dreamer = make_canary(3)
    player = ShowingPlayer(dreamer.copied(), on_adoption=on_adoption)
    fill(player, 1)  # what the workers begin with, version 1
    with playing(player, MultiSyncCollector) as collector:
        hook, found = hooked(collector, dreamer, player), []
        for batch in collector:
            found.append(batch.reshape(WORKERS, ROLLOUT).clone())
            publish(dreamer, hook)
            if len(found) == 4:
                break
    for frames in torch.cat(found, 1).unbind(0):
        said = zip(frames["state_version"].flatten().tolist(), frames["belief"].tolist(), strict=True)
        assert list(said) == expected(frames, on_adoption)
        assert len(values(frames, "policy_version")) > 1


@pytest.mark.thorough
def test_a_worker_that_adopts_at_every_policy_call_recomputes_in_the_middle_of_a_rollout() -> None:
    dreamer = make_canary(3)
    player = ShowingPlayer(dreamer.copied(), on_adoption="recompute")
    scheme = BoardScheme(adopt_at="policy_call")
    with playing(player, MultiAsyncCollector, scheme) as collector:
        hook = hooked(collector, dreamer, player)
        publish(dreamer, hook)
        for taken, batch in enumerate(collector):
            publish(dreamer, hook)
            frames = batch.reshape(-1)
            check_frames(frames)
            carried = frames["state_version"].flatten()
            assert bool(((carried == frames["policy_version"]) | (carried == -1)).all())
            if taken == 8:
                break


# ------------------------------------------------------------------------------------- workers that are lost

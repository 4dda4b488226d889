"""A worker in the learner's own process: the same batches as one worker with lag 0, and no process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import nn

from rlsync import VerifySync
from rlsync.core.errors import BoardClosed
from rlsync.record.schedule import FixedLag
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.specs import EnvSpec, GymnasiumEnvs
from rlsync.runs.actors.player import Player
from rlsync.runs.actors.players.prefill import PrefilledPlayer
from rlsync.runs.actors.players.q import EpsilonGreedyPlayer
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.evaluation.evaluator import board_of
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from rlsync.runs.recipes.ppo import RECIPE
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig, PPOConfig
from rlsync.runs.recipes.sync_settings import SyncConfig
from rlsync.sync.adopter import Adopter, Destination
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.actors.test_envs import LADDER

STEPS, ENVS, BATCHES = 6, 2, 8
CARTPOLE = GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 9})


def impala() -> Player:
    torch.manual_seed(0)
    return ImpalaNet((4,), Categorical(2), hidden=(8,)).player()


def prefilled() -> Player:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return PrefilledPlayer(EpsilonGreedyPlayer(network, DiscreteActions(2), (4,)))


@contextmanager
def acting_here(player: Player, spec: EnvSpec = CARTPOLE, **options: Any) -> Iterator[UnrollCollector]:
    settings: dict[str, Any] = {"steps": STEPS, "envs_per_worker": ENVS, "seed": 3}
    collector = UnrollCollector(player, spec, CollectSettings(**settings | options), num_workers=0)
    try:
        yield collector
    finally:
        collector.shutdown()


@contextmanager
def one_worker(player: Player, **options: Any) -> Iterator[UnrollCollector]:
    """A worker process that waits for each version."""
    settings = CollectSettings(
        steps=STEPS,
        envs_per_worker=ENVS,
        silent_timeout_s=100.0,
        seed=3,
        start_method="fork",
        **options,
    )
    collector = RepeatedUnrolls(player, CARTPOLE, settings, life=FixedLag(0, 1, 1), lag=0, num_workers=1)
    try:
        yield collector
    finally:
        collector.shutdown()


def changed(collector: UnrollCollector) -> list[TensorDictBase]:
    """Batches; the learner draws random numbers and changes the weights between them."""
    torch.manual_seed(5)
    made = []
    for batch in itertools.islice(collector, BATCHES):
        made.append(batch.clone())
        with torch.no_grad():
            for parameter in collector.player.modules["policy"].parameters():
                parameter.add_(torch.randn_like(parameter))
        collector.update_policy_weights_()
    return made


@pytest.mark.processes
@pytest.mark.parametrize("make", [impala, prefilled])
@pytest.mark.parametrize("transitions", [False, True], ids=["unrolls", "transitions"])
def test_its_batches_are_those_of_one_worker_that_waits_for_each_version(
    make: Any, transitions: bool
) -> None:
    options = {"transitions": transitions, "random_frames": 3 * STEPS * ENVS}
    with acting_here(make(), **options) as here:
        ours = changed(here)
        assert here.procs == []
    with one_worker(make(), **options) as there:
        theirs = changed(there)
    for our, their in zip(ours, theirs, strict=True):
        assert set(our.keys(True, True)) == set(their.keys(True, True))
        for key in our.keys(True, True):
            assert torch.equal(our[key], their[key]), key
    versions = [int(batch["policy_version"].flatten()[0]) for batch in ours]
    assert versions == list(range(1, BATCHES + 1)), "each acts with what was published before it"


def test_an_error_of_an_environment_reaches_the_learner_as_it_is() -> None:
    player = ImpalaNet((4,), Categorical(3), hidden=(8,)).player()
    with acting_here(player, GymnasiumEnvs(LADDER, {"fails_at": 8}), envs_per_worker=1) as collector:
        batches = iter(collector)
        next(batches)
        with pytest.raises(ValueError, match="the ladder broke at step 8"):
            next(batches)
        assert collector.closed, "as TorchRL's collectors are after an error"


def test_an_environment_that_cannot_be_made_raises_its_own_error() -> None:
    with (
        pytest.raises(Exception, match="no-such-env") as raised,
        acting_here(impala(), GymnasiumEnvs("no-such-env-v0")),
    ):
        pass
    assert "no-such-env" in str(raised.value)


def test_a_collector_that_is_interrupted_in_a_rollout_can_be_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = iter(range(100))
    with acting_here(impala()) as collector:
        batches = iter(collector)
        next(batches)
        envs = collector._workers._worker._roller._groups[0].envs  # type: ignore[union-attr]
        send = envs.send

        def interrupted(action: torch.Tensor) -> None:
            if next(steps) == 2:
                raise KeyboardInterrupt
            send(action)

        monkeypatch.setattr(envs, "send", interrupted)
        state = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert torch.equal(torch.get_rng_state(), state), "the learner's random numbers are its own again"
        monkeypatch.setattr(envs, "send", send)
        collector.shutdown()
        assert collector.closed
        with pytest.raises(BoardClosed):
            next(iter(collector))


def test_environments_are_closed_with_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    with acting_here(impala()) as collector:
        envs = collector._workers._worker._roller._groups[0].envs  # type: ignore[union-attr]
        close = envs.close
        monkeypatch.setattr(envs, "close", lambda: (closed.append(1), close()))
        next(iter(collector))
        assert closed == []
    assert closed == [1]
    collector.shutdown()
    assert closed == [1]


def test_another_process_or_reader_gets_each_version_from_its_board() -> None:
    with acting_here(impala()) as collector:
        handle = board_of(collector)
        assert handle is not None
        module = impala().modules["policy"]
        reader = Adopter(handle, 5)
        reader.place({"policy": Destination(lambda: module, "copy")})
        try:
            assert reader.adopt() == 1
            with torch.no_grad():
                for parameter in collector.player.modules["policy"].parameters():
                    parameter.fill_(0.25)
            collector.update_policy_weights_()
            assert reader.adopt() == 2
            assert all(bool((parameter == 0.25).all()) for parameter in module.parameters())
        finally:
            reader.close()


def test_a_run_in_one_process_is_verified_as_any_other() -> None:
    config = Config(
        env=EnvConfig("CartPole-v1", 2),
        collector=CollectorConfig(num_workers=0, frames_per_batch=64),
        sync=SyncConfig(verify_every_s=1e-6),
        recipe=PPOConfig(total_frames=6 * 64, hidden=[8], num_epochs=1, lr=0.01),
    )
    trainer = RECIPE.build(config)
    (verify,) = (hook for hook in registered_modules(trainer) if isinstance(hook, VerifySync))
    trainer.train()
    assert verify.checks > 0
    assert verify.deviations == []
    assert verify.behaviour_held is not None
    assert verify.behaviour_held > 1


def test_a_seed_begins_the_episodes_and_the_random_numbers_anew() -> None:
    with acting_here(impala()) as collector:
        batches = iter(collector)
        first = next(batches).clone()
        next(batches)
        collector.set_seed(3)
        again = next(batches)
        for key in ("observation", "action", "reward"):
            assert torch.equal(first[key], again[key]), key

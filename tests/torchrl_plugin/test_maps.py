"""Faults 1, 2, 7 and 12: a map is carried out as it is written, or refused before anything runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

from rlsync import (
    AmbiguousSource,
    BoardScheme,
    DestinationNotFound,
    LayoutMismatch,
    SyncWeights,
    UpdateWeights,
    WeightBoard,
)
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    Canary,
    make_collector,
    make_critic,
    make_dqn_trainer,
    make_env_with_module,
    make_policy,
    make_ppo_trainer,
    make_small_canary,
    make_workers,
)
from tests.tools.running import (
    ACTOR,
    ObservedPostproc,
    Witness,
    acted,
    in_three_lines,
    make_buffered_env,
    on_a_board,
    running,
    values,
)


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --------------------------------------------------------------------- fault 1: a plain Collector


def test_a_map_on_an_in_process_collector_arrives_at_every_batch() -> None:
    acting, learning = make_policy(), make_policy()
    collector = make_collector(acting)
    trainer = make_ppo_trainer(collector, learning, total_frames=30)
    hook = SyncWeights(ACTOR)
    hook.register(trainer)
    witness = Witness(trainer, hook, make_policy, "logits")

    trainer.train()

    assert witness.stamps() == [{1}, {2}, {3}]
    assert witness.agrees()
    assert _same(acting, learning)
    assert not _same(witness.published[1], witness.published[3])


def test_a_map_of_the_drop_in_hook_arrives_at_an_in_process_collector() -> None:
    acting, learning = make_policy(), make_policy()
    collector = make_collector(acting)
    trainer = make_ppo_trainer(collector, learning)

    UpdateWeights(collector, 1, weight_update_map=ACTOR, trainer=trainer)()

    assert _same(acting, learning)
    assert collector.policy_version == 1


def test_a_misspelt_destination_is_refused_at_registration_and_nothing_has_moved() -> None:
    acting = make_policy()
    before = copy.deepcopy(acting)
    trainer = make_ppo_trainer(make_collector(acting), make_policy())
    wrong = {"polcy": "loss_module.actor_network"}

    with pytest.raises(DestinationNotFound, match="did you mean 'policy'") as refusal:
        SyncWeights(wrong).register(trainer)
    with pytest.raises(DestinationNotFound, match="did you mean 'policy'"):
        UpdateWeights(trainer.collector, 1, weight_update_map=wrong, trainer=trainer)

    assert in_three_lines(refusal.value)
    assert _same(acting, before)
    assert trainer.collector.policy_version == 0


# ------------------------------------------- fault 2: other destinations on process collectors


@pytest.mark.usefixtures("fork_workers")
def test_a_destination_that_the_board_does_not_serve_is_refused_and_the_served_ones_are_named() -> None:
    policy = make_policy()
    with on_a_board(policy, workers=1) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.statistics = Canary(4, 100)
        with pytest.raises(DestinationNotFound, match="offers: policy") as refusal:
            SyncWeights({"env.transform[0].module": "statistics"}).register(trainer)
    assert in_three_lines(refusal.value)


def _three_schemes(adopt: str = "alias") -> dict[str, BoardScheme]:
    board = WeightBoard()
    return {path: board.scheme(adopt) for path in ("policy", "env.transform[0].module", "postproc.net")}


@pytest.mark.processes
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_three_destinations_of_a_process_collector_are_published_as_one_version(
    storage: type,
) -> None:
    buffer = ReplayBuffer(storage=storage(200), shared=True)
    policy = make_small_canary()
    with running(
        MultiSyncCollector(
            [make_buffered_env],
            policy,
            frames_per_batch=20,
            total_frames=-1,
            weight_sync_schemes=_three_schemes(),
            postproc=ObservedPostproc(),
            replay_buffer=buffer,
        )
    ) as collector:
        trainer = make_dqn_trainer(collector)
        trainer.actor, trainer.scaler, trainer.ranker = policy, Canary(4, 100), Canary(4, 100)
        hook = SyncWeights(
            {
                "policy": "actor",
                "env.transform[0].module": "scaler",
                "postproc.net": "ranker",
            }
        )
        hook.register(trainer)
        batches = iter(collector)
        for version in (2, 3):
            policy.fill(version)
            trainer.scaler.fill(10 * version)
            trainer.ranker.fill(100 * version)
            assert hook.publish().version == version
            next(batches)

    frames = buffer[:]
    stamp = frames["policy_version"]
    assert set(stamp.tolist()) == {2, 3}
    assert torch.equal(frames["next", "policy_version"], stamp)
    # The transform of a step acts on what comes next.
    shown = {
        1.0: (frames["canary_min"], frames["canary_max"]),
        10.0: (frames["next", "transform_min"], frames["next", "transform_max"]),
        100.0: (frames["observation"][:, 0], frames["observation"][:, 1]),
    }
    for factor, (low, high) in shown.items():
        assert torch.equal(low, stamp * factor)
        assert torch.equal(high, stamp * factor)


@pytest.mark.usefixtures("fork_workers")
def test_two_destinations_reach_forked_workers_as_one_version() -> None:
    board, policy, scaler = WeightBoard(), make_small_canary(), Canary(4, 100)
    schemes = {"policy": board.scheme(), "env.transform[0].module": board.scheme("copy")}
    with running(
        make_workers(MultiSyncCollector, policy, schemes=schemes, env=make_env_with_module)
    ) as collector:
        batches = iter(collector)
        for version in (2, 3, 4):
            weights = {
                "policy": policy.fill(version),
                "env.transform[0].module": scaler.fill(version) or scaler,
            }
            collector.update_policy_weights_(weights_dict=weights)
            batch = next(batches)
            assert acted(batch) == values(batch, "policy_version") == {version}
            assert values(batch, "next", "transform_min") == {version}
            assert values(batch, "next", "transform_max") == {version}


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.each_value
def test_a_collector_names_the_newest_version_and_that_of_each_worker(kind: type, tracks: bool) -> None:
    """Whatever TorchRL counts: an update of two destinations is one version, a refused one is none."""
    board, policy, scaler = WeightBoard(), make_small_canary(), Canary(4, 100)
    collector = kind(
        [make_env_with_module] * 2,
        policy,
        frames_per_batch=FRAMES_PER_BATCH,
        total_frames=-1,
        track_policy_version=tracks,
        weight_sync_schemes={"policy": board.scheme(), "env.transform[0].module": board.scheme()},
    )
    with running(collector):
        batches = iter(collector)
        next(batches)
        assert collector.policy_version == 1
        assert collector.worker_policy_versions() == {0: 1, 1: 1}

        collector.update_policy_weights_(
            weights_dict={"policy": policy.fill(2), "env.transform[0].module": scaler}
        )
        with pytest.raises(LayoutMismatch):
            collector.update_policy_weights_(Canary(4, 99))
        with pytest.raises(DestinationNotFound):
            collector.update_policy_weights_(weights_dict={"polcy": policy})
        assert collector.policy_version == collector.get_policy_version() == 2

        while collector.worker_policy_versions() != {0: 2, 1: 2}:
            next(batches)
        arriving = next(batches)
        if kind is MultiSyncCollector:  # of asynchronous workers an older rollout may wait in the queue
            assert values(arriving, "policy_version") == {2}

        kept = collector.state_dict()
        collector.update_policy_weights_(policy.fill(3))
        collector.load_state_dict(kept)
        assert collector.policy_version == 4, "what was loaded acts as a new version"


@pytest.mark.usefixtures("fork_workers")
def test_a_misspelt_destination_of_a_board_ends_the_construction_and_names_the_nearest() -> None:
    board = WeightBoard()
    schemes = {"policy": board.scheme(), "env.transform[0].modul": board.scheme()}
    with pytest.raises(DestinationNotFound, match="did you mean 'module'"):
        make_workers(
            MultiSyncCollector,
            make_small_canary(),
            schemes=schemes,
            env=make_env_with_module,
            workers=1,
        )


# ------------------------------------------------------------ fault 7: all destinations, or none


@pytest.mark.usefixtures("fork_workers")
def test_weights_for_a_model_that_has_no_scheme_update_nothing_at_all() -> None:
    with on_a_board(make_small_canary().fill(1), workers=1) as collector:
        batches = iter(collector)
        weights = {"policy": make_small_canary().fill(5), "critic": make_critic()}
        with pytest.raises(DestinationNotFound, match="no destination 'critic'"):
            collector.update_policy_weights_(weights_dict=weights)
        batch = next(batches)
    assert acted(batch) == {1}
    assert values(batch, "policy_version") == {1}


@pytest.mark.usefixtures("fork_workers")
def test_a_map_with_one_wrong_entry_is_refused_as_a_whole() -> None:
    policy = make_policy()
    with on_a_board(policy, workers=1) as collector:
        trainer = make_ppo_trainer(collector, policy, weight_update_map=ACTOR)
        wrong = {**ACTOR, "critic": "loss_module.critic_network"}
        version = collector.policy_version
        with pytest.raises(DestinationNotFound, match="'critic'"):
            SyncWeights(wrong).register(trainer)
        assert collector.policy_version == version
        SyncWeights(ACTOR).register(trainer)  # the refused hook left no trace


@pytest.mark.processes
def test_one_destination_that_does_not_fit_keeps_back_all_the_others() -> None:
    board = WeightBoard()
    schemes = {"policy": board.scheme(), "env.transform[0].module": board.scheme()}
    with running(
        make_workers(
            MultiAsyncCollector,
            make_small_canary().fill(1),
            schemes=schemes,
            env=make_env_with_module,
            workers=1,
        )
    ) as collector:
        weights = {
            "policy": make_small_canary().fill(5),
            "env.transform[0].module": Canary(4, 99),
        }
        with pytest.raises(LayoutMismatch, match="99"):
            collector.update_policy_weights_(weights_dict=weights)
        batch = next(iter(collector))
    assert acted(batch) == {1}
    assert values(batch, "policy_version") == {1}


# -------------------------------------------- fault 12: modules that do not hold what is trained


def test_the_stale_actor_of_a_copied_loss_is_refused_and_its_trained_parameters_arrive() -> None:
    acting = make_policy()
    trainer = make_ppo_trainer(make_collector(acting), make_policy())
    trainer.loss_module = copy.deepcopy(trainer.loss_module)
    trained = trainer.loss_module.actor_network_params
    with torch.no_grad():
        for weight in trained.parameters():
            weight.fill_(3.0)

    with pytest.raises(AmbiguousSource, match="actor_network_params"):
        SyncWeights(ACTOR).register(trainer)
    hook = SyncWeights({"policy": "loss_module.actor_network_params"})
    hook.register(trainer)
    hook.publish()

    assert all(bool((weight == 3).all()) for weight in acting.parameters())


def test_a_layer_that_is_replaced_in_mid_training_is_named_with_its_shapes() -> None:
    acting = make_policy()
    trainer = make_ppo_trainer(make_collector(acting), make_policy())
    hook = SyncWeights(ACTOR)
    hook.register(trainer)
    actor = trainer.loss_module.actor_network
    name, layer = next((n, m) for n, m in actor.named_modules() if isinstance(m, nn.Linear))
    outer, _, last = name.rpartition(".")
    setattr(actor.get_submodule(outer), last, nn.Linear(layer.in_features, 99))
    with pytest.raises(AmbiguousSource, match=rf"its {name}.\w+ \(99, .* is not the trained one") as refusal:
        hook.publish()
    assert in_three_lines(refusal.value)

"""Players that explore: random actions until a version ends them, and at a rate that travels with weights."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrl.data import OneHot
from torchrl.modules import EGreedyModule

from rlsync.core.plan import POLICY
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.actions import BoxActions, DiscreteActions
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.player import Acted, Player, State, materialised, without_memory
from rlsync.runs.actors.players.prefill import PREFILL, PrefilledPlayer
from rlsync.runs.actors.players.q import MAX_VALUE, TAKEN_VALUE, EpsilonGreedyPlayer, EpsilonLadder
from rlsync.runs.actors.settings import CollectSettings

CARTPOLE = GymnasiumEnvs("CartPole-v1")
GREEDY = EpsilonLadder(0.0)
COUNT = 4000
STEPS, ENVS = 8, 2


class Prefers(nn.Module):
    """Q-values by which one action is the best for each observation, whatever the observation is."""

    def __init__(self, action: int = 1) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.nn.functional.one_hot(torch.tensor(action), 2).float())

    def forward(self, observation: Tensor) -> Tensor:
        return self.values.expand(len(observation), -1)


def greedy(action: int = 1) -> EpsilonGreedyPlayer:
    return EpsilonGreedyPlayer(Prefers(action), DiscreteActions(2), (4,), ladder=GREEDY)


def acted(player: Player, *, seed: int = 1, worker: int = 0, workers: int = 1, count: int = COUNT) -> Acted:
    generator = torch.Generator().manual_seed(seed)
    state = player.begin(count, generator, worker, workers)
    begins, reward = torch.ones(count, dtype=torch.bool), torch.zeros(count)
    with torch.inference_mode():
        return player.act(torch.zeros(count, *player.observation_shape), begins, reward, state, generator)


def share_of_others(player: Player, **options: Any) -> float:
    """How often the action is not the preferred one."""
    return float((acted(player, **options).action != 1).float().mean())


# --------------------------------------------------------------------------------------- prefill


def test_actions_are_random_while_the_version_says_so_and_no_longer() -> None:
    player = PrefilledPlayer(greedy())
    assert set(player.modules) == {POLICY, PREFILL}
    assert share_of_others(player) == pytest.approx(0.5, abs=0.03)
    player.prefill.random.fill_(False)
    assert share_of_others(player) == 0.0


def test_random_actions_fill_the_bounds_of_a_box() -> None:
    class Still(Player):
        def begin(self, num_envs: int, *given: Any) -> State:
            return {}

        def act(self, observation: Tensor, *given: Any) -> Acted:
            return Acted(torch.zeros(len(observation), 1), {}, {})

    player = PrefilledPlayer(Still({POLICY: nn.Linear(1, 1)}, BoxActions(1, (-2.0,), (3.0,)), (3,)))
    action = acted(player, count=500).action
    assert -2.0 <= action.min() < -1.8
    assert 2.8 < action.max() <= 3.0
    player.prefill.random.fill_(False)
    assert not acted(player, count=500).action.any()


def test_the_player_inside_keeps_its_records_and_its_state_and_is_told_what_was_done_instead() -> None:
    class Keeps(EpsilonGreedyPlayer):
        def instead(self, acted: Acted, action: Tensor) -> Acted:
            return acted._replace(action=action, records={**acted.records, TAKEN_VALUE: action.float()})

        def adopted(self, state: State, version: int) -> State:
            return {"version": torch.tensor([version])}

    inner = Keeps(Prefers(), DiscreteActions(2), (4,), ladder=GREEDY)
    player = PrefilledPlayer(inner)
    assert player.records == inner.records
    made = acted(player)
    assert set(made.records) == {TAKEN_VALUE, MAX_VALUE}
    assert torch.equal(made.records[TAKEN_VALUE], made.action.float())
    assert int(player.adopted({}, 7)["version"]) == 7
    assert player.by_weights() is inner


def test_a_worker_gets_the_player_without_memory_and_acts_by_its_seed() -> None:
    player = PrefilledPlayer(greedy())
    arrived = materialised(pickle.loads(pickle.dumps(without_memory(player))))
    for name, module in arrived.modules.items():
        module.load_state_dict(player.modules[name].state_dict())
    one, other = acted(player, seed=5).action, acted(arrived, seed=5).action
    assert torch.equal(one, other)
    assert not torch.equal(one, acted(player, seed=6).action)


def collected(batches: int, random_frames: int, num_workers: int = 0) -> list[tuple[int, bool]]:
    """The version and whether its actions were all the preferred one, of each batch; a publish after each."""
    torch.manual_seed(0)
    collector = UnrollCollector(
        PrefilledPlayer(greedy()),
        CARTPOLE,
        CollectSettings(
            steps=STEPS,
            envs_per_worker=ENVS,
            start_method="fork",
            seed=3,
            transitions=True,
            random_frames=random_frames,
        ),
        num_workers=num_workers,
    )
    found = []
    try:
        for batch in itertools.islice(collector, batches):
            (version,) = batch["policy_version"].unique().tolist()
            found.append((version, bool((batch["action"].argmax(-1) == 1).all())))
            collector.update_policy_weights_()
    finally:
        collector.shutdown()
    return found


def test_the_first_publish_after_the_random_frames_ends_them() -> None:
    per_batch = STEPS * ENVS
    assert collected(5, 3 * per_batch) == [(1, False), (2, False), (3, False), (4, True), (5, True)]
    assert collected(3, 0)[1:] == [(2, True), (3, True)]


@pytest.mark.processes
def test_a_stamp_says_whether_the_actions_of_a_worker_process_were_random() -> None:
    per_batch = STEPS * ENVS
    made = collected(12, 3 * per_batch, num_workers=1)
    assert all(by_weights == (version >= 4) for version, by_weights in made), made
    assert {by_weights for _, by_weights in made} == {False, True}


@pytest.mark.parametrize("frames", [0, 10**6])
def test_who_sets_the_random_frames_later_decides_from_the_next_publish_on(frames: int) -> None:
    settings = CollectSettings(
        steps=STEPS, envs_per_worker=ENVS, transitions=True, random_frames=10**6 - frames
    )
    collector = UnrollCollector(PrefilledPlayer(greedy()), CARTPOLE, settings, num_workers=0)
    try:
        collector.init_random_frames = frames
        assert collector.init_random_frames == frames
        collector.update_policy_weights_()
        batch = next(iter(collector))
        assert bool((batch["action"].argmax(-1) == 1).all()) is (frames == 0)
    finally:
        collector.shutdown()


# ------------------------------------------------------------------------ a rate beside the weights


class Policy(nn.Module):
    """A network and an exploration rate, as the policy of a sync map has them."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.network = Prefers()
        self.greedy = EGreedyModule(spec=OneHot(2), eps_init=epsilon, eps_end=0.0, annealing_num_steps=10)


def with_rate(epsilon: float, alpha: float = 0.0, *, record_values: bool = False) -> EpsilonGreedyPlayer:
    policy = Policy(epsilon)
    return EpsilonGreedyPlayer(
        policy.network,
        DiscreteActions(2),
        (4,),
        ladder=EpsilonLadder(alpha=alpha),
        policy=policy,
        rate=policy.greedy,
        record_values=record_values,
    )


def test_the_rate_is_that_of_the_policys_module_and_changes_with_it() -> None:
    player = with_rate(0.5)  # half of the random actions are the preferred one
    assert share_of_others(player) == pytest.approx(0.25, abs=0.03)
    policy = player.modules[POLICY]
    assert isinstance(policy, Policy)
    policy.greedy.step(10)
    assert share_of_others(player) == 0.0


def test_a_ladder_raises_the_rate_to_the_power_of_each_worker() -> None:
    player = with_rate(0.5, alpha=7.0)
    assert share_of_others(player, worker=0, workers=2) == pytest.approx(0.25, abs=0.03)
    assert share_of_others(player, worker=1, workers=2) == pytest.approx(0.5**8 / 2, abs=0.01)
    assert share_of_others(player, worker=0, workers=1) == pytest.approx(0.25, abs=0.03)


def test_values_are_recorded_only_if_asked_for() -> None:
    assert list(with_rate(0.5).records) == []
    assert acted(with_rate(0.5)).records == {}
    player = with_rate(0.5, record_values=True)
    made = acted(player)
    assert torch.equal(made.records[TAKEN_VALUE], (made.action == 1).float())
    assert bool((made.records[MAX_VALUE] == 1).all())


def test_what_compares_weights_gets_a_greedy_player_of_the_same_modules() -> None:
    player = with_rate(0.5)
    looked_through = PrefilledPlayer(player).by_weights()
    assert looked_through.modules[POLICY] is player.modules[POLICY]
    assert share_of_others(looked_through) == 0.0
    assert set(acted(looked_through).records) == {TAKEN_VALUE, MAX_VALUE}


# ---------------------------------------------------------------------------------- last_rollouts


@pytest.mark.processes
def test_a_batch_tells_which_rollouts_it_is_made_of_in_its_order() -> None:
    settings = CollectSettings(
        steps=STEPS, envs_per_worker=ENVS, rollouts_per_batch=3, start_method="fork", transitions=True
    )
    collector = UnrollCollector(greedy(), CARTPOLE, settings, num_workers=2)
    numbers: dict[int, list[int]] = {0: [], 1: []}
    try:
        assert collector.last_rollouts == ()
        for batch in itertools.islice(collector, 4):
            rollouts = collector.last_rollouts
            assert len(rollouts) == 3
            assert len(batch) == 3 * ENVS
            assert collector.last_workers == tuple(rollout.worker for rollout in rollouts)
            for rollout in rollouts:
                assert rollout.life == 0
                numbers[rollout.worker].append(rollout.number)
    finally:
        collector.shutdown()
    for made in numbers.values():
        assert made == list(range(len(made))), "each worker's follow each other"
    assert sum(map(len, numbers.values())) == 12

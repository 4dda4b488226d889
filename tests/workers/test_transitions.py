"""Unrolls as transitions, and TorchRL policies that explore as players: nothing of Ray."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import OneHot
from torchrl.modules import QValueActor

from rlsync.recipes.dqn import GreedyOnLadder
from rlsync.recipes.env_settings import EnvConfig
from rlsync.recipes.place import make_env_on_rung
from rlsync.workers.envs.actions import BoxActions, DiscreteActions
from rlsync.workers.envs.specs import GymnasiumEnvs, make_venv
from rlsync.workers.frames import RolloutShape, batch_of
from rlsync.workers.player import Player, Seat, materialised, without_memory
from rlsync.workers.players.q import EpsilonLadder
from rlsync.workers.players.torchrl_policy import PREFILL, ActingPolicy, Prefill, transitions
from rlsync.workers.roller import Roller

STEPS, ENVS = 40, 2
SHORT = GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 9})  # so that some episodes are truncated


def q_policy(epsilon: float, *, hidden: int = 4) -> TensorDictSequential:
    net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))
    actor = QValueActor(net, in_keys=["observation"], spec=OneHot(2))
    greedy = GreedyOnLadder(spec=OneHot(2), eps_init=epsilon, eps_end=epsilon, annealing_num_steps=1)
    return TensorDictSequential(actor, greedy)


def q_player(epsilon: float, prefill: Prefill | None = None) -> ActingPolicy:
    ladder = EpsilonLadder(alpha=7.0)
    return ActingPolicy(q_policy(epsilon), DiscreteActions(2), (4,), ladder=ladder, prefill=prefill)


def unrolled(player: Player, seed: int = 0, rollouts: int = 1) -> list[TensorDict]:
    """What a worker fills, rollout after rollout."""
    shape = RolloutShape(STEPS, ENVS)
    layout = shape.layout(player)
    image = torch.zeros(layout.image_bytes, dtype=torch.uint8)
    views = dict(zip([entry.leaf.name for entry in layout.entries], layout.views(image), strict=True))
    roller = Roller(Seat.taken(player, seed), lambda count: make_venv(SHORT, count), shape, overlap=False)
    roller.reset(seed)
    made = []
    for version in range(1, rollouts + 1):
        assert roller.roll(0, views, version, lambda: False)
        made.append(batch_of([views], player.records).clone())
    roller.close()
    return made


def test_transitions_have_what_a_step_by_step_reading_of_the_unrolls_has() -> None:
    torch.manual_seed(0)
    (batch,) = unrolled(q_player(0.5))
    made = transitions(batch, DiscreteActions(2))
    assert made.batch_size == (ENVS, STEPS)
    truncated = {
        (t, b): row
        for (t, b), row in zip(batch["final_index"].tolist(), batch["final_observation"], strict=True)
    }
    assert truncated
    assert not batch["terminated"].all()
    for env in range(ENVS):
        total = 0.0
        for step in range(STEPS):
            one = made[env, step]
            total = 0.0 if batch["is_init"][step, env] else total
            assert torch.equal(one["observation"], batch["observation"][step, env])
            after = truncated.get((step, env), batch["observation"][step + 1, env])
            assert torch.equal(one["next", "observation"], after)
            assert one["action"].argmax() == batch["action"][step, env]
            assert one["reward_sum"].item() == total
            total += batch["reward"][step, env].item()
            assert one["next", "reward_sum"].item() == total
            ends = [bool(batch[name][step, env]) for name in ("terminated", "truncated")]
            assert [bool(one["next", name]) for name in ("terminated", "truncated")] == ends
            assert bool(one["next", "done"]) is any(ends)
            assert not one["done"]
            assert not one["terminated"]
            assert not one["truncated"]
            assert one["policy_version"] == 1


def test_returns_go_on_from_one_unroll_to_the_next() -> None:
    torch.manual_seed(0)
    first, second = (transitions(batch, DiscreteActions(2)) for batch in unrolled(q_player(0.5), rollouts=2))
    going_on = ~first["next", "done"][:, -1]
    assert going_on.any()
    assert torch.equal(second["reward_sum"][:, 0][going_on], first["next", "reward_sum"][:, -1][going_on])


def test_pieces_of_episodes_are_numbered_on() -> None:
    torch.manual_seed(0)
    (batch,) = unrolled(q_player(0.5))
    pieces = transitions(batch, DiscreteActions(2), first_piece=10)["collector", "traj_ids"]
    changes = pieces[:, 1:] - pieces[:, :-1]
    assert torch.equal(changes.bool(), batch["is_init"][1:STEPS].T)
    assert pieces[0, 0] == 10
    assert pieces[1, 0] == pieces[0, -1] + 1


def test_transitions_do_not_share_memory_with_the_slot_that_they_come_from() -> None:
    torch.manual_seed(0)
    (batch,) = unrolled(q_player(0.5))
    made = transitions(batch, DiscreteActions(2))
    before = made.clone()
    for tensor in batch.values(True, True):
        tensor.zero_()
    assert all(torch.equal(made.get(key), before.get(key)) for key in before.keys(True, True))


def rate(player: ActingPolicy, worker: int, num_workers: int) -> float:
    """How often a worker does not take the action of the largest value."""
    generator = torch.Generator().manual_seed(1)
    count = 4000
    seen, first = torch.randn(count, 4, generator=generator), torch.ones(count, dtype=torch.bool)
    state = player.begin(count, generator, worker, num_workers)
    acted = player.act(seen, first, torch.zeros(count), state, generator)
    greedy = acted.records["action_value"].argmax(-1)
    return float((acted.action != greedy).float().mean())


def test_each_worker_explores_at_the_rate_of_its_rung() -> None:
    player = q_player(0.5)  # half of the random actions are the greedy one
    assert rate(player, 0, 2) == pytest.approx(0.25, abs=0.03)
    assert rate(player, 1, 2) == pytest.approx(0.5**8 / 2, abs=0.01)


def test_what_is_published_says_whether_actions_are_random() -> None:
    player = q_player(0.0, Prefill())
    assert set(player.modules) == {"policy", PREFILL}
    assert rate(player, 0, 1) == pytest.approx(0.5, abs=0.03)
    assert player.prefill is not None
    player.prefill.random.fill_(False)
    assert rate(player, 0, 1) == 0.0


def test_random_actions_fill_the_bounds_of_a_box() -> None:
    policy = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    player = ActingPolicy(policy, BoxActions(1, (-2.0,), (3.0,)), (3,), prefill=Prefill())
    generator = torch.Generator().manual_seed(1)
    seen = torch.zeros(500, 3), torch.ones(500, dtype=torch.bool), torch.zeros(500)
    action: Tensor = player.act(*seen, player.begin(500, generator), generator).action
    assert action.min() < -1.8
    assert action.max() > 2.8
    assert action.min() >= -2.0
    assert action.max() <= 3.0


def test_a_worker_gets_the_player_without_memory_and_acts_by_its_seed() -> None:
    torch.manual_seed(0)
    player = q_player(0.3, Prefill())
    arrived = materialised(pickle.loads(pickle.dumps(without_memory(player))))
    for name, module in arrived.modules.items():
        module.load_state_dict(player.modules[name].state_dict())
    one, other = (unrolled(acting, seed=5)[0] for acting in (player, arrived))
    assert all(torch.equal(one.get(key), other.get(key)) for key in one.keys(True, True))


@pytest.mark.processes
def test_transitions_have_the_keys_of_a_stock_collector() -> None:
    stock = Collector(
        partial(make_env_on_rung, EnvConfig("CartPole-v1", ENVS), 1.0),
        q_policy(0.5),
        frames_per_batch=ENVS * STEPS,
        total_frames=ENVS * STEPS,
        track_policy_version=True,
    )
    try:
        expected = next(iter(stock))
    finally:
        stock.shutdown()
    (batch,) = unrolled(q_player(0.5))
    made = transitions(batch, DiscreteActions(2))

    def forms(batch: TensorDictBase) -> dict[Any, Any]:
        return {key: (batch.get(key).shape, batch.get(key).dtype) for key in batch.keys(True, True)}

    assert forms(made) == forms(expected), "so that a replay buffer takes the frames of both"

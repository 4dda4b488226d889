"""Batches of transitions: what their keys hold, and where their memory is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiDiscrete
from tensordict import TensorDictBase
from torch import Generator, Tensor, nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, SerialEnv

from rlsync.core.errors import ConfigError
from rlsync.core.plan import POLICY
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import BoxActions, DiscreteActions, MultiDiscreteActions
from rlsync.runs.actors.envs.specs import EnvSpec, GymnasiumEnvs, make_venv
from rlsync.runs.actors.frames import RolloutShape, batch_of
from rlsync.runs.actors.player import Acted, Player, Record, Seat, State
from rlsync.runs.actors.ring.reader import TakenRollout
from rlsync.runs.actors.roller import Roller
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.transitions import Transitions
from tests.runs.actors.test_envs import LADDER
from tests.tools.running import in_three_lines

ENVS, STEPS, HORIZON = 2, 12, 5
SECOND, VALUE = "second", "value"


class Counting(Player):
    """Takes the actions 0, 1, 2, 0, ... in each episode, and records which step of its life it is."""

    def __init__(self, records: tuple[Record, ...] = (Record(VALUE, (2,), torch.float32),)) -> None:
        super().__init__({POLICY: nn.Linear(1, 1)}, DiscreteActions(3), (4,), records=records)

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {"steps": torch.zeros(num_envs, dtype=torch.int64)}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        steps = state["steps"]
        value = steps.float().unsqueeze(-1).expand(-1, 2)
        recorded = {record.name: value for record in self.records if record.per == "step"}
        return Acted(observation[:, 2].long() % 3, recorded, {"steps": steps + 1})


class Leaning(Player):
    """Takes half the number of the step in its episode."""

    def __init__(self) -> None:
        super().__init__({}, BoxActions(1, (-2.0,), (2.0,)), (4,))

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        return Acted(observation[:, 2:3] / 2, {}, state)


class Two(Leaning):
    """Makes two choices: by the step in its episode, and the first of seven."""

    def __init__(self) -> None:
        Player.__init__(self, {}, MultiDiscreteActions((5, 7)), (4,))

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        step = observation[:, 2].long() % 5
        return Acted(torch.stack([step, torch.zeros_like(step)], -1), {}, state)


PUSHED = Box(-2.0, 2.0, (1,), np.float32)


def ladder(ends: str = "truncated", **options: Any) -> GymnasiumEnvs:
    return GymnasiumEnvs(LADDER, {"ends": ends, "horizon": HORIZON, **options})


def rollouts_of(
    player: Player, spec: EnvSpec, count: int, *, envs: int = ENVS, steps: int = STEPS
) -> list[TakenRollout]:
    """Rollouts that follow each other, as a worker makes them, each in memory of its own."""
    shape = RolloutShape(steps, envs)
    layout = shape.layout(player)
    names = [entry.leaf.name for entry in layout.entries]
    roller = Roller(Seat.taken(player, 3), lambda number: make_venv(spec, number), shape, overlap=False)
    roller.reset(3)
    made = []
    for number in range(count):
        image = torch.zeros(layout.image_bytes, dtype=torch.uint8)
        views = dict(zip(names, layout.views(image), strict=True))
        assert roller.roll(number, views, number + 1, lambda: False)
        made.append(TakenRollout(slot=number, writer=0, number=number, views=views, image=image))
    roller.close()
    return made


def transitions_of(player: Player, spec: EnvSpec, count: int = 1, **shape: int) -> TensorDictBase:
    form = Transitions(player.actions, player.records)
    return form.batch(rollouts_of(player, spec, count, **shape), CPU)


@contextmanager
def collecting(player: Player, spec: EnvSpec, **options: Any) -> Iterator[UnrollCollector]:
    """A collector of transitions that are made in this process."""
    settings: dict[str, Any] = {"steps": STEPS, "envs_per_worker": ENVS, "seed": 3, "transitions": True}
    collector = UnrollCollector(player, spec, CollectSettings(**settings | options), num_workers=0)
    try:
        yield collector
    finally:
        collector.shutdown()


def forms(batch: TensorDictBase) -> dict[Any, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(batch.get(key).shape), batch.get(key).dtype) for key in batch.keys(True, True)}


# ---------------------------------------------------------------------------- keys, shapes, dtypes


def test_a_batch_has_the_keys_shapes_and_dtypes_that_its_module_says() -> None:
    batch = transitions_of(Counting(), ladder())
    assert tuple(batch.batch_size) == (ENVS, STEPS)
    each = ENVS, STEPS
    assert forms(batch) == {
        "observation": ((*each, 4), torch.float32),
        "action": ((*each, 3), torch.int64),
        "is_init": ((*each, 1), torch.bool),
        "policy_version": (each, torch.int64),
        VALUE: ((*each, 2), torch.float32),
        ("next", "observation"): ((*each, 4), torch.float32),
        ("next", "reward"): ((*each, 1), torch.float32),
        ("next", "terminated"): ((*each, 1), torch.bool),
        ("next", "truncated"): ((*each, 1), torch.bool),
        ("next", "done"): ((*each, 1), torch.bool),
        ("collector", "episode_return"): (each, torch.float32),
        ("collector", "episode_length"): (each, torch.int64),
    }


def test_actions_that_are_numbers_stay_as_they_are() -> None:
    batch = transitions_of(Leaning(), ladder(space=PUSHED))
    assert forms(batch)["action"] == ((ENVS, STEPS, 1), torch.float32)
    assert torch.equal(batch["action"], batch["observation"][..., 2:3] / 2)


def test_several_choices_stay_indices() -> None:
    batch = transitions_of(Two(), ladder(space=MultiDiscrete([5, 7])), 2)
    assert forms(batch)["action"] == ((2 * ENVS, STEPS, 2), torch.int64)
    steps = batch["observation"][..., 2].long() % 5
    assert torch.equal(batch["action"], torch.stack([steps, torch.zeros_like(steps)], -1))


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
def test_transitions_have_what_a_step_by_step_reading_of_the_unrolls_has(ends: str) -> None:
    player = Counting()
    made = rollouts_of(player, ladder(ends), 3)
    unrolls = batch_of([rollout.views for rollout in made], player.records).clone()
    batch = Transitions(player.actions, player.records).batch(made, CPU)
    finals = {}
    if keys.FINAL_INDEX in unrolls:
        places = map(tuple, unrolls[keys.FINAL_INDEX].tolist())
        finals = dict(zip(places, unrolls[keys.FINAL_OBSERVATION], strict=True))
    assert bool(finals) is (ends == "truncated")
    assert len(batch) == 3 * ENVS
    for env, step in itertools.product(range(3 * ENVS), range(STEPS)):
        one = batch[env, step]
        assert torch.equal(one["observation"], unrolls["observation"][step, env])
        after = finals.get((step, env), unrolls["observation"][step + 1, env])
        assert torch.equal(one["next", "observation"], after)
        assert one["action"].tolist() == [int(unrolls["action"][step, env]) == n for n in range(3)]
        assert bool(one["is_init"]) is bool(unrolls["is_init"][step, env])
        assert one["next", "reward"].tolist() == [float(unrolls["reward"][step, env])]
        assert bool(one["next", "terminated"]) is bool(unrolls["terminated"][step, env])
        assert bool(one["next", "truncated"]) is bool(unrolls["truncated"][step, env])
        over = bool(unrolls["terminated"][step, env] or unrolls["truncated"][step, env])
        assert bool(one["next", "done"]) is over
        assert int(one["policy_version"]) == env // ENVS + 1, "of its own rollout"
        assert torch.equal(one[VALUE], unrolls[VALUE][step, env])
        ended = one["collector", "episode_return"], one["collector", "episode_length"]
        assert (float(ended[0]) != 0.0) is over
        assert int(ended[1]) == (HORIZON if over else 0)


# ------------------------------------------------------------------------------- ends of episodes


def test_a_truncated_step_leads_to_its_true_last_observation_at_the_end_of_a_rollout() -> None:
    player = Counting()
    form = Transitions(player.actions, player.records)
    first, second = (form.batch([made], CPU) for made in rollouts_of(player, ladder(), 2, steps=HORIZON))
    assert first["next", "truncated"].flatten(1).nonzero().tolist() == [[0, HORIZON - 1], [1, HORIZON - 1]]
    assert first["next", "observation"][:, -1, 1:3].tolist() == [[0, HORIZON], [0, HORIZON]]
    assert second["observation"][:, 0, 1:3].tolist() == [[1, 0], [1, 0]], "the next rollout begins anew"
    assert second["is_init"][:, 0].all()


# --------------------------------------------------------------------------------------- memory


def test_several_rollouts_stand_behind_each_other_in_memory_of_their_own() -> None:
    player = Counting()
    made = rollouts_of(player, ladder(), 3)
    form = Transitions(player.actions, player.records)
    alone = [form.batch([rollout], CPU).clone() for rollout in made]
    together = form.batch(made, CPU)
    before = together.clone()
    assert (together == torch.cat(alone)).all()
    for rollout in made:
        rollout.image.fill_(255)
    assert (together == before).all(), "the slots can be used again"


def test_a_single_rollout_is_not_copied_and_its_batch_is_valid_until_the_next_one() -> None:
    with collecting(Counting(), ladder("terminated"), slots=1) as collector:
        batches = iter(collector)
        first = next(batches)
        kept = first.clone()
        assert first["observation"].data_ptr() == collector._intake._held[0].views["observation"].data_ptr()
        assert first["next", "observation"].data_ptr() == first["observation"][:, 1:].data_ptr()
        second = next(batches)
        assert (kept["policy_version"] == 1).all()
        assert torch.equal(first["observation"], second["observation"]), "there is one slot, which is reused"
        assert not torch.equal(kept["observation"], second["observation"])


def test_a_batch_may_be_changed_by_keys_and_the_next_one_of_its_slot_is_as_ever() -> None:
    """Hooks of a trainer set entries in a batch; the layout of a slot is made once."""
    with collecting(Counting(), ladder(), slots=1) as collector:
        batches = iter(collector)
        first = next(batches)
        before = forms(first)
        first.set("advantage", torch.zeros(ENVS, STEPS, 1))
        first["next"].set("value", torch.zeros(ENVS, STEPS, 1))
        first["collector"].set("mask", torch.ones(ENVS, STEPS))
        first.pop("action")
        assert forms(next(batches)) == before


def test_a_replay_buffer_keeps_transitions_after_their_slot_was_reused() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
    kept = []
    with collecting(Counting(), ladder(), slots=1) as collector:
        for batch in itertools.islice(collector, 4):
            buffer.extend(batch.reshape(-1))
            kept.append(batch.reshape(-1).clone())
    stored = buffer[:]
    assert (stored.exclude("index") == torch.cat(kept)).all()


# -------------------------------------------------------------------------------------- refusals


def test_a_record_of_an_unroll_is_refused_where_transitions_are_asked_for() -> None:
    player = Counting((Record("state", (2,), torch.float32, per="unroll"),))
    with pytest.raises(ConfigError) as refused:
        UnrollCollector(player, ladder(), CollectSettings(steps=3, envs_per_worker=1, transitions=True))
    in_three_lines(refused.value)
    assert refused.value.what.startswith("the player records 'state' once for each unroll")


# ------------------------------------------------------------------------------ TorchRL's collector


def policy(td: TensorDictBase) -> TensorDictBase:
    """Acts as :class:`Counting` does."""
    return td.set("action", nn.functional.one_hot(td["observation"][..., 2].long() % 3, 3))


def pushes(td: TensorDictBase) -> TensorDictBase:
    """Acts as :class:`Leaning` does."""
    return td.set("action", td["observation"][..., 2:3] / 2)


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize(
    ("player", "stock", "options"),
    [(Counting(()), policy, {}), (Leaning(), pushes, {"space": PUSHED})],
    ids=["choices", "numbers"],
)
def test_transitions_are_those_of_torchrls_own_collector(
    player: Player, stock: Any, options: dict[str, Any], ends: str
) -> None:
    make = partial(GymEnv, LADDER, ends=ends, horizon=HORIZON, **options)
    frames = ENVS * STEPS
    collector = Collector(SerialEnv(ENVS, make), stock, frames_per_batch=frames, total_frames=2 * frames)
    theirs = [batch.clone() for batch in collector]
    collector.shutdown()
    with collecting(player, ladder(ends, **options)) as ring:
        ours = [batch.clone() for batch in itertools.islice(ring, 2)]
    for our, their in zip(ours, theirs, strict=True):
        shared = forms(our).keys() & forms(their).keys()
        ends_and_rewards = [("next", name) for name in ("reward", "terminated", "truncated", "done")]
        assert shared == {"observation", "action", ("next", "observation"), *ends_and_rewards}
        for key in shared:
            assert forms(our)[key] == forms(their)[key], key
        terminated = their["next", "terminated"].squeeze(-1)
        assert their["next", "done"].any()
        for key in shared:
            got = our[key].clone()
            expected = their[key].clone()
            if "observation" in key:  # not the seed, and the number of the episode counts from the first
                for values, batches in ((got, ours), (expected, theirs)):
                    values[..., 0] = 0.0
                    values[..., 1] -= batches[0]["observation"][0, 0, 1]
            if key == ("next", "observation"):  # nothing may be learned of what comes after an end
                got[terminated] = expected[terminated] = 0.0
            assert torch.equal(got, expected), key

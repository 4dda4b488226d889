"""The rows that Dreamers store of unrolls: which follow each other over batches, workers, lives and gaps."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyTensorStorage

from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.intake import RolloutId
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.compat.replay import RowBuffer
from rlsync.runs.recipes.dreamer.sequences import SequenceMemory, Sequences, Streams, as_rows
from tests.runs.actors.test_unroll_collector import QUICK, WAIT_S, collecting
from tests.tools.processes import kill, wait_until

SHORT = GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 15})
ENVS, STEPS = 2, 5


def a_memory(collector: UnrollCollector) -> SequenceMemory:
    sequences = Sequences(4)
    buffer = RowBuffer(storage=LazyTensorStorage(5_000), sampler=sequences, batch_size=80)
    return SequenceMemory(buffer, sequences, {"belief": 3}, lambda: collector.last_rollouts)


def acting(**options: Any) -> Any:
    player = UniformPlayer(DiscreteActions(2), (4,))
    player.keeps_last = True
    sizes = {"steps": STEPS, "envs_per_worker": ENVS, "restarts": QUICK, "transitions": True}
    return collecting(player, SHORT, **sizes, **options)


Made = dict[tuple[int, int, int], list[TensorDictBase]]  #: transitions of a worker's life and environment


def stored(collector: UnrollCollector, memory: SequenceMemory, batches: int, made: Made) -> None:
    """Store batches, and keep what each environment did."""
    for batch in itertools.islice(collector, batches):
        steps = batch.clone()
        memory.store(batch)
        for number, rollout in enumerate(collector.last_rollouts):
            for env in range(ENVS):
                made[rollout.worker, rollout.life, env].append(steps[number * ENVS + env].clone())


def of_streams(memory: SequenceMemory) -> list[TensorDict]:
    """The rows of each stream, in order."""
    rows = memory.buffer[:]
    streams = [rows[rows["stream"].flatten() == stream] for stream in rows["stream"].unique()]
    return [stream[stream["row"].flatten().argsort()] for stream in streams]


def in_order(steps: list[TensorDictBase]) -> list[tuple[Any, ...]]:
    """The rows of one environment, as a reading of its steps one by one has them."""
    rows = []
    for step in torch.cat(steps):
        if step["is_init"]:
            rows.append((True, step["observation"].tolist(), [0.0, 0.0], 0.0, False))
        brought = step["next"]
        action = step["action"].float().tolist()
        rows.append(
            (False, brought["observation"].tolist(), action, float(brought["reward"]), bool(brought["done"]))
        )
    return rows


def read(stream: TensorDict) -> list[tuple[Any, ...]]:
    return [
        (
            bool(row["is_init"]),
            row["next", "observation"].tolist(),
            row["action"].tolist(),
            float(row["next", "reward"]),
            bool(row["next", "done"]),
        )
        for row in stream
    ]


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rollouts", [1, 3])
def test_the_rows_of_an_environment_follow_each_other_whatever_worker_is_first(
    rollouts: int, overlap: bool
) -> None:
    made: Made = defaultdict(list)
    with acting(num_workers=2, rollouts_per_batch=rollouts, overlap=overlap) as collector:
        memory = a_memory(collector)
        stored(collector, memory, 24 // rollouts, made)
    streams = of_streams(memory)
    assert len(streams) == len(made) == 4
    for stream in streams:
        numbers = stream["row"].flatten()
        assert torch.equal(numbers, torch.arange(len(stream))), "none is missing, none is there twice"
    expected = [in_order(steps) for steps in made.values()]
    assert sorted(map(read, streams)) == sorted(expected)
    assert sum(begins for rows in expected for begins, *_ in rows) > 8


@pytest.mark.processes
def test_a_row_has_the_last_observation_of_an_episode_also_where_it_terminates() -> None:
    made: Made = defaultdict(list)
    with acting(num_workers=1) as collector:
        memory = a_memory(collector)
        stored(collector, memory, 20, made)
    after = memory.buffer[:]["next"]
    position, angle = after["observation"][:, 0].abs(), after["observation"][:, 2].abs()
    fell = (position > 2.4) | (angle > math.radians(12))
    assert torch.equal(fell, after["terminated"].flatten())
    assert fell.any()
    assert (after["done"].flatten() & ~fell).any(), "some episodes are truncated"


@pytest.mark.processes
def test_another_life_of_a_worker_begins_other_streams() -> None:
    made: Made = defaultdict(list)
    with acting(num_workers=2) as collector:
        memory = a_memory(collector)
        stored(collector, memory, 8, made)
        (victim,) = [p.pid for p in collector.procs if collector.ring.writer(1).pid == p.pid]
        kill(victim)

        def again() -> bool:
            stored(collector, memory, 1, made)
            return {(1, 1, 0), (1, 1, 1)} <= made.keys() and len(made[1, 1, 0]) > 2

        assert wait_until(again, WAIT_S)
    expected = [in_order(steps) for steps in made.values()]
    assert len(expected) == 6
    assert sorted(map(read, of_streams(memory))) == sorted(expected)


def rollout_of(begins: list[bool]) -> TensorDict:
    is_init = torch.tensor(begins).reshape(1, -1, 1)
    size = list(is_init.shape[:2])
    ends = {name: torch.zeros_like(is_init) for name in ("done", "terminated")}
    brought = {"observation": torch.zeros(*size, 4), "reward": torch.zeros(*size, 1), **ends}
    made = {"observation": torch.zeros(*size, 4), "action": torch.zeros(*size, 2), "is_init": is_init}
    return TensorDict({**made, "next": TensorDict(brought, size)}, size)


def test_after_a_lost_rollout_and_in_another_life_rows_do_not_follow() -> None:
    streams, seen = Streams(), []
    names = [(0, 0, 0), (0, 0, 1), (1, 0, 2), (0, 0, 3), (0, 0, 4), (0, 1, 5), (1, 0, 3)]
    for name in names:
        rows = as_rows(streams.numbered(rollout_of([False] * 3), [RolloutId(*name)]))
        assert len(rows["stream"].unique()) == 1
        seen.append((int(rows["stream"][0]), rows["row"].flatten().tolist()))
    ids = [stream for stream, _ in seen]
    assert ids[0] == ids[1]
    assert ids[3] == ids[4]
    assert ids[2] == ids[6]
    assert len(set(ids)) == 4
    assert [rows for _, rows in seen] == [
        [0, 1, 2],
        [3, 4, 5],
        [0, 1, 2],
        [0, 1, 2],
        [3, 4, 5],
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_the_first_row_of_an_episode_stands_between_those_of_two_steps() -> None:
    streams = Streams()
    first = as_rows(streams.numbered(rollout_of([True, False, True]), [RolloutId(0, 0, 0)]))
    second = as_rows(streams.numbered(rollout_of([True, False, False]), [RolloutId(0, 0, 1)]))
    rows = torch.cat([first, second])
    rows = rows[rows["row"].flatten().argsort()]
    assert rows["row"].flatten().tolist() == list(range(9))
    assert rows["is_init"].flatten().nonzero().flatten().tolist() == [0, 3, 5]


def test_a_resumed_run_begins_other_streams_than_those_in_its_buffer() -> None:
    names = [RolloutId(0, 0, 0)]
    before = as_rows(Streams().numbered(rollout_of([True, False]), names))
    after = as_rows(Streams().numbered(rollout_of([True, False]), names))
    assert len({int(stream) for stream in torch.cat([before, after])["stream"]}) == 2

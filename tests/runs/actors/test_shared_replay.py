"""SharedReplay: what goes in comes out, in any process, and whoever dies leaves no row that can be drawn."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from rlsync.core.errors import BoardClosed, ConfigError
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.replay.mixing import ReplayMix
from rlsync.runs.actors.replay.shared import _BLOCK_LOCK, SharedReplay, SharedReplayHandle, made_replay
from rlsync.runs.recipes.impala import check_batch
from rlsync.transport.shared_file import SharedFile
from tests.runs.actors.test_unroll_replay import ENVS, STEPS, make_batch, make_net, unroll
from tests.tools.processes import wait_until

FORK = multiprocessing.get_context("fork")
IN_BLOCK = 2  # unrolls: a batch of four is two rollouts
PLAYER = make_net().player(store_params=True)
MANY_BYTES = 1 << 24


def made(blocks: int = 8, agents: int = 1) -> tuple[SharedFile, SharedReplayHandle]:
    shape = RolloutShape(STEPS, IN_BLOCK)
    return made_replay(PLAYER, shape, blocks * STEPS * IN_BLOCK, MANY_BYTES, agents)


def opened(handle: SharedReplayHandle, workers: Sequence[int] = (0, 1), seed: int = 0) -> SharedReplay:
    return SharedReplay(handle, PLAYER.records, lambda: workers, seed)


@pytest.fixture
def handle() -> Iterator[SharedReplayHandle]:
    file, found = made()
    yield found
    file.close()


def numbered(*numbers: int) -> TensorDict:
    """Unrolls that carry a number as their reward."""
    batch = make_batch(envs=len(numbers), truncate=0.0)
    batch["reward"] = torch.tensor(numbers).float().expand(STEPS, -1).clone()
    return batch


def drawn_numbers(replay: SharedReplay, times: int = 200) -> set[int]:
    return set(replay.draw(times).batch["reward"][0].int().tolist())


def as_text(one: dict[str, Any]) -> str:
    return repr({key: one[key].tolist() for key in sorted(one) if one[key].numel()})


# -------------------------------------------------------------------------- what is held


def test_what_is_drawn_is_what_another_agent_put_in_bit_by_bit(handle: SharedReplayHandle) -> None:
    one, other = opened(handle, (5, 3)), opened(handle)
    batches = [make_batch(seed) for seed in range(3)]
    for batch in batches:
        one.extend(batch, agent=7)
    whole = {as_text(unroll(batch, b)) for batch in batches for b in range(ENVS)}
    drawn = other.draw(200)
    check_batch(drawn.batch, PLAYER)
    assert {as_text(unroll(drawn.batch, b)) for b in range(200)} == whole
    assert drawn.batch["replayed"].all()
    assert set(drawn.agent.tolist()) == {7}
    assert drawn.worker is not None
    assert set(drawn.worker.tolist()) == {5, 3}
    assert other.steps == 3 * ENVS * STEPS


def test_the_oldest_rollout_goes_first_whoever_made_it(handle: SharedReplayHandle) -> None:
    one, other = opened(handle, (0,)), opened(handle, (0,))
    for number in range(8):
        assert not one.full
        (one, other)[number % 2].extend(numbered(number, number), number % 2)
    assert one.full
    assert drawn_numbers(one) == set(range(8))
    other.extend(numbered(8, 8), 1)
    assert drawn_numbers(one) == set(range(1, 9))


def test_nobody_waits_for_a_block_that_is_read_or_written(handle: SharedReplayHandle) -> None:
    writer, reader = opened(handle, (0,)), opened(handle, (0,))
    for number in range(8):
        writer.extend(numbered(number, number))
    file = reader._file
    assert file.try_lock(_BLOCK_LOCK, exclusive=False)  # it reads the oldest
    writer.extend(numbered(8, 8))
    file.unlock(_BLOCK_LOCK)
    assert drawn_numbers(reader) == {0, *range(2, 9)}, "the oldest but one was written in its place"
    assert writer._file.try_lock(_BLOCK_LOCK, exclusive=True)  # it writes the block of 0
    assert drawn_numbers(reader) == set(range(2, 9))


def test_a_row_that_is_evicted_before_it_is_locked_is_not_drawn(handle: SharedReplayHandle) -> None:
    writer, reader = opened(handle, (0,)), opened(handle, (0,))
    for number in range(8):
        writer.extend(numbered(number, number))
    lock, new = reader._file.try_lock, iter(range(8, 16))

    def evict_then_lock(at: int, *, exclusive: bool) -> bool:
        for number in new:
            writer.extend(numbered(number, number))
        return lock(at, exclusive=exclusive)

    reader._file.try_lock = evict_then_lock  # type: ignore[method-assign]
    assert drawn_numbers(reader, 1) <= set(range(8, 16))
    assert reader.draw(1).batch["reward"].shape == (STEPS, 1)


def test_a_row_whose_writer_is_killed_before_it_is_locked_is_not_drawn(handle: SharedReplayHandle) -> None:
    writer, reader = opened(handle, (0,)), opened(handle, (0,))
    for number in range(8):
        writer.extend(numbered(number, number))
    lock, killed = reader._file.try_lock, []

    def kill_then_lock(at: int, *, exclusive: bool) -> bool:
        if not killed:  # in the middle of its write, which frees the lock
            killed.append(at - _BLOCK_LOCK)
            writer._numbers[killed] = 0
            writer._columns["reward"][killed] = -1.0
        return lock(at, exclusive=exclusive)

    reader._file.try_lock = kill_then_lock  # type: ignore[method-assign]
    assert drawn_numbers(reader, 1) <= set(range(8)) - set(killed)


def test_a_block_that_another_agent_fills_before_it_is_locked_is_not_taken_again(
    handle: SharedReplayHandle,
) -> None:
    one, other = opened(handle, (0,)), opened(handle, (0,))
    for number in range(8):
        one.extend(numbered(number, number))
    lock, begun = one._file.try_lock, []

    def fill_then_lock(at: int, *, exclusive: bool) -> bool:
        if not begun:
            begun.append(at)
            other.extend(numbered(8, 8))
        return lock(at, exclusive=exclusive)

    one._file.try_lock = fill_then_lock  # type: ignore[method-assign]
    one.extend(numbered(9, 9))
    assert drawn_numbers(other) == set(range(2, 10)), "the two oldest are gone"


def test_a_rollout_that_does_not_fit_leaves_no_row(handle: SharedReplayHandle) -> None:
    replay = opened(handle)
    with pytest.raises(RuntimeError, match="must match"):
        replay.extend(make_batch(shape=(5,)))
    assert replay.steps == 0
    with pytest.raises(ConfigError, match="1 unrolls cannot be drawn from 0"):
        replay.draw(1)


def test_it_is_bounded_in_bytes_and_has_a_block_more_than_agents() -> None:
    shape = RolloutShape(STEPS, IN_BLOCK)
    with pytest.raises(ConfigError, match="may take 1,000") as refused:
        made_replay(PLAYER, shape, 1000, 1000, 2)
    assert "recipe.replay.max_bytes" in str(refused.value)
    with pytest.raises(ConfigError, match="2 agents cannot share a replay of 29 steps"):
        made_replay(PLAYER, shape, 29, MANY_BYTES, 2)
    file, handle = made()
    assert file.size_bytes() <= MANY_BYTES
    file.close()
    with pytest.raises(BoardClosed, match="gone"):
        opened(handle)


def test_mixes_count_which_agents_taught_and_forget_foreign_states(handle: SharedReplayHandle) -> None:
    replays = [opened(replace(handle, agent=agent)) for agent in range(2)]
    mixes = [ReplayMix(replay, 2.0, agent=agent) for agent, replay in enumerate(replays)]
    for seed in range(20):
        batch = mixes[seed % 2](make_batch(seed))
    assert mixes[0].taught.total() == mixes[0].total.online + mixes[0].total.replayed
    assert mixes[0].taught[0] == mixes[0].total.online + mixes[0].total.own
    assert 0 < mixes[0].taught[1] == mixes[0].total.foreign
    states = batch["recurrent_state"][ENVS:].flatten(1).abs().sum(1)
    assert (states == 0).any(), "of the other agent"
    assert (states > 0).any(), "its own"
    again = ReplayMix(replays[0], 2.0)
    again.load_state_dict(mixes[0].state_dict())
    assert again.taught == mixes[0].taught


# -------------------------------------------------------------------------- agents that are killed


def checked(agent: int, count: int) -> TensorDict:
    """Rollouts whose last reward tells what all other numbers of their unroll must be, and who made it."""
    batch = make_batch(count, envs=IN_BLOCK, truncate=0.2 if count % 2 else 0.0)
    batch["policy_version"] = torch.full((STEPS, IN_BLOCK), count)
    batch["observation"][0, :, 0], batch["observation"][0, :, 1] = agent, count
    for b in range(IN_BLOCK):
        batch["reward"][-1, b] = digest(batch, b)
    return batch


def digest(batch: TensorDictBase, b: int) -> float:
    one = unroll(batch, b)
    one["reward"] = one["reward"][:-1]
    for key in ("recurrent_state", "policy_version"):  # a mix drops those of other agents
        one.pop(key)
    return float(int(hashlib.blake2b(as_text(one).encode(), digest_size=2).hexdigest(), 16))


def live(handle: SharedReplayHandle, told: Any) -> None:
    """Extend and draw for ever; tell how many torn rows each batch has, and who made its rows."""
    replay = opened(handle, (3,), seed=os.getpid())
    mix = ReplayMix(replay, 4.0, agent=handle.agent)
    for count in range(1 << 30):
        batch = mix(checked(handle.agent, count))
        rows = range(IN_BLOCK, batch["reward"].shape[1])
        bad = [b for b in rows if float(batch["reward"][-1, b]) != digest(batch, b)]
        makers, counts = batch["observation"][0, IN_BLOCK:, :2].int().T
        versions = torch.where(makers == handle.agent, counts, -1)  # another agent's are unknown
        bad += (batch["policy_version"][:, IN_BLOCK:] != versions).any(0).nonzero().flatten().tolist()
        makers = makers.tolist()
        told.send((len(bad), makers))


def storm(kills: int, agents: int, seed: int) -> None:
    """Kill agents at random moments, start others in their place, and look at all that the living draw."""
    dice, (file, handle) = random.Random(seed), made(blocks=agents + 3, agents=agents)
    taught: Counter[int] = Counter()

    def start(agent: int) -> tuple[Any, Any]:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=live, args=(replace(handle, agent=agent), theirs), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def look(pipe: Any, until: float) -> bool:
        try:
            while pipe.poll(max(0.0, until - time.monotonic())):
                bad, makers = pipe.recv()
                assert not bad, "torn rows were drawn"
                taught.update(makers)
        except (EOFError, OSError):
            return False
        return True

    living = [start(agent) for agent in range(agents)]
    try:
        for _ in range(kills):
            for _, pipe in living:
                look(pipe, time.monotonic() + dice.uniform(0, 0.02))
            victim = dice.randrange(agents)
            process, pipe = living[victim]
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            look(pipe, time.monotonic())
            living[victim] = start(victim)
        for _, pipe in living:  # whoever lives goes on
            wait_until(partial(pipe.poll, 0.0), 30.0)
            assert look(pipe, time.monotonic() + 0.2)
    finally:
        for process, _ in living:
            process.kill()
            process.join()
        file.close()
    assert set(taught) == set(range(agents)), "every agent taught somebody"


def die_in_the_middle(handle: SharedReplayHandle) -> None:
    replay = opened(handle, (0,))

    def write_half(block: int, batch: TensorDictBase, number: int) -> None:
        replay._columns["reward"][block] = -1.0
        os.kill(os.getpid(), signal.SIGKILL)

    replay._write = write_half  # type: ignore[method-assign]
    replay.extend(numbered(8, 8))


@pytest.mark.processes
def test_the_block_that_a_killed_agent_was_writing_is_written_next_and_not_drawn(
    handle: SharedReplayHandle,
) -> None:
    replay = opened(handle, (0,))
    for number in range(8):
        replay.extend(numbered(number, number))
    dying = FORK.Process(target=die_in_the_middle, args=(handle,))
    dying.start()
    dying.join()
    assert dying.exitcode == -signal.SIGKILL
    assert drawn_numbers(replay) == set(range(1, 8))
    replay.extend(numbered(9, 9))
    assert drawn_numbers(replay) == {*range(1, 8), 9}


@pytest.mark.processes
def test_no_torn_row_is_drawn_while_agents_are_killed() -> None:
    storm(kills=6, agents=3, seed=0)


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute alone; each kill waits for two processes, and machines may be loaded
@pytest.mark.parametrize("seed", range(5))
def test_no_torn_row_is_drawn_in_a_long_storm(seed: int) -> None:
    storm(kills=300, agents=4, seed=seed)

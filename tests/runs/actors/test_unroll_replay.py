"""UnrollReplay and ReplayMix: what goes in comes out, drawn uniformly, mixed exactly, and it teaches."""

from __future__ import annotations

import gc
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.frames import FINAL, KEYS, TIMED
from rlsync.runs.actors.replay.mixing import MixCounts, ReplayMix
from rlsync.runs.actors.replay.unrolls import UnrollReplay
from rlsync.runs.recipes.impala import (
    Categorical,
    ImpalaNet,
    check_batch,
    concatenate,
)

STEPS, ENVS = 5, 4
PIXELS = (2, 3, 3)


def make_net(**settings: Any) -> ImpalaNet:
    return ImpalaNet(
        (4,), Categorical(3), hidden=(8,), lstm=4, last_action=True, last_reward=True, **settings
    )


def make_batch(
    seed: int = 0, *, envs: int = ENVS, shape: tuple[int, ...] = (4,), truncate: float = 0.2, state: int = 4
) -> TensorDict:
    """Random unrolls with every key of the contract but ``replayed``, reproducible from a seed."""
    dice = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=dice)

    terminated = torch.rand(STEPS, envs, generator=dice) < 0.1
    truncated = (torch.rand(STEPS, envs, generator=dice) < truncate) & ~terminated
    params = normal(STEPS, envs, 3)
    action, log_prob = Categorical(3).act(params, dice)
    seen = normal(STEPS + 1, envs, *shape)
    batch = {
        "observation": seen if shape == (4,) else (50 * seen).to(torch.uint8),
        "is_init": torch.cat([torch.rand(1, envs, generator=dice) < 0.5, terminated | truncated]),
        "action": action,
        "reward": normal(STEPS, envs),
        "terminated": terminated,
        "truncated": truncated,
        "behaviour_log_prob": log_prob,
        "behaviour_params": params,
        "policy_version": torch.full((STEPS, envs), seed),
        "recurrent_state": normal(envs, 2, state),
        "last_action": torch.randint(3, (envs,), generator=dice),
        "last_reward": normal(envs),
    }
    index = truncated.nonzero()
    if len(index):
        index = index[torch.randperm(len(index), generator=dice)]
        hidden = normal(len(index), *shape)
        batch["final_observation"] = hidden if shape == (4,) else (50 * hidden).to(torch.uint8)
        batch["final_index"] = index
    return TensorDict(batch)


def numbered(*numbers: int, final: bool = False) -> TensorDict:
    """Unrolls that carry a number as their reward; with ``final``, as their final observation, too."""
    batch = make_batch(envs=len(numbers), truncate=0.0)
    batch["reward"] = torch.tensor(numbers).float().expand(STEPS, -1).clone()
    if final:
        batch["truncated"][2] = True
        batch["terminated"][2] = False
        batch["is_init"][3] = True
        batch["final_observation"] = torch.tensor(numbers).float().unsqueeze(-1).repeat(1, 4)
        batch["final_index"] = torch.tensor([[2, b] for b in range(len(numbers))])
    return batch


def numbers_of(batch: TensorDictBase) -> list[int]:
    return batch["reward"][0].int().tolist()


def held_by(replay: UnrollReplay) -> TensorDict:
    """All that a replay holds, from old to new."""
    return replay.state_dict()["contents"]


def unroll(batch: TensorDictBase, b: int) -> dict[str, Tensor]:
    """One unroll of a batch, its final observations in the order of their steps."""
    out = {
        str(key): value[:, b] if key in TIMED else value[b]
        for key, value in batch.items()
        if key not in (*FINAL, "replayed")
    }
    if "final_index" in batch:
        mine = (batch["final_index"][:, 1] == b).nonzero().flatten()
        mine = mine[batch["final_index"][mine, 0].argsort()]
        out["final_time"] = batch["final_index"][mine, 0]
        out["final_observation"] = batch["final_observation"][mine]
    return out


def assert_same_unrolls(got: TensorDictBase, wanted: TensorDictBase) -> None:
    assert got["reward"].shape == wanted["reward"].shape
    for b in range(wanted["reward"].shape[1]):
        ours, theirs = unroll(got, b), unroll(wanted, b)
        for key in ours.keys() | theirs.keys():
            if key.startswith("final"):
                empty = torch.zeros(0)
                a, b_ = ours.get(key, empty), theirs.get(key, empty)
                assert len(a) == len(b_), key
                assert not len(a) or torch.equal(a, b_), key
            else:
                assert ours[key].dtype == theirs[key].dtype, key
                assert torch.equal(ours[key], theirs[key]), key


@pytest.fixture(params=["memory", "disk"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


# ------------------------------------------------------------------------------------- in and out


@pytest.mark.parametrize("shape", [(4,), PIXELS], ids=["vectors", "pixels"])
def test_what_goes_in_comes_out_bit_by_bit_with_every_key_of_the_contract(
    where: Path | None, shape: tuple[int, ...]
) -> None:
    batches = [make_batch(seed, shape=shape) for seed in range(3)]
    assert set(batches[0].keys()) == set(KEYS) - {"replayed"}
    replay = UnrollReplay(1000, path=where)
    for batch in batches:
        replay.extend(batch)
    assert_same_unrolls(held_by(replay), concatenate(batches))
    assert (len(replay), replay.steps) == (12, 60)


def test_drawn_unrolls_are_whole_and_marked_and_the_loss_takes_them(where: Path | None) -> None:
    batches = [make_batch(seed) for seed in range(3)]
    replay = UnrollReplay(1000, path=where)
    for batch in batches:
        replay.extend(batch)
    drawn = replay.draw(20).batch
    everything = concatenate(batches)
    known = everything["reward"].t().tolist()
    picked = [known.index(one) for one in drawn["reward"].t().tolist()]
    for position, b in enumerate(picked):
        ours, theirs = unroll(drawn, position), unroll(everything, b)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert drawn["replayed"].tolist() == [True] * 20
    check_batch(drawn, make_net(), ["behaviour_params", "replayed"])


def test_pixels_stored_channels_last_come_out_with_the_same_values() -> None:
    batch = make_batch(shape=PIXELS)
    pixels = batch["observation"]
    strided = pixels.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    replay = UnrollReplay(1000)
    replay.extend(batch.copy().set("observation", strided))
    assert torch.equal(held_by(replay)["observation"], pixels)


def test_a_network_without_a_state_has_a_state_without_bytes_and_may_store_it(where: Path | None) -> None:
    batch = make_batch()
    batch["recurrent_state"] = torch.zeros(ENVS, 0)
    replay = UnrollReplay(1000, path=where)
    replay.extend(batch)
    assert replay.draw(3).batch["recurrent_state"].shape == (3, 0)


def test_what_is_changed_outside_changes_nothing_inside(where: Path | None) -> None:
    batch = make_batch()
    replay = UnrollReplay(1000, path=where)
    before = batch.clone()
    replay.extend(batch)
    for tensor in batch.values():
        tensor.zero_()
    for tensor in replay.draw(50).batch.values():
        tensor.zero_()
    assert_same_unrolls(held_by(replay), before)


def test_a_batch_without_truncations_has_no_final_observations() -> None:
    replay = UnrollReplay(1000)
    replay.extend(numbered(1, 2))
    assert "final_index" not in replay.draw(4).batch


# ------------------------------------------------------------------------------------- capacity


def test_the_oldest_unrolls_leave_first_and_the_capacity_counts_whole_unrolls(where: Path | None) -> None:
    replay = UnrollReplay(4 * STEPS + 3, path=where)
    replay.extend(numbered(0, 1, 2))
    assert (numbers_of(held_by(replay)), replay.full) == ([0, 1, 2], False)
    replay.extend(numbered(3, 4))
    assert (numbers_of(held_by(replay)), replay.full) == ([1, 2, 3, 4], True)
    replay.extend(numbered(5, 6, 7))
    assert numbers_of(held_by(replay)) == [4, 5, 6, 7]
    replay.extend(numbered(*range(8, 20)))  # more than it holds
    assert numbers_of(held_by(replay)) == [16, 17, 18, 19]
    assert replay.steps == 4 * STEPS
    assert set(numbers_of(replay.draw(100).batch)) == {16, 17, 18, 19}


def test_final_observations_stay_with_their_unrolls_however_often_both_stores_went_round(
    where: Path | None,
) -> None:
    replay = UnrollReplay(6 * STEPS, path=where)
    batches = [make_batch(seed, truncate=0.3) for seed in range(20)]
    for batch in batches:
        replay.extend(batch)
    held = held_by(replay)
    newest = concatenate(batches)
    kept = len(replay)
    assert 0 < kept <= 6
    all_unrolls = newest["reward"].shape[1]
    for position in range(kept):
        ours, theirs = unroll(held, position), unroll(newest, all_unrolls - kept + position)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_where_final_observations_find_no_room_the_oldest_unrolls_leave_with_theirs() -> None:
    replay = UnrollReplay(10 * STEPS)
    for number in range(8):
        batch = make_batch(envs=1, truncate=1.0)  # a final observation at every step: two unrolls have room
        batch["reward"][:] = number
        replay.extend(batch)
    held = held_by(replay)
    assert numbers_of(held) == [6, 7]
    newest = batch["final_observation"]
    assert torch.equal(held["final_observation"][-len(newest) :].sort(0).values, newest.sort(0).values)
    assert replay.full
    replay.extend(numbered(*range(20, 28)))  # none of these needs room for one
    assert numbers_of(held_by(replay)) == [6, 7, *range(20, 28)]


def test_a_capacity_below_one_unroll_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for an unroll of 5"):
        UnrollReplay(4).extend(make_batch())


# ------------------------------------------------------------------------------------- refusals


def test_a_batch_that_lacks_a_key_the_others_had_is_refused_and_nothing_is_held_of_it() -> None:
    replay = UnrollReplay(1000)
    replay.extend(make_batch())
    with pytest.raises(ConfigError, match="'behaviour_params' of an unroll is none") as error:
        replay.extend(make_batch(1).exclude("behaviour_params"))
    assert len(str(error.value).splitlines()) == 3
    assert len(replay) == ENVS


def test_unrolls_of_another_length_or_another_state_are_refused() -> None:
    replay = UnrollReplay(1000)
    replay.extend(make_batch())
    longer = concatenate([make_batch(1)])
    for key in TIMED:
        longer[key] = torch.cat([longer[key], longer[key][-1:]])
    with pytest.raises(ConfigError, match="; the replay holds"):
        replay.extend(longer)
    with pytest.raises(ConfigError, match=r"'recurrent_state'.*\[2, 8\].*\[2, 4\]"):
        replay.extend(make_batch(1, state=8))


def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'reward'"):
        UnrollReplay(1000).extend(make_batch().set("rewards", torch.zeros(STEPS, ENVS)))


def test_replayed_unrolls_are_not_held_a_second_time() -> None:
    replay = UnrollReplay(1000)
    replay.extend(make_batch())
    with pytest.raises(ConfigError, match="held twice"):
        replay.extend(replay.draw(2).batch)


def test_nothing_can_be_drawn_from_nothing() -> None:
    with pytest.raises(ConfigError, match="cannot be drawn from 0"):
        UnrollReplay(1000).draw(1)


@pytest.mark.parametrize(
    "options",
    [{"replay_ratio": -1}, {"replay_ratio": float("nan")}, {"min_steps": 2000}],
    ids=str,
)
def test_options_of_a_mix_that_are_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ReplayMix(UnrollReplay(1000), **({"replay_ratio": 1.0} | options))


# ------------------------------------------------------------------------------------- the draws


def test_draws_are_uniform_over_what_is_held() -> None:
    replay = UnrollReplay(20 * STEPS, seed=5)
    for first in range(0, 28, 4):  # the ring is past its end
        replay.extend(numbered(*range(first, first + 4)))
    draws = 20_000
    counts = torch.bincount(replay.draw(draws).batch["reward"][0].long(), minlength=28)
    assert counts[:8].tolist() == [0] * 8
    expected = draws / 20
    chi_square = float(((counts[8:] - expected) ** 2 / expected).sum())
    assert chi_square < 43.8  # 19 degrees of freedom: one in a thousand is above; the seed is fixed


def test_the_seed_decides_the_draws_and_the_disk_draws_as_memory_does(tmp_path: Path) -> None:
    replays = [UnrollReplay(10 * STEPS, seed=3), UnrollReplay(10 * STEPS, seed=3, path=tmp_path)]
    other = UnrollReplay(10 * STEPS, seed=4)
    for seed in range(5):
        drawn = []
        for replay in (*replays, other):
            replay.extend(make_batch(seed))
            drawn.append(replay.draw(8).batch)
        assert_same_unrolls(drawn[1], drawn[0])
    assert not torch.equal(drawn[2]["reward"], drawn[0]["reward"])


def test_files_lie_in_the_folder_while_the_replay_lives_and_are_gone_after(tmp_path: Path) -> None:
    replay = UnrollReplay(1000, path=tmp_path / "new")
    second = UnrollReplay(1000, path=tmp_path / "new")
    replay.extend(make_batch())
    second.extend(make_batch(1))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) > 2 * 1000 * 4 * 4
    assert_same_unrolls(held_by(replay), make_batch())
    del replay, second
    gc.collect()
    assert not list((tmp_path / "new").iterdir())


# ------------------------------------------------------------------------------------- the ratio


@pytest.mark.seconds
@pytest.mark.parametrize("ratio", [0, 0.1, 0.5, 1, 1.25, 7])
def test_after_n_online_unrolls_exactly_ratio_times_n_were_replayed(ratio: float) -> None:
    mix = ReplayMix(UnrollReplay(100 * STEPS), ratio)
    mix(numbered(0))  # fills
    online = 0
    for batch in range(40):
        out = mix(numbered(*range(1 + batch % 3)))
        online += 1 + batch % 3
        replayed = int(out["replayed"].sum())
        assert out["replayed"].tolist() == [False] * (1 + batch % 3) + [True] * replayed
        assert mix.total.replayed == Fraction(str(ratio)) * online // 1


def test_a_batch_is_not_replayed_beside_itself_and_is_held_for_later() -> None:
    mix = ReplayMix(UnrollReplay(1000), 20)
    mix(numbered(1))
    assert set(numbers_of(mix(numbered(2)))[1:]) == {1}
    assert set(numbers_of(mix(numbered(3)))[1:]) == {1, 2}


def test_nothing_is_replayed_before_the_minimum_is_there_nor_made_up_for_later() -> None:
    mix = ReplayMix(UnrollReplay(1000), 2, min_steps=5 * STEPS)
    added = [int(mix(numbered(n, n + 1))["replayed"].sum()) for n in range(6)]
    assert added == [0, 0, 0, 4, 4, 4]


def test_a_replay_whose_capacity_in_unrolls_is_below_the_minimum_is_drawn_from_once_it_is_full() -> None:
    capacity = 3 * STEPS + 4
    mix = ReplayMix(UnrollReplay(capacity), 1, min_steps=capacity)
    assert [int(mix(numbered(n))["replayed"].sum()) for n in range(6)] == [0, 0, 0, 0, 1, 1]


def test_the_online_part_of_a_mixed_batch_is_the_online_batch() -> None:
    mix = ReplayMix(UnrollReplay(1000), 2)
    mix(make_batch(0))
    online = make_batch(1)
    mixed = mix(online)
    check_batch(mixed, make_net(), ["behaviour_params", "replayed"])
    for b in range(ENVS):
        ours, theirs = unroll(mixed, b), unroll(online, b)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert "replayed" not in online


# ------------------------------------------------------------------------------------- saved and restored


def test_a_restored_replay_holds_the_same_and_draws_the_same(where: Path | None, tmp_path: Path) -> None:
    replay = UnrollReplay(10 * STEPS, seed=1, path=where)
    mix = ReplayMix(replay, 0.19)
    for seed in range(6):
        mix(make_batch(seed))
    file = tmp_path / "state.pt"
    torch.save({"replay": replay.state_dict(), "mix": mix.state_dict()}, file)
    saved = torch.load(file, weights_only=False)
    restored = UnrollReplay(10 * STEPS, seed=2)
    restored_mix = ReplayMix(restored, 0.19)
    restored.load_state_dict(saved["replay"])
    restored_mix.load_state_dict(saved["mix"])
    assert restored_mix.total == mix.total
    for seed in range(6, 12):
        ours, theirs = restored_mix(make_batch(seed)), mix(make_batch(seed))
        assert_same_unrolls(ours, theirs)
        assert torch.equal(ours["replayed"], theirs["replayed"])


def test_a_restored_replay_knows_whose_unrolls_it_holds() -> None:
    replay = UnrollReplay(1000)
    for agent in (2, 1, 2):
        replay.extend(numbered(agent, agent), agent=agent)
    restored = UnrollReplay(1000)
    restored.load_state_dict(replay.state_dict())
    drawn = restored.draw(40)
    assert drawn.agent.tolist() == numbers_of(drawn.batch)
    assert set(drawn.agent.tolist()) == {1, 2}


def test_a_state_without_contents_leaves_an_empty_replay_that_draws_as_it_would_have() -> None:
    replay = UnrollReplay(1000, seed=1)
    replay.extend(numbered(*range(10)))
    replay.draw(7)
    state = replay.state_dict(contents=False)
    assert list(state) == ["generator"]
    wanted = numbers_of(replay.draw(5).batch)
    restored = UnrollReplay(1000, seed=9)
    restored.extend(numbered(99))
    restored.load_state_dict(state)
    assert (len(restored), restored.full) == (0, False)
    restored.extend(numbered(*range(10)))
    assert numbers_of(restored.draw(5).batch) == wanted


def test_a_smaller_replay_keeps_the_newest_and_another_s_state_is_refused() -> None:
    replay = UnrollReplay(10 * STEPS)
    replay.extend(numbered(*range(10), final=True))
    small = UnrollReplay(3 * STEPS)
    small.load_state_dict(replay.state_dict())
    assert numbers_of(held_by(small)) == [7, 8, 9]
    with pytest.raises(ConfigError, match="not the state of a replay: step"):
        small.load_state_dict({"step": 1})


# ------------------------------------------------------------------------------------- several agents


def test_two_agents_draw_from_the_unrolls_of_both_and_are_told_whose_they_are() -> None:
    replay = UnrollReplay(1000 * STEPS)
    first = ReplayMix(replay, 4, agent=0)
    second = ReplayMix(replay, 1, agent=1)
    counts = {0: MixCounts(), 1: MixCounts()}
    for number in range(50):
        for agent, mix in enumerate((first, second)):
            numbers = numbers_of(mix(numbered(100 * agent + number)))
            own = sum(one // 100 == agent for one in numbers[1:])
            assert mix.last == MixCounts(1, own, len(numbers) - 1 - own)
            counts[agent] += mix.last
    assert {0: first.total, 1: second.total} == counts
    assert first.total.replayed == 4 * 49
    assert second.total.replayed == 50
    assert 0.3 < first.total.own / first.total.replayed < 0.7


def test_the_state_and_version_of_another_agent_s_network_are_dropped_and_one_s_own_kept() -> None:
    replay = UnrollReplay(1000)
    mine = ReplayMix(replay, 20, agent=1)
    replay.extend(numbered(1), agent=1)
    replay.extend(numbered(2), agent=2)
    mixed = mine(numbered(3))
    nonzero = mixed["recurrent_state"].flatten(1).any(1)
    own = mixed["reward"][0] != 2
    assert mine.last.foreign == int((~own).sum()) > 0
    assert mine.last.own > 0
    assert nonzero[own].all()
    assert not nonzero[~own].any()
    assert (mixed["policy_version"][:, own] >= 0).all()
    assert (mixed["policy_version"][:, ~own] == -1).all(), "it counts another learner's publishes"


@pytest.mark.seconds
def test_agents_in_threads_of_their_own_share_a_replay(tmp_path: Path) -> None:
    replay = UnrollReplay(50 * STEPS, path=tmp_path)
    failures: list[object] = []

    def learn(agent: int) -> None:
        mix = ReplayMix(replay, 2, agent=agent)
        for number in range(60):
            batch = mix(numbered(number, number, final=True))
            followed = batch["reward"][0, batch["final_index"][:, 1]]
            if not torch.equal(batch["final_observation"][:, 0], followed):
                failures.append((agent, number))

    threads = [threading.Thread(target=learn, args=(agent,), daemon=True) for agent in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    assert len(replay) == 50


# ------------------------------------------------------------------------------------- it teaches


def total(out: TensorDictBase) -> Tensor:
    return out["loss_policy"] + out["loss_baseline"] + out["loss_entropy"]

"""Prioritised replay: how likely each frame is, what its step weighs, and what a resumed run knows of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from rlsync.core.errors import NotFinite
from rlsync.runs.recipes.replay.memory import WEIGHT, PrioritizedRows
from rlsync.runs.recipes.run_files import CHECKPOINT
from tests.runs.recipes.test_off_policy import built, every_recipe, small, tiny
from tests.runs.recipes.test_recipes import trained


def buffer_of(sampler: PrioritizedRows, frames: int) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler, batch_size=20_000)
    buffer.extend(TensorDict({"row": torch.arange(frames)}, [frames]))
    return buffer


@pytest.mark.parametrize("capacity", [1, 256, 1000])
def test_only_frames_that_are_there_are_drawn_and_each_by_its_share(capacity: int) -> None:
    sampler = PrioritizedRows(capacity, alpha=1.0, beta=0.0)
    storage = LazyTensorStorage(capacity)
    there = torch.arange(capacity)[:: 1 + capacity // 4]
    sampler.extend(there)
    for size in (1e9, 1.0, 3.0):  # a sum that keeps what was taken from it would be wrong after the first
        sampler.update_priority(there[-1:], size)
    drawn, _ = sampler.sample(storage, 20_000)
    counts = torch.bincount(drawn, minlength=capacity)
    share = sampler.probabilities() * 20_000
    assert share.count_nonzero() == len(there)
    assert_close(counts.double(), share, atol=400, rtol=0)
    assert not counts[share == 0].any(), "never a frame that is not there"


def test_frames_are_drawn_as_often_as_their_errors_say_and_weigh_less_for_it() -> None:
    sampler = PrioritizedRows(8, alpha=0.5, beta=1.0)
    buffer = buffer_of(sampler, 5)
    errors = torch.tensor([1.0, 4.0, 9.0, 16.0])
    buffer.update_priority(torch.arange(1, 5), errors)
    meant = torch.tensor([1.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0]).double() / 11
    torch.testing.assert_close(sampler.probabilities(), meant, rtol=1e-5, atol=0)
    torch.manual_seed(0)
    drawn = buffer.sample()
    counts = torch.bincount(drawn["row"], minlength=8) / 20_000
    torch.testing.assert_close(counts.double(), meant, rtol=0, atol=0.02)
    weighed = torch.tensor([1.0, 1.0, 1 / 2, 1 / 3, 1 / 4])[drawn["row"]]
    torch.testing.assert_close(drawn[WEIGHT], weighed, rtol=1e-5, atol=0)
    estimate = float((drawn[WEIGHT] * drawn["row"]).sum() / drawn[WEIGHT].sum())
    assert estimate == pytest.approx(2.0, abs=0.05), "the weighted mean is that of all frames alike"


def test_a_new_frame_is_as_likely_as_the_likeliest_and_takes_the_place_of_the_oldest() -> None:
    sampler = PrioritizedRows(8, alpha=1.0, beta=0.4)
    buffer = buffer_of(sampler, 8)
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([50.0, 0.0]))
    buffer.extend(TensorDict({"row": torch.tensor([8])}, [1]))
    values = sampler.probabilities() / sampler.probabilities()[2]
    assert values[0] == pytest.approx(50.0), "row 0 is the new frame now"
    assert 0 < values[1] < 1e-5, "without an error it is drawn hardly ever"
    assert buffer[0]["row"] == 8


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_a_priority_that_is_not_finite_is_refused_and_changes_nothing(error: float) -> None:
    sampler = PrioritizedRows(8, alpha=0.6, beta=0.4)
    buffer = buffer_of(sampler, 5)
    before = sampler.probabilities()
    with pytest.raises(NotFinite, match=f"priority of a frame cannot be {error:g}"):
        buffer.update_priority(torch.tensor([1, 2]), torch.tensor([2.0, error]))
    assert torch.equal(sampler.probabilities(), before)


def test_weights_are_divided_by_the_largest_one_of_what_is_drawn() -> None:
    sampler = PrioritizedRows(8, alpha=1.0, beta=1.0)
    buffer = buffer_of(sampler, 3)
    buffer.update_priority(torch.arange(3), torch.tensor([1e-9, 1.0, 2.0]))  # the first is never drawn
    torch.manual_seed(0)
    drawn = buffer.sample()
    assert_close(drawn[WEIGHT], torch.tensor([0.0, 1.0, 0.5])[drawn["row"]])


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_beta_goes_to_its_end_with_the_frames_of_the_run() -> None:
    trainer = built(small("dqn", prioritized=True, priority_beta=0.2, priority_beta_end=1.0))
    betas: list[float] = []
    trainer.register_op("post_steps", lambda: betas.append(trainer.replay_buffer.sampler.beta))
    trained(trainer)
    assert betas == pytest.approx([0.4, 0.6, 0.8, 1.0])


@every_recipe
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_run_gives_what_it_drew_the_errors_of_its_loss_and_a_resumed_run_knows_them(
    name: str, tmp_path: Path
) -> None:
    config = tiny(name, prioritized=True, run_dir=tmp_path, buffer_frames=256)
    trainer = built(config)
    newest: dict[int, float] = {}

    def look(batch: TensorDict) -> None:
        assert batch[WEIGHT].max() <= 1.0
        sizes = batch["td_error"].reshape(-1)
        sizes = sizes if name == "sac" else sizes.sqrt()
        newest.update(zip(batch["index"].reshape(-1).tolist(), sizes.tolist(), strict=True))

    trainer.register_op("post_optim_log", look)
    trained(trainer)
    sampler = trainer.replay_buffer.sampler
    shares = sampler.probabilities()
    rows = torch.tensor(list(newest))
    meant = (torch.tensor(list(newest.values())).double() + 1e-6) ** 0.6
    torch.testing.assert_close(shares[rows] / shares[rows].sum(), meant / meant.sum(), rtol=1e-4, atol=1e-7)
    assert len(set(meant.tolist())) > 10
    assert shares[:128].min() > 0
    assert shares[128:].max() == 0

    again = built(tiny(name, prioritized=True, total_frames=160, buffer_frames=256))
    again.load_from_file(tmp_path / CHECKPOINT)
    assert torch.equal(again.replay_buffer.sampler.probabilities(), shares)
    trained(again)
    assert again.replay_buffer.sampler.probabilities()[128:160].min() > 0

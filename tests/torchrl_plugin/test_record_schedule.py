"""A run of a user's own trainer with a stock collector is recorded, and made again from Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer

from rlsync import ConfigError, Every, RecordSchedule, Rerun, SyncWeights, WeightBoard
from rlsync.record.record_schedule import stop
from rlsync.record.schedule import Comparison, ScheduleWriter, lives_in
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.compat.trainers import ShutdownStage
from tests.tools.parts import FRAMES_PER_BATCH, make_cartpole, make_policy, make_workers
from tests.tools.running import ACTOR, in_three_lines

BATCHES = 8


class WaitingCollector(MultiAsyncCollector):
    """Its workers wait for the learner.

    TorchRL's queue has room for one rollout: a worker that finds it full for a second, as on a loaded
    machine, throws its own away and makes another, which no schedule tells.
    """

    @property
    def _queue_len(self) -> int:
        return self.num_workers


class OwnLoss(nn.Module):
    """Reinforces each action by the reward after it."""

    def __init__(self, actor: nn.Module) -> None:
        super().__init__()
        self.actor_network = actor
        self.dropout = nn.Dropout(0.1)  # the learner draws, too

    def forward(self, batch: TensorDictBase) -> TensorDict:
        weight: Tensor = self.dropout(batch["next", "reward"].squeeze(-1) + batch["observation"].sum(-1))
        chosen = self.actor_network.get_dist(batch).log_prob(batch["action"])
        return TensorDict({"loss_actor": -(chosen * weight).mean()})


def built(
    file: Path,
    again: Rerun | None = None,
    *,
    kind: type[BaseCollector] = WaitingCollector,
    seed: int = 3,
    workers: int = 2,
    adopt_at: Any = "rollout",
    when: Every | None = None,
    **options: Any,
) -> Trainer:
    """A trainer that records its schedule to `file`."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    actor = make_policy()
    board = WeightBoard() if again is None else again.board
    schemes = {"policy": board.scheme(adopt_at=adopt_at)}
    collector = make_workers(kind, actor, schemes=schemes, env=make_cartpole, workers=workers)
    loss: Any = OwnLoss(actor)
    trainer = Trainer(
        collector=collector, total_frames=BATCHES * FRAMES_PER_BATCH, frame_skip=1, optim_steps_per_batch=1,
        loss_module=loss, optimizer=torch.optim.Adam(loss.parameters(), lr=0.01), progress_bar=False,
        seed=seed, **options,
    )  # fmt: skip
    sync = SyncWeights(ACTOR, when)
    sync.register(trainer)
    RecordSchedule(sync, file, every=1).register(trainer)
    return trainer


def recorded(folder: Path, spoil: Callable[[TensorDictBase], object] = id, **options: Any) -> Path:
    """The schedule of a run; `spoil` is called with each batch."""
    trainer = built(folder / "schedule.bin", **options)
    trainer.register_op("batch_process", spoil)
    trainer.train()
    return folder / "schedule.bin"


def end(trainer: Trainer) -> None:
    """Without training."""
    stop(trainer)
    ShutdownStage.of(trainer)()
    trainer.shutdown()


def made_again(schedule: Path, until: int | None = None, **options: Any) -> Comparison:
    """In a process whose generators are elsewhere."""
    torch.manual_seed(77)
    rerun = Rerun(schedule, until)
    return rerun.run(built(schedule.with_name("again.bin"), rerun, **options))


@pytest.mark.parametrize("kind", [WaitingCollector, MultiSyncCollector])
@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_run_of_a_users_trainer_is_made_again(tmp_path: Path, kind) -> None:
    schedule = recorded(tmp_path, kind=kind)
    life = lives_in(schedule)[-1]
    assert len({rollout.worker for rollout in life.rollouts}) == 1 + (kind is WaitingCollector)
    found = made_again(schedule, kind=kind)
    assert found.unequal == 0, found
    assert found.equal == len(life.digests) == BATCHES + 1


def an_altered_frame() -> Callable[[TensorDictBase], object]:
    batches = iter(range(BATCHES))

    def alter(batch: TensorDictBase) -> None:
        if next(batches) == 4:
            batch["next", "reward"][3] += 0.5

    return alter


@pytest.mark.parametrize("what", ["an altered frame", "another seed"])
@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_what_is_unequal_is_named_with_its_version_and_leaves(tmp_path: Path, what: str) -> None:
    schedule = recorded(tmp_path, an_altered_frame() if what == "an altered frame" else id)
    found = made_again(schedule, seed=3 if what == "an altered frame" else 4)
    unequal = 7 if what == "an altered frame" else 2  # version 2 is what the first batch acts with
    assert found.unequal == unequal
    assert str(found).startswith(f"unequal at version {unequal}: 4 leaves: policy.module.0.module.0.weight")
    assert len(lives_in(tmp_path / "again.bin")[-1].digests) < BATCHES, "it stops there"


def written(folder: Path) -> Path:
    """A schedule in which worker 0 makes five rollouts, and worker 1 one, with a version of later."""
    writer = ScheduleWriter(folder / "schedule.bin", {"workers": 2})
    writer.publish(1, 0)
    writer.publish(2, 0)
    for number in range(5):
        writer.rollout(0, 0, number, number + 2)
        writer.publish(number + 3, number + 1)
    writer.rollout(1, 0, 0, 7)
    writer.close()
    return folder / "schedule.bin"


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_rerun_stops_at_a_version_with_a_checkpoint_though_a_worker_waits_for_a_later_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trainer.pt"
    made_again(written(tmp_path), until=4, save_trainer_file=file, save_trainer_interval=10**9)
    assert lives_in(tmp_path / "again.bin")[-1].publishes[-1].version == 4
    assert file.exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "workers": ({"workers": 3}, "it had 2 workers, and this collector has 3"),
    "kind": ({"kind": MultiSyncCollector}, "this MultiSyncCollector does not keep to its schedule"),
    "adopt_at": ({"adopt_at": "policy_call"}, "its workers adopted at every policy call"),
    "seconds": ({"when": Every(1, "seconds")}, "it published every so many seconds"),
    "checkpoints": (
        {"save_trainer_file": "trainer.pt", "save_trainer_interval": 1},
        "checkpoints ask workers that wait",
    ),
}


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_versions_that_workers_adopt_at_policy_calls_are_recorded_frame_by_frame(tmp_path: Path) -> None:
    trainer, stamps = built(tmp_path / "schedule.bin", adopt_at="policy_call"), list[list[int]]()
    trainer.register_op("batch_process", lambda batch: stamps.append(batch[STAMP].flatten().tolist()))
    trainer.train()
    (life,) = lives_in(tmp_path / "schedule.bin")
    adopted = {(note["worker"], note["number"]): note for note in life.notes if note["event"] == "adopted"}
    assert adopted, "no version was published during a rollout"
    recorded = []
    for rollout in life.rollouts[: len(stamps)]:
        note = adopted.get((rollout.worker, rollout.number), {"at": [], "versions": []})
        ends = [*note["at"], FRAMES_PER_BATCH]
        spans = zip([0, *note["at"]], ends, [rollout.version, *note["versions"]], strict=True)
        recorded.append([version for begin, end, version in spans for _ in range(begin, end)])
    assert recorded == stamps


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_trainer_that_cannot_make_the_run_again_is_refused_before_anything_runs(
    tmp_path: Path, name: str
) -> None:
    options, why = REFUSED[name]
    rerun = Rerun(written(tmp_path))
    trainer = built(tmp_path / "again.bin", rerun, **options)
    with pytest.raises(ConfigError, match=f"this run cannot be made again: {why}") as refused:
        rerun.run(trainer)
    assert in_three_lines(refused.value)
    assert trainer.collected_frames == 0
    end(trainer)


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_rerun_that_begins_late_or_without_its_board_or_record_is_refused(tmp_path: Path) -> None:
    rerun = Rerun(written(tmp_path))
    trainer = built(tmp_path / "free.bin")
    with pytest.raises(ConfigError, match="does not keep to its schedule"):
        rerun.run(trainer)
    end(trainer)
    trainer = built(tmp_path / "again.bin", rerun)
    trainer.collector.update_policy_weights_()  # version 2, for which worker 0 waits
    next(iter(trainer.collector))
    with pytest.raises(ConfigError, match="collection has begun"):
        rerun.run(trainer)
    trainer._modules.clear()
    with pytest.raises(ConfigError, match="its trainer has no RecordSchedule"):
        rerun.run(trainer)
    end(trainer)


def test_a_schedule_that_is_not_there_damaged_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no schedule: No such file"):
        Rerun(tmp_path / "schedule.bin")
    schedule = written(tmp_path)
    whole = schedule.read_bytes()
    schedule.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    with pytest.raises(ConfigError, match="the schedule is damaged in the block at byte"):
        Rerun(schedule)
    ScheduleWriter(tmp_path / "empty.bin", {}).close()
    with pytest.raises(ConfigError, match="the schedule has no rollouts yet"):
        Rerun(str(tmp_path / "empty.bin"))

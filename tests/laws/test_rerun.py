"""An asynchronous run is made again bit by bit from its schedule, and what is wrong in one is found.

With a fixed lag it is the same each time.
"""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.trainers import Trainer

from rlsync import RecordSchedule, Rerun
from rlsync.core.errors import ConfigError, WorkerLost
from rlsync.record.schedule import Comparison, Life, Published, compared, lives_in
from rlsync.runs.actors.replay.unrolls import UnrollReplay
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.runs.actors.roller import Roller
from rlsync.runs.life.resume import load
from rlsync.runs.life.state import handle_in
from rlsync.runs.life.training import leave_address
from rlsync.runs.recipes import dqn, ppo
from rlsync.runs.recipes.impala.recipe import RECIPE as IMPALA
from rlsync.runs.recipes.impala.settings import ImpalaConfig, UnrollReplayConfig
from rlsync.runs.recipes.registry import Recipe
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.rerun import (
    config_of_rerun,
    frame_of,
    keep_life,
    lives_to_repeat,
    number_versions,
    watch_frame,
)
from rlsync.runs.recipes.run_files import CHECKPOINT, LIVES, RESOLVED, SCHEDULE, STALENESS
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    OnPolicyModelConfig,
    OnPolicyNormalizeConfig,
    PPOConfig,
)
from rlsync.runs.recipes.sync_settings import RouteConfig, SyncConfig
from rlsync.sync.adopter import Adopter
from rlsync.transport.board.format import BoardWatch
from tests.tools.parts import undecided
from tests.tools.parts.space_envs import TOLD

pytestmark = pytest.mark.processes

FRAMES_PER_BATCH = 5 * 4
BATCHES = 40
LASER = UnrollReplayConfig(ratio=1.5, capacity_steps=400, min_steps=40, threshold=0.5, entropy_on="online")


@pytest.fixture(autouse=True)
def forked(fork_workers: None) -> None:
    """Workers are forked, with what a test breaks in this process broken in them, too."""


def config(folder: Path, env: str = "CartPole-v1", **recipe: Any) -> Config:
    """Two free workers with two environments each; every version is digested."""
    options = {"total_frames": BATCHES * FRAMES_PER_BATCH, "unroll_length": 5, "batch_size": 4, **recipe}
    return Config(
        run_dir=str(folder),
        env=EnvConfig(id=env, num_envs=2),
        collector=CollectorConfig(frames_per_batch=FRAMES_PER_BATCH, lag=None, silent_timeout_s=60.0),
        sync=SyncConfig(digest_every=1),
        checkpoint_every_frames=15 * FRAMES_PER_BATCH,
        recipe=ImpalaConfig(target_return=None, **options),
    )


def trained(
    recipe: Recipe,
    given: Config,
    *hooks: Callable[[Trainer, int], None],
    begun: Callable[[Trainer], object] = bool,
) -> Life:
    """Train; call ``begun`` before, and each hook after each batch. Returns what was recorded."""
    Path(str(given.run_dir)).mkdir(parents=True, exist_ok=True)
    trainer = recipe.build(given)
    begun(trainer)
    batches = iter(range(1, 10**6))

    def after_a_batch(batch: object = None) -> None:
        number = next(batches)
        for hook in hooks:
            hook(trainer, number)

    trainer.register_op("post_steps_log", after_a_batch)
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    return lives_in(Path(str(given.run_dir)) / SCHEDULE)[-1]


def again(
    recipe: Recipe,
    given: Config,
    until: int | None = None,
    begun: Callable[[Trainer], object] = bool,
) -> Comparison:
    """Make the run of this config again, all its lives. ``begun`` is called in each."""
    run, found = Path(str(given.run_dir)), None
    folder = run / "again"
    folder.mkdir()
    for life, recorded in lives_to_repeat(run, lambda _: given).values():
        config = config_of_rerun(recorded, life, folder)
        number_versions(life, folder)
        trainer = recipe.build(config, again=life)
        if config.resume is not None:
            load(trainer, Path(config.resume) / CHECKPOINT, None)
        begun(trainer)
        found = Rerun(life, until).run(trainer).after(found)
    assert found is not None
    return found


def faults(at: dict[int, tuple[int, int]]) -> Callable[[Trainer, int], None]:
    """Send a signal to a worker after some batches: ``{batch: (worker, signal)}``."""

    def send(trainer: Trainer, batch: int) -> None:
        if batch in at:
            worker, number = at[batch]
            os.kill(trainer.collector.procs[worker].pid, number)

    return send


def without_a_pause(trainer: Trainer, batch: int) -> None:
    """Start a worker again at once, else the others may make all rollouts meanwhile."""
    due = trainer.collector._workers._pauses.due
    due.update(dict.fromkeys(due, 0.0))


#: Each worker is killed and replaced while the other one is stopped.
STORM = {
    2: (0, signal.SIGKILL),
    3: (1, signal.SIGSTOP),  # until the next life of worker 0 has made rollouts
    11: (1, signal.SIGCONT),
    13: (1, signal.SIGKILL),
    14: (0, signal.SIGSTOP),
    22: (0, signal.SIGCONT),
}
STORM_ENDS = 25


@pytest.mark.parametrize("replay", [UnrollReplayConfig(), LASER], ids=["impala", "laser"])
@pytest.mark.one_case
def test_a_free_run_with_killed_replaced_and_stopped_workers_is_made_again(tmp_path: Path, replay) -> None:
    given = config(tmp_path / "run", replay=replay, total_frames=STORM_ENDS * FRAMES_PER_BATCH)

    life = trained(IMPALA, given, faults(STORM), without_a_pause)
    lives = {(rollout.worker, rollout.life) for rollout in life.rollouts}
    assert lives == {(0, 0), (0, 1), (1, 0), (1, 1)}
    found = again(IMPALA, given)
    assert found.unequal == 0, found
    assert found.equal == len(life.digests) == STORM_ENDS + 1


def test_a_worker_that_dies_in_a_rerun_ends_it_and_is_named(tmp_path: Path) -> None:
    """Else its next recorded life would begin too early, and the run would be said to differ."""
    given = config(tmp_path / "run", total_frames=12 * FRAMES_PER_BATCH)
    trained(IMPALA, given)

    def kill(trainer: Trainer) -> None:
        trainer.register_op(
            "pre_steps_log", lambda batch: os.kill(trainer.collector.procs[0].pid, signal.SIGKILL)
        )

    with pytest.raises(WorkerLost, match="worker 0 ended before its recorded life did"):
        again(IMPALA, given, begun=kill)


@pytest.mark.thorough
def test_two_free_runs_of_one_seed_differ_so_that_equal_digests_say_something(tmp_path: Path) -> None:
    one = trained(IMPALA, config(tmp_path / "a"), faults({3: (0, signal.SIGSTOP), 30: (0, signal.SIGCONT)}))
    other = trained(IMPALA, config(tmp_path / "b"), faults({3: (1, signal.SIGSTOP), 30: (1, signal.SIGCONT)}))
    assert one.digests[2] == other.digests[2], "the first weights"
    assert one.digests[max(one.digests)] != other.digests[max(other.digests)]


@pytest.mark.thorough
def test_a_rerun_stops_at_the_version_that_is_asked_for_with_a_checkpoint(tmp_path: Path) -> None:
    given = config(tmp_path / "run")
    trained(IMPALA, given)
    found = again(IMPALA, given, until=12)
    assert (found.unequal, found.last_equal) == (0, 12)
    assert (tmp_path / "run" / "again" / "checkpoint" / "manifest.json").is_file()


@pytest.mark.thorough
def test_what_the_ring_dropped_is_made_again_and_not_learned_from(tmp_path: Path) -> None:
    given = config(tmp_path / "run", when_full="drop_oldest", slots=3)
    life = trained(IMPALA, given)
    assert any(rollout.dropped for rollout in life.rollouts)
    assert again(IMPALA, given).unequal == 0


def small_ppo(folder: Path) -> Config:
    return Config(
        run_dir=str(folder),
        collector=CollectorConfig(frames_per_batch=64, lag=None),
        checkpoint_every_frames=10**9,  # which would wait for a stopped worker
        sync=SyncConfig(digest_every=1),
        recipe=PPOConfig(
            total_frames=64 * 12, num_epochs=1, batch_size=32, hidden=[8], target_return=None, compile="off"
        ),
    )


def small_ppo_of_numbers(folder: Path) -> Config:
    config = small_ppo(folder)
    config.env = EnvConfig("Pendulum-v1")
    config.recipe.normalize = OnPolicyNormalizeConfig(observations=True, rewards=True)
    return config


def small_ppo_with_memory(folder: Path) -> Config:
    config = small_ppo(folder)
    config.recipe.model = OnPolicyModelConfig(lstm=4)
    config.recipe.normalize = OnPolicyNormalizeConfig(rewards=True)
    return config


def small_ppo_of_several_choices(folder: Path) -> Config:
    config = small_ppo(folder)
    config.env = EnvConfig(TOLD)
    return config


def small_dqn(folder: Path) -> Config:
    return Config(
        run_dir=str(folder),
        collector=CollectorConfig(frames_per_batch=16, lag=None),
        checkpoint_every_frames=10**9,  # which would wait for a stopped worker
        sync=SyncConfig(
            digest_every=1,
            map=[
                RouteConfig("policy.module[0]", "loss_module.value_network"),
                RouteConfig("policy.module[1]", "greedy_module"),
            ],
        ),
        recipe=dqn.DQNConfig(
            total_frames=16 * 25, hidden=[8], batch_size=16, prioritized=True,
            pace=PaceConfig(0.5, prefill=64), target_return=None, compile="off",
        ),
    )  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("recipe", "given"),
    [
        (ppo.RECIPE, small_ppo),
        (ppo.RECIPE, small_ppo_of_numbers),
        (ppo.RECIPE, small_ppo_of_several_choices),
        (ppo.RECIPE, small_ppo_with_memory),
        (dqn.RECIPE, small_dqn),
    ],
    ids=["ppo", "ppo, numbers", "ppo, several choices", "ppo, memory", "dqn"],
)
def test_a_free_run_of_transitions_is_made_again(tmp_path: Path, recipe, given) -> None:
    stops = faults({2: (0, signal.SIGSTOP), 6: (0, signal.SIGCONT)})
    life = trained(recipe, given(tmp_path / "run"), stops)
    assert {rollout.worker for rollout in life.rollouts} == {0, 1}
    found = again(recipe, given(tmp_path / "run"))
    assert found.unequal == 0, found
    assert found.equal == len(life.digests)


def in_one_process(folder: Path) -> Config:
    given = small_ppo(folder)
    given.collector = CollectorConfig(num_workers=0, frames_per_batch=64)
    given.recipe.total_frames = 64 * 5
    return given


def in_step(folder: Path) -> Config:
    given = small_dqn(folder)
    given.collector, given.env.num_envs = CollectorConfig(frames_per_batch=16, lag=0), 2
    given.recipe.total_frames = 16 * 10
    return given


def laser(folder: Path) -> Config:
    return config(folder, total_frames=12 * FRAMES_PER_BATCH, replay=LASER)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("recipe", "given", "place"),
    [
        (IMPALA, laser, (1, 7, 3, 1)),
        (dqn.RECIPE, in_step, (1, 7, 3, 1)),
        (ppo.RECIPE, in_one_process, (0, 3, 50, 0)),
    ],
    ids=["laser", "dqn", "ppo"],
)
def test_a_frame_is_made_again_as_the_learner_took_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe, given, place
) -> None:
    """In a slot time comes first, and a choice is a number; in transitions it comes last, and is one-hot."""
    made: dict[tuple[int, int], Any] = {}
    taken = RecordSchedule._taken

    def keep_rollout(hook: RecordSchedule, rollout: Any, dropped: bool) -> None:
        views = {name: view.clone() for name, view in rollout.views.items()}
        made[rollout.writer, rollout.number] = TensorDict(views)
        taken(hook, rollout, dropped)

    with monkeypatch.context() as patch:
        patch.setattr(RecordSchedule, "_taken", keep_rollout)
        life = trained(recipe, given(tmp_path / "run"))
    worker, rollout, step, env = place
    if recipe is IMPALA:  # of 24 rollouts, one of its two free workers has made as many
        worker = next(writer for writer, number in made if number == rollout)
    place = worker, rollout, step, env
    frame = frame_of(life, given(tmp_path), None, place)
    assert frame_of(life, given(tmp_path), frame.number, place) == frame
    seen: dict[str, Any] = {}

    def look(trainer: Trainer) -> None:
        nonlocal seen
        seen = watch_frame(trainer, frame)

    assert again(recipe, given(tmp_path / "run"), begun=look).equal > 1
    theirs = made[worker, rollout]
    if recipe is not IMPALA:
        seen["action"] = seen["action"].argmax()
    for name, value in seen.items():
        assert torch.equal(value, theirs[name][step, env]), name
    assert {"policy_version", "observation", "action"} <= {*seen}
    assert any(name.endswith("log_prob") for name in seen) == (recipe is not dqn.RECIPE)


@pytest.mark.thorough
def test_the_way_of_updates_is_recorded_and_told_where_runs_differ(tmp_path: Path) -> None:
    def hang_on(trainer: Trainer, batch: int) -> None:
        if batch == 8:
            trainer.register_op("post_loss", lambda sub_batch: sub_batch)

    given = small_dqn(tmp_path / "run")
    given.collector = CollectorConfig(num_workers=0, frames_per_batch=16)
    life = trained(dqn.RECIPE, given, hang_on)
    assert all(life.digests.values()), "those of leaves that policy and learner share, too"
    ways = [(note["way"], note["update"]) for note in life.notes if note["event"] == "updates"]
    assert ways == [("eagerly", 1), ("in TorchRL's way", ANY)]
    assert 1 < ways[1][1] < life.publishes[-1].optim_steps
    last = max(life.digests)
    other = deepcopy(life)
    other.digests[last] = dict.fromkeys(life.digests[last], 0)
    other.notes = [note for note in life.notes if note.get("update") != ways[1][1]]
    assert "updates were made" not in compared(life, other).window, "the other life may have ended before"
    other.notes.append(life.notes[-1] | {"event": "updates", "way": "in one graph", "update": 9})
    told = f"eagerly from 1 on, in TorchRL's way from {ways[1][1]} on, and in the other eagerly from 1 on, in"
    assert told in compared(life, other).window


@pytest.mark.thorough
def test_a_run_that_was_resumed_is_made_again_from_its_checkpoint_or_refused_without_it(
    tmp_path: Path,
) -> None:
    first = config(tmp_path / "first", total_frames=10 * FRAMES_PER_BATCH)
    given = config(tmp_path / "second", total_frames=25 * FRAMES_PER_BATCH)
    trained(IMPALA, first)
    given.resume = str(tmp_path / "first")
    checkpoint = tmp_path / "first" / CHECKPOINT
    life = trained(IMPALA, given, begun=lambda trainer: load(trainer, checkpoint, None))
    assert life.facts["resumed"]
    assert len(life.rollouts) == 15 * 2
    assert again(IMPALA, given).unequal == 0
    (checkpoint / "digests.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not the one that it began from"):
        lives_to_repeat(tmp_path / "second", lambda _: given)


def test_a_run_that_was_killed_and_resumed_in_its_folder_is_made_again_life_after_life(
    tmp_path: Path,
) -> None:
    """What a killed run leaves is what lies in its folder at that moment."""
    given = config(tmp_path / "1", total_frames=18 * FRAMES_PER_BATCH)
    given.checkpoint_every_frames = 6 * FRAMES_PER_BATCH
    for life, killed_after in ((1, 10), (2, None)):
        run = Path(str(given.run_dir))

        def kill(
            trainer: Trainer, batch: int, run: Path = run, life: int = life, at: Any = killed_after
        ) -> None:
            if batch == at:
                shutil.copytree(run, tmp_path / str(life + 1))

        def go_on(trainer: Trainer, run: Path = run) -> None:
            OmegaConf.save(OmegaConf.structured(given), run / RESOLVED)
            if given.resume is not None:
                load(trainer, run / CHECKPOINT, None)
                keep_life(run, run / CHECKPOINT)
                trainer.save_trainer(force_save=True)

        trained(IMPALA, given, kill, begun=go_on)
        if killed_after is not None:
            given.run_dir = given.resume = str(tmp_path / str(life + 1))
    lives = lives_in(run / SCHEDULE)
    assert [len(life.publishes) for life in lives] == [12, 14], "the checkpoint is after 7 batches"
    found = again(IMPALA, given)
    assert found.unequal == 0, found
    assert found.equal == sum(len(life.digests) for life in lives)
    assert [life.digests for life in lives] == [life.digests for life in lives_in(run / "again" / SCHEDULE)]
    shutil.rmtree(run / LIVES / "1" / CHECKPOINT)
    with pytest.raises(ConfigError, match="lives/1 is not the one that it began from"):
        lives_to_repeat(run, lambda _: given)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("replay", [UnrollReplayConfig(), LASER], ids=["impala", "laser"])
def test_runs_are_made_again_under_random_kills_and_stops(tmp_path: Path, seed: int, replay) -> None:
    """Three workers, a fault every ten batches on average; a stopped one goes on a few batches later."""
    draw, batches = random.Random(seed), 300
    given = config(
        tmp_path / "run", replay=replay, total_frames=batches * FRAMES_PER_BATCH, max_restarts=1000
    )
    given.collector.num_workers, given.seed = 3, seed
    stopped: dict[int, tuple[int, int]] = {}  # by worker: the batch at which it goes on, and its pid

    def storm(trainer: Trainer, batch: int) -> None:
        workers = trainer.collector.procs
        for worker, (until, pid) in list(stopped.items()):
            if batch >= until or batch == batches - 1:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                del stopped[worker]
        worker = draw.randrange(3)
        # Batches may follow each other faster than looks at the workers: all dead at once end a run.
        two_live = sum(each.is_alive() for each in workers) > 1
        may_harm = two_live and not stopped and batch < batches - 1 and workers[worker].is_alive()
        if draw.random() < 0.1 and may_harm:
            harm = draw.choice([signal.SIGKILL, signal.SIGSTOP])
            os.kill(workers[worker].pid, harm)
            if harm == signal.SIGSTOP:
                stopped[worker] = batch + draw.randrange(1, 8), workers[worker].pid
            else:
                # A killed worker may live for another batch, and would then be counted as a live one.
                workers[worker].join()
        without_a_pause(trainer, batch)

    life = trained(IMPALA, given, storm)
    assert len({(rollout.worker, rollout.life) for rollout in life.rollouts}) > 4
    found = again(IMPALA, given)
    assert found.unequal == 0, found
    assert found.equal == len(life.digests) == batches + 1


# What is broken on purpose, in the run that is recorded, and never in the rerun.


def torn_reads(patch: pytest.MonkeyPatch) -> None:
    """A worker reads the first leaf as it was a version before: a reader without its lease."""
    apply = Adopter._apply
    before: dict[int, Any] = {}

    def torn(adopter: Adopter, version: int, layout: Any, views: Any) -> bool:
        kept, before[id(adopter)] = before.get(id(adopter), views[0]), views[0].clone()
        return apply(adopter, version, layout, [kept, *views[1:]] if version > 2 else views)

    patch.setattr(Adopter, "_apply", torn)


def stamps_off_by_one(patch: pytest.MonkeyPatch) -> None:
    roll = Roller.roll

    def misnamed(roller: Roller, number: int, slot: Any, version: int, stop: Any) -> bool:
        return roll(roller, number, slot, max(2, version - 1), stop)

    patch.setattr(Roller, "roll", misnamed)


def late_adoptions(patch: pytest.MonkeyPatch) -> None:
    """A worker says that it acts with the newest version, and goes on with the one before."""
    apply = Adopter._apply

    def late(adopter: Adopter, version: int, layout: Any, views: Any) -> bool:
        return apply(adopter, version, layout, views) if version < 3 or version % 2 else False

    patch.setattr(Adopter, "_apply", late)


def an_altered_frame(patch: pytest.MonkeyPatch) -> None:
    in_slot, seen = RolloutRing._in_slot, iter(range(10**6))

    def altered(ring: RolloutRing, slot: int) -> Any:
        taken = in_slot(ring, slot)
        if next(seen) == 9:
            taken.views["observation"][2, 0, 1] += 0.5
        return taken

    patch.setattr(RolloutRing, "_in_slot", altered)


def an_altered_row(patch: pytest.MonkeyPatch) -> None:
    draw, seen = UnrollReplay.draw, iter(range(10**6))

    def altered(replay: UnrollReplay, count: int) -> Any:
        drawn = draw(replay, count)
        if next(seen) == 5:
            drawn.batch["reward"][1, 0] -= 5.0
        return drawn

    patch.setattr(UnrollReplay, "draw", altered)


@pytest.mark.parametrize(
    "harm",
    [stamps_off_by_one, torn_reads, late_adoptions, an_altered_frame, an_altered_row],
    ids=lambda harm: harm.__name__,
)
@pytest.mark.one_case
def test_what_is_wrong_in_a_run_is_found_by_its_rerun(tmp_path: Path, monkeypatch, harm) -> None:
    # Without a trust region, which would learn nothing from what was altered.
    replay = UnrollReplayConfig(ratio=1.5, capacity_steps=400, min_steps=40)
    given = config(tmp_path / "run", replay=replay, lr=0.02, total_frames=20 * FRAMES_PER_BATCH)
    with monkeypatch.context() as patch:
        harm(patch)
        trained(IMPALA, given)
    found = again(IMPALA, given)
    assert found.unequal > 2, harm.__doc__
    assert "rollouts; worker" in str(found)


@pytest.mark.thorough
def test_an_environment_that_its_seed_does_not_decide_is_found(tmp_path: Path) -> None:
    given = config(tmp_path / "run", env=f"{undecided.MODULE}:Noisy-v0")
    trained(IMPALA, given)
    assert again(IMPALA, given).unequal > 2


# With a fixed lag.


def slowed(patch: pytest.MonkeyPatch, worker: int) -> None:
    """Let a worker take long for each rollout."""
    commit = RingWriter.commit

    def late(writer: RingWriter) -> None:
        time.sleep(0.02 * (writer._writer == worker))
        commit(writer)

    patch.setattr(RingWriter, "commit", late)


def ages(life: Life) -> list[int]:
    """How many versions old each rollout was when the learner took it."""
    newest, found = 0, []
    for event in life.events:
        if isinstance(event, Published):
            newest = event.version
        else:
            found.append(newest - event.version)
    return found


@pytest.mark.parametrize("replay", [UnrollReplayConfig(), LASER], ids=["impala", "laser"])
@pytest.mark.one_case
def test_with_a_fixed_lag_a_run_is_the_same_whichever_worker_is_slow_and_has_that_lag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay
) -> None:
    lives, batches = [], 15
    for name, (lag, slow) in enumerate([(1, 0), (1, 1), (3, 1)]):
        given = config(tmp_path / str(name), replay=replay, total_frames=batches * FRAMES_PER_BATCH)
        given.collector.lag = lag
        with monkeypatch.context() as patch:
            slowed(patch, slow)
            lives.append(trained(IMPALA, given))
        # Both workers make a batch together, and a version follows each.
        lags = [min(number, lag) for number in range(batches) for _ in range(2)]
        assert ages(lives[-1]) == lags
        with (tmp_path / str(name) / STALENESS).open(newline="") as file:
            consumed = {int(row["staleness_versions"]): int(row["steps"]) for row in csv.DictReader(file)}
        if not replay.ratio:
            assert consumed == {age: count * 10 for age, count in Counter(lags).items()}
    one, other, older = lives
    order = [(rollout.number, rollout.worker) for rollout in one.rollouts]
    assert order == [(number, worker) for number in range(batches) for worker in range(2)]
    assert [r.version for r in one.rollouts] == [r.version for r in other.rollouts]
    assert one.digests == other.digests
    assert len(one.digests) == batches + 1
    assert one.digests[max(one.digests)] != older.digests[max(one.digests)]


@pytest.mark.thorough
def test_a_lag_of_0_is_lockstep(tmp_path: Path) -> None:
    """A worker with one slot takes turns with the learner."""
    lives, newest = [], []

    def watch(trainer: Trainer, batch: int) -> None:
        leave_address(trainer, tmp_path)
        handle = handle_in(tmp_path)
        assert handle is not None
        newest.append(BoardWatch(*handle.open()).newest)

    for lag, slots in ((None, 1), (0, None)):
        given = config(tmp_path / str(lag), batch_size=2, slots=slots)
        given.collector.num_workers, given.collector.frames_per_batch = 1, 10
        given.collector.lag, given.checkpoint_every_frames = lag, 10**6  # one life
        lives.append(trained(IMPALA, given, watch))
    assert lives[0].digests == lives[1].digests
    assert newest[: len(newest) // 2] == newest[len(newest) // 2 :], "rlsync status sees both boards"
    assert ages(lives[1]) == [0] * 2 * BATCHES


@pytest.mark.thorough
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fixed_lag_outlives_a_worker_and_the_run_is_made_again(
    fault: signal.Signals, tmp_path: Path
) -> None:
    given = config(tmp_path / "run")
    given.collector.lag, given.checkpoint_every_frames = 1, 10**6
    if fault is signal.SIGSTOP:
        given.collector.silent_timeout_s = 10.0
    life = trained(IMPALA, given, faults({5: (1, fault)}))
    assert {(rollout.worker, rollout.life) for rollout in life.rollouts} == {(0, 0), (1, 0)}
    order = [(rollout.number, rollout.worker) for rollout in life.rollouts]
    assert order == [(number, worker) for number in range(BATCHES) for worker in range(2)]
    found = again(IMPALA, given)
    assert found.unequal == 0, found

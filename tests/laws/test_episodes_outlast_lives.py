"""Where environments can be saved episodes go on at the end of a life, and a run is the same whoever dies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchrl.trainers import Trainer

from rlsync import RlsyncError, WorkerLost
from rlsync.core.errors import ConfigError
from rlsync.runs.actors import trail
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.config.trust import check_checkpoint
from rlsync.runs.life.resume import Change, load
from rlsync.runs.recipes.checkpoints import envs_in
from rlsync.runs.recipes.impala import Categorical, ImpalaNet
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.rerun import keep_life
from rlsync.runs.recipes.run_files import CHECKPOINT, RESOLVED
from rlsync.runs.recipes.settings import Config
from rlsync.seams import schedule
from tests.laws.test_a_death_changes_nothing import (
    QUICKLY,
    gone_on,
    in_lives,
    killed_in_its_second_life,
    killed_often,
    require_same,
)
from tests.laws.test_rerun import again, forked
from tests.runs.recipes.test_one_worker import BATCH, life_of, same
from tests.tools.parts import saving_envs

__all__ = ["forked"]  # a fixture

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("forked")]

NAMES = ["ppo", "ppo-lstm", "dqn"]
LIMIT = 20  # steps of an episode; a life has 12


def going_on(name: str, folder: Path, *, env: str = "Saving-v0", lag: int = 1, workers: int = 2) -> Config:
    """Three lives of two batches, in none of which an episode begins and ends."""
    config = in_lives(name, folder, lag=lag, workers=workers)
    config.env.id, config.env.max_episode_steps = f"{saving_envs.MODULE}:{env}", LIMIT
    return config


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_case
def test_workers_that_are_killed_change_nothing(
    name: str, lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rlsync.runs.recipes.place.CollectSettings", partial(CollectSettings, restarts=QUICKLY)
    )
    undisturbed = life_of(going_on(name, tmp_path / "one", lag=lag))
    assert same(undisturbed, killed_often(going_on(name, tmp_path / "other", lag=lag)))
    assert not same(undisturbed, life_of(going_on(name, tmp_path / "begins anew", env="Windy-v0", lag=lag)))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_case
def test_a_learner_that_dies_and_goes_on_from_its_checkpoint_changes_nothing(
    name: str, workers: int, tmp_path: Path
) -> None:
    lag = 0 if workers == 0 else 1
    life_of(going_on(name, tmp_path / "one", lag=lag, workers=workers))
    config = going_on(name, tmp_path / "other", lag=lag, workers=workers)
    killed_in_its_second_life(config)
    gone_on(config)
    require_same(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_case
def test_without_a_worker_process_a_run_is_that_of_one_worker_with_a_lag_of_0(
    name: str, tmp_path: Path
) -> None:
    alone = life_of(going_on(name, tmp_path / "0", workers=0))
    assert same(alone, life_of(going_on(name, tmp_path / "1", lag=0, workers=1)))


def test_a_run_that_went_on_is_made_again_by_its_schedule(tmp_path: Path) -> None:
    config = going_on("ppo", tmp_path / "run")
    killed_in_its_second_life(config)
    config.resume, run = config.run_dir, tmp_path / "run"
    OmegaConf.save(OmegaConf.structured(config), run / RESOLVED)

    def go_on(trainer: Trainer) -> None:
        load(trainer, run / CHECKPOINT, [])
        keep_life(run, run / CHECKPOINT)

    recorded = life_of(config, go_on)
    found = again(recipe_of(config), config)
    assert found.unequal == 0, found
    assert found.equal > len(recorded.digests)


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [("recipe.lr", True), ("env.frame_stack", False), ("collector.num_workers", False)],
)
def test_episodes_begin_anew_where_a_resumed_run_has_other_environments(
    changed: str, goes_on: bool, tmp_path: Path
) -> None:
    config = going_on("ppo", tmp_path)
    config.recipe.total_frames = 2 * BATCH
    life_of(config)
    trainer = recipe_of(config).build(config)
    try:
        load(trainer, tmp_path / CHECKPOINT, [Change(changed, 1, 2)])
        assert bool(trainer.collector.saved_envs()) == goes_on
    finally:
        trainer.shutdown()


# ------------------------------------------------------------------------------------ what a learner gets


@contextmanager
def collected(env: str, workers: int = 2, **options: int) -> Iterator[RepeatedUnrolls]:
    """Rollouts of 4 steps of 2 environments; lives of 3 rollouts."""
    settings = CollectSettings(
        steps=4,
        envs_per_worker=2,
        rollouts_per_batch=max(1, workers),
        seed=3,
        life_rollouts=3,
        start_method="fork",
        restarts=QUICKLY,
    )
    life = schedule.FixedLag(0, max(1, workers), max(1, workers), 3)
    spec = GymnasiumEnvs(f"{saving_envs.MODULE}:{env}", max_episode_steps=LIMIT, **options)
    network = ImpalaNet((4 * options.get("frame_stack", 1),), Categorical(2), hidden=(16,))
    collector = RepeatedUnrolls(network, spec, settings, life=life, lag=0, num_workers=workers)
    try:
        yield collector
    finally:
        collector.shutdown()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"frame_stack": 3}], ids=["as it is", "stacked"])
def test_an_episode_that_is_longer_than_a_life_has_its_return_and_ends_at_its_limit(
    options: dict[str, int], workers: int
) -> None:
    for env in ("Saving-v0", "Around-v0"):
        lengths, rewards, returns = set(), [], []
        with collected(env, workers, **options) as collector:
            last = None
            for number, batch in zip(range(15), collector, strict=False):
                begins, observation = batch["is_init"], batch["observation"]
                # Of 60 steps every 20th one begins an episode, whichever life it is in.
                assert bool(begins.all(1)[[(4 * number + step) % LIMIT == 0 for step in range(5)]].all())
                assert int(begins.sum()) == begins.shape[1] * sum(
                    (4 * number + step) % LIMIT == 0 for step in range(5)
                )
                if last is not None:
                    assert torch.equal(observation[0], last), "a rollout goes on from the one before"
                last = observation[-1].clone()
                rewards.append(batch["reward"].clone())
                over = batch["collector", "episode_length"]
                lengths |= set(over[over > 0].tolist())
                returns.append(batch["collector", "episode_return"].sum(0))
        assert lengths == {LIMIT}
        # So the sum of all returns is that of all rewards.
        torch.testing.assert_close(torch.stack(returns).sum(0), torch.cat(rewards).sum(0))


def test_episodes_of_other_environments_are_broken_off_at_the_end_of_a_life() -> None:
    for env in ("Windy-v0", "Hiding-v0"):
        with collected(env) as collector:
            for number, batch in zip(range(9), collector, strict=False):
                assert bool(batch["is_init"][0].all()) == (number % 3 == 0)
                assert not bool(batch["collector", "episode_length"].any())
                assert collector.saved_envs() == []


def test_only_the_end_of_a_life_can_be_gone_on_from() -> None:
    with collected("Saving-v0") as collector:
        for number, _ in zip(range(1, 8), collector, strict=False):
            assert len(collector.saved_envs()) == 2 * (number % 3 == 0)


# ---------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ("Raises-v0", r"Raises\.state\(\) of an environment raises OSError: the simulator is busy"),
        ("Unloadable-v0", r"Unloadable\.load\(\) of an environment raises OSError: the simulator is busy"),
        ("Locked-v0", "cannot be pickled: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_an_environment_that_fails_to_save_itself_is_refused_before_the_first_frame(
    env: str, problem: str, workers: int
) -> None:
    kind = WorkerLost if workers else ConfigError
    with pytest.raises(kind, match=problem), collected(env, workers):
        pass


def test_a_state_for_which_there_is_no_room_is_refused_before_the_first_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trail, "_SAVED_BYTES", 500)
    with pytest.raises(
        RlsyncError, match=r"the environments' states have [0-9,]+ bytes, and a trail has room"
    ):
        with collected("Saving-v0", workers=1):
            pass


def test_the_state_of_another_users_environment_is_loaded_if_it_is_plain_data_or_trusted(
    tmp_path: Path,
) -> None:
    for env in ("Saving-v0", "Around-v0"):
        config = going_on("ppo", tmp_path / env, env=env, workers=0)
        config.recipe.total_frames = 2 * BATCH
        life_of(config)
        shutil.copytree(tmp_path / env / CHECKPOINT, tmp_path / f"foreign {env}" / CHECKPOINT)
        assert len(envs_in(tmp_path / env / CHECKPOINT)) == 1
    check_checkpoint(tmp_path / "foreign Saving-v0" / CHECKPOINT, trusted=False)
    foreign = tmp_path / "foreign Around-v0" / CHECKPOINT
    check_checkpoint(foreign, trusted=True)
    with pytest.raises(ConfigError, match=r"a pickle holds more than plain data: it names numpy"):
        check_checkpoint(foreign, trusted=False)

"""The config of a resumed run is that of the run before, with what this command line changes; it is true."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from torchrl.checkpoint import Checkpoint
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, RlsyncWarning
from rlsync.runs.actors.worker import seed_after
from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line
from rlsync.runs.evaluation.checkpoint import Component
from rlsync.runs.life.job import Job, jobs_of
from rlsync.runs.life.resume import Settings, load
from rlsync.runs.recipes.bounds import Restored
from rlsync.torchrl_plugin.compat import trainers
from tests.runs.cli.test_main import finished
from tests.runs.recipes.test_checkpoints import facts

#: What a user tried first.
FIRST = ("seed=7", "recipe.lr=1e-4", "logger=none")
PPO = ("recipe.total_frames=512", "recipe.num_epochs=1", "collector.frames_per_batch=256")
DQN = ("recipe=dqn", "recipe.total_frames=256", "recipe.gamma=0.9", "recipe.pace.prefill=100")
IMPALA = ("recipe=impala", "env.num_envs=2", "recipe.total_frames=160", "recipe.batch_size=4")
IMPALA += ("recipe.unroll_length=10", "collector.frames_per_batch=40", "recipe.rho_bar=2.0")
LASER = ("recipe=laser", *IMPALA[1:], "recipe.replay.ratio=2", "recipe.replay.min_steps=40")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``ppo``."""
    folder = tmp_path_factory.mktemp("resumed")
    finished(folder, "train", *FIRST, *PPO, "+env.kwargs.max_episode_steps=100", "run_dir=ppo")
    return folder


def config_of(run: Path) -> Any:
    return OmegaConf.load(run / "config.yaml")


def job_of(*words: str) -> Job:
    (job,) = jobs_of(command_line.read(list(words)))
    return job


def learning_rates(run: Path) -> list[float]:
    """The rate at which each parameter group of the checkpoint began."""
    received = Component()
    Checkpoint(optimizer=received).load(run / "checkpoint")
    return [group["initial_lr"] for group in received.state["param_groups"]]


@pytest.mark.slow
def test_a_resumed_run_keeps_what_the_first_one_was_told_and_so_does_the_next(runs: Path) -> None:
    before = facts(runs / "ppo" / "checkpoint")
    second = finished(runs, "train", "resume=ppo", "recipe.total_frames=768", "run_dir=second")
    assert facts(runs / "ppo" / "checkpoint") == before, "a checkpoint is only read"
    assert f"resumes {runs}/ppo/checkpoint\n" in second.output
    assert f"resumed from {runs}/ppo/checkpoint  frames 512" in second.output
    assert "changed recipe.total_frames 512 -> 768" in second.output
    third = job_of(f"resume={runs / 'second'}", "recipe.total_frames=1024", "seed=8").config
    first, second = config_of(runs / "ppo"), config_of(runs / "second")
    assert (first.seed, first.recipe.lr) == (7, 1e-4)
    for config, total, seed in ((second, 768, 7), (third, 1024, 8)):
        assert (config.seed, config.recipe.lr, config.recipe.num_epochs) == (seed, 1e-4, 1)
        assert (config.logger.kind, config.recipe.total_frames) == ("none", total)
    assert third.resume == str(runs / "second")
    assert learning_rates(runs / "second") == [1e-4]
    assert json.loads((runs / "second" / "ended.json").read_text())["frames"] == 768
    seen_by_hydra = OmegaConf.load(runs / "second" / ".hydra" / "config.yaml")
    assert (seen_by_hydra.recipe.lr, seen_by_hydra.seed) == (1e-4, 7)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "more"),
    [
        (DQN, ("recipe.total_frames=512", "recipe.pace.ratio=0.25")),
        (LASER, ("recipe.total_frames=240", "recipe.replay.threshold=0.2")),
        (IMPALA, ("recipe.total_frames=240", "recipe.c_bar=0.5")),
    ],
    ids=["dqn", "laser", "impala"],
)
def test_every_recipe_is_resumed_without_being_named(
    words: tuple[str, ...], more: tuple[str, ...], tmp_path: Path
) -> None:
    finished(tmp_path, "train", *FIRST, *words, "run_dir=first")
    told = finished(tmp_path, "train", "resume=first", *more, "run_dir=second").output
    (recipe,) = (word for word in words if word.startswith("recipe="))
    assert f"settings those of the run that is resumed, {recipe.replace('=', ' ')}" in told
    before = OmegaConf.to_container(config_of(tmp_path / "first"))
    after = OmegaConf.to_container(config_of(tmp_path / "second"))
    expected = OmegaConf.create(before)
    for word in (*more, f"resume={tmp_path}/first", f"run_dir={tmp_path}/second"):
        key, _, value = word.partition("=")
        OmegaConf.update(expected, key, OmegaConf.create(f"it: {value}").it)
    assert after == OmegaConf.to_container(expected)
    assert after["recipe"]["lr"] == 1e-4


def built(runs: Path, *words: str) -> tuple[Job, Trainer]:
    job = job_of(f"resume={runs / 'ppo'}", "recipe.total_frames=1024", *words)
    assert job.checkpoint is not None
    trainer = job.build()
    try:
        load(trainer, job.checkpoint, job.changes)
    finally:
        trainer.shutdown()
    return job, trainer


@pytest.mark.thorough
@pytest.mark.seconds
@pytest.mark.usefixtures("fork_workers")
def test_coefficients_that_torchrl_keeps_in_buffers_are_those_of_this_config(runs: Path) -> None:
    others = "recipe.gamma=0.9", "recipe.gae_lambda=0.8"  # no checkpoint keeps them
    _, trainer = built(runs, "recipe.clip_epsilon=0.1", "recipe.critic_coeff=1.5", *others)
    loss: Any = trainer.loss_module
    assert float(loss.clip_epsilon) == pytest.approx(0.1)
    assert float(loss.critic_coeff) == pytest.approx(1.5)
    held = [value for hook in trainers.registered_modules(trainer) for value in vars(hook).values()]
    (advantages,) = {(value.gamma, value.lmbda) for value in held if hasattr(value, "lmbda")}
    assert advantages == (0.9, 0.8)
    with pytest.warns(RlsyncWarning, match="no buffer is called lmda"):
        Settings(trainer).put_back([Restored(buffer="lmda")])


@pytest.mark.thorough
@pytest.mark.seconds
@pytest.mark.usefixtures("fork_workers")
def test_another_number_of_workers_and_another_logger_are_honoured(runs: Path) -> None:
    job, trainer = built(runs, "collector.num_workers=1", "collector.lag=null", "logger=csv", "run_dir=null")
    assert (job.config.collector.num_workers, job.config.collector.lag) == (1, None)
    assert (job.config.logger.kind, job.config.collector.frames_per_batch) == ("csv", 256)
    assert trainer.collected_frames == 512


@pytest.mark.one_case
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "what", "cure"),
    [
        ("recipe.hidden=[16]", "does not fit", "recipe.hidden [64, 64] -> [16]"),
        ("env=gymnasium env.id=Acrobot-v1", "size mismatch for", "env.id CartPole-v1 -> Acrobot-v1"),
        ("recipe=dqn", "cannot resume a run of 'ppo' with the recipe 'dqn'", "add recipe=ppo"),
        ("recipe.anneal_lr=false", "recipe.anneal_lr True -> False", "leave recipe.anneal_lr out"),
        ("collector.frames_per_batch=512", "collector.frames_per_batch 256 -> 512", "leave"),
        ("recipe.lrr=1", "unknown key 'recipe.lrr'", "did you mean 'recipe.lr'?"),
        ("recipe.total_frames=512", "has collected 512 frames already", "recipe.total_frames=1024"),
        ("recipe=impala tuned=impala_pong", "with the recipe 'impala'", "add recipe=ppo"),
        (
            "tuned=ppo_cartpole recipe=ppo",
            "a tuned config would replace them",
            "leave tuned=ppo_cartpole out",
        ),
    ],
)
def test_what_a_checkpoint_does_not_fit_is_refused_in_three_lines_before_a_worker_starts(
    runs: Path,
    words: str,
    what: str,
    cure: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"resume={runs / 'ppo'}", "recipe.total_frames=1024", *words.split()]) == 2
    said = capsys.readouterr()
    first, where, last = said.err.splitlines()
    assert what in first
    assert where.startswith("  where  ")
    assert cure in last.removeprefix("  cure   ")
    assert said.out == ""
    assert list(tmp_path.iterdir()) == [], "nothing is written either"


@pytest.mark.thorough
@pytest.mark.seconds
def test_naming_the_recipe_and_the_environment_again_changes_nothing(runs: Path) -> None:
    plain = job_of(f"resume={runs / 'ppo'}", "recipe.total_frames=1024")
    again = job_of(
        f"resume={runs / 'ppo'}", "recipe=ppo", "env=cartpole", "logger=none", "recipe.total_frames=1024"
    )
    assert again.config == plain.config
    assert again.config.recipe.lr == 1e-4


@pytest.mark.seconds
@pytest.mark.thorough
def test_impala_is_not_resumed_as_laser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path, "train", *FIRST, *IMPALA, "run_dir=first")
    resume = f"resume={tmp_path / 'first'}"
    for words in (["recipe=laser"], ["recipe.replay.ratio=4"]):
        assert main(["check", resume, *words]) == 2
        assert "cannot resume a run of 'impala' with the recipe 'laser'" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.seconds
def test_each_job_of_a_sweep_resumes_with_its_own_changes(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", f"resume={runs / 'ppo'}", "recipe.total_frames=1024", "recipe.lr=1e-3,2e-3"]
    jobs = jobs_of(command_line.read(words))
    assert [(job.config.recipe.lr, job.config.seed) for job in jobs] == [(1e-3, 7), (2e-3, 7)]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_checkpoint_that_was_taken_elsewhere_is_resumed_with_the_config_of_the_command_line(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "ppo" / "checkpoint", tmp_path / "kept")
    words = (*PPO[1:], "recipe.total_frames=768", "recipe.lr=3e-4", "logger=none")
    run = finished(tmp_path, "train", "resume=kept", *words, "run_dir=it")
    assert "no config.yaml lies beside this checkpoint" in run.output
    assert config_of(tmp_path / "it").recipe.lr == 3e-4
    assert learning_rates(tmp_path / "it") == [3e-4], "the record is true"


def test_an_argument_of_the_environment_that_the_run_has_is_named_where_it_is_mistyped(runs: Path) -> None:
    with pytest.raises(ConfigError, match=r"cure   did you mean 'env\.kwargs\.max_episode_steps'\?"):
        job_of(f"resume={runs / 'ppo'}", "env.kwargs.max_episode_step=6")


@pytest.mark.seconds
def test_a_damaged_checkpoint_is_refused_and_one_that_cannot_be_checked_needs_trust(
    runs: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(runs / "ppo", tmp_path / "run")
    (file,) = run.glob("checkpoint/components/*-rng/state/tensor_00000000.memmap")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    words = (f"resume={run}", "recipe.total_frames=1024")
    with pytest.raises(ConfigError, match="its bytes are not those that were written") as refused:
        job_of(*words)
    assert refused.value.where == str(file)
    file.write_bytes(whole)
    (run / "checkpoint" / "digests.json").unlink()
    with pytest.raises(ConfigError, match=r"it has no digests\.json"):
        job_of(*words)
    trusted = command_line.read([*words, "--trust"])
    assert "--trust" not in trusted.flag_words, "Hydra does not know it"
    (job,) = jobs_of(trusted)
    assert job.told["resumes"] == f"{run / 'checkpoint'}, unchecked: it has no digests.json"


@pytest.mark.seconds
def test_a_checkpoint_that_was_moved_aside_by_a_killed_writer_is_found(runs: Path, tmp_path: Path) -> None:
    run = shutil.copytree(runs / "ppo", tmp_path / "run")
    (run / "checkpoint").rename(run / ".checkpoint.backup-1f")
    job = job_of(f"resume={run}", "recipe.total_frames=1024")
    assert job.checkpoint == run / ".checkpoint.backup-1f"
    assert "the one before: a newer one was not in its place yet" in job.told["resumes"]
    assert job.config.recipe.lr == 1e-4


def test_a_run_that_is_resumed_plays_other_frames_and_the_same_ones_each_time() -> None:
    assert seed_after(0, 640) == seed_after(0, 640)
    assert seed_after(0, 640) != seed_after(0, 1280)

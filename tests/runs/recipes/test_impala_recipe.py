"""The recipes impala and laser: from the command line to episodes, faults and resumes."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync import SyncWeights, VerifySync
from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.evaluation.evaluator import Evaluator
from rlsync.runs.evaluation.play import Score, play
from rlsync.runs.evaluation.process import read_evaluations
from rlsync.runs.recipes.checks import errors
from rlsync.runs.recipes.env_settings import AtariConfig
from rlsync.runs.recipes.evaluating import APART
from rlsync.runs.recipes.hooks.measuring import Load, StalenessHistogram, StatisticsHook
from rlsync.runs.recipes.hooks.steering import EpisodeReturns, MixReplayed
from rlsync.runs.recipes.impala.loss import final_index, unrolled_by
from rlsync.runs.recipes.impala.recipe import RECIPE, make_network
from rlsync.runs.recipes.impala.settings import (
    EvaluationConfig,
    ImpalaConfig,
    ModelConfig,
    UnrollReplayConfig,
)
from rlsync.runs.recipes.normalize import NormalizeUnrolls, Standardize
from rlsync.runs.recipes.run_files import CHECKPOINT, EVALUATIONS, STALENESS
from rlsync.runs.recipes.settings import (
    CollectorConfig,
    Config,
    EnvConfig,
    OnPolicyNormalizeConfig,
    PPOConfig,
)
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from rlsync.transport.board.format import EVALUATOR
from tests.runs.cli.test_main import checked_statistics
from tests.tools.parts.space_envs import HINTED, PARTS
from tests.tools.processes import is_alive, wait_until
from tests.tools.programs import run_program

FRAMES_PER_BATCH = 5 * 4
LASER = UnrollReplayConfig(ratio=1.5, capacity_steps=400, min_steps=40, threshold=0.5, entropy_on="online")


def small(total_frames: int = 40 * FRAMES_PER_BATCH, run_dir: Path | None = None, **recipe: Any) -> Config:
    """Four environments, unrolls of five steps."""
    return Config(
        run_dir=None if run_dir is None else str(run_dir),
        env=EnvConfig(num_envs=2),
        collector=CollectorConfig(frames_per_batch=FRAMES_PER_BATCH, lag=None, silent_timeout_s=60.0),
        recipe=ImpalaConfig(
            **{"total_frames": total_frames, "target_return": None, "unroll_length": 5, "batch_size": 4}
            | recipe
        ),
    )


def part(trainer: Trainer, kind: type) -> Any:
    (found,) = (module for module in registered_modules(trainer) if isinstance(module, kind))
    return found


def trained(config: Config) -> Trainer:
    trainer = RECIPE.build(config)
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    return trainer


def train_until_stopped(trainer: Trainer, at_most_s: float) -> None:
    """Train until a hook has seen enough, or it is late."""
    alarm = threading.Timer(at_most_s, trainer.request_stop, ("late",))
    alarm.start()
    try:
        trainer.train()
    finally:
        alarm.cancel()
        trainer.shutdown()


@pytest.mark.processes
def test_it_trains_publishes_every_batch_and_writes_down_how_old_steps_were(tmp_path: Path) -> None:
    trainer = trained(small(run_dir=tmp_path))
    sync, lag = part(trainer, SyncWeights), part(trainer, StalenessHistogram)
    assert trainer.collected_frames == 40 * FRAMES_PER_BATCH
    assert sync.version == 1 + 1 + 40  # of the collector, before the first batch, after each
    assert sum(lag.counts.values()) == trainer.collected_frames
    with (tmp_path / STALENESS).open() as file:
        assert [tuple(map(int, row)) for row in list(csv.reader(file))[1:]] == sorted(lag.counts.items())
    # The slots bound the lag of a worker that runs. One that the machine takes off its core in the middle
    # of a rollout comes back as late as it likes, while the other worker feeds the learner.
    on_time = sum(count for steps, count in lag.counts.items() if steps <= 8)
    assert on_time > trainer.collected_frames / 2, lag.counts
    assert part(trainer, EpisodeReturns).finished > 10
    statistics = part(trainer, StatisticsHook)
    assert 0 <= statistics.load.workers_waited <= 1
    assert sum(statistics.now().frames_by_worker.values()) == trainer.collected_frames


@pytest.mark.slow
@pytest.mark.thorough
def test_cartpole_reaches_450(tmp_path: Path) -> None:
    config = Config(
        seed=0,
        env=EnvConfig(num_envs=8),
        collector=CollectorConfig(frames_per_batch=160, lag=None),
        recipe=ImpalaConfig(target_return=450.0),
    )
    assert part(trained(config), EpisodeReturns).reached


@pytest.mark.processes
def test_laser_adds_replayed_unrolls_at_the_ratio_and_knows_the_online_ones() -> None:
    trainer = RECIPE.build(small(replay=LASER))
    seen = []
    trainer.register_op("process_optim_batch", lambda batch: seen.append(batch) or batch)
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    mix = part(trainer, MixReplayed).mix
    assert mix.total.online == 160
    assert mix.total.replayed == int((160 - 2 * 4) * 1.5), "the first two batches fill it"
    assert int(sum(batch["replayed"].sum() for batch in seen)) == mix.total.replayed
    assert {batch["replayed"].shape[0] for batch in seen} == {4, 10}
    assert mix.replay.steps == 400
    steps = trainer.collected_frames // mix.total.online  # of an unroll
    ages = part(trainer, StalenessHistogram).counts
    assert ages.total() == steps * (mix.total.online + mix.total.replayed), "all that is learned from"
    assert max(ages) > 10
    assert {key for key in trainer._log_dict if key.startswith("replay/")}


@pytest.mark.processes
@pytest.mark.parametrize("entropy_on", ["all", "online"])
def test_without_a_replay_laser_is_impala(entropy_on: str) -> None:
    replay = UnrollReplayConfig(**{**vars(LASER), "ratio": 0.0, "entropy_on": entropy_on})
    config = small(4 * FRAMES_PER_BATCH, replay=replay)
    assert list(errors(config)) == []
    trainer = trained(config)
    assert trainer.collected_frames == 4 * FRAMES_PER_BATCH
    assert trainer.loss_module.settings.trust_region is None
    assert not {key for key in trainer._log_dict if key in ("kl", "rejected_fraction")}


@pytest.mark.processes
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.one_case
def test_a_resumed_run_goes_on_with_versions_counters_optimizer_and_replay(
    tmp_path: Path, kept: bool
) -> None:
    replay = UnrollReplayConfig(**{**vars(LASER), "checkpointed": kept})
    first = trained(small(20 * FRAMES_PER_BATCH, tmp_path / "first", replay=replay))
    again = RECIPE.build(small(30 * FRAMES_PER_BATCH, tmp_path / "again", replay=replay))
    try:
        again.load_from_file(tmp_path / "first" / CHECKPOINT)
        before, now = part(first, MixReplayed).mix, part(again, MixReplayed).mix
        assert now.total == before.total
        assert now.replay.steps == (before.replay.steps if kept else 0)
        for old, new in zip(first.loss_module.parameters(), again.loss_module.parameters(), strict=True):
            assert torch.equal(old, new)
        assert again.optimizer.state_dict()["state"][0]["step"] == 20
        stamps: list[int] = []
        again.register_op(
            "batch_process", lambda b: stamps.extend(b["policy_version"].unique().tolist()) or b
        )
        again.train()
    finally:
        again.shutdown()
    assert again.collected_frames == 30 * FRAMES_PER_BATCH
    # TorchRL publishes what it has loaded, then comes the hook's own before the first frame.
    assert part(again, SyncWeights).version == part(first, SyncWeights).version + 2 + 10
    assert min(stamps) > part(first, SyncWeights).version, "the first frame acts with the saved weights"


@pytest.mark.processes
def test_a_killed_worker_is_started_again_and_the_run_goes_on() -> None:
    trainer = RECIPE.build(small(400 * FRAMES_PER_BATCH))
    pids = [process.pid for process in trainer.collector.procs]
    after: list[int] = []
    now: list[int] = []

    def kill_once() -> None:
        if part(trainer, SyncWeights).version == 5:
            os.kill(pids[0], signal.SIGKILL)
        if trainer.collector.restarted:
            after.append(trainer.collected_frames)
            now[:] = [process.pid for process in trainer.collector.procs]
            if len(after) > 5:
                trainer.request_stop("seen enough")

    trainer.register_op("post_steps", kill_once)
    train_until_stopped(trainer, at_most_s=60)
    assert trainer.collector.restarted == 1
    assert now[1] == pids[1]
    assert now[0] != pids[0]
    assert not any(is_alive(pid) for pid in [*pids, *now])


@pytest.mark.processes
def test_a_separate_process_evaluates_pinned_versions_and_disturbs_neither_lag_nor_end(
    tmp_path: Path,
) -> None:
    evaluation = EvaluationConfig(every_frames=FRAMES_PER_BATCH, episodes=2)
    trainer = RECIPE.build(small(10**9, tmp_path, evaluation=evaluation))
    ops = [getattr(op, "__wrapped__", op) for op, _ in trainer._post_steps_log_ops]
    (evaluator,) = (op for op in ops if isinstance(op, Evaluator))
    sync, board, acting = part(trainer, SyncWeights), trainer.collector.board, []

    def stop_when_seen() -> None:
        acting.append((len(sync.acting_versions()), len(board.status())))
        if len(evaluator.evaluations()) > 1:
            trainer.request_stop("seen enough")

    trainer.register_op("post_steps", stop_when_seen)
    train_until_stopped(trainer, at_most_s=90)
    assert acting[-1] == (2, 3), "the evaluator reads along, and is no worker"
    found = evaluator.evaluations()
    assert len(found) > 1
    versions = [each.version for each in found]
    assert versions == sorted(set(versions))
    assert all(each.episodes == 2 and 8 <= each.return_mean <= 500 for each in found)
    assert (tmp_path / EVALUATIONS).read_text().startswith("episodes,return_mean")
    assert "eval/return" in trainer._log_dict
    assert wait_until(lambda: not evaluator._process.is_alive(), 60)
    assert EVALUATOR > 1000
    assert sync.version >= versions[-1]


@pytest.mark.processes
def test_the_last_version_is_evaluated_greedily_and_not_in_the_episodes_of_a_worker(tmp_path: Path) -> None:
    config = small(run_dir=tmp_path, evaluation=EvaluationConfig(every_frames=10**9, episodes=2))
    trainer = trained(config)
    found = read_evaluations(tmp_path / EVALUATIONS)[-1]
    assert found.version == part(trainer, SyncWeights).version, "it is not due for a billion frames"
    greedy, envs = (
        trainer.collector.player.network.player(deterministic=True),
        make_venv(config.env.spec(), 2),
    )
    played = [episode for ended in play(greedy, envs, 2, config.seed + APART) for episode in ended]
    envs.close()
    assert found.return_mean == Score.of(played).return_mean


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (small(batch_size=3), "collector.frames_per_batch"),
        (Config(recipe=PPOConfig()), "recipe"),
        (
            small(replay=UnrollReplayConfig(ratio=1.0, capacity_steps=10, min_steps=20)),
            "recipe.replay.min_steps",
        ),
        (small(model=ModelConfig(hidden=[])), "recipe.model.hidden"),
        (small(evaluation=EvaluationConfig(every_frames=1)), "recipe.evaluation.every_frames, run_dir"),
        (small(lr=-1.0), "recipe.lr"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_before_a_worker_starts(config: Config, key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RECIPE.build(config)
    assert refused.value.where == key
    assert refused.value.cure


def test_who_waits_for_whom_is_said_in_words() -> None:
    assert str(Load(0.97, 0.41)) == "learner busy 97 %, workers waited 41 %: the learner is the bottleneck"
    assert str(Load(0.5, 0.0)).endswith("the workers are the bottleneck")
    assert str(Load(0.99, 0.02)).endswith("neither waits for the other")


# ------------------------------------------------------------------------------- the command line


def rlsync(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program("rlsync", *arguments, cwd=folder)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_launcher_trains_laser_says_who_waits_for_whom_and_resumes(tmp_path: Path) -> None:
    small_run = ("recipe=laser", "recipe.total_frames=4800", "recipe.target_return=null")
    ended = rlsync(tmp_path, "train", *small_run)
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^learner busy \d+ %, workers waited \d+ %: ", ended.stdout, re.M)
    (run_dir,) = (tmp_path / line.split()[1] for line in ended.stdout.splitlines() if line.startswith("run "))
    written = {path.name for path in run_dir.iterdir()}
    assert {"receipts.jsonl", "staleness_versions.csv", "checkpoint", "ended.json", "config.yaml"} <= written
    statistics = checked_statistics(run_dir)
    assert statistics.frames == 4800
    assert statistics.workers_wait_s is not None
    told = rlsync(tmp_path, "status", str(run_dir)).stdout
    assert f"frames 4,800 ({statistics.frames_per_s:,.0f}/s)" in told
    assert "workers together" in told
    resumed = rlsync(tmp_path, "train", *small_run, "recipe.total_frames=6400", f"resume={run_dir}")
    assert re.search(r"^stopped: total_frames collected  frames 6,400 ", resumed.stdout, re.M), resumed.stderr


@pytest.mark.processes
@pytest.mark.thorough
def test_the_plan_of_the_recipe_is_told_before_it_runs(tmp_path: Path) -> None:
    told = rlsync(tmp_path, "explain", "recipe=impala")
    assert told.returncode == 0, told.stderr
    assert "loss_module.actor_network.torso.0.weight" in told.stdout
    assert "settings recipe/impala with tuned/impala_cartpole" in told.stderr
    assert "board: 2 worker processes, adopted by alias" in told.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_dtype_is_that_of_the_torso(dtype: str) -> None:
    network = make_network(ImpalaConfig(update_dtype=dtype), RECIPE.probe(EnvConfig("CartPole-v1")))
    assert network.in_bfloat16 == (dtype == "bfloat16")


@pytest.mark.processes
@pytest.mark.parametrize("replay", [UnrollReplayConfig(), LASER], ids=["impala", "laser"])
@pytest.mark.parametrize("parts", [PARTS["numbers"], PARTS["picture and numbers"]])
def test_without_a_lag_a_version_normalises_by_the_frames_before_it_and_rewards_by_returns(
    parts: str, replay: UnrollReplayConfig
) -> None:
    normalize = OnPolicyNormalizeConfig(observations=True, rewards=True)
    model = ModelConfig(hidden=[8], last_reward=True)
    config = small(10 * FRAMES_PER_BATCH, normalize=normalize, replay=replay, model=model, lr=0.01)
    config.env = EnvConfig(HINTED, 2, {"parts": parts})
    config.collector.lag = 0
    trainer = RECIPE.build(config)
    loss = trainer.loss_module
    network = loss.actor_network
    statistics = part(trainer, NormalizeUnrolls)
    (layer,) = (module for module in network.modules() if isinstance(module, Standardize))
    rows: list[Tensor] = []

    def look(batch: TensorDictBase) -> None:
        before = torch.cat([torch.zeros(1, network.observations.features), *rows])[len(rows) > 0 :]
        torch.testing.assert_close(layer.mean, before.mean(0), rtol=1e-4, atol=1e-5)
        rows.append(network.observations.numbers(batch["observation"][:-1]).flatten(0, 1).clone())
        with torch.no_grad():
            scored = unrolled_by(network, batch, final_index(batch)).params[:-1]
            log_prob = network.head.score(scored, batch["action"])[0]
        torch.testing.assert_close(log_prob, batch["behaviour_log_prob"], rtol=1e-5, atol=1e-5)

    seen: list[Tensor] = []

    def scaled(reward: Tensor) -> Tensor:
        seen.append(reward)
        return statistics.scaled(reward)

    loss.scaled = scaled
    trainer.register_op("batch_process", look)
    try:
        trainer.train()
    finally:
        trainer.shutdown()
    assert len(rows) == len(seen) == 10
    torch.testing.assert_close(layer.std, torch.cat(rows).std(0, correction=0), rtol=1e-4, atol=1e-5)
    assert all(set(reward.unique().tolist()) <= {0.0, 1.0} for reward in seen), "the environment's own"
    assert statistics.returns.count == 10 * FRAMES_PER_BATCH
    assert statistics.reward_scale not in (0.0, 1.0)


@pytest.mark.processes
@pytest.mark.seconds
@pytest.mark.parametrize("torso", ["nature", pytest.param("impala", marks=pytest.mark.thorough)])
def test_what_acts_on_pixels_in_bfloat16_is_proven(torso: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsync.tensors.device.bfloat16_instructions", lambda: None)  # they may be slow
    normalize = OnPolicyNormalizeConfig(observations=True)
    config = small(update_dtype="bfloat16", batch_size=8, model=ModelConfig(torso=torso), normalize=normalize)
    config.env, config.collector.frames_per_batch = AtariConfig("ALE/Pong-v5", num_envs=8), 5 * 8
    config.sync.verify_every_s = 0.01
    trainer = RECIPE.build(config)
    verify = part(trainer, VerifySync)
    trainer.register_op("post_steps", lambda: verify.behaviour_held and trainer.request_stop("proven"))
    train_until_stopped(trainer, at_most_s=200.0)
    assert (verify.uncompared, verify.deviations) == ((), [])
    assert verify.behaviour_held is not None

"""Recipes and the actor-learner on CUDA."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.tools.programs import fresh_python
from tests.torchrl_plugin.test_devices import ends_well

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]

PPO = (
    *("~tuned", "recipe.total_frames=1024", "collector.frames_per_batch=256"),
    *("recipe.batch_size=64", "logger=none"),
)
LASER = (
    *("~tuned", "recipe=laser", "recipe.total_frames=800", "env.num_envs=2", "recipe.batch_size=4"),
    *("recipe.unroll_length=10", "collector.frames_per_batch=40", "recipe.replay.min_steps=80"),
    *("recipe.model.lstm=8", "logger=none"),
)


def rlsync(cwd: Path, *line: str) -> CompletedProcess[str]:
    """The command in an interpreter of its own: a forked process cannot use CUDA after its parent has."""
    done = fresh_python("-m", "rlsync", *line, cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("workers", ["cpu", "cuda", "[cuda,cpu]"])
@pytest.mark.parametrize("line", [PPO, (*PPO, "recipe=dqn"), LASER], ids=["ppo", "dqn", "laser"])
def test_a_recipe_trains_with_its_learner_on_cuda(
    line: tuple[str, ...], workers: str, tmp_path: Path
) -> None:
    devices = ("learner.device=cuda", f"collector.device={workers}")
    done = rlsync(tmp_path, "train", *line, *devices, "run_dir=run")
    assert "stopped: total_frames collected" in done.stdout


def test_workers_on_cuda_serve_a_learner_on_the_cpu(tmp_path: Path) -> None:
    done = rlsync(tmp_path, "train", *PPO, "collector.device=cuda", "run_dir=run")
    assert "stopped: total_frames collected" in done.stdout


@pytest.mark.parametrize("line", [PPO, LASER], ids=["ppo", "laser"])
def test_a_run_on_cuda_resumes_on_the_cpu_and_back(line: tuple[str, ...], tmp_path: Path) -> None:
    rlsync(tmp_path, "train", *line, "learner.device=cuda", "run_dir=a")
    there = rlsync(
        tmp_path, "train", "resume=a", "run_dir=b", "recipe.total_frames=1600", "learner.device=cpu"
    )
    assert "changed learner.device cuda -> cpu" in there.stdout
    back = rlsync(
        tmp_path, "train", "resume=b", "run_dir=c", "recipe.total_frames=2400", "learner.device=cuda"
    )
    assert "changed learner.device cpu -> cuda" in back.stdout


def test_rlsync_eval_plays_on_cuda(tmp_path: Path) -> None:
    rlsync(tmp_path, "train", *PPO, "run_dir=run")
    told = rlsync(tmp_path, "eval", "run", "--device", "cuda", "--episodes", "2", "--json", "--no-video")
    assert json.loads(told.stdout)["device"] == "cuda:0"


PROGRAMS = ["slots_are_pinned", "batches_are_whole", "graphs_replay_updates", "all_widths_compile"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_rollouts_reach_cuda_whole_and_a_graph_replays_an_update(program: str) -> None:
    ends_well(program, "cuda")

"""Recipes and the actor-learner on CUDA. Nobody has run these tests yet: see docs/reliability.md."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from rlsync.recipes.impala import Categorical, GymnasiumEnvs, ImpalaLoss, ImpalaNet, UnrollCollector
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.ring.reader import RolloutRing
from rlsync.transport.ring.writer import RingWriter
from rlsync.workers.intake import PinnedSlots
from tests.tools.programs import fresh_python

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


def test_slots_are_pinned_for_a_learner_on_cuda() -> None:
    layout = Layout.build({"rollout": [LeafSpec("reward", "buffer", (4096,), torch.float32)]})
    ring = RolloutRing(layout, slots=1, writers=1)
    writer = RingWriter(ring.handle, 0)
    ring.run()
    views = writer.take()
    assert views is not None
    views["reward"].fill_(3.0)
    writer.commit()
    taken = ring.take(timeout_s=60.0)
    assert taken is not None
    pinned = PinnedSlots(torch.device("cuda", 0))
    pinned.pin(taken.slot, taken.views.values())
    assert taken.views["reward"].is_pinned()
    assert taken.views["reward"].to("cuda", non_blocking=True).eq(3.0).all()
    torch.cuda.synchronize()
    pinned.forget()
    assert not taken.views["reward"].is_pinned()
    writer.close()
    ring.close()


@pytest.mark.parametrize("rollouts", [1, 2])
def test_batches_of_the_actor_learner_are_whole_on_cuda(rollouts: int) -> None:
    device = torch.device("cuda", 0)
    network = ImpalaNet((4,), Categorical(2), hidden=(16,)).to(device)
    loss = ImpalaLoss(network)
    collector = UnrollCollector(
        network,
        GymnasiumEnvs("CartPole-v1"),
        steps=10,
        envs_per_worker=4,
        rollouts_per_batch=rollouts,
        policy_device=["cuda", "cpu"],
        storing_device=device,
        seed=3,
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    try:
        for _, batch in zip(range(50), collector, strict=False):
            assert batch["observation"].device == device
            losses = loss(batch)  # checks the first batch in full
            optimizer.zero_grad()
            sum(losses[name] for name in loss.out_keys[:3]).backward()
            optimizer.step()
            collector.update_policy_weights_()
            ends = batch["terminated"] | batch["truncated"]
            assert torch.equal(batch["is_init"][1:], ends), "a slot was overwritten before it was copied"
    finally:
        collector.shutdown()

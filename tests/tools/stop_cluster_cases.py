"""Stop on a Ray cluster that goes on: test_cluster.py runs these tests in their own network.

They share one Ray, which outlives every run: so what a run leaves is seen. Each builds a recipe, lets its
agent or its workers stop, die or hang, and ends it.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import ray

from rlsync.core.errors import WorkerLost
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.settings import ClusterConfig, CollectorConfig, Config, EnvConfig, LoggerConfig
from rlsync.runs.recipes.sync_settings import SyncConfig
from tests.tools.cluster_recipe_cases import VALUE_GREEDY
from tests.tools.parts import hanging
from tests.tools.parts.stopping import stopped_run
from tests.tools.processes import descendant_pids, is_alive, wait_until
from tests.torchrl_plugin.test_stop import saved_frames

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("one_node"),
]

WITHIN_S, FOR_EVER = 1.0, 10**9

#: Beyond the deadline: workers have 5 s to leave, their agent 5 s more to answer, and this machine is loaded.
GONE_WITHIN_S = 40.0


def config(recipe: str, run_dir: Path, flag: Path) -> Config:
    impala = recipe == "impala"
    return Config(
        seed=3,
        run_dir=str(run_dir),
        env=EnvConfig(hanging.ID, 2, {"flag": str(flag)}),
        collector=CollectorConfig(2, 20, lag=None if impala else 0),
        cluster=ClusterConfig(kind="ray"),
        sync=SyncConfig() if impala else SyncConfig(map=VALUE_GREEDY),
        logger=LoggerConfig(kind="none"),
        recipe=ImpalaConfig(total_frames=FOR_EVER, target_return=None, unroll_length=5, batch_size=4)
        if impala
        else DQNConfig(total_frames=FOR_EVER, target_return=None),
    )


def processes_of_runs() -> set[int]:
    """Agents, mailboxes and workers that live on this machine, of whichever run."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and is_alive(int(folder.name)):
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if re.search(rb"ray::(NodeAgent|MailboxActor)", command) and is_ours(int(folder.name)):
                found.add(int(folder.name))
    return found


def is_ours(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink()


@pytest.mark.parametrize(
    ("recipe", "fault", "whom"),
    [
        ("impala", "killed", "agent, its workers stopped"),
        pytest.param("dqn", "hanging", "environments", marks=pytest.mark.thorough),
        pytest.param("impala", "stopped", "workers", marks=pytest.mark.thorough),
        pytest.param("impala", "stopped", "agent", marks=pytest.mark.thorough),
        pytest.param("impala", "stopped", "agent and workers", marks=pytest.mark.thorough),
        pytest.param("impala", "hanging", "environments", marks=pytest.mark.thorough),
        pytest.param("dqn", "stopped", "agent and workers", marks=pytest.mark.thorough),
    ],
)
def test_a_run_ends_with_a_checkpoint_and_leaves_no_process(
    recipe: str, fault: str, whom: str, tmp_path: Path
) -> None:
    settings = config(recipe, tmp_path, tmp_path / "hang")
    trainer = recipe_of(settings).build(settings, None)
    collector = trainer.collector
    assert isinstance(collector, ClusterCollector)
    (node,) = collector._nodes
    assert node.pid is not None
    workers = descendant_pids(node.pid)
    assert len(workers) >= 2
    before = processes_of_runs()
    assert node.pid in before

    def hit() -> set[int]:
        if whom == "agent, its workers stopped":
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
        return {"workers": workers, "agent and workers": workers | {node.pid}}.get(whom, {node.pid})

    ended = stopped_run(trainer, WITHIN_S, fault, tmp_path / "hang", hit)
    assert not any(map(is_alive, workers | {node.pid})), "at the end of the block"
    assert isinstance(ended.stop.lost, WorkerLost)
    assert ended.seconds < GONE_WITHIN_S
    assert trainer.collected_frames == saved_frames(tmp_path) >= 3 * 20
    assert ray.is_initialized(), "the cluster is somebody else's"
    assert wait_until(lambda: processes_of_runs() == set(), GONE_WITHIN_S), (
        "Ray ends the mailbox in its own time"
    )

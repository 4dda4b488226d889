"""The actor-learner on a Ray cluster: its parts, what is refused, nodes that fail, and whole runs.

What starts Ray does so in a network of its own, where this user may make one.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from rlsync.core.errors import ConfigError, PublishError
from rlsync.runs.actors.cluster.job import Turns, pack, unpack
from rlsync.runs.actors.cluster.session import check_reachable
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.runs.cli.main import main
from rlsync.runs.recipes.checks import cluster_errors, device_errors
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.sac import SACConfig
from rlsync.runs.recipes.settings import ClusterConfig, CollectorConfig, Config, PPOConfig, RecipeConfig
from rlsync.runs.recipes.td3 import TD3Config
from tests.tools.cluster_player import CanaryPlayer
from tests.tools.parts.namespaces import ALONE, ROOT, in_a_session, may_unshare
from tests.tools.processes import is_alive, wait_until
from tests.tools.running import in_three_lines

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra rlsync[ray]")
WAIT_S = 30.0

#: How long a part of a run may take on a loaded machine. A test may take 600 s at most.
RUN_WAIT_S = 150.0

# -------------------------------------------------------------------------- parts


def test_a_rollout_arrives_bit_for_bit_without_the_room_that_it_did_not_use() -> None:
    player, shape = CanaryPlayer(), RolloutShape(steps=30, num_envs=2)
    layout = shape.layout(player)
    ring = RolloutRing(layout, slots=1, writers=1)
    ring.run()
    writer = RingWriter(ring.handle, 0)
    views = writer.take(WAIT_S)
    assert views is not None
    for name, view in views.items():
        drawn = torch.randint(0, 2, view.shape)
        view.copy_(drawn if name != "final_count" else torch.ones_like(view))
    writer.commit()
    taken = ring.take(WAIT_S)
    assert taken is not None
    flat = pack(taken, layout, ring.counters())
    assert flat.image.nbytes < layout.image_bytes, "the final observations that are not used stay behind"
    flat.image.flags.writeable = False  # as what comes out of the object store
    arrived = unpack(flat, layout, torch.full((layout.image_bytes,), 255, dtype=torch.uint8))
    assert set(arrived) == set(taken.views)
    for name, view in arrived.items():
        expected = taken.views[name]
        assert torch.equal(view, expected[:1] if name.startswith("final_") else expected), name
    assert (flat.writer, flat.number, flat.counters.written) == (0, 0, 1)
    writer.close()
    ring.close()


@pytest.mark.parametrize("harm", ["cut", "of another layout", "of nothing"])
def test_what_is_no_rollout_of_this_run_is_refused(harm: str) -> None:
    layout = RolloutShape(steps=3, num_envs=2).layout(CanaryPlayer())
    ring = RolloutRing(layout, slots=1, writers=1)
    ring.run()
    writer = RingWriter(ring.handle, 0)
    assert writer.take(WAIT_S) is not None
    writer.commit()
    taken = ring.take(WAIT_S)
    assert taken is not None
    flat = pack(taken, layout, ring.counters())
    if harm == "cut":
        flat = flat._replace(image=flat.image[:-1])
    elif harm == "of nothing":
        flat = flat._replace(image=np.zeros(10, dtype=np.uint8))
    else:
        layout = RolloutShape(steps=4, num_envs=2).layout(CanaryPlayer())
    with pytest.raises(PublishError, match="not a rollout of this run") as refused:
        unpack(flat, layout, torch.empty(layout.image_bytes, dtype=torch.uint8))
    assert in_three_lines(refused.value)
    writer.close()
    ring.close()


def test_calls_are_served_in_the_order_of_their_numbers_however_they_begin() -> None:
    turns, served = Turns(), []

    def call(number: int) -> None:
        with turns.turn(number, WAIT_S):
            served.append(number)

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in (3, 1, 2, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.01)  # so that they begin in this order, mostly
    for thread in threads:
        thread.join(WAIT_S)
    assert served == [0, 1, 2, 3]


def test_a_call_that_fails_ends_its_turn() -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.turn(0, WAIT_S):
        _ = 1 / 0
    with turns.turn(1, WAIT_S):
        pass


# -------------------------------------------------------------------------- what is refused


def refused(cluster: ClusterConfig, **settings: object) -> list[str]:
    config = Config(cluster=cluster, **{"recipe": ImpalaConfig(), **settings})  # type: ignore[arg-type]
    found = list(cluster_errors(config))
    assert all(map(in_three_lines, found))
    return [error.where for error in found]


@needs_ray
def test_settings_that_cannot_work_are_refused_before_ray_starts() -> None:
    assert refused(ClusterConfig(kind="ray")) == []
    assert refused(ClusterConfig(kind="ray", address="10.0.0.1:6379", placement="others")) == []
    assert refused(ClusterConfig(kind="ray", address="auto")) == []
    for address in ("ray://10.0.0.1:10001", "10.0.0.1", ":6379", "head:port", "head:99999", ""):
        assert refused(ClusterConfig(kind="ray", address=address)) == [f"cluster.address={address}"]
    assert refused(ClusterConfig(kind="ray", placement="others")) == ["cluster.placement=others"]
    assert refused(ClusterConfig(kind="ray", resources={"a": 0})) == ["cluster.resources.a"]
    assert refused(ClusterConfig(kind="ray", resources={"a": "much"})) == ["cluster.resources.a"]
    assert refused(ClusterConfig(kind="ray"), recipe=RecipeConfig("own")) == ["cluster.kind=ray"]
    for recipe in (PPOConfig(), DQNConfig(), SACConfig(), TD3Config()):
        assert refused(ClusterConfig(kind="ray"), recipe=recipe) == []
    three = ClusterConfig(kind="ray", workers_per_node=3)
    few = Config(cluster=three, collector=CollectorConfig(device=["cpu", "cpu"]))
    assert [error.where for error in device_errors(few)] == ["collector.device"]
    assert refused(ClusterConfig(), recipe=RecipeConfig("own")) == [], "cluster=none is for every recipe"


@needs_ray
def test_the_defaults_of_a_config_are_those_of_the_collector() -> None:
    from rlsync.runs.actors.cluster.nodes import Placement

    config, placement = ClusterConfig(), Placement()
    for name in ("min_nodes", "credits", "node_timeout_s", "start_timeout_s", "resources"):
        assert getattr(config, name) == getattr(placement, name), name
    assert (config.placement == "all") is placement.beside_learner


@needs_ray
def test_nodes_are_taken_only_with_the_resources() -> None:
    from rlsync.runs.actors.cluster.node import Machine
    from rlsync.runs.actors.cluster.nodes import Placement

    assert not Placement(resources={"rollouts": 1.0}).takes({"CPU": 8.0})
    assert str(Machine("0a1b2c3d4e5f", "10.0.0.7", "worker-3")) == "worker-3 (10.0.0.7, node 0a1b2c3d)"


def test_an_address_where_nothing_listens_is_refused_at_once() -> None:
    with closing(socket.socket()) as taken:  # bound and not listening, so nobody else listens there either
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"nothing answers at {address}") as error:
            check_reachable(address)
    assert in_three_lines(error.value)


@needs_ray
@pytest.mark.seconds
@pytest.mark.processes
@pytest.mark.thorough
def test_a_run_on_an_address_where_nothing_listens_is_refused(tmp_path: Path) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [*TRAIN, f"cluster.address={address}", f"run_dir={tmp_path / 'run'}"]
        ran, left = in_a_session([sys.executable, *words], alone=False, timeout_s=RUN_WAIT_S)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert f"nothing answers at {address}" in ran.stderr
    assert left == set()


# -------------------------------------------------------------------------- nodes


@needs_ray
@pytest.mark.processes
def test_the_end_of_an_agent_that_dies_already_is_waited_for() -> None:
    """The kernel takes milliseconds to free its memory; meanwhile it lives, and its command line is empty."""
    from rlsync.runs.actors.cluster.node import family_of, kill_family

    words = "x = b'x' * (256 << 20); print(1, flush=True); input()"
    agent = [sys.executable, "-c", words, "NodeAgent"]
    for _ in range(20):  # on a loaded machine it is gone before this process looks
        with subprocess.Popen(agent, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            process.kill()
            assert wait_until(lambda: not Path(f"/proc/{process.pid}/cmdline").read_bytes(), WAIT_S, 0.0)
            dying = is_alive(process.pid)
            kill_family(family_of(process.pid))
            assert not is_alive(process.pid)
        if dying:
            return
    pytest.fail("no process was seen while it died")


# -------------------------------------------------------------------------- whole runs

TRAIN = ["-m", "rlsync", "train", "recipe=impala", "env=cartpole", "cluster=ray", "logger=none"]
ENDLESS = ["recipe.total_frames=100000000", "recipe.target_return=null", "checkpoint_every_frames=500"]


class ClusterRun:
    """One ``rlsync train`` on a Ray of its own, and every process that it starts, whosever child it is."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.said = folder.with_suffix(".log")
        self._mark = uuid.uuid4().hex
        self._ray = tempfile.mkdtemp(prefix="ray")  # short: Ray puts sockets there
        with self.said.open("w") as output:
            self.process = subprocess.Popen(
                [*(ALONE if may_unshare("-n") else []), sys.executable, *TRAIN, f"run_dir={folder}", *words],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "RLSYNC_TEST_MARK": self._mark,
                    "RAY_TMPDIR": self._ray,
                    "RAY_USAGE_STATS_ENABLED": "0",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.said.read_text()

    def wait_for(self, pattern: str) -> None:
        def said() -> bool:
            return re.search(pattern, self.output, re.MULTILINE) is not None

        wait_until(lambda: said() or self.process.poll() is not None, RUN_WAIT_S, 0.1)
        assert said(), f"no {pattern!r}:\n{self.output}"

    def pids(self) -> set[int]:
        """Its processes that live; the environment of the first is inherited by all."""
        found = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and is_alive(int(folder.name)):
                try:
                    marked = self._mark.encode() in (folder / "environ").read_bytes()
                except OSError:  # it has ended
                    continue
                if marked:
                    found.add(int(folder.name))
        return found

    def leaves_nothing(self) -> bool:
        return wait_until(lambda: not self.pids(), RUN_WAIT_S, 0.1)

    def end(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT_S)
        shutil.rmtree(self._ray, ignore_errors=True)


@pytest.fixture
def runs() -> Iterator[list[ClusterRun]]:
    made: list[ClusterRun] = []
    yield made
    for run in made:
        run.end()


@needs_ray
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_a_run_is_interrupted_killed_and_resumed_and_leaves_no_process(
    tmp_path: Path, runs: list[ClusterRun], capsys: pytest.CaptureFixture[str]
) -> None:
    first = ClusterRun(tmp_path / "first", *ENDLESS)
    runs.append(first)
    first.wait_for(r"^frames .* version")
    assert main(["status", str(first.folder)]) == 0
    told = capsys.readouterr().out
    assert re.match(r"newest version \d+; 1 node acts, 0 lost so far", told)
    assert len(re.findall(r"^  worker \d", told, re.MULTILINE)) == 2
    os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does, Ray's processes included
    assert first.process.wait(RUN_WAIT_S) == 130, first.output
    assert "stopped: interrupted" in first.output
    assert "Traceback" not in first.output
    assert "unexpected system error" not in first.output, "Ray's page about agents that the run has ended"
    assert first.leaves_nothing()
    assert main(["status", str(first.folder)]) == 1
    assert "interrupted" in capsys.readouterr().out

    second = ClusterRun(tmp_path / "second", f"resume={first.folder}")
    runs.append(second)
    second.wait_for(r"^resumed from .* frames")
    second.wait_for(r"^frames .* version")
    os.kill(second.process.pid, signal.SIGKILL)
    second.process.wait(WAIT_S)
    assert second.leaves_nothing(), "nodes and workers end with their learner"
    assert main(["status", str(second.folder)]) == 1
    assert capsys.readouterr().out.startswith("killed")

    (frames,) = re.findall(r"^stopped: interrupted  frames ([\d,]+)", first.output, re.MULTILINE)
    goal = int(frames.replace(",", "")) + 1600
    third = ClusterRun(tmp_path / "third", f"resume={first.folder}", f"recipe.total_frames={goal}")
    runs.append(third)
    assert third.process.wait(RUN_WAIT_S) == 0, third.output
    assert f"frames {frames}" in third.output, "it goes on from the checkpoint"
    assert re.search(rf"^stopped: total_frames collected  frames {goal:,}", third.output, re.MULTILINE)
    assert third.leaves_nothing()

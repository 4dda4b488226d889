"""Workers that fill unrolls: what they say acted did, and they outlive nothing that they should not."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import GymEnv
from torchrl.trainers import Trainer

from rlsync import Every, Source, SyncWeights
from rlsync.core.errors import (
    AdoptionTimeout,
    BoardClosed,
    ConfigError,
    LayoutMismatch,
    PublishError,
    WorkerLost,
)
from rlsync.record.schedule import FixedLag
from rlsync.runs.actors.player import Playable, Player
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.actors.ring.format import WhenFull
from rlsync.runs.recipes.impala import (
    AtariEnvs,
    Categorical,
    CollectSettings,
    DiagonalGaussian,
    EnvSpec,
    GymnasiumEnvs,
    ImpalaLoss,
    ImpalaNet,
    Restarts,
    TorchRLEnvs,
    UnrollCollector,
    check_batch,
)
from rlsync.sync.sample import Judgement
from rlsync.transport.shared_file import KIND_VARIABLE
from tests.conftest import LeakCheck
from tests.runs.actors.test_envs import LADDER, Ladder
from tests.tools.processes import child_pids, is_alive, kill, open_fds, stopped, wait_until
from tests.tools.programs import Program
from tests.tools.running import in_three_lines

WAIT_S = 20.0
SILENT_S = 3.0  # longer than a loaded machine keeps a process waiting
QUICK = Restarts(at_most=3, first_pause_s=0.05)
CARTPOLE = GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 15})
PENDULUM = GymnasiumEnvs("Pendulum-v1", {"max_episode_steps": 9})
PONG = AtariEnvs("pong", max_episode_frames=60)
TORCHRL = TorchRLEnvs(partial(GymEnv, "CartPole-v1", max_episode_steps=15))


def ladder_net(**options: Any) -> ImpalaNet:
    return ImpalaNet((4,), Categorical(3), hidden=(8,), **options)


def cartpole_net(**options: Any) -> ImpalaNet:
    return ImpalaNet((4,), Categorical(2), hidden=(16,), **options)


@contextmanager
def collecting(
    network: Player | Playable,
    env: EnvSpec,
    *,
    num_workers: int = 2,
    when_full: WhenFull = "block",
    **options: Any,
) -> Iterator[UnrollCollector]:
    """A collector of small rollouts whose workers are forked, shut down with the block."""
    small = {"steps": 6, "envs_per_worker": 4, "start_method": "fork", "seed": 3, "restarts": QUICK}
    settings = CollectSettings(**small | options)
    collector = UnrollCollector(network, env, settings, num_workers=num_workers, when_full=when_full)
    try:
        yield collector
    finally:
        collector.shutdown(timeout=5)


def batches_of(collector: UnrollCollector, count: int) -> list[TensorDictBase]:
    return [batch.clone() for batch in itertools.islice(collector, count)]


def recomputed(network: ImpalaNet, batch: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and values of a batch by the network's one pass."""
    state = network.initial_state(batch["is_init"].shape[1])
    state = batch.get("recurrent_state", state)
    last_action = last_reward = None
    if network.takes_last_action:
        last_action = torch.cat([batch["last_action"].unsqueeze(0), batch["action"]])
    if network.takes_last_reward:
        last_reward = torch.cat([batch["last_reward"].unsqueeze(0), batch["reward"]])
    with torch.no_grad():
        out = network(batch["observation"], batch["is_init"], state, last_action, last_reward)
    return network.head.score(out.params[:-1], batch["action"])[0], out.value[:-1]


# -------------------------------------------------------------------------- what is in a batch


def replayed_by_hand(batches: list[TensorDictBase], make: Callable[[], Any], column: int) -> None:
    """Step one copy of the environment with the stored actions, and compare all that is stored of it."""
    env = make()
    observation, _ = env.reset(seed=3 + column)
    begins, returned, length, finals_seen = True, 0.0, 0, 0
    for batch in batches:
        index = batch.get("final_index", torch.zeros(0, 2, dtype=torch.int64)).tolist()
        assert len(index) == int((batch["truncated"] & ~batch["terminated"]).sum())
        for t in range(batch["reward"].shape[0]):
            assert np.array_equal(batch["observation"][t, column].numpy(), observation)
            assert bool(batch["is_init"][t, column]) is begins
            observation, reward, terminated, truncated, _ = env.step(batch["action"][t, column].numpy())
            returned, length, begins = returned + float(reward), length + 1, bool(terminated or truncated)
            assert float(batch["reward"][t, column]) == pytest.approx(float(reward))
            assert bool(batch["terminated"][t, column]) is bool(terminated)
            assert bool(batch["truncated"][t, column]) is bool(truncated)
            assert ([t, column] in index) is bool(truncated and not terminated)
            if [t, column] in index:
                finals_seen += 1
                kept = batch["final_observation"][index.index([t, column])]
                assert np.array_equal(kept.numpy(), observation)
            assert float(batch["collector", "episode_return"][t, column]) == pytest.approx(
                returned if begins else 0.0
            )
            assert int(batch["collector", "episode_length"][t, column]) == (length if begins else 0)
            if begins:
                observation, _ = env.reset()
                returned, length = 0.0, 0
        assert np.array_equal(batch["observation"][-1, column].numpy(), observation)
        assert bool(batch["is_init"][-1, column]) is begins
    env.close()


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
@pytest.mark.each_value
def test_unrolls_tell_what_the_environment_shows_when_stepped_by_hand(ends: str, overlap: bool) -> None:
    env = GymnasiumEnvs(LADDER, {"ends": ends, "horizon": 4})
    with collecting(ladder_net(), env, num_workers=1, envs_per_worker=3, overlap=overlap) as collector:
        batches = batches_of(collector, 5)
    for column in range(3):
        replayed_by_hand(batches, lambda: Ladder(4, ends), column)
    assert ("final_observation" in batches[0]) is (ends == "truncated")


class OfTheLearner:
    """Ends any other process that collects it, as a library does whose threads were not forked."""

    def __init__(self) -> None:
        self.pid, self.cycle = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.processes
def test_a_forked_worker_leaves_alone_what_the_learner_has_not_collected_yet() -> None:
    gc.disable()
    try:
        OfTheLearner()
        with collecting(cartpole_net(), CARTPOLE, num_workers=1) as collector:
            batches_of(collector, 2)
            assert collector.restarted == 0
    finally:
        gc.enable()
        gc.collect()


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"rollouts_per_batch": 3}])
@pytest.mark.parametrize(
    ("env", "head"),
    [(CARTPOLE, Categorical(2)), (TORCHRL, Categorical(2)), (PENDULUM, DiagonalGaussian(1))],
)
@pytest.mark.one_case
def test_every_batch_is_as_the_contract_says(env: EnvSpec, head: Any, options: dict[str, Any]) -> None:
    shape = (3,) if env is PENDULUM else (4,)
    network = ImpalaNet(shape, head, hidden=(8,), lstm=5, last_action=True, last_reward=True)
    wide = network.player(store_params=True, store_value=True)
    rollouts = options.get("rollouts_per_batch", 1)
    with collecting(wide, env, **options) as collector:
        finals = 0
        for batch in itertools.islice(collector, 8):
            check_batch(batch, wide, ["policy_version"])
            assert batch["observation"].shape == (7, 4 * rollouts, *shape)
            assert batch["collector", "mask"].sum() == collector.frames_per_batch == 24 * rollouts
            log_prob, value = recomputed(network, batch)
            assert torch.allclose(log_prob, batch["behaviour_log_prob"], atol=1e-5)
            assert torch.allclose(value, batch["collector", "value"], atol=1e-5)
            scored = head.score(batch["behaviour_params"], batch["action"])[0]
            assert torch.allclose(scored, batch["behaviour_log_prob"], atol=1e-5)
            finals += len(batch.get("final_index", ()))
            assert torch.isfinite(ImpalaLoss(network)(batch)["loss_baseline"])
        assert finals or env is not PENDULUM


@pytest.mark.thorough
@pytest.mark.processes
def test_atari_unrolls_are_as_the_contract_says_and_their_log_probabilities_true() -> None:
    network = ImpalaNet((4, 84, 84), Categorical(6), torso="nature", hidden=(32,), channels_last=True)
    with collecting(network, PONG, num_workers=1, overlap=True, steps=8) as collector:
        finals = 0
        for batch in itertools.islice(collector, 4):
            check_batch(batch, network)
            assert batch["observation"].dtype == torch.uint8
            log_prob, _ = recomputed(network, batch)
            assert torch.allclose(log_prob, batch["behaviour_log_prob"], atol=1e-4)
            finals += len(batch.get("final_index", ()))
        assert finals == 8, "four games, cut short twice"


@pytest.mark.processes
def test_the_recurrent_state_at_the_start_of_an_unroll_is_what_the_unroll_before_left() -> None:
    network = ladder_net(lstm=6, last_action=True, last_reward=True)
    env = GymnasiumEnvs(LADDER, {"horizon": 4})
    with collecting(network, env, num_workers=1) as collector:
        batches = batches_of(collector, 4)
    state = network.initial_state(4)
    for before, batch in itertools.pairwise([None, *batches]):
        assert batch is not None
        assert torch.allclose(batch["recurrent_state"], state, atol=1e-6)
        if before is not None:
            assert torch.equal(batch["observation"][0], before["observation"][-1])
            assert torch.equal(batch["last_action"], before["action"][-1])
            assert torch.equal(batch["last_reward"], before["reward"][-1])
        action, reward = batch["last_action"], batch["last_reward"]
        for t in range(6):
            seen = network.step(batch["observation"][t], batch["is_init"][t], state, action, reward)
            state, action, reward = seen.state, batch["action"][t], batch["reward"][t]
    assert float(state.abs().max()) > 0


@pytest.mark.processes
def test_nothing_that_the_learner_does_to_its_slot_reaches_the_worker() -> None:
    network = ladder_net(lstm=6, last_action=True, last_reward=True)
    with collecting(network, GymnasiumEnvs(LADDER), num_workers=1, slots=1) as collector:
        kept = []
        for batch in itertools.islice(collector, 4):
            kept.append(batch.clone())
            for name in ("observation", "reward", "action", "recurrent_state", "is_init"):
                batch[name].fill_(1)
    for column in range(4):
        replayed_by_hand(kept, Ladder, column)
    for before, after in itertools.pairwise(kept):
        assert torch.equal(after["last_action"], before["action"][-1])
        assert torch.equal(after["last_reward"], before["reward"][-1])


@pytest.mark.processes
def test_a_single_rollout_is_not_copied_and_stays_until_the_next_batch_is_asked_for() -> None:
    with collecting(cartpole_net(), CARTPOLE, slots=3, num_workers=1) as collector:
        batches = iter(collector)
        batch = next(batches)
        before = batch.clone()
        assert wait_until(lambda: collector.counters().full == 2, WAIT_S), "the worker has filled the rest"
        assert (batch == before).all()
        assert collector.counters().reading == 1
        collector.release()
        assert wait_until(lambda: collector.counters().full == 3, WAIT_S)
        next(batches)
        assert collector.counters().reading == 1


@pytest.mark.processes
def test_the_batch_of_a_single_rollout_is_the_slot_itself() -> None:
    with collecting(cartpole_net(), CARTPOLE, slots=1, num_workers=1, silent_timeout_s=10) as collector:
        first, second = (batch["observation"] for batch in itertools.islice(collector, 2))
        assert first.data_ptr() == second.data_ptr()


@pytest.mark.processes
def test_several_rollouts_are_copied_and_live_as_long_as_they_are_used() -> None:
    with collecting(cartpole_net(), CARTPOLE, rollouts_per_batch=2) as collector:
        batches = iter(collector)
        first = next(batches)
        before = first.clone()
        for _ in range(5):
            next(batches)
        assert (first == before).all()


@pytest.mark.processes
def test_workers_wait_when_the_learner_is_slow_and_that_is_counted() -> None:
    with collecting(cartpole_net(), CARTPOLE, slots=2) as collector:
        next(iter(collector))
        assert wait_until(lambda: collector.counters().worker_wait_s > 0.5, WAIT_S)
        assert collector.counters().written <= 2


@pytest.mark.processes
def test_workers_begin_no_rollout_while_they_are_paused() -> None:
    with collecting(cartpole_net(), CARTPOLE, slots=8) as collector:
        with collector.pause():
            assert collector.counters().written == 0
        assert not wait_until(lambda: collector.counters().written > 0, 0.3), "nothing was asked for yet"
        next(iter(collector))
        with collector.pause():
            assert wait_until(lambda: collector.counters().writing == 0, WAIT_S)
            for _ in range(collector.counters().full):
                # Its writer lets go of it a moment after it is full.
                assert collector.ring.take(WAIT_S) is not None
            assert not wait_until(lambda: collector.counters().full > 0, 0.3)


@pytest.mark.processes
def test_runs_with_the_same_seed_are_the_same_and_with_another_are_not() -> None:
    def actions(seed: int, reseed: int | None = None) -> torch.Tensor:
        torch.manual_seed(0)
        with collecting(cartpole_net(), CARTPOLE, num_workers=1, seed=seed) as collector:
            if reseed is not None:
                assert collector.set_seed(reseed) == reseed + 4
            return torch.cat([batch["observation"] for batch in batches_of(collector, 3)])

    assert torch.equal(actions(5), actions(5))
    assert not torch.equal(actions(5), actions(6))
    assert torch.equal(actions(1, reseed=5), actions(2, reseed=5))


@pytest.mark.processes
def test_iteration_ends_at_the_total_of_frames_and_goes_on_where_a_checkpoint_stood() -> None:
    with collecting(cartpole_net(), CARTPOLE, total_frames=70) as collector:
        assert len(batches_of(collector, 99)) == 3
        assert (len(collector), collector.stats()["frames"]) == (3, 72)
        collector.load_state_dict({"frames": 24, "batches": 1})
        assert len(batches_of(collector, 99)) == 2
        assert collector.state_dict() == {"frames": 72, "batches": 3}


# -------------------------------------------------------------------------- which weights acted


class Recorder:
    """Keeps the weights of every version that a collector publishes."""

    def __init__(self, collector: UnrollCollector, network: ImpalaNet) -> None:
        self.collector = collector
        self.network = network
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.remember()

    def remember(self) -> None:
        state = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        self.kept.setdefault(self.collector.policy_version, state)

    def check(self, batch: TensorDictBase, make: Callable[[], ImpalaNet]) -> set[int]:
        """Recompute each unroll with the weights that its stamp names; returns the stamps."""
        network, stamps = make(), batch["policy_version"]
        assert (stamps == stamps[:1]).all(), "one version acts in a rollout"
        for version in set(stamps.flatten().tolist()):
            network.load_state_dict(self.kept[version])
            columns = stamps[0] == version
            log_prob, _ = recomputed(network, batch)
            stored = batch["behaviour_log_prob"]
            assert torch.allclose(log_prob[:, columns], stored[:, columns], atol=1e-5)
        return set(stamps.flatten().tolist())


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True])
def test_every_step_was_made_with_the_weights_that_were_published_under_its_stamp(overlap: bool) -> None:
    make = partial(cartpole_net, lstm=4)
    network = make()
    with collecting(network, CARTPOLE, overlap=overlap) as collector:
        recorder, seen = Recorder(collector, network), set()
        for batch in itertools.islice(collector, 40):
            seen |= recorder.check(batch, make)
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
            collector.update_policy_weights_()
            recorder.remember()
        assert collector.policy_version == 41
        assert len(seen) > 8
        assert max(seen) > 30


def make_trainer(collector: UnrollCollector, network: ImpalaNet, frames: int) -> Trainer:
    loss = ImpalaLoss(network)
    return Trainer(
        collector=collector,
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), lr=0.05),
        progress_bar=False,
        auto_log_optim_steps=False,
        seed=11,
    )


@pytest.mark.processes
def test_it_runs_under_the_stock_trainer_with_stamps_that_are_true() -> None:
    torch.manual_seed(0)
    network = cartpole_net()
    with collecting(network, CARTPOLE) as collector:
        trainer = make_trainer(collector, network, frames=24 * 30)
        hook = SyncWeights({"policy": "loss_module.actor_network"}, when=Every(2, "optim_steps"))
        hook.register(trainer)
        rows = [(row.destination, row.verdict.value) for row in hook.plan.rows]
        assert len(rows) == 6
        assert {verdict for _, verdict in rows} == {"copied"}
        recorder = Recorder(collector, network)
        seen: list[set[int]] = []

        def look(batch: TensorDictBase) -> TensorDictBase:
            seen.append(recorder.check(batch, cartpole_net))
            return batch

        trainer.register_op("setup", recorder.remember)
        trainer.register_op("batch_process", look)
        trainer.register_op("post_steps", recorder.remember)
        trainer.train()
        assert trainer.collected_frames == 24 * 30
        assert hook.version == 2 + 15
        assert hook.receipts[0].reason == "start"
        assert seen[0] == {2}, "no frame was made before the first publish"
        assert max(max(stamps) for stamps in seen) > 10
        assert collector.closed


@pytest.mark.processes
def test_a_map_that_does_not_fit_the_workers_is_refused_leaf_by_leaf() -> None:
    with collecting(cartpole_net(), CARTPOLE) as collector:
        other = ImpalaNet((4,), Categorical(2), hidden=(16, 3))
        trainer = make_trainer(collector, other, frames=24)
        with pytest.raises(LayoutMismatch):
            SyncWeights({"policy": "loss_module.actor_network"}).register(trainer)
        with pytest.raises(LayoutMismatch):
            collector.update_policy_weights_(other)
        with pytest.raises(PublishError, match="all workers alike"):
            collector.update_policy_weights_(worker_ids=[0])
        assert collector.policy_version == 1
        trainer.shutdown()


@torch.no_grad()
def train_on(network: ImpalaNet) -> None:
    """Give the learner other weights than those that were published."""
    for parameter in network.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))


@pytest.mark.processes
def test_the_workers_answer_what_they_act_with() -> None:
    network = cartpole_net()
    with collecting(network, CARTPOLE) as collector:
        trainer = make_trainer(collector, network, frames=24)
        hook = SyncWeights({"policy": "loss_module.actor_network"})
        hook.register(trainer)
        check = hook.bound.endpoint.verification()
        check.ask(hook.bound.judge)
        train_on(network)
        batches = iter(collector)
        assert wait_until(lambda: next(batches) is not None and check.hear().done, WAIT_S)
        found = check.hear()
        assert (found.answered, found.deviations) == (2, ())
        assert found.behaviour == (Judgement(held=1), Judgement(held=1))
        assert hook.acting_versions() == [1, 1]
        assert hook.bound.endpoint.in_flight


@pytest.mark.thorough
@pytest.mark.processes
def test_workers_act_in_the_dtype_that_the_map_declares_and_with_exactly_the_rounded_weights() -> None:
    network = ImpalaNet((4, 84, 84), Categorical(6), torso="nature", hidden=(16,), lstm=4)
    with collecting(network, PONG, envs_per_worker=2, steps=2, dtype=torch.bfloat16) as collector:
        trainer = make_trainer(collector, network, frames=4)
        declared = Source("loss_module.actor_network", dtype=torch.bfloat16)
        hook = SyncWeights({"policy": declared})
        hook.register(trainer)
        assert {row.verdict.value for row in hook.plan.rows} == {"cast"}
        assert hook.plan.payload_bytes * 2 == sum(p.nbytes for p in network.parameters())
        train_on(network)  # the version before would act alike otherwise
        hook.publish()
        check = hook.bound.endpoint.verification()
        check.ask(hook.bound.judge)
        before = copy.deepcopy(network.state_dict())
        train_on(network)
        batches = iter(collector)
        assert wait_until(lambda: next(batches) is not None and check.hear().done, WAIT_S)
        found = check.hear()
        assert (found.answered, found.deviations) == (2, ())
        assert found.behaviour == (Judgement(held=1), Judgement(held=1))
        network.load_state_dict(before)
        batch = next(batches)
        assert (batch["policy_version"] == 2).all()
        check_batch(batch, network)
        rounded = ImpalaNet((4, 84, 84), Categorical(6), torso="nature", hidden=(16,), lstm=4)
        rounded.load_state_dict(network.state_dict())
        log_prob, _ = recomputed(rounded.bfloat16().float(), batch)
        assert torch.allclose(log_prob, batch["behaviour_log_prob"], atol=0.05)


# -------------------------------------------------------------------------- faults


@pytest.mark.processes
def test_a_killed_worker_is_started_again_with_the_newest_version_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = cartpole_net()
    with collecting(network, CARTPOLE) as collector, caplog.at_level(logging.WARNING):
        batches = iter(collector)
        next(batches)
        victim = collector.procs[1].pid
        assert victim is not None
        kill(victim)
        collector.update_policy_weights_()
        deadline = time.monotonic() + WAIT_S
        while not (collector.restarted and collector.ring.writer(1).alive):
            next(batches)
            assert time.monotonic() < deadline
        successor = collector.procs[1].pid
        assert successor not in (victim, None)
        versions = []
        while len(versions) < 3:
            collector.update_policy_weights_()
            batch = next(batches)
            if collector.last_workers == (1,) and collector.ring.writer(1).pid == successor:
                versions.append(int(batch["policy_version"][0, 0]))
            assert time.monotonic() < deadline
        assert min(versions[1:]) > 2, "it acts with what was published since"
        assert f"worker 1 (pid {victim}) killed by SIGKILL" in caplog.text
        assert f"started again (pid {successor})" in caplog.text


@pytest.mark.processes
def test_a_worker_whose_environment_raises_is_started_again_with_pauses_and_then_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = GymnasiumEnvs(LADDER, {"fails_at": 20})
    restarts = Restarts(at_most=2, alike_at_most=2, first_pause_s=0.1)
    with collecting(ladder_net(), env, num_workers=1, restarts=restarts) as collector:
        started = time.monotonic()
        with caplog.at_level(logging.WARNING), pytest.raises(WorkerLost) as caught:
            batches_of(collector, 1000)
        assert time.monotonic() - started >= 0.3
        assert collector.restarted == 2
        assert collector.closed
        assert in_three_lines(caught.value)
        assert caught.value.what.endswith(", 3 times within 600 s: ValueError: the ladder broke at step 20")
        assert caplog.text.count("Traceback") == 2
        assert "in 0.1 s" in caplog.text
        assert "in 0.2 s" in caplog.text


@pytest.mark.processes
def test_an_error_that_comes_again_after_as_many_rollouts_ends_the_run_at_once() -> None:
    env = GymnasiumEnvs(LADDER, {"fails_at": 20})
    with collecting(ladder_net(), env, num_workers=1, restarts=Restarts(first_pause_s=0.05)) as collector:
        with pytest.raises(
            WorkerLost, match=", 2 times within 600 s: ValueError: the ladder broke at step 20"
        ):
            batches_of(collector, 1000)
        assert collector.restarted == 1


@pytest.mark.processes
def test_one_worker_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    env = GymnasiumEnvs(
        "tests.runs.actors.test_unroll_collector:rlsync-tests/FailsOnce-v0", {"folder": str(tmp_path)}
    )
    with collecting(ladder_net(), env, num_workers=2) as collector:
        batches = iter(collector)
        assert wait_until(lambda: next(batches) is not None and collector.restarted == 1, WAIT_S)
        writers: set[int] = set()

        def both() -> bool:
            next(batches)
            writers.update(collector.last_workers)
            return writers == {0, 1}

        assert wait_until(both, WAIT_S)


class FailsOnce(Ladder):
    """The first one in a folder raises after some steps."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        try:
            os.close(os.open(Path(folder) / "failed", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        self.fails_at = 15


class Lingers(Ladder):
    """Raises in its twentieth step, and its process ends some seconds later."""

    def step(self, action: Any) -> Any:
        if self.steps == 19:
            Thread(target=time.sleep, args=(2 * SILENT_S,)).start()
            raise ValueError("the ladder gives way")
        return super().step(action)


class Hangs(Ladder):
    """Never returns from its twentieth step."""

    def step(self, action: Any) -> Any:
        if self.steps == 19:
            time.sleep(3600)
        return super().step(action)


HANGS = GymnasiumEnvs("tests.runs.actors.test_unroll_collector:rlsync-tests/Hangs-v0")
gymnasium.register("rlsync-tests/Hangs-v0", Hangs, disable_env_checker=True, order_enforce=False)
LINGERS = GymnasiumEnvs("tests.runs.actors.test_unroll_collector:rlsync-tests/Lingers-v0")
gymnasium.register("rlsync-tests/Lingers-v0", Lingers, disable_env_checker=True, order_enforce=False)
gymnasium.register("rlsync-tests/FailsOnce-v0", FailsOnce, disable_env_checker=True, order_enforce=False)


@pytest.mark.thorough
@pytest.mark.processes
def test_a_worker_that_fails_and_ends_late_has_failed_and_was_not_silent() -> None:
    settings = {"num_workers": 1, "silent_timeout_s": SILENT_S, "restarts": Restarts(at_most=0)}
    with collecting(ladder_net(), LINGERS, **settings) as collector:
        with pytest.raises(WorkerLost, match="exited with status 1: ValueError: the ladder gives way"):
            batches_of(collector, 1000)


@pytest.mark.thorough
@pytest.mark.processes
def test_workers_that_are_waited_for_too_long_after_their_end_are_told_as_ended() -> None:
    env = GymnasiumEnvs(LADDER, {"fails_at": 20})
    settings = {"num_workers": 1, "silent_timeout_s": SILENT_S, "restarts": Restarts(first_pause_s=600.0)}
    with collecting(ladder_net(), env, **settings) as collector:
        with pytest.raises(AdoptionTimeout) as caught:
            batches_of(collector, 1000)
        assert in_three_lines(caught.value)
        ended = r"no rollout was completed for 3 s: worker 0 \(pid \d+\) exited with status 1: ValueError: "
        assert re.match(ended, caught.value.what), caught.value.what


@pytest.mark.processes
def test_when_all_workers_are_killed_the_run_ends_at_once() -> None:
    with collecting(cartpole_net(), CARTPOLE) as collector:
        batches = iter(collector)
        next(batches)
        for process in collector.procs:
            assert process.pid is not None
            kill(process.pid)
        assert wait_until(lambda: not any(process.is_alive() for process in collector.procs), 20.0)
        with pytest.raises(WorkerLost) as caught:
            list(itertools.islice(batches, 100))
        assert in_three_lines(caught.value)
        assert caught.value.what.count("killed by SIGKILL") == 2
        assert collector.closed


@pytest.mark.processes
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.one_case
def test_workers_that_all_say_nothing_end_the_run(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsync.runs.actors.rollout_collector.LEAVE_TIMEOUT_S", 1.0)  # none of them leaves
    settings = {"num_workers": workers, "silent_timeout_s": SILENT_S}
    with collecting(cartpole_net(), CARTPOLE, **settings) as collector:
        batches = iter(collector)
        next(batches)
        pids = [process.pid or 0 for process in collector.procs]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        collector._workers._silence.clear()  # else one may count as silent first, and be killed alone
        with pytest.raises(AdoptionTimeout, match="no rollout was completed") as caught:
            list(itertools.islice(batches, 100))
        assert in_three_lines(caught.value)
        assert all(f"pid {pid}, stopped" in caught.value.what for pid in pids)


@pytest.mark.processes
def test_a_worker_that_is_stopped_is_started_again_while_the_other_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collecting(cartpole_net(), CARTPOLE, silent_timeout_s=SILENT_S) as collector:
        batches = iter(collector)
        next(batches)
        first, second = (process.pid or 0 for process in collector.procs)
        os.kill(second, signal.SIGSTOP)
        with caplog.at_level(logging.WARNING):
            assert wait_until(lambda: next(batches) is not None and collector.restarted == 1, 2 * WAIT_S)
        assert not is_alive(second)
        assert f"worker 1 (pid {second}) killed by SIGKILL after 3 s of silence; it is started" in caplog.text
        assert wait_until(lambda: next(batches) is not None and collector.last_workers == (1,), WAIT_S)
        assert collector.procs[0].pid == first
        assert collector.restarted == 1


@pytest.mark.thorough
@pytest.mark.processes
def test_a_worker_that_is_stopped_and_may_not_be_started_again_ends_the_run() -> None:
    settings = {"silent_timeout_s": SILENT_S, "restarts": Restarts(at_most=0)}
    with collecting(cartpole_net(), CARTPOLE, **settings) as collector:
        batches = iter(collector)
        next(batches)
        pid = collector.procs[0].pid or 0
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="after 3 s of silence") as caught:
            wait_until(lambda: next(batches) is None, 2 * WAIT_S)
        assert in_three_lines(caught.value)
        assert f"worker 0 (pid {pid})" in caught.value.what
        assert collector.closed


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize("paused", [False, True])
def test_workers_that_wait_for_the_learner_are_not_silent(paused: bool) -> None:
    with (
        collecting(cartpole_net(), CARTPOLE, slots=2, silent_timeout_s=2.0) as collector,
        ExitStack() as rest,
    ):
        next(iter(collector))
        if paused:
            rest.enter_context(collector.pause())
        assert not wait_until(lambda: collector._workers.look(), 4.0, poll_s=0.1)


@pytest.mark.processes
def test_silence_counts_only_while_the_learner_looks() -> None:
    with collecting(cartpole_net(), CARTPOLE, silent_timeout_s=2.0) as collector:
        batches = iter(collector)
        next(batches)
        first, second = (process.pid or 0 for process in collector.procs)
        with stopped(first), stopped(second):
            time.sleep(3.0)
            assert not collector._workers.look()
        assert len(list(itertools.islice(batches, 10))) == 10
        assert collector.restarted == 0


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize(
    ("network", "env", "what"),
    [
        (ladder_net(), GymnasiumEnvs(LADDER, {"horizom": 3}), "unexpected keyword argument 'horizom'"),
        (ladder_net(), CARTPOLE, "the player chooses from DiscreteActions"),
        (cartpole_net(), PENDULUM, "the player takes observations"),
        (cartpole_net(), GymnasiumEnvs("NoSuchGame-v0"), "NoSuchGame"),
    ],
)
def test_a_worker_that_cannot_begin_ends_the_constructor_with_its_own_error(
    network: ImpalaNet, env: EnvSpec, what: str
) -> None:
    with pytest.raises(WorkerLost) as caught, collecting(network, env):
        pass
    assert what in caught.value.what
    assert in_three_lines(caught.value)


LEARNER = """
import sys, time
from tests.runs.actors.test_unroll_collector import *
if __name__ == "__main__":
    settings = CollectSettings(steps=6, envs_per_worker=2, start_method=sys.argv[1])
    env = HANGS if sys.argv[2] == "hangs" else GymnasiumEnvs(LADDER)
    collector = UnrollCollector(ladder_net(), env, settings)
    for number, batch in enumerate(collector):
        if number == 5 or sys.argv[2] == "waits":
            print(*(p.pid for p in collector.procs), flush=True)
            time.sleep(3600 if sys.argv[2] == "waits" else 1)
"""


def _with_helpers(pid: int) -> set[int]:
    """Children of any kind, such as a fork server, and theirs."""
    found = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return found.union(*(_with_helpers(child) for child in found))


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "how"), [("fork", "runs"), ("fork", "waits"), ("fork", "hangs"), ("forkserver", "runs")]
)
def test_no_worker_survives_a_learner_that_is_killed(method: str, how: str, tmp_path: Path) -> None:
    script = tmp_path / "learner.py"
    script.write_text(LEARNER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    own = "fork" if method == "fork" else "spawn"  # with "fork" it would have no fork server
    learner = Program(str(script), method, how, cwd=tmp_path, env=environment, start_method=own)
    try:
        pids = {int(pid) for pid in learner.stdout.readline().split()}
        assert len(pids) == 2
        assert all(map(is_alive, pids))
        family = pids | _with_helpers(learner.pid)
        os.kill(learner.pid, signal.SIGKILL)
        assert wait_until(lambda: not any(map(is_alive, family)), WAIT_S), "they end by themselves"
    finally:
        learner.kill()
        learner.wait(WAIT_S)
        learner.stdout.close()
        learner.stderr.close()


@pytest.mark.processes
def test_a_collector_leaves_nothing_behind(no_leaks: LeakCheck) -> None:
    def run() -> None:
        with collecting(cartpole_net(), CARTPOLE) as collector:
            batches_of(collector, 3)
            kill(collector.procs[0].pid or 0)
            batches_of(collector, 3)

    run()
    no_leaks.rebase()
    run()


@pytest.mark.processes
def test_a_collector_that_is_dropped_ends_its_workers() -> None:
    before = child_pids()
    settings = CollectSettings(steps=3, envs_per_worker=1, start_method="fork")
    collector = UnrollCollector(cartpole_net(), CARTPOLE, settings)
    batches_of(collector, 1)
    assert len(child_pids() - before) == 2
    del collector
    assert wait_until(lambda: child_pids() == before, WAIT_S)


def test_the_learner_keeps_few_descriptors_and_its_own_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KIND_VARIABLE, "memfd")
    network = cartpole_net()
    pointers = [p.data_ptr() for p in network.parameters()]
    before = len(open_fds())
    with collecting(network, CARTPOLE) as collector:
        batches_of(collector, 2)
        assert len(open_fds()) - before <= 2 + 2 * collector.num_workers
        assert [p.data_ptr() for p in network.parameters()] == pointers
        assert not any(p.is_shared() for p in network.parameters())
    with pytest.raises(BoardClosed, match="was shut down"):
        next(iter(collector))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"num_workers": -1},
        {"num_workers": 1.5},
        {"overlap": True, "envs_per_worker": 1},
        {"slots": 0},
        {"rollouts_per_batch": 3, "slots": 2},
    ],
)
def test_numbers_that_make_no_collector_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError), collecting(cartpole_net(), CARTPOLE, **options):
        pass


@pytest.mark.processes
def test_the_time_in_which_workers_with_a_lag_wait_for_their_versions_is_counted() -> None:
    """They have a free slot meanwhile, so it is not the ring that they wait for."""
    settings = CollectSettings(steps=3, envs_per_worker=1, start_method="fork", silent_timeout_s=WAIT_S)
    life = FixedLag(lag=0, workers=1, per_batch=1)
    collector = RepeatedUnrolls(cartpole_net(), CARTPOLE, settings, life=life, lag=0, num_workers=1)
    try:
        batches_of(collector, 1)
        so_far_s = collector.counters().worker_wait_s
        assert wait_until(lambda: collector.counters().worker_wait_s > so_far_s, WAIT_S)
    finally:
        collector.shutdown(timeout=5)

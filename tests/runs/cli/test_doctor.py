"""``rlsync doctor``: the probes of the machine, and whether weights arrive in real workers."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from tensordict import TensorDictBase
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.trainers import Trainer, UpdateWeights
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme

from rlsync import BoardScheme, Every, SyncWeights, WatchWorkers
from rlsync.runs.cli import doctor
from rlsync.runs.cli.main import main
from rlsync.torchrl_plugin.examine import machine as doctor_machine
from rlsync.torchrl_plugin.examine.examine import Examination, Outcome, examine, marked
from rlsync.torchrl_plugin.examine.verdicts import Finding, findings_of, worst
from rlsync.torchrl_plugin.examine.workers import ExaminedWorkers
from rlsync.transport.shared_file import KIND_VARIABLE, FileAddress, SharedFile, kind
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    Canary,
    child_pids,
    is_alive,
    kill,
    make_a2c_loss,
    make_collector,
    make_env_with_module,
    make_policy,
    make_sac_loss,
    make_workers,
    stopped,
    undecided,
    wait_until,
)
from tests.tools.parts.answering_envs import SAME_ARRAY

HERE = Path(__file__).resolve()
TIMEOUT_S = 30.0
SOURCE = "loss_module.actor_network"
MAP = {"policy": SOURCE}
#: A build in a process of its own takes its time on a busy machine.
PATIENT = ("--timeout-s", "200")
#: A build that hangs, and writes the pids of its processes to a file.
HANGS = """
from pathlib import Path
from tests.runs.cli.test_doctor import never_return

def make():
    never_return(Path({pids!r}))
"""


def trainer_on(collector: Collector, loss: nn.Module | None = None) -> Trainer:
    """A trainer without any hook that publishes."""
    loss = loss or make_a2c_loss()
    return Trainer(
        collector=collector,
        total_frames=1000 * FRAMES_PER_BATCH,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-3),
        progress_bar=False,
    )


def with_stock_hook(trainer: Trainer, sync_map: dict[str, str], **options: object) -> Trainer:
    """TorchRL's own hook, as its documentation registers it."""
    hook = UpdateWeights(trainer.collector, weight_update_map=sync_map, trainer=trainer, **options)
    trainer.register_op("post_steps", hook)
    return trainer


def with_our_hook(trainer: Trainer) -> Trainer:
    SyncWeights(MAP, when=Every(1000, "optim_steps")).register(trainer)
    return trainer


# Named on the command line of the doctor: tests/runs/cli/test_doctor.py:make_dropped


def make_dropped() -> Trainer:
    """A stock map on a plain Collector with a policy of its own."""
    sys.stdout.write("the build talks\n")
    return with_stock_hook(trainer_on(make_collector(make_policy())), MAP)


def make_on_a_board() -> Trainer:
    multiprocessing.set_start_method("fork", force=True)  # sooner there than spawned workers
    schemes = {"policy": BoardScheme()}
    return with_our_hook(trainer_on(make_workers(MultiSyncCollector, make_policy(), schemes=schemes)))


def never_return(pids: Path) -> None:
    multiprocessing.set_start_method("fork", force=True)  # sooner there than a spawned worker
    pids.write_text(str(os.getpid()))  # a slow machine gets no further
    collector = make_workers(MultiSyncCollector, make_policy(), workers=1, schemes={"policy": BoardScheme()})
    pids.write_text(f"{os.getpid()} {collector.procs[0].pid}")
    time.sleep(1000)


def make_that_raises() -> Trainer:
    raise ValueError("no such data set")


def make_that_is_killed() -> Trainer:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def make_with_a_typo() -> Trainer:
    trainer = trainer_on(make_collector(make_policy()))
    SyncWeights({"polcy": SOURCE}).register(trainer)
    return trainer


# ------------------------------------------------------------------------------ one process


def outcomes(found: Examination) -> list[Outcome]:
    return [arrival.outcome for arrival in found.arrivals]


def test_a_stock_map_on_an_in_process_collector_never_arrives_and_the_cure_is_named() -> None:
    found = examine(make_dropped(), TIMEOUT_S)

    (line,) = [finding for finding in findings_of(found) if finding.verdict == "fail"]
    assert outcomes(found) == [Outcome.LOST]
    assert "the weights never arrive" in line.found
    assert "rlsync.SyncWeights({'policy': 'loss_module.actor_network'}).register(trainer)" in line.cure


def test_the_cure_that_is_named_cures() -> None:
    trainer = make_dropped()
    SyncWeights(MAP).register(trainer)
    found = examine(trainer, TIMEOUT_S)

    assert (outcomes(found), found.by_rlsync) == ([Outcome.ARRIVED], True)
    assert told_of_outputs(found) == ["the policies compute what the learner's module computes"]
    assert worst(findings_of(found)) == "ok"


def test_a_policy_that_the_collector_shares_with_the_loss_needs_no_publish() -> None:
    loss = make_a2c_loss()
    trainer = trainer_on(make_collector(loss.actor_network), loss)
    found = examine(with_stock_hook(trainer, MAP), TIMEOUT_S)

    assert outcomes(found) == [Outcome.SHARED]
    assert worst(findings_of(found)) == "ok"


def test_a_trainer_without_a_hook_is_told_so() -> None:
    found = examine(trainer_on(make_collector(make_policy())), TIMEOUT_S)

    assert (found.sync, found.routes, outcomes(found)) == ("", (("policy", SOURCE),), [Outcome.LOST])
    assert worst(findings_of(found)) == "fail"


def test_a_collector_of_no_known_kind_is_asked_for_no_batch() -> None:
    class Theirs(BaseCollector):
        def iterator(self) -> Iterator[TensorDictBase]:
            raise AssertionError("a batch was asked for")

        def set_seed(self, seed: int, static_seed: bool = False) -> int:
            return seed

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            return

        def shutdown(self, *args: object, **kwargs: object) -> None:
            return

    assert ExaminedWorkers.of(Theirs()).roll_out() is None


def test_a_misspelt_destination_of_a_stock_map_is_told_with_the_nearest_name() -> None:
    trainer = trainer_on(make_collector(make_policy()))
    found = examine(with_stock_hook(trainer, {"polcy": SOURCE}), TIMEOUT_S)

    assert outcomes(found) == [Outcome.ABSENT]
    assert "did you mean 'policy'?" in found.arrivals[0].detail
    assert worst(findings_of(found)) == "fail"


def test_a_publish_that_raises_is_a_problem_and_no_crash() -> None:
    trainer = trainer_on(make_collector(make_policy()))
    trainer.register_op("post_steps", UpdateWeights(trainer.collector, policy_weights_getter=make_policy))
    found = examine(trainer, TIMEOUT_S)

    assert [problem.partition(":")[0] for problem in found.problems] == ["the publish raised AttributeError"]
    assert outcomes(found) == [Outcome.LOST]


class HalfSender:
    """Sends the first layer only."""

    def __init__(self, source: nn.Module, destination: nn.Module) -> None:
        self.pairs = list(zip(destination.parameters(), source.parameters(), strict=True))[:2]

    def update_weights(self) -> None:
        for mine, theirs in self.pairs:
            mine.data.copy_(theirs)


def test_weights_that_arrive_in_part_are_told_with_one_that_does_not() -> None:
    trainer = trainer_on(make_collector(make_policy()))
    sender = HalfSender(trainer.loss_module.actor_network, trainer.collector.policy)
    trainer.register_op("post_steps", UpdateWeights(sender=sender))
    found = examine(trainer, TIMEOUT_S)

    assert outcomes(found) == [Outcome.PARTLY]
    assert found.arrivals[0].detail.startswith("2 of 4 tensors; not, for one, module.0.module.2.")


def test_an_interval_does_not_keep_the_doctor_from_publishing() -> None:
    trainer = make_dropped()
    SyncWeights(MAP, when=Every(1000, "batches")).register(trainer)
    assert outcomes(examine(trainer, TIMEOUT_S)) == [Outcome.ARRIVED]


def test_a_source_that_no_optimizer_trains_is_pointed_out() -> None:
    loss = make_sac_loss()
    trainer = trainer_on(make_collector(make_policy()), loss)
    found = examine(with_stock_hook(trainer, {"policy": "loss_module.qvalue_network"}), TIMEOUT_S)

    assert found.coverage.untrained == ("loss_module.qvalue_network",)
    assert any("qvalue_network_params" in finding.cure for finding in findings_of(found))


def follow_with(trainer: Trainer, average: AveragedModel, every: int) -> None:
    steps = itertools.count(1)

    def update() -> None:
        if next(steps) % every == 0:
            average.update_parameters(trainer.loss_module.actor_network)

    trainer.register_op("post_optim", update)


@pytest.mark.parametrize("follows", [1, 10, 0])
def test_an_average_that_follows_the_trained_weights_is_no_untrained_source(follows: int) -> None:
    trainer = trainer_on(make_collector(make_policy()))
    trainer.ema = AveragedModel(trainer.loss_module.actor_network, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if follows:
        follow_with(trainer, trainer.ema, follows)
    SyncWeights({"policy": "ema.module"}).register(trainer)
    before = [
        tensor.clone() for tensor in (*trainer.ema.state_dict().values(), *trainer.loss_module.parameters())
    ]
    found = examine(trainer, TIMEOUT_S)

    assert found.coverage.untrained == (() if follows else ("ema.module",))
    after = (*trainer.ema.state_dict().values(), *trainer.loss_module.parameters())
    assert all(map(torch.equal, after, before))


def test_a_path_to_parameters_is_not_given_as_its_own_cure_once_more() -> None:
    found = examine(make_dropped(), TIMEOUT_S)
    untrained = replace(found.coverage, untrained=("loss_module.target_value_network_params",))
    lines = findings_of(replace(found, coverage=untrained))
    (line,) = [finding for finding in lines if finding.what == "source"]
    cure = "name the module that the optimizer trains, or give the optimizer the parameters of this one"
    assert line.cure == cure


def test_a_module_of_the_environments_transforms_is_looked_into() -> None:
    loss, transform = make_a2c_loss(), "env.transform[0].module"
    loss.canary = Canary(4, 100)
    trainer = trainer_on(make_collector(make_policy(), env=make_env_with_module), loss)
    SyncWeights({transform: "loss_module.canary"}).register(trainer)
    found = examine(trainer, TIMEOUT_S)

    assert [(arrival.destination, arrival.outcome) for arrival in found.arrivals] == [
        (transform, Outcome.ARRIVED)
    ]


def test_the_weights_are_afterwards_what_they_were_bit_by_bit() -> None:
    trainer = make_dropped()
    before = {name: weight.clone() for name, weight in trainer.loss_module.state_dict().items()}
    pointers = [weight.data_ptr() for weight in trainer.loss_module.parameters()]

    examine(trainer, TIMEOUT_S)

    after = trainer.loss_module.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert [weight.data_ptr() for weight in trainer.loss_module.parameters()] == pointers


@pytest.mark.parametrize("value", [0.0, -1.0, -0.125, -1 / 7, 3e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mark_shows_after_a_cast_and_is_taken_back(value: float, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.tensor([value]))
    with marked([weight, weight]):
        shows = weight.to(dtype) != torch.tensor([value]).to(dtype)
        assert shows or torch.isinf(weight.to(dtype))
    assert weight.item() == torch.tensor(value).item()


# ------------------------------------------------------------------------------ worker processes


@pytest.fixture
def ended() -> Iterator[Callable[[Trainer], Trainer]]:
    """`ended(trainer)` gives the trainer back, and shuts it down after the test."""
    trainers: list[Trainer] = []

    def remember(trainer: Trainer) -> Trainer:
        trainers.append(trainer)
        return trainer

    yield remember
    for trainer in trainers:
        trainer.collector.shutdown(timeout=2, raise_on_error=False)


Ended = Callable[[Trainer], Trainer]
kinds = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@kinds
def test_on_a_board_the_weights_arrive_in_every_worker(kind: type, ended: Ended) -> None:
    workers = make_workers(kind, make_policy(), schemes={"policy": BoardScheme()})
    found = examine(ended(with_our_hook(trainer_on(workers))), TIMEOUT_S)

    assert outcomes(found) == [Outcome.ARRIVED] * 2
    assert [arrival.worker.partition(" (")[0] for arrival in found.arrivals] == ["worker 0", "worker 1"]
    assert worst(findings_of(found)) == "ok"
    assert told_of_outputs(found) == ["the policies compute what the learner's module computes"]


def told_of_outputs(found: Examination) -> list[str]:
    return [finding.found for finding in findings_of(found) if finding.what == "outputs"]


def test_weights_that_arrive_and_are_used_otherwise_are_found() -> None:
    other = make_policy()
    other.module[0].module.append(Doubled())
    trainer = trainer_on(make_collector(other))
    with_our_hook(trainer)
    found = examine(trainer, TIMEOUT_S)

    assert outcomes(found) == [Outcome.ARRIVED]
    (finding,) = (finding for finding in findings_of(found) if finding.verdict == "fail")
    assert "apart from what the learner's module computes" in finding.found
    assert "rlsync explain" in finding.cure


class Doubled(nn.Module):
    """A layer without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@kinds
@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_stock_schemes_bring_the_weights_of_a_policy_of_their_own(
    kind: type, scheme: type[WeightSyncScheme], ended: Ended
) -> None:
    workers = make_workers(kind, make_policy(), schemes={"policy": scheme()})
    found = examine(ended(with_stock_hook(trainer_on(workers), MAP)), TIMEOUT_S)

    assert outcomes(found) == [Outcome.ARRIVED] * 2


@pytest.mark.usefixtures("fork_workers")
def test_workers_that_act_with_the_learners_own_memory_are_found_out(ended: Ended) -> None:
    loss = make_a2c_loss()
    schemes = {"policy": SharedMemWeightSyncScheme()}
    workers = make_workers(MultiSyncCollector, loss.actor_network, schemes=schemes)
    found = examine(ended(with_stock_hook(trainer_on(workers, loss), MAP)), TIMEOUT_S)

    lines = [finding for finding in findings_of(found) if finding.verdict == "warn"]
    assert outcomes(found) == [Outcome.SHARED] * 2
    assert len(lines) == 2
    assert "rlsync.BoardScheme()" in lines[0].cure


@pytest.mark.usefixtures("fork_workers")
def test_workers_on_a_board_without_a_hook_are_told_of_the_hook_alone(ended: Ended) -> None:
    workers = make_workers(MultiSyncCollector, make_policy(), workers=1, schemes={"policy": BoardScheme()})
    found = examine(ended(trainer_on(workers)), TIMEOUT_S)

    cures = {finding.cure for finding in findings_of(found) if finding.verdict != "ok"}
    assert cures == {f"rlsync.SyncWeights({{'policy': '{SOURCE}'}}).register(trainer)"}


@pytest.mark.usefixtures("fork_workers")
def test_a_stopped_worker_is_named_and_the_others_are_examined(ended: Ended) -> None:
    workers = make_workers(MultiAsyncCollector, make_policy(), schemes={"policy": BoardScheme()})
    trainer = ended(with_our_hook(trainer_on(workers)))

    with stopped(workers.procs[1].pid):
        found = examine(trainer, timeout_s=2.0)

    assert outcomes(found) == [Outcome.ARRIVED, Outcome.SILENT]
    assert found.arrivals[1].detail == "no answer within 2 s"


@pytest.mark.usefixtures("fork_workers")
def test_a_push_that_hangs_on_a_stopped_worker_is_given_up(ended: Ended) -> None:
    schemes = {"policy": SharedMemWeightSyncScheme()}
    workers = make_workers(MultiAsyncCollector, make_policy(), schemes=schemes)
    trainer = ended(with_stock_hook(trainer_on(workers), MAP))

    with stopped(workers.procs[1].pid):
        found = examine(trainer, timeout_s=2.0)

    assert found.problems[0] == "the publish did not return within 2 s"
    assert outcomes(found)[1] == Outcome.SILENT
    assert worst(findings_of(found)) == "fail"


@pytest.mark.one_case
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("watched", [False, True])
def test_a_killed_worker_is_named_with_how_it_ended(watched: bool, ended: Ended) -> None:
    workers = make_workers(MultiAsyncCollector, make_policy(), schemes={"policy": BoardScheme()})
    trainer = ended(with_our_hook(trainer_on(workers)))
    if watched:
        WatchWorkers().register(trainer)
    kill(workers.procs[1].pid)

    found = examine(trainer, timeout_s=5.0)

    assert found.arrivals[1].outcome == Outcome.DEAD
    assert found.arrivals[1].detail == "killed by SIGKILL"
    other = found.arrivals[0]  # TorchRL may end it, too
    assert other.outcome != Outcome.DEAD or other.detail.endswith(", after another worker had died")


# ------------------------------------------------------------------------------ the command


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """The exit status, and the findings by what they are about, of a doctor in this process."""
    status = main(["doctor", "--json", *arguments])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return status, {finding["what"]: finding for finding in findings}


@pytest.mark.usefixtures("forked_builds")
def test_the_workers_of_a_trainer_are_examined_and_gone_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, said = said_by(capsys, *PATIENT, "--trainer", f"{HERE}:make_on_a_board")

    workers = [finding for what, finding in said.items() if what.startswith("policy of worker")]
    assert status == 0
    assert [finding["found"].partition(":")[0] for finding in workers] == ["the weights arrive"] * 2
    assert not child_pids()


@pytest.mark.thorough
@pytest.mark.usefixtures("forked_builds")
def test_a_build_that_hangs_is_reported_and_its_workers_are_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pids, file = tmp_path / "pids", tmp_path / "hangs.py"
    file.write_text(HANGS.format(pids=str(pids)))
    status, said = said_by(capsys, "--timeout-s", "5", "--trainer", f"{file}:make")

    assert (status, said["trainer"]["found"]) == (1, "building it took more than 5 s")
    assert pids.is_file(), "the build had not started its worker yet"
    workers = [int(pid) for pid in pids.read_text().split()]
    assert wait_until(lambda: not any(map(is_alive, workers)), 60)


@pytest.mark.usefixtures("forked_builds")
@pytest.mark.parametrize(
    ("function", "found"),
    [
        ("make_that_raises", "ValueError: no such data set"),
        ("make_that_is_killed", "building it: its process ended, killed by SIGKILL"),
    ],
)
def test_a_build_that_fails_is_a_finding(
    function: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = said_by(capsys, *PATIENT, "--trainer", f"{HERE}:{function}")
    assert (status, said["trainer"]["found"]) == (1, found)


@pytest.mark.usefixtures("forked_builds")
def test_what_rlsync_refuses_while_building_is_told_in_three_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", *PATIENT, "--trainer", f"{HERE}:make_with_a_typo"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3].startswith("no 'polcy' on the collector")
    assert [line.split()[0] for line in lines[-2:]] == ["where", "cure"]


@pytest.mark.one_case
@pytest.mark.usefixtures("forked_builds")
@pytest.mark.parametrize(
    ("env", "status", "found"),
    [
        ("CartPole-v1", 0, "the environment is decided by its seed: "),
        (f"{undecided.MODULE}:Global-v0", 1, "not decided by its seed: the reward of step "),
        (f"{undecided.MODULE}:Noisy-v0", 1, "the observation of step 1 after reset(seed=3) differs"),
    ],
    ids=["decided", "global", "noisy"],
)
def test_an_environment_is_played_twice_and_what_its_seed_does_not_decide_is_named(
    env: str, status: int, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, said = said_by(capsys, "--env", "recipe=impala", f"env.id={env}", "seed=3")
    assert (ended, [*said]) == (status, [env])
    assert found in said[env]["found"]


@pytest.mark.usefixtures("forked_builds")
def test_an_environment_that_writes_into_its_answers_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--env", f"env.id={SAME_ARRAY}"]) == 0
    decided, *written = json.loads(capsys.readouterr().out)["findings"]
    assert decided["verdict"] == "ok"
    assert [finding["verdict"] for finding in written] == ["warn", "warn"]
    assert all("writes into its" in finding["found"] for finding in written)


def test_an_override_that_is_wrong_is_refused_before_an_environment_is_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--env", "env.ids=CartPole-v1"]) == 2
    assert "did you mean 'env.id'" in capsys.readouterr().err


@pytest.mark.processes
def test_markdown_is_one_table_with_a_row_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--markdown"]) == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert head == "| | what | found | cure |"
    assert rule == "|---|---|---|---|"
    assert {row.count(" | ") for row in rows} == {3}
    assert [row for row in rows if row.startswith(("| ok | torchrl | 0.14", "| ok | torchrl | 0.15"))]


def test_a_bar_or_a_line_break_does_not_break_the_table() -> None:
    row = doctor.as_markdown([Finding("fail", "trainer", "a | b\nc")]).splitlines()[-1]
    assert row == "| fail | trainer | a \\| b c |  |"


def test_people_see_each_cure_uncut_and_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    cure = "rlsync.SyncWeights({'policy': 'loss_module.actor_network'}).register(trainer)"
    findings = [Finding("ok", "torch", "2.13.0"), Finding("warn", "/dev/shm", "[64] MiB", cure)]
    doctor.show(findings, Console(width=40))
    assert capsys.readouterr().out.splitlines() == [
        "ok    torch     2.13.0",
        "warn  /dev/shm  [64] MiB",
        f"      cure  {cure}",
        "1 ok, 1 warn, 0 fail",
    ]


# ------------------------------------------------------------------------------ this machine


@pytest.mark.processes
def test_this_machine_is_fit() -> None:
    assert [finding for finding in doctor_machine.machine() if finding.verdict == "fail"] == []


def test_a_publish_is_measured_beside_a_plain_copy() -> None:
    found = doctor_machine.publish_ratio()
    assert re.fullmatch(r"16 MB in \d+\.\d\d times a plain copy of the same bytes", found.found)


def test_ranges_are_those_of_the_installed_package() -> None:
    asked = [Requirement(line) for line in importlib.metadata.requires("rlsync") or ()]
    (torchrl,) = (requirement for requirement in asked if requirement.name == "torchrl")
    said = {finding.what: finding for finding in doctor_machine.packages()}
    assert str(torchrl.specifier) in said["torchrl"].found
    assert {"rlsync", "python", "torch", "tensordict", "gymnasium", "hydra-core"} <= said.keys()
    assert worst(list(said.values())) == "ok"


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("0.14.1", "ok"), ("0.14.0+cpu", "ok"), ("0.14.3.dev1", "ok"), ("0.15.0", "fail"), ("0.13.9", "fail")],
)
def test_a_version_outside_the_range_fails(version: str, verdict: str) -> None:
    assert doctor_machine.judged("torchrl", version, SpecifierSet(">=0.14,<0.15")).verdict == verdict


def test_a_package_that_is_needed_and_not_installed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("gymnasium", "ale-py"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    said = {finding.what: finding for finding in doctor_machine.packages()}
    assert said["gymnasium"] == Finding("fail", "gymnasium", "not installed", "pip install 'gymnasium>=1.1'")
    assert "ale-py" not in said


def test_a_build_of_the_night_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the files of torchrl, and may stand beside it: then the files are those of one of the two."""
    installed = importlib.metadata.version
    nights = {"torchrl-nightly": "2026.10.27"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: nights.get(name) or installed(name))
    said = {finding.what: finding for finding in doctor_machine.packages()}
    assert said["torchrl-nightly"].verdict == "warn"
    assert said["torchrl-nightly"].found.startswith("2026.10.27, in the place of torchrl<0.15,>=0.14.1")
    assert "torchrl" not in said
    assert worst(list(said.values())) == "warn"


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_a_sandbox_without_memory_files_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KIND_VARIABLE, "memfd")
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert doctor_machine.memory_file().verdict == "fail"
    assert doctor_machine.lock().verdict == "fail"


@pytest.mark.processes
def test_a_file_that_other_processes_cannot_open_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = FileAddress(os.getpid(), "/proc/self/fd/99999")
    monkeypatch.setattr(SharedFile, "create", lambda name: SharedFile(os.memfd_create(name), elsewhere))
    finding = doctor_machine.memory_file()
    assert finding.verdict == "fail"
    assert "another process cannot open it: FileNotFoundError" in finding.found


def test_locks_that_do_not_exclude_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind(), "try_lock", lambda self, at, *, exclusive: True)
    assert doctor_machine.lock().verdict == "fail"


def test_a_small_shm_is_warned_of_and_a_missing_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor_machine.shm_size(tmp_path / "none").verdict == "warn"
    room = SimpleNamespace(total=64 * 2**20, free=60 * 2**20)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda folder: room)
    finding = doctor_machine.shm_size(tmp_path)
    assert (finding.verdict, finding.found) == ("warn", "60 MiB free of 64 MiB")


@pytest.mark.parametrize(
    ("soft", "verdict"), [(64, "fail"), (256, "warn"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_few_descriptors_are_told(soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", lambda what: (soft, 2048))
    finding = doctor_machine.descriptors()
    assert finding.verdict == verdict
    assert (finding.cure == "ulimit -n 2048") is (verdict != "ok")


def test_more_threads_than_cores_are_warned_of() -> None:
    assert doctor_machine.threads(2, 2).verdict == "ok"
    assert doctor_machine.threads(64, 2).verdict == "warn"
    assert doctor_machine.omp(None, 2).verdict == "ok"
    assert doctor_machine.omp("1", 2).verdict == "ok"
    assert doctor_machine.omp("64", 2).verdict == "warn"
    assert doctor_machine.omp("many", 2).verdict == "warn"


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    v1, v2 = tmp_path / "v1" / "cpu", tmp_path / "v2"
    v1.mkdir(parents=True)
    v2.mkdir()
    (v1 / "cpu.cfs_quota_us").write_text("150000\n")
    (v1 / "cpu.cfs_period_us").write_text("100000\n")
    (v2 / "cpu.max").write_text("400000 100000\n")
    assert doctor_machine.quota_cores(v1.parent) == 2
    assert doctor_machine.quota_cores(v2) == 4
    (v2 / "cpu.max").write_text("max 100000\n")
    assert doctor_machine.quota_cores(v2) > 10_000
    assert doctor_machine.quota_cores(tmp_path) > 10_000


@pytest.mark.parametrize(
    ("capabilities", "verdict"), [({"avx512_bf16": True}, "ok"), ({"bf16": True}, "ok"), ({}, "warn")]
)
def test_bfloat16_is_fast_where_the_cpu_has_instructions_for_it(
    capabilities: dict[str, bool], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert doctor_machine.bfloat16().verdict == verdict

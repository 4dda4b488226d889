"""The programs of test_devices.py: ``python -m tests.tools.device_programs NAME DEVICE``.

Each runs in a process of its own, because a process cannot get rid of the second device of the tests.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torchrl.collectors import BaseCollector, MultiAsyncCollector
from torchrl.modules import MLP

from rlsync import Every, SyncWeights, VerifySync
from rlsync.core.ledger import Stamp
from rlsync.runs.actors.ring.reader import RolloutRing
from rlsync.runs.actors.ring.writer import RingWriter
from rlsync.runs.recipes.impala import (
    Categorical,
    CollectSettings,
    GymnasiumEnvs,
    ImpalaLoss,
    ImpalaNet,
    UnrollCollector,
)
from rlsync.runs.recipes.networks import MixedMLP
from rlsync.runs.recipes.pure import Graphs, PureStepper
from rlsync.tensors.device import pin, shared_memory, unmapped
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target
from rlsync.torchrl_plugin.examine.examine import Outcome, examine
from rlsync.torchrl_plugin.examine.verdicts import findings_of
from rlsync.transport.board.reader import BoardReader
from rlsync.transport.board.slots import Staging
from rlsync.transport.board.writer import BoardWriter
from rlsync.transport.local import LocalTransport
from tests.laws.test_canary import Census, Learner
from tests.runs.recipes.test_pure import UPDATES, Drawn, State
from tests.tools.parts import CanaryPolicy, make_collector, make_dqn_trainer
from tests.tools.parts.second_device import NAME, register
from tests.tools.running import on_a_board, running, values
from tests.torchrl_plugin.test_background_publish import CountedPolicy, Seen, make_counting_trainer

SIZE = 100_000
ENOUGH_FRAMES, ENOUGH_VERSIONS = 150, 10


def full(device: torch.device, value: float) -> Tensor:
    return torch.full((SIZE,), float(value), device=device)


def low_high(tensor: Tensor) -> tuple[float, float]:
    on_cpu = tensor.detach().cpu()
    return on_cpu.min().item(), on_cpu.max().item()


@contextmanager
def stream_of_its_own(device: torch.device) -> Iterator[None]:
    module = torch.get_device_module(device)
    with module.stream(module.Stream(device=device)):
        yield


LAYOUT = Layout.build({"policy": [LeafSpec("w", "parameter", (SIZE,), torch.float32)]})

# ------------------------------------------------------------------------------------- publishing


def before_the_publish(device: torch.device) -> None:
    board, seen = BoardWriter(), []
    board.lay_out(LAYOUT)
    reader = BoardReader(board.handle, lambda version, layout, views: bool(seen.append(low_high(views[0]))))
    weights = full(device, 0)
    for version, later in enumerate([set(), {0}, set(), {0}], start=1):
        weights.fill_(version)
        assert board.publish([weights], later, stamp=Stamp(1, version)) == version
        board.join()
        assert reader.adopt() == version
    assert seen == [(v, v) for v in (1, 2, 3, 4)], seen
    reader.close()
    board.close()


def after_the_publish(device: torch.device) -> None:
    """Of four leaves the optimizer writes to the last two, and joins before it does."""
    layout = Layout.build({"policy": [LeafSpec(n, "buffer", (SIZE,), torch.float32) for n in "abcd"]})
    for beside in (torch.device("cpu"), device):  # where every second leaf is
        slot = layout.owned_views(torch.zeros(layout.image_bytes, dtype=torch.uint8))
        learners = [full(device, 1), full(beside, 1), full(device, 1), full(beside, 1)]
        copy = Staging().copy(slot, learners).begin({2, 3})
        for buffer in learners[:2]:
            buffer.fill_(2)
            buffer.cpu()  # the learner may even wait until its write is done
        read = [weakref.ref(learners[0]), weakref.ref(learners[2])]
        del learners, buffer
        assert all(ref() is not None for ref in read), "their memory would be used for something else"
        copy.finish()
        assert [low_high(leaf) for leaf in slot] == [(1, 1)] * 4, list(map(low_high, slot))


def other_dtypes_and_strides(device: torch.device) -> None:
    specs = [LeafSpec(n, "parameter", (3, 4), torch.bfloat16) for n in "ab"]
    layout = Layout.build({"policy": specs})
    slot = layout.owned_views(torch.zeros(layout.image_bytes, dtype=torch.uint8))
    values = torch.arange(12.0).view(4, 3)
    Staging().copy(slot, [values.to(device).t(), values.t()]).finish()
    assert torch.equal(slot[0], values.t().bfloat16())
    assert torch.equal(slot[1], values.t().bfloat16())


# --------------------------------------------------------------------------------------- adopting


class Tied(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.one = nn.Parameter(full(device, 0))
        self.two = nn.Parameter(self.one.data)  # two objects, one memory


class Counted(Tied):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.register_buffer("seen", torch.zeros(3, device=device))


def adopting(module: nn.Module) -> tuple[Target, list[LeafSpec], Callable[[float], list[Tensor]]]:
    """A target, its leaves, and views that hold a number."""
    leaves = Leaves(module, "policy").specs()
    layout = Layout.build({"policy": leaves})

    def views(value: float) -> list[Tensor]:
        found = layout.views(torch.zeros(layout.image_bytes, dtype=torch.uint8))
        for view in found:
            view.fill_(value)
        return found

    return Target(module, "policy", leaves), leaves, views


def still_queued(device: torch.device) -> None:
    module = Tied(device)  # without buffers: the host waits for the copies of those
    target, _, views = adopting(module)
    seen, sets = [full(device, -1) for _ in range(5)], []
    for version, out in enumerate(seen, start=1):
        assert not target.alias(views(version)), "nothing reads the views after an adoption by copy"
        out.copy_(module.one.data)  # a rollout's work, which the device has not done yet
        sets.append(module.one.data_ptr())
    assert [low_high(out) for out in seen] == [(v, v) for v in (1, 2, 3, 4, 5)], list(map(low_high, seen))
    assert sets == [sets[0], sets[1], sets[0], sets[1], sets[0]], "two sets take turns"
    assert sets[0] != sets[1]


def given_back(device: torch.device) -> None:
    module = Counted(device)
    target, _, views = adopting(module)
    for version in (1, 2, 3):
        for adopt in (target.alias, target.copy):
            arrived = views(version)
            adopt(arrived)
            for view in arrived:
                view.fill_(-1)  # the learner's next version, in the same slot
            assert low_high(module.one) == (version, version)
            assert low_high(module.seen) == (version, version)


def tied(device: torch.device) -> None:
    module = Tied(device)
    target, leaves, views = adopting(module)
    assert [leaf.tie for leaf in leaves] == ["", "one"]
    for version in (1, 2, 3):
        target.alias(views(version))
        assert module.two.data_ptr() == module.one.data_ptr()
        assert target.current()
        assert module.one.device == module.two.device == device


def in_place(device: torch.device) -> None:
    module = Counted(device)
    target, _, views = adopting(module)
    pointers = module.one.data_ptr(), module.seen.data_ptr()
    target.copy(views(4))
    assert (module.one.data_ptr(), module.seen.data_ptr()) == pointers, "compiled code reads this memory"
    assert low_high(module.one) == (4, 4)


def move(module: nn.Module, device: torch.device) -> None:
    """Keep its parameters the same objects, as ``to()`` does between the CPU and CUDA by itself."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    before = list(module.parameters())
    module.to(device)
    assert all(one is other for one, other in zip(before, module.parameters(), strict=True))


def moved(device: torch.device) -> None:
    module = Tied(torch.device("cpu"))
    target, _, views = adopting(module)
    assert target.alias(views(1))
    move(module, device)
    assert not target.current(), "the parameters are the same objects, and elsewhere"
    again, _, _ = adopting(module)
    again.alias(views(2))
    assert module.one.device == device
    assert low_high(module.one) == (2, 2)


def moved_off(device: torch.device) -> None:
    module = Tied(device)
    target, _, views = adopting(module)
    assert not target.alias(views(1))
    assert target.current()
    move(module, torch.device("cpu"))
    assert not target.current(), "the parameters are the same objects, and elsewhere"
    again, _, _ = adopting(module)
    assert again.alias(views(2)), "the views are read from now on"
    assert module.one.device == torch.device("cpu")
    assert low_high(module.one) == (2, 2)


# ------------------------------------------------------------------------------------- one process


def staged(device: torch.device) -> None:
    weights, acts = full(device, 0), full(device, 0)
    transport = LocalTransport()
    reader = transport.subscribe(lambda version, layout, views: bool(acts.copy_(views[0]) is None))
    transport.lay_out(LAYOUT)
    with reader.acting(), stream_of_its_own(device):  # the learner's thread, during a rollout
        weights.fill_(1)
        transport.publish([weights], stamp=Stamp(1, 1))
        weights.fill_(2)
    assert reader.adopt() == 1
    assert low_high(acts) == (1, 1), low_high(acts)


def in_turn(device: torch.device) -> None:
    """Rollouts on one stream, publishes on another, as in a program with two threads."""
    with running(make_collector(CanaryPolicy(1, SIZE).to(device))) as collector:
        sync = hooked(collector, learner := CanaryPolicy(1, SIZE).to(device))
        seen: list[list[Tensor]] = []

        def act(*_: object) -> None:
            weights = collector.policy.canary.weights[0].data
            seen[-1].append(full(device, -1).copy_(weights))  # not done yet when the rollout ends

        collector.policy.register_forward_hook(act)
        rollouts = iter(collector)
        for version in (1, 2, 3):
            with stream_of_its_own(device):
                learner.fill(version)
                sync.publish()
                if version == 2:
                    learner.canary.weights[0].cpu()  # the learner may wait for its own work, or not
            seen.append([])
            next(rollouts)
        acted = [set(map(low_high, of_a_version)) for of_a_version in seen]
    assert acted == [{(1, 1)}, {(2, 2)}, {(3, 3)}], acted


def in_process(device: torch.device) -> None:
    learner = make_canary(device)
    for acting, crossing in (
        (make_canary(device), f"{device}: 16,008 bytes copied on the device"),
        (make_canary("cpu"), f"{device} -> cpu: 16,008 bytes cross at a publish"),
    ):
        with running(make_collector(acting)) as collector:
            sync = hooked(collector, learner)
            assert [str(found) for found in sync.plan.crossings] == [crossing]
            exact(collector, sync, learner)
    with running(make_collector(learner)) as collector:
        sync = hooked(collector, learner)
        assert [str(found) for found in sync.plan.crossings] == [f"{device}: 5 leaves aliased, 0 bytes"]
        assert sync.publish().copied_bytes == 0


# ------------------------------------------------------------------------------- worker processes


def make_canary(device: torch.device | str) -> CanaryPolicy:
    return CanaryPolicy(4, 1000).to(device)


def hooked(collector: BaseCollector, learner: nn.Module) -> SyncWeights:
    trainer = make_dqn_trainer(collector)
    trainer.policy = learner
    sync = SyncWeights({"policy": "policy"})
    sync.register(trainer)
    return sync


def exact(collector: BaseCollector, sync: SyncWeights, learner: CanaryPolicy) -> None:
    """Five publishes, each before a batch: its frames were made by that version and say so."""
    verify = VerifySync(sync, when=Every(1, "batches"))
    verify.register(sync.trainer)
    rollouts = iter(collector)
    for _ in range(5):
        learner.fill(sync.version + 1)
        sync.publish()
        batch = next(rollouts)
        acted = {values(batch, key).pop() for key in ("canary_min", "canary_max", "policy_version")}
        assert acted == {float(sync.version)}, (acted, sync.version)
        verify()


def both_sides(device: torch.device) -> None:
    """The learner publishes without a pause, on the device; two processes act there."""
    with on_a_board(None, MultiAsyncCollector, policy_factory=partial(make_canary, device)) as collector:
        learner = Learner(collector, policy=make_canary(device))
        across = f"{device} -> host memory -> {device}"
        assert [str(found) for found in learner.hook.plan.crossings] == [
            f"{across}: 16,008 bytes cross at a publish, 16,008 at each adoption"
        ]
        census, batches = Census(), iter(collector)
        with learner.publishing():
            while census.frames < ENOUGH_FRAMES or len(census.versions) < ENOUGH_VERSIONS:
                census.take(next(batches))
    census.assert_clean()
    assert census.mixed_batches == 0


def one_side(device: torch.device) -> None:
    """The learner on the device and workers not, and the other way round."""
    for ours, theirs, crossing in (
        (device, "cpu", f"{device} -> host memory -> cpu: 16,008 bytes cross at a publish"),
        ("cpu", device, f"cpu -> host memory -> {device}: 16,008 bytes cross at each adoption"),
    ):
        with on_a_board(None, policy_factory=partial(make_canary, theirs)) as collector:
            learner = make_canary(ours)
            sync = hooked(collector, learner)
            assert [str(found) for found in sync.plan.crossings] == [crossing]
            rows = {(row.source_device, row.device) for row in sync.plan.rows}
            assert rows == {(str(ours), str(theirs))}
            exact(collector, sync, learner)


def workers_differ(device: torch.device) -> None:
    here, there = (partial(make_canary, where) for where in ("cpu", device))
    with on_a_board(None, policy_factory=[here, there]) as collector:
        sync = hooked(collector, learner := make_canary("cpu"))
        assert {row.device for row in sync.plan.rows} == {f"cpu, {device}"}
        exact(collector, sync, learner)


def training(device: torch.device) -> None:
    """Every optimizer step adds 1 to the weights, and publishes go on in the background meanwhile."""

    def policy() -> CountedPolicy:
        return CountedPolicy().to(device)

    with on_a_board(None, MultiAsyncCollector, policy_factory=policy) as collector:
        trainer = make_counting_trainer(collector, policy(), 8)
        hook = SyncWeights({"policy": "loss_module.policy"}, when=Every(1, "optim_steps"), background=True)
        hook.register(trainer)
        seen = Seen(trainer, hook)
        trainer.train()
        hook.join()
    assert seen.wrong() == 0
    assert hook.version > 8
    assert all(receipt.background_bytes for receipt in hook.receipts if receipt.reason == "trigger")


def doctor(device: torch.device) -> None:
    with on_a_board(None, policy_factory=partial(make_canary, device)) as collector:
        found = examine(hooked(collector, make_canary("cpu")).trainer)
    assert [arrival.outcome for arrival in found.arrivals] == [Outcome.ARRIVED] * 2, found.arrivals
    told = [finding.found for finding in findings_of(found) if finding.what == "devices"]
    assert told == [f"cpu -> host memory -> {device}: 16,008 bytes cross at each adoption"], told


def benchmark(device: torch.device) -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "devices.py"))
    row = script["measure"](0.1, 10, device)
    assert row["bytes"] == 100_000
    assert all(rate > 0 for rate in (*row["gb_s"].values(), *row["limits_gb_s"].values()))


# ------------------------------------------------------------------------------ the actor-learner


def slots_are_pinned(device: torch.device) -> None:
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
    reward = taken.views["reward"]
    assert pin(shared_memory([reward]), device)
    assert not pin(torch.zeros(4096), device), "that memory may be freed, and nobody would tell CUDA"
    assert reward.is_pinned()
    assert reward.to(device, non_blocking=True).eq(3.0).all()
    torch.cuda.synchronize()
    unmapped(reward.untyped_storage().data_ptr(), reward.untyped_storage().nbytes())
    assert not reward.is_pinned()
    writer.close()
    ring.close()


def batches_are_whole(device: torch.device) -> None:
    for rollouts in (1, 2):
        _one_batch_size(device, rollouts)


def _one_batch_size(device: torch.device, rollouts: int) -> None:
    network = ImpalaNet((4,), Categorical(2), hidden=(16,)).to(device)
    loss = ImpalaLoss(network)
    collector = UnrollCollector(
        network,
        GymnasiumEnvs("CartPole-v1"),
        CollectSettings(
            steps=10,
            envs_per_worker=4,
            rollouts_per_batch=rollouts,
            policy_device=[str(device), "cpu"],
            storing_device=device,
            seed=3,
        ),
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


# ------------------------------------------------------------------------------------- updates


def graphs_replay_updates(device: torch.device) -> None:
    MixedMLP.forward = MLP.forward  # in double precision, which a MixedMLP does not return
    for name in UPDATES:
        ways = []
        for graphs in (None, Graphs(device)):
            drawn = Drawn(name, 3, device=str(device))
            trainer = drawn.trainer()
            stepper = PureStepper(partial(UPDATES[name], trainer), graphs)
            stepper.register(trainer)
            for number in range(10):
                torch.manual_seed(number)
                trainer.optim_steps(drawn.batch(number))
            assert stepper.why_not is None
            assert graphs is None or graphs.why_not is None, graphs
            ways.append(State.of(trainer))
        ways[0].assert_close(ways[1], 1e-7)


def all_widths_compile(device: torch.device) -> None:
    """Wherever Inductor may pad a product, it would."""
    with inductor.patch(force_shape_pad=True):
        for name in UPDATES:
            drawn = Drawn(name, 3, torch.float32, str(device))
            drawn.features, drawn.actions = 17, 6
            trainer = drawn.trainer()
            stepper = PureStepper(partial(UPDATES[name], trainer), graphs := Graphs(device))
            stepper.register(trainer)
            for number in range(3):
                trainer.optim_steps(drawn.batch(number))
            assert stepper.why_not is None
            assert graphs.why_not is None, graphs


def main(name: str, device: str) -> None:
    multiprocessing.set_start_method("fork" if device == NAME else "spawn", force=True)
    globals()[name](register() if device == NAME else torch.device(device, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])

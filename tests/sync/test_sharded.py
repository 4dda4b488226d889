"""Learners whose weights are sharded over several processes: FSDP 2 and tensor parallelism, on gloo."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rlsync import SendShards
from rlsync.core.errors import ConfigError, LayoutMismatch, PublishError
from rlsync.sync.publisher import Publisher
from rlsync.sync.sharded import meeting
from rlsync.sync.sharded import send_shards as send_shards_module
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.sharded import Sharding, own_part
from rlsync.transport.board import BoardHandle, BoardWriter
from rlsync.transport.board import format as fmt
from tests.conftest import may_start_processes
from tests.tools.board_workers import Remote, bits, low_high
from tests.tools.parts import kill
from tests.tools.parts.ranks import Ranks, learner

pytestmark = [pytest.mark.processes, pytest.mark.seconds]

Own = dict[str, Any]


class Net(nn.Module):
    """Sizes that no number of ranks divides, a buffer, a scalar, and two leaves that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.second = nn.Linear(7, 3)
        self.tied = nn.Linear(7, 3, bias=False)
        self.tied.weight = self.second.weight
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.second(hidden) + self.tied(hidden)


def plain_net() -> Net:
    torch.manual_seed(1)
    return Net()


def fsdp(world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    net = plain_net()
    fully_shard(net.first, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def hybrid(world: int) -> nn.Module:
    """Replicated over one dimension of the mesh, sharded over the other."""
    return fully_shard(
        plain_net(), mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    )


def tensor_parallel(world: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 2))
    return parallelize_module(
        net, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def both(world: int) -> nn.Module:
    """FSDP over tensor parallelism: one dimension of a leaf is cut twice, and a part is not contiguous."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(net, mesh=mesh["data"])


def by_hand(world: int) -> nn.Module:
    """Every way to cut a tensor in two dimensions, with parts that are empty on some ranks."""
    mesh = init_device_mesh("cpu", (2, world // 2))
    net = nn.Module()
    cuts = (Replicate(), Shard(0), Shard(1))
    for one in cuts:
        for other in cuts:
            whole = torch.randn(3, 5)
            net.register_parameter(
                f"w{len(net._parameters)}", nn.Parameter(distribute_tensor(whole, mesh, [one, other]))
            )
    net.register_parameter(
        "scalar", nn.Parameter(distribute_tensor(torch.tensor(2.5), mesh, [Replicate()] * 2))
    )
    net.register_buffer("seen", distribute_tensor(torch.arange(2), mesh, [Shard(0), Replicate()]))
    return net


# ------------------------------------------------------------------------------------ commands of a rank


def build(own: Own, make: Any, world: int) -> None:
    own["net"] = make(world)


def train(own: Own) -> None:
    """One step of an optimizer: the weights are not those that were built."""
    net = own["net"]
    torch.manual_seed(2)
    net(torch.randn(4, 5)).square().sum().backward()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


def fill(own: Own, number: float) -> None:
    """All weights are one number."""
    with torch.no_grad():
        for parameter in own["net"].parameters():
            own_part(parameter).fill_(number)


def open_board(own: Own, dtype: torch.dtype | None = None) -> BoardHandle:
    """Own a board, whose workers have their weights in another dtype, perhaps."""
    own["board"] = BoardWriter()
    there = None if dtype is None else [replace(s, dtype=dtype) for s in Leaves(plain_net(), "there").specs()]
    own["publisher"] = Publisher(own["board"], leaves_at=lambda _: there)
    return own["board"].handle


def send_shards(own: Own, timeout_s: float = 60.0, in_place: bool = True) -> None:
    own["shards"] = SendShards({"policy": own["net"]}, timeout_s=timeout_s, in_place=in_place)


def publish(own: Own, *_: object) -> int | None:
    return own["publisher"].publish(_leaves(own["net"]))


def publish_zeros(own: Own) -> int | None:
    """Whole tensors in the same layout, for which no other rank is asked."""
    leaves = {
        key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in _leaves(own["net"]).items()
    }
    tied = [key for key in leaves if key[1] == "tied.weight"]
    return own["publisher"].publish(leaves | {key: leaves[key[0], "second.weight"] for key in tied})


def take_part(own: Own, *_: object) -> int | None:
    return own["shards"]()


def full(own: Own) -> dict[str, bytes]:
    """Every leaf as torch puts it together."""
    whole = (
        (n, t.full_tensor() if isinstance(t, DTensor) else t) for (_, n), t in _leaves(own["net"]).items()
    )
    return {name: bits(tensor) for name, tensor in whole}


def on_the_board(own: Own) -> dict[str, bytes]:
    return {name: bits(view) for name, view in _views(own).items()}


def ledger_and_board(own: Own) -> tuple[int, int]:
    return own["publisher"].version, own["board"].newest


def _views(own: Own) -> dict[str, torch.Tensor]:
    layout, views = own["board"].newest_leaves()
    return {e.leaf.name: view for e, view in zip(layout.entries, layout.spread(views), strict=True)}


def _leaves(net: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    leaves = Leaves(net, "net", shards=True)
    return {("policy", name): t for name, t in zip(leaves.names, leaves.tensors(), strict=True)}


def begin(ranks: Ranks, make: Any = fsdp, timeout_s: float = 60.0) -> BoardHandle:
    """All ranks have the net; rank 0 has a board, and the others take part."""
    ranks.all(build, make, len(ranks))
    for rank in ranks[1:]:
        rank.do(send_shards, timeout_s)
    return ranks[0].do(open_board)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks, for tests that leave them alive."""
    with may_start_processes(), learner(4, tmp_path_factory.mktemp("four")) as ranks:
        yield ranks


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Ranks]:
    """Three ranks, for tests that kill some."""
    with learner(3, tmp_path) as ranks:
        yield ranks


# ------------------------------------------------------------------------------------ bit for bit


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("make", [fsdp, hybrid, tensor_parallel, both, by_hand])
@pytest.mark.one_case
def test_the_parts_of_four_ranks_make_the_very_tensor_that_torch_gathers(
    four: Ranks, make: Any, in_place: bool
) -> None:
    four.all(build, make, 4)
    if make is not by_hand:
        four.all(train)
    four[0].do(open_board)
    for rank in four[1:]:
        rank.do(send_shards, 60.0, in_place)
    assert four.publish(publish, take_part) == [1, 1, 1, 1]
    assert four[0].do(on_the_board) == four.all(full)[0]
    four.all(fill, 3.0)
    assert four.publish(publish, take_part) == [2, 2, 2, 2]
    assert four[0].do(on_the_board) == four.all(full)[0]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_cast_is_the_cast_of_the_gathered_tensor(four: Ranks, in_place: bool) -> None:
    four.all(build, fsdp, 4)
    four[0].do(open_board, torch.bfloat16)
    for rank in four[1:]:
        rank.do(send_shards, 60.0, in_place)
    four.publish(publish, take_part)
    assert four.all(casts_alike)[0]


def casts_alike(own: Own) -> bool:
    whole = {n: t.full_tensor() for (_, n), t in _leaves(own["net"]).items() if isinstance(t, DTensor)}
    if "board" not in own or own["board"] is None:
        return True
    views = _views(own)
    assert views["first.weight"].dtype is torch.bfloat16
    return all(torch.equal(views[name], tensor.to(torch.bfloat16)) for name, tensor in whole.items())


def test_leaves_that_are_one_have_one_place_on_the_board(four: Ranks) -> None:
    begin(four)
    four.publish(publish, take_part)
    assert four[0].do(offsets)["tied.weight"] == four[0].do(offsets)["second.weight"]


def offsets(own: Own) -> dict[str, int]:
    return {entry.leaf.name: entry.offset for entry in own["board"].layout.entries}


def test_a_learner_of_one_rank_needs_no_other(tmp_path: Path) -> None:
    with learner(1, tmp_path) as ranks:
        begin(ranks)
        assert ranks[0].do(publish) == 1
        assert ranks[0].do(on_the_board) == ranks[0].do(full)


# ------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("gather", ["in_place", "sent", "full_tensor"])
@pytest.mark.one_case
def test_a_publish_needs_no_second_copy_of_a_leaf(tmp_path: Path, gather: str) -> None:
    """The rank that publishes may map no more memory than it has: full_tensor() fails there."""
    with learner(2, tmp_path) as ranks:
        ranks.all(build, one_large_leaf, 2)
        ranks[0].do(open_board)
        ranks[1].do(send_shards, 60.0, gather == "in_place")
        for number in (1.0, 2.0, 3.0, 4.0):  # all slots are mapped, all buffers are there
            ranks.all(fill, number)
            ranks.publish(publish, take_part)
        spare = LARGE_BYTES // 2 + (4 << 20) if gather == "sent" else LARGE_BYTES // 4
        ranks[0].do(allow_no_more_memory, spare)
        ranks.all(fill, 5.0)
        if gather == "full_tensor":
            ranks[1].tell(full_large)
            with pytest.raises(RuntimeError, match="allocate memory"):
                ranks[0].do(full_large)
        else:
            assert ranks.publish(publish, take_part) == [5, 5]
            assert ranks[0].do(low_high_on_the_board) == (5.0, 5.0)


LARGE_BYTES = 64 << 20


def one_large_leaf(world: int) -> nn.Module:
    net = nn.Module()
    whole = torch.zeros(LARGE_BYTES // 4)
    mesh = init_device_mesh("cpu", (world,))
    net.register_parameter("large", nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return net


def allow_no_more_memory(own: Own, spare_bytes: int) -> None:
    gc.collect()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + spare_bytes, resource.RLIM_INFINITY))


def full_large(own: Own) -> int:
    return own["net"].large.full_tensor().numel()


def low_high_on_the_board(own: Own) -> tuple[float, float]:
    return low_high(list(_views(own).values()))


# ------------------------------------------------------------------------------------ refusals


def test_a_leaf_that_is_sharded_in_another_way_on_another_rank_is_named(four: Ranks) -> None:
    four.all(build, by_hand, 4)
    four[0].do(open_board)
    four[2].do(lose_a_leaf, "w1")
    for rank in four[1:]:
        rank.do(send_shards, 5.0)
    with pytest.raises(LayoutMismatch, match=r"policy\.w1 is not on rank 2 as it is on rank 0"):
        four[0].do(publish)


def lose_a_leaf(own: Own, name: str) -> None:
    del own["net"]._parameters[name]


def test_a_sum_that_is_not_made_yet_is_refused(four: Ranks) -> None:
    four.all(build, partial, 4)
    with pytest.raises(LayoutMismatch, match=r"w is sharded as Partial\(sum\)[\s\S]*redistribute"):
        four.all(send_shards)
    four[0].do(open_board)
    with pytest.raises(LayoutMismatch, match=r"w is sharded as Partial"):
        four[0].do(publish)


def partial(world: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (world,))
    net = nn.Module()
    part = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    net.register_parameter("w", nn.Parameter(part))
    return net


def test_a_rank_that_makes_no_send_shards_is_named_after_the_deadline(four: Ranks) -> None:
    four.all(build, fsdp, 4)
    four[0].do(open_board)
    four[1].do(send_shards)
    four[3].do(send_shards)
    with pytest.raises(PublishError, match=r"rank 2 made no SendShards within 0\.5 s"):
        four[0].do(publish_with_little_patience)
    four[2].do(send_shards)  # its note is read at the next publish
    assert four.publish(publish, take_part) == [1, 1, 1, 1]


def publish_with_little_patience(own: Own) -> int | None:
    patience, meeting.TIMEOUT_S = meeting.TIMEOUT_S, 0.5
    try:
        return publish(own)
    finally:
        meeting.TIMEOUT_S = patience


def test_send_shards_of_weights_that_are_whole_is_refused(four: Ranks) -> None:
    with pytest.raises(LayoutMismatch, match="no leaf is sharded"):
        four[1].do(send_whole)


def send_whole(own: Own) -> None:
    SendShards({"policy": nn.Linear(2, 1)})


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_is_none_is_refused(four: Ranks, timeout_s: float) -> None:
    four.all(build, fsdp, 4)
    with pytest.raises(ConfigError, match="a timeout is a positive number of seconds"):
        four[1].do(send_shards, timeout_s)


# ------------------------------------------------------------------------------------ ranks that fail


def test_a_killed_rank_aborts_the_version_and_is_named(three: Ranks) -> None:
    handle = begin(three)
    three.publish(publish, take_part)
    worker = Remote()
    try:
        worker.ask("attach", handle, "alias")
        assert worker.ask("adopt") == 1
        before = worker.ask("bits")
        three.all(fill, 2.0)
        kill(three[2].pid)
        three[0].tell(publish)
        three[1].tell(take_part)
        for rank in three[:2]:
            with pytest.raises(PublishError, match=rf"rank 2 \(pid {three[2].pid}, (dead|running)\) is lost"):
                rank.answer()
        assert three[0].do(ledger_and_board) == (1, 1)
        with pytest.raises(PublishError, match=r"rank 2 .* is lost[\s\S]*restart the learner"):
            three[0].do(publish)  # at once
        assert worker.ask("adopt") == 1
        assert worker.ask("bits") == before
    finally:
        worker.end()


def test_a_learner_that_starts_a_fresh_process_group_goes_on_publishing(three: Ranks, tmp_path: Path) -> None:
    begin(three)
    three.publish(publish, take_part)
    kill(three[2].pid)
    left = Ranks(three[:2])
    with pytest.raises(PublishError, match="rank 2"):
        left.publish(publish, take_part)
    left.all(regroup, str(tmp_path / "fresh"), 2)
    left.all(build, fsdp, 2)
    left[1].do(send_shards)
    left.all(fill, 7.0)
    assert left.publish(publish, take_part) == [2, 2]
    assert left[0].do(on_the_board) == left.all(full)[0]


def regroup(own: Own, store: str, world: int) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)


def test_a_rank_killed_while_it_writes_leaves_the_board_as_it_was(three: Ranks) -> None:
    begin(three)
    three.publish(publish, take_part)
    before = three[0].do(on_the_board)
    three.all(fill, 2.0)
    three[2].do(at_the_second_leaf, signal.SIGKILL)
    for rank in three:
        rank.tell(take_part if rank.number else publish)
    with pytest.raises(PublishError, match=rf"rank 2 \(pid {three[2].pid}, (dead|running)\) is lost"):
        three[0].answer()
    assert three[0].do(ledger_and_board) == (1, 1)
    assert three[0].do(on_the_board) == before


def at_the_second_leaf(own: Own, number: int) -> None:
    """This process sends itself a signal in the middle of its next write."""
    write, left = send_shards_module.write_blocks, [1]

    def write_blocks(view: torch.Tensor, tensor: torch.Tensor, blocks: Any) -> None:
        if not left:
            send_shards_module.write_blocks = write
            os.kill(os.getpid(), number)
        left[:] = left[1:]
        write(view, tensor, blocks)

    send_shards_module.write_blocks = write_blocks


def test_a_rank_stopped_while_it_writes_tears_nothing_when_it_goes_on(three: Ranks) -> None:
    begin(three, timeout_s=1.0)
    three.publish(publish, take_part)
    three.all(fill, 2.0)
    three[2].do(at_the_second_leaf, signal.SIGSTOP)
    for rank in three:
        rank.tell(take_part if rank.number else publish)
    late = rf"rank 2 \(pid {three[2].pid}, stopped\) did not bring the parts of version 2 within 1 s"
    for rank in three[:2]:
        with pytest.raises(PublishError, match=late):
            rank.answer()
    assert three[0].do(ledger_and_board) == (1, 1)
    (given_up,), _ = three[0].do(half_written_and_newest)
    for version in range(2, 9):  # rank 2 still writes for the version that was given up: its slot is not used
        assert three[0].do(publish_zeros) == version
        half_written, newest = three[0].do(half_written_and_newest)
        assert (half_written, newest != given_up) == ([given_up], True)
    before = three[0].do(on_the_board)
    os.kill(three[2].pid, signal.SIGCONT)
    with pytest.raises(PublishError, match=late):
        three[2].answer()
    assert three[0].do(on_the_board) == before
    for rank in three[1:]:
        rank.do(skip_decisions, 7)
    three.all(fill, 9.0)
    assert three.publish(publish, take_part) == [9, 9, 9]
    assert three[0].do(on_the_board) == three.all(full)[0]


def half_written_and_newest(own: Own) -> tuple[list[int], int]:
    """The slots whose version was given up, and the one that workers read."""
    writer = own["publisher"].transport
    slots = range(writer._words[fmt.SLOT_COUNT])
    states = [writer._words[fmt.slot_line(slot) + fmt.SLOT_STATE] for slot in slots]
    half_written = [slot for slot in slots if states[slot] == fmt.SlotState.WRITING]
    return half_written, fmt.unpack_head(writer._words[fmt.HEAD])[1]


def skip_decisions(own: Own, count: int) -> None:
    """Hear of the publishes without shards, as a rank that calls in step does."""
    assert [own["shards"]() for _ in range(count)] == [None] * count


def test_a_rank_that_does_not_call_is_named_after_its_own_deadline(three: Ranks) -> None:
    begin(three, timeout_s=1.0)
    three[1].tell(take_part)
    with pytest.raises(PublishError, match=r"rank 2 \(pid \d+, running\) did not bring .* within 1 s"):
        three[0].do(publish)
    with pytest.raises(PublishError, match="rank 2"):
        three[1].answer()
    with pytest.raises(PublishError, match="rank 2"):  # it learns that it was late, and is in step again
        three[2].do(take_part)
    assert three.publish(publish, take_part) == [1, 1, 1]


def test_a_rank_that_calls_too_often_is_told(three: Ranks) -> None:
    begin(three, timeout_s=1.0)
    with pytest.raises(PublishError, match=r"did not come within 1 s\n  where  SendShards of rank 1"):
        three[1].do(take_part)
    assert three.publish(publish, take_part) == [1, 1, 1]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_other_ranks_are_told_when_the_publishing_one_dies(three: Ranks, in_place: bool) -> None:
    three.all(build, fsdp, 3)
    for rank in three[1:]:
        rank.do(send_shards, 60.0, in_place)
    three[0].do(open_board)
    three.publish(publish, take_part)
    kill(three[0].pid)
    for rank in three[1:]:
        with pytest.raises(PublishError, match="rank 0, which publishes, is gone"):
            rank.do(take_part)


def test_a_rank_elsewhere_that_dies_while_it_sends_aborts_the_version(three: Ranks) -> None:
    three.all(build, fsdp, 3)
    for rank in three[1:]:
        rank.do(send_shards, 60.0, False)
    three[0].do(open_board)
    three.publish(publish, take_part)
    three[2].do(at_the_second_part, signal.SIGKILL)
    for rank in three:
        rank.tell(take_part if rank.number else publish)
    for rank in three[:2]:
        with pytest.raises(PublishError, match=r"rank 2 .* is lost"):
            rank.answer()
    assert three[0].do(ledger_and_board) == (1, 1)


def at_the_second_part(own: Own, number: int) -> None:
    """This process sends itself a signal in the middle of its next parts."""
    cut, left = send_shards_module.block_of, [1]

    def block_of(part: torch.Tensor, block: Any) -> torch.Tensor:
        if not left:
            os.kill(os.getpid(), number)
        left[:] = left[1:]
        return cut(part, block)

    send_shards_module.block_of = block_of


def test_messages_arrive_whole_and_one_that_is_not_there_is_none() -> None:
    here, there = map(meeting.Wire, socket.socketpair())
    here.send({"say": "skip"}, timeout_s=1.0)
    assert (there.receive(timeout_s=1.0), there.receive(timeout_s=0.0)) == ({"say": "skip"}, None)
    here.close()
    there.close()


def test_a_rank_brings_its_rows() -> None:
    sharding = Sharding((5, 2), "float32", (2,), (0, 1), ((0, 1),))
    assert sharding.blocks(1, owner=0) == [((0, 3, 2), (0, 0, 2))], "rows 3 and 4, both columns"

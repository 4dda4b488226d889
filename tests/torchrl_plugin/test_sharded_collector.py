"""Sharded learners with real workers: the hook, the hand-written form, the plan, and the frames' stamps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchrl.collectors import MultiSyncCollector
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Every, SendShards, SyncWeights, resolve
from rlsync.cli.bench import PolicyHolder
from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.plan import Verdict
from rlsync.tensors.sharded import own_part
from tests.conftest import may_start_processes
from tests.tools.parts import CanaryPolicy, make_workers
from tests.tools.parts.ranks import Ranks, learner

pytestmark = [pytest.mark.processes, pytest.mark.seconds]

Own = dict[str, Any]
MAP = {"policy": "loss_module.actor_network"}
WORLD = 2
make_canary = partial(CanaryPolicy, tensors=7, size=1001)


def make_collector(own: Own) -> None:
    """Two workers, which make their own policies."""
    own["collector"] = make_workers(
        MultiSyncCollector,
        policy_factory=make_canary,
        schemes={"policy": BoardScheme()},
        frames_per_batch=20,
    )


def shard(own: Own) -> None:
    own["policy"] = fully_shard(make_canary(), mesh=init_device_mesh("cpu", (WORLD,)))


def register(own: Own, every: int = 1, options: dict[str, Any] | None = None) -> Any:
    own["trainer"] = Trainer(
        collector=own["collector"],
        total_frames=1,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=PolicyHolder(own["policy"]),
        optimizer=torch.optim.SGD(own["policy"].parameters(), lr=0.1),
        progress_bar=False,
    )
    DTensor.full_tensor, gather = _never, DTensor.full_tensor
    try:
        resolve(MAP, own["trainer"])
        own["hook"] = SyncWeights(MAP, when=Every(every, "batches"), **options or {})
        own["hook"].register(own["trainer"])
        return own["hook"].plan
    finally:
        DTensor.full_tensor = gather


def _never(self: DTensor) -> None:
    raise AssertionError("a plan gathers nothing")


def send_shards(own: Own) -> None:
    own["hook"] = SendShards({"policy": own["policy"]})


def fill(own: Own, number: float) -> None:
    for parameter in own["policy"].parameters():
        own_part(parameter).fill_(number)


def call(own: Own) -> int | None:
    """What all ranks call after each batch; the version that was published."""
    if isinstance(own["hook"], SendShards):
        return own["hook"]()
    before = own["hook"].version
    own["hook"]._count_batch()  # the trainer's loop counts its batches
    own["hook"]()
    after = own["hook"].version
    return after if after > before else None


def acted(own: Own) -> set[tuple[float, float, int]]:
    """What the frames of the next batch tell: the range of the weights that acted, and the stamp."""
    own.setdefault("batches", iter(own["collector"]))
    batch = next(own["batches"])
    told = (batch["canary_min"], batch["canary_max"], batch["policy_version"])
    return set(zip(*(column.flatten().tolist() for column in told), strict=True))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, of which the first one has a collector with two workers, and a hook."""
    with may_start_processes(), learner(WORLD, tmp_path_factory.mktemp("two"), make_collector) as ranks:
        ranks.all(shard)
        ranks[1].do(send_shards)
        ranks[0].plan = ranks[0].do(register, 2)
        yield ranks
        ranks[0].do(shut_down)


def shut_down(own: Own) -> None:
    own["collector"].shutdown()


def test_the_plan_shows_sharded_leaves_and_gathers_nothing(two: Ranks) -> None:
    plan = two[0].plan
    assert (plan.count(Verdict.SHARDED), plan.count(Verdict.COPIED)) == (7, 1)
    assert plan.payload_bytes == 7 * 1001 * 4 + 8
    line = r"sharded +4,004  float32 +1001 +cpu +policy\.canary\.weights\.0  \(dimension 0, 2 ranks\)"
    assert re.search(line, plan.table())
    assert (plan.frozen, plan.unsent) == ((), ())
    assert "leaves     1 copied, 7 sharded" in plan.summary()


def test_every_frame_acts_with_the_whole_version_that_it_names(two: Ranks) -> None:
    two.all(fill, 1.0)
    assert two.all(call) == [1, 1]  # before the first frame
    assert two[0].do(acted) == {(1.0, 1.0, 1)}
    published = []
    for batch in range(2, 8):
        two.all(fill, float(batch))
        published.append(two.all(call))
        version = two[0].do(newest)
        assert {(stamp, low == high) for low, high, stamp in two[0].do(acted)} == {(version, True)}
    assert published == [[2, 2], [None, None], [3, 3], [None, None], [4, 4], [None, None]]
    assert {low for low, _, _ in two[0].do(acted)} == {6.0}  # the last batch at which something was published


def newest(own: Own) -> int:
    return own["hook"].version


def test_a_loop_without_a_trainer_publishes_with_the_collectors_own_method(two: Ranks) -> None:
    before = two[0].do(newest)
    two.all(fill, 40.0)
    two.publish(send_by_hand, call)
    assert two[0].do(newest) == before + 1
    assert two[0].do(acted) == {(40.0, 40.0, before + 1)}


def send_by_hand(own: Own) -> None:
    own["collector"].update_policy_weights_(own["policy"])


def test_numbers_of_another_rank_that_are_not_finite_are_refused_by_name(two: Ranks) -> None:
    before = two[0].do(newest)
    two[0].do(guard, True)
    try:
        two[1].do(fill, float("nan"))
        two[0].tell(publish)
        two[1].tell(call)
        for rank in two:
            with pytest.raises(PublishError, match=r"policy\.canary\.weights\.0 is not finite on rank 1"):
                rank.answer()
    finally:
        two[0].do(guard, False)
        two.all(fill, 41.0)
    assert two[0].do(newest) == before
    two.publish(publish, call)
    assert two[0].do(newest) == before + 1


def guard(own: Own, finite: bool) -> None:
    own["hook"]._bound._finite = own["hook"]._bound.endpoint.publisher.ranks.finite = finite


def publish(own: Own) -> None:
    own["hook"].publish()


def test_an_error_of_the_publishing_rank_reaches_the_others(two: Ranks) -> None:
    two[0].do(lose_the_policy)
    two[0].tell(publish)
    two[1].tell(call)
    for rank in two:
        with pytest.raises(Exception, match="no 'actor_network' on"):
            rank.answer()
    two[0].do(find_the_policy)
    two.publish(publish, call)


def lose_the_policy(own: Own) -> None:
    del own["trainer"].loss_module.actor_network


def find_the_policy(own: Own) -> None:
    own["trainer"].loss_module.actor_network = own["policy"]


def test_shards_are_not_published_in_the_background(two: Ranks) -> None:
    two.all(shard)
    two[1].do(send_shards)
    with pytest.raises(ConfigError, match="7 leaves are sharded over ranks, which bring their parts at once"):
        two[0].do(register, 1, {"background": True})

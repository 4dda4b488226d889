"""Sharded learners with real workers: the hook, the hand-written form, the plan, and the frames' stamps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer

from rlsync import BoardScheme, Every, SendShards, SyncWeights, VerifySync, resolve
from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.plan import Verdict
from rlsync.tensors.sharded import own_part
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from tests.conftest import may_start_processes
from tests.tools.parts import (
    FRAMES_PER_BATCH,
    CanaryPolicy,
    make_continuous_env,
    make_continuous_policy,
    make_counting_env,
    make_critic,
    make_policy,
    make_sac_loss,
    make_workers,
)
from tests.tools.parts.ranks import Ranks, learner
from tests.tools.running import in_three_lines

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
        frames_per_batch=FRAMES_PER_BATCH,
    )


def shard(own: Own) -> None:
    own["policy"] = make_canary()
    fully_shard(own["policy"].canary, mesh=init_device_mesh("cpu", (WORLD,)))


def register(own: Own, every: int = 1, options: dict[str, Any] | None = None) -> Any:
    own["trainer"] = Trainer(
        collector=own["collector"],
        total_frames=1,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=nn.ModuleDict({"actor_network": own["policy"]}),
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
    assert (plan.unheld, plan.unsent) == ((), ())
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
    own["hook"].bound.finite = own["hook"].bound.endpoint.publisher.ranks.finite = finite


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


# --------------------------------------------------------------------- what trains, and what does not


BATCHES = 3


def make_learning_collector(own: Own) -> None:
    """Two workers, whose policies the learner trains."""
    own["collector"] = make_workers(
        MultiSyncCollector,
        policy_factory=make_policy,
        schemes={"policy": BoardScheme()},
        frames_per_batch=FRAMES_PER_BATCH,
    )


def make_sharded_loss(own: Own, functional: bool, part: Callable[[Any], nn.Module]) -> None:
    """A PPO loss of whose networks ``part`` is sharded."""
    mesh = init_device_mesh("cpu", (WORLD,))
    actor, critic = make_policy(), make_critic()
    fully_shard(part(actor), mesh=mesh)
    fully_shard(critic.module, mesh=mesh)
    own["loss"] = ClipPPOLoss(actor, critic, functional=functional)


def what_takes_tensors(actor: Any) -> nn.Module:
    return actor.module[0].module


def what_takes_a_tensordict(actor: Any) -> nn.Module:
    return actor.module[0]


def make_learning_trainer(own: Own) -> None:
    """The same on each rank: the ranks do each step together. Those beside rank 0 act by themselves."""
    if "collector" not in own:
        own["collector"] = Collector(
            make_counting_env, make_policy(), frames_per_batch=FRAMES_PER_BATCH, total_frames=-1
        )
    own["trainer"] = trainer = Trainer(
        collector=own["collector"],
        total_frames=BATCHES * FRAMES_PER_BATCH,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=own["loss"],
        optimizer=torch.optim.SGD(own["loss"].parameters(), lr=0.1),
        clip_norm=1.0,
        progress_bar=False,
    )
    critic = own["loss"].critic_network
    advantages = GAE(gamma=0.9, lmbda=0.9, value_network=critic, deactivate_vmap=True)
    trainer.register_op("batch_process", advantages)


def train(own: Own, rank: int) -> dict[str, Any]:
    """Train in step with the other rank; what the frames say, and the actor before and after."""
    make_learning_trainer(own)
    trainer, actor = own["trainer"], own["loss"].actor_network
    if rank:
        shards = SendShards({"policy": actor})
        trainer.register_op("setup", shards)
        trainer.register_op("post_steps", shards)
    else:
        sync = SyncWeights(MAP, when=Every(1, "batches"))
        sync.register(trainer)
        own["verify"] = VerifySync(sync, Every(1, "batches"))
        own["verify"].register(trainer)
    stamps: list[set[int]] = []
    if not rank:
        trainer.register_op(
            "pre_steps_log", lambda b: stamps.append(set(b["policy_version"].unique().tolist()))
        )
    before = [p.full_tensor().tolist() for p in actor.parameters()]
    trainer.train()
    after = [p.full_tensor().tolist() for p in actor.parameters()]
    return {"before": before, "after": after, "stamps": stamps}


def on_the_board(own: Own) -> list[Any]:
    """The newest weights that workers can adopt, how many checks there were, and which failed."""
    _, leaves = endpoint_of(own["collector"]).publisher.transport.newest_leaves()
    return [[leaf.tolist() for leaf in leaves], own["verify"].checks, own["verify"].deviations]


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("learning")
    with may_start_processes(), learner(WORLD, folder, make_learning_collector) as ranks:
        yield ranks
        ranks[0].do(shut_down)


@pytest.mark.parametrize(
    ("functional", "part", "says"),
    [
        (False, what_takes_a_tensordict, "does not train a module that takes a tensordict"),
        (True, what_takes_tensors, "a functional loss cannot compute with"),
    ],
)
def test_shards_that_no_step_would_change_are_refused_at_registration(
    learning: Ranks, functional: bool, part: Callable[[Any], nn.Module], says: str
) -> None:
    learning.all(make_sharded_loss, functional, part)
    with pytest.raises(ConfigError, match=says) as refusal:
        learning[0].do(register_on_the_loss)
    assert in_three_lines(refusal.value)
    assert "loss_module.actor_network.module.0" in refusal.value.where


def register_on_the_loss(own: Own) -> None:
    apart = {"loss": own["loss"]}  # a stock Trainer that is dropped shuts its collector down
    make_learning_trainer(apart)
    SyncWeights(MAP).register(apart["trainer"])


def test_ppo_steps_of_two_ranks_move_the_weights_that_are_published_and_act(learning: Ranks) -> None:
    learning.all(make_sharded_loss, False, what_takes_tensors)
    for rank in learning:
        rank.tell(train, rank.number)
    first, second = learning.answers()
    assert all(old != new for old, new in zip(first["before"], first["after"], strict=True))
    assert first["after"] == second["after"]
    leaves, checks, deviations = learning[0].do(on_the_board)
    assert leaves == first["after"], "the board has what the last step left"
    assert (len(first["stamps"]), deviations) == (BATCHES, [])
    assert checks >= BATCHES - 1, "the last one may wait for an answer"
    assert all(len(versions) == 1 for versions in first["stamps"])
    assert len(set.union(*first["stamps"])) == BATCHES, "each batch acted with the version of the step before"


def step_of_sac(own: Own, parallel: bool) -> list[Any]:
    """The actor's weights after a step of a functional loss on given data."""
    torch.manual_seed(0)
    actor = make_continuous_policy()
    loss = make_sac_loss(actor)
    if parallel:
        torch.manual_seed(0)
        actor = make_continuous_policy()
        mlp, mesh = actor.module[0].module[0], init_device_mesh("cpu", (WORLD,))
        parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        loss = make_sac_loss(actor)
    torch.manual_seed(1)
    batch = make_continuous_env().rollout(8)
    losses = loss(batch)
    (losses["loss_actor"] + losses["loss_qvalue"]).backward()
    torch.optim.SGD(actor.parameters(), lr=0.1).step()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).tolist() for p in actor.parameters()]


def test_a_functional_loss_trains_with_tensor_parallelism_as_it_does_without(learning: Ranks) -> None:
    torch.manual_seed(0)
    untrained = list(make_continuous_policy().parameters())
    whole, parallel = (learning.all(step_of_sac, way)[0] for way in (False, True))
    for before, one, other in zip(untrained, whole, parallel, strict=True):
        assert before.tolist() != one
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other))

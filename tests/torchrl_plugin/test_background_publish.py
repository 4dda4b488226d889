"""Publishing in the background: the copy overlaps the next forward and backward pass, and nothing is torn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from rlsync import ConfigError, Every, PublishError, SyncWeights, VerifySync
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.transport.board import BoardReader
from tests.tools.board_workers import low_high
from tests.tools.counted_board import CountedBoard
from tests.tools.parts import FRAMES_PER_BATCH, CanaryPolicy
from tests.tools.running import in_three_lines, on_a_board, values

BIG = 8_000_000  # numbers: 32 MB take some milliseconds to copy
WIDE = 100_000  # numbers of each weight of a policy
STEPS_PER_BATCH = 4


# ------------------------------------------------------------------------------------------- the board


@pytest.fixture
def board() -> Iterator[CountedBoard]:
    board = CountedBoard()
    buffer, weight = (
        LeafSpec("steps", "buffer", (2,), torch.float32),
        LeafSpec("w", "parameter", (BIG,), torch.float32),
    )
    board.lay_out(Layout.build({"policy": [buffer, weight]}))
    yield board
    board.close()


@pytest.mark.seconds
def test_what_is_not_put_off_is_copied_when_publish_returns_and_the_version_is_whole_after_join(
    board: CountedBoard,
) -> None:
    buffer, weight = torch.ones(2), torch.ones(BIG)
    assert board.publish([buffer, weight], later={1}) == 1
    buffer.fill_(2.0)  # as the next forward does
    board.join()
    assert board.version == 1
    assert [low_high([view]) for view in board.newest_views()] == [(1.0, 1.0)] * 2


@pytest.mark.seconds
def test_readers_see_the_version_before_until_all_of_it_is_copied(board: CountedBoard) -> None:
    seen: list[Tensor] = []
    reader = BoardReader(board.handle, lambda version, layout, views: bool(seen.extend(views)))
    for number in range(1, 11):
        tensors = [torch.full((2,), float(number)), torch.full((BIG,), float(number))]
        board.publish(tensors, later={1})
        adopted = reader.adopt()
        assert adopted in (number - 1, number)
        assert all(float(v.min()) == float(v.max()) == adopted for v in seen[-2:])
        board.join()
        assert reader.adopt() == number
    reader.close()


@pytest.mark.parametrize("wait_first", [False, True])
def test_writing_to_weights_that_are_being_copied_is_an_error_and_never_goes_unnoticed(
    board: CountedBoard, wait_first: bool
) -> None:
    weight = torch.ones(BIG)
    board.publish([torch.ones(2), weight], later={1})
    if wait_first:
        board._copying[0].result()  # copied, and published; still the law was broken
    weight.add_(1)
    with pytest.raises(PublishError, match="written to while version 1") as refusal:
        board.join()
    assert in_three_lines(refusal.value)
    board.join()
    assert board.publish([torch.ones(2), weight]) == board.version


def test_closing_a_board_waits_for_the_copy() -> None:
    board = CountedBoard()
    board.lay_out(Layout.build({"policy": [LeafSpec("w", "parameter", (BIG,), torch.float32)]}))
    board.publish([torch.ones(BIG)], later={0})
    board.close()
    assert board.version == 1


# ------------------------------------------------------------------------- the hook, with a real optimizer


class CountedPolicy(CanaryPolicy):
    """A canary with a buffer that must hold what its weights hold."""

    def __init__(self) -> None:
        super().__init__(tensors=8, size=WIDE)
        self.canary.register_buffer("steps", torch.zeros(1000))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict = super().forward(tensordict)
        for name in ("min", "max"):
            seen = torch.full(tensordict.batch_size, float(getattr(self.canary.steps, name)()))
            tensordict.set(f"buffer_{name}", seen)
        return tensordict


class Counting(LossModule):
    """Each optimizer step adds 1 to every weight; each forward makes the buffer hold what comes next."""

    def __init__(self, policy: CountedPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, _: TensorDictBase) -> TensorDict:
        weights = self.policy.canary.weights
        for weight in weights:
            weight.detach().sin()  # a forward pass that takes its time
        self.policy.canary.steps.fill_(float(weights[0][0].detach()) + 1)
        return TensorDict({"loss_count": -sum(weight.sum() for weight in weights)})


def make_counting_trainer(collector: BaseCollector, policy: CountedPolicy, batches: int) -> Trainer:
    loss = Counting(policy)
    return Trainer(
        collector=collector,
        total_frames=batches * FRAMES_PER_BATCH,
        frame_skip=1,
        optim_steps_per_batch=STEPS_PER_BATCH,
        loss_module=loss,
        optimizer=torch.optim.SGD(loss.parameters(), lr=1.0),
        clip_grad_norm=False,
        progress_bar=False,
    )


class Seen:
    """What the frames of a training say: weights, buffer, and the steps that their stamp stands for."""

    def __init__(self, trainer: Trainer, hook: SyncWeights) -> None:
        self.hook = hook
        self.batches: list[TensorDictBase] = []
        trainer.register_op("batch_process", self._see)

    def _see(self, batch: TensorDictBase) -> TensorDictBase:
        self.batches.append(batch.clone())
        return batch

    def wrong(self) -> int:
        versions = range(self.hook.version + 1)
        steps_at = torch.tensor(
            [known.optim_steps if (known := self.hook.ledger.known(v)) else 0 for v in versions]
        )
        return sum(
            int((steps_at[batch["policy_version"]] != batch[f"{part}_{end}"]).sum())
            for batch in self.batches
            for part in ("canary", "buffer")
            for end in ("min", "max")
        )

    def versions(self) -> list[set[float]]:
        return [values(batch, "policy_version") for batch in self.batches]


def train(kind: type, adopt: str, when: Every, *, background: bool, batches: int) -> tuple[Seen, SyncWeights]:
    policy = CountedPolicy()
    with on_a_board(policy, kind, adopt=adopt) as collector:
        trainer = make_counting_trainer(collector, policy, batches)
        hook = SyncWeights({"policy": "loss_module.policy"}, when=when, background=background)
        hook.register(trainer)
        seen = Seen(trainer, hook)
        trainer.train()
        hook.join()
    return seen, hook


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.parametrize("adopt", ["alias", "copy"])
@pytest.mark.parametrize("unit", ["optim_steps", "batches"])
@pytest.mark.one_case
def test_every_frame_was_made_by_exactly_the_weights_and_buffers_of_its_stamp(adopt: str, unit: str) -> None:
    batches = 12
    seen, hook = train(MultiAsyncCollector, adopt, Every(1, unit), background=True, batches=batches)
    assert seen.wrong() == 0
    fired = [receipt for receipt in hook.receipts if receipt.reason == "trigger"]
    assert len(fired) == batches * (STEPS_PER_BATCH if unit == "optim_steps" else 1)
    assert {receipt.background_bytes for receipt in fired} == {8 * WIDE * 4}
    assert all(receipt.copied_bytes > receipt.background_bytes for receipt in fired)
    assert len(set().union(*seen.versions())) > 5


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_workers_that_wait_for_the_learner_act_with_what_was_published_for_their_rollout() -> None:
    runs = [
        train(MultiSyncCollector, "alias", Every(1, "batches"), background=background, batches=10)
        for background in (False, True)
    ]
    (plain, _), (background, hook) = runs
    assert background.wrong() == 0
    assert background.versions() == plain.versions() == [{float(v)} for v in range(2, 12)]
    assert hook.version == 12


@pytest.mark.usefixtures("fork_workers")
def test_a_publish_that_was_asked_for_by_hand_is_made_when_it_returns() -> None:
    policy = CountedPolicy()
    with on_a_board(policy) as collector:
        trainer = make_counting_trainer(collector, policy, 1)
        hook = SyncWeights({"policy": "loss_module.policy"}, background=True, trainer=trainer)
        receipt = hook.publish()
        assert (receipt.version, receipt.background_bytes) == (hook.version, 0)


@pytest.mark.usefixtures("fork_workers")
def test_a_weight_that_no_optimizer_holds_is_copied_at_once() -> None:
    policy = CountedPolicy()
    policy.canary.weights[3].requires_grad_(False)
    with on_a_board(policy) as collector:
        trainer = make_counting_trainer(collector, policy, 1)
        group = trainer.optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p.requires_grad]
        hook = SyncWeights({"policy": "loss_module.policy"}, background=True, trainer=trainer)
        hook.publish()
        trainer.register_op("post_steps", hook)
        trainer.train()
        assert hook.receipts[-1].background_bytes == 7 * WIDE * 4


@pytest.mark.usefixtures("fork_workers")
@pytest.mark.thorough
def test_what_workers_act_with_can_be_verified_while_publishes_go_on_in_the_background() -> None:
    policy = CountedPolicy()
    with on_a_board(policy, MultiAsyncCollector) as collector:
        trainer = make_counting_trainer(collector, policy, 40)
        hook = SyncWeights({"policy": "loss_module.policy"}, when=Every(1, "optim_steps"), background=True)
        hook.register(trainer)
        verify = VerifySync(hook, when=Every(2, "batches"))
        verify.register(trainer)
        trainer.train()
    assert (verify.checks > 3, verify.deviations) == (True, [])


@pytest.mark.usefixtures("fork_workers")
def test_a_checkpoint_has_the_version_that_was_underway_and_a_resumed_hook_has_none() -> None:
    policy = CountedPolicy()
    with on_a_board(policy) as collector:
        trainer = make_counting_trainer(collector, policy, 1)
        hook = SyncWeights({"policy": "loss_module.policy"}, background=True)
        hook.register(trainer)
        hook._settle()
        hook._count_batch()
        hook()
        underway = hook.receipts[-1]
        assert (underway.reason, underway.background_bytes > 0) == ("trigger", True)
        saved = hook.state_dict()
        assert hook.ledger.version == underway.version
        assert saved["published"][-1].tolist() == [underway.version, 0]
        hook._count_batch()
        hook()
        hook.load_state_dict(saved)
        hook._settle()
        assert (hook.receipts[-1].reason, hook.version) == ("resume", underway.version + 2)


@pytest.mark.usefixtures("fork_workers")
def test_a_step_hook_of_an_optimizer_joins_before_it_writes() -> None:
    policy = CountedPolicy()
    with on_a_board(policy, MultiAsyncCollector) as collector:
        trainer = make_counting_trainer(collector, policy, 1)
        hook = SyncWeights({"policy": "loss_module.policy"}, when=Every(1, "optim_steps"), background=True)
        hook.register(trainer)
        for step in range(1, 21):
            trainer.loss_module(TensorDict())["loss_count"].backward()
            trainer.optimizer.step()  # it would write into what the step before put off
            trainer.optimizer.zero_grad()
            trainer._post_optim_hook()
            assert hook.receipts[-1].version == step + 1
        hook.join()
        views = collector._weight_sync_schemes["policy"].board.writer.newest_leaves()[1]
        assert {float(end) for view in views for end in view.float().aminmax()} >= {20.0}


@pytest.mark.usefixtures("fork_workers")
def test_a_trainer_without_an_optimizer_is_refused_with_the_cure() -> None:
    policy = CountedPolicy()
    with on_a_board(policy) as collector:
        trainer = make_counting_trainer(collector, policy, 1)
        trainer.optimizer = None
        trainer._optimizer_ops.clear()
        for name in [n for n, m in trainer._modules.items() if "optim" in n]:
            del trainer._modules[name]
        hook = SyncWeights({"policy": "loss_module.policy"}, background=True)
        with pytest.raises(ConfigError, match="no optimizer"):
            hook.register(trainer)

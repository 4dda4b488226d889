"""A coupled player: tied to the learner's modules, and every way in which such a tie breaks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from rlsync import DreamerPlayer, LayoutMismatch, Receipt, SyncWeights, dreamer_map
from tests.tools.dreamer_parts import (
    Dreamer,
    make_dreamer_collector,
    make_stock_trainer,
    make_trainer,
    make_v3,
)
from tests.tools.running import in_three_lines, running
from tests.torchrl_plugin.test_dreamer_map import as_trainer

LEAVES = 18
ENCODER = 3  #: leaves of the encoder: a linear layer and its norm
ACTOR = 5


class Coupled:
    """A learner and its player in one process, with the hook that feeds it.

    Args:
        shared: the player is made of the learner's own modules. Otherwise it has modules of its own, whose
            parameters were pointed at the learner's memory once.
    """

    def __init__(self, *, shared: bool) -> None:
        self.dreamer: Dreamer = make_v3()
        own = self.dreamer.player if shared else self.dreamer.copied()
        for mine, learned in zip(own.parameters(), self.dreamer.player.parameters(), strict=True):
            mine.data = learned.data
        player = DreamerPlayer(own)
        self.collector = make_dreamer_collector(player)
        self.trainer = as_trainer(make_trainer(self.dreamer, self.collector))
        self.hook = SyncWeights(dreamer_map(self.dreamer.loss_module, player), trainer=self.trainer)

    @property
    def encoder(self) -> nn.Module:
        """The learner's."""
        return self.dreamer.player[0]

    @property
    def acting(self) -> nn.Module:
        """What acts."""
        return self.collector.policy.player


def halve(it: Coupled) -> None:
    it.encoder.half()


def assign(it: Coupled) -> None:
    actor = it.dreamer.player[2]
    actor.load_state_dict({name: value + 1 for name, value in actor.state_dict().items()}, assign=True)


def rebind(it: Coupled) -> None:
    for parameter in it.encoder.parameters():
        parameter.data = parameter.data.clone() + 1


def norm_weights(it: Coupled) -> None:
    parametrizations.weight_norm(it.encoder.module.model[0])


def parametrise(it: Coupled) -> None:
    parametrize.register_parametrization(it.encoder.module.model[0], "weight", nn.Identity())


def freeze_and_replace(it: Coupled) -> None:
    frozen = copy.deepcopy(it.encoder.module).requires_grad_(False)
    for parameter in frozen.parameters():
        parameter.add_(1)
    it.dreamer.model_loss.world_model.module[0].module = frozen


def quantise(it: Coupled) -> None:
    torch.ao.quantization.quantize_dynamic(it.encoder.module, {nn.Linear}, inplace=True)


def copy_the_player(it: Coupled) -> None:
    it.collector.policy = copy.deepcopy(it.collector.policy)


def copy_the_loss(it: Coupled) -> None:
    it.trainer.loss_module = copy.deepcopy(it.trainer.loss_module)


def compile_it(it: Coupled) -> None:
    encoder = it.dreamer.model_loss.world_model.module[0]
    encoder.module = torch.compile(encoder.module, backend="eager")


def compile_in_place(it: Coupled) -> None:
    it.encoder.module.compile(backend="eager")


Break = Callable[[Coupled], None]


def published(breaks: Break, *, shared: bool) -> tuple[Coupled, Receipt]:
    """Break the tie after a publish that moved nothing, and publish again."""
    it = Coupled(shared=shared)
    with running(it.collector):
        first = it.hook.publish()
        assert (first.aliased_leaves, first.copied_bytes) == (LEAVES, 0)
        breaks(it)
        return it, it.hook.publish()


def test_a_coupled_player_is_aliased_and_moves_no_bytes() -> None:
    for shared in (True, False):
        it, receipt = published(lambda _: None, shared=shared)
        assert f"{LEAVES} aliased, 0 bytes a publish" in it.hook.plan.summary()
        assert (receipt.aliased_leaves, receipt.copied_bytes, receipt.repaired) == (LEAVES, 0, ())


@pytest.mark.parametrize(
    ("breaks", "leaves"),
    [
        (halve, ENCODER),
        (assign, ACTOR),
        (rebind, ENCODER),
        (freeze_and_replace, ENCODER),
        (copy_the_player, LEAVES),
        (copy_the_loss, LEAVES),
    ],
)
def test_a_broken_tie_is_told_in_the_receipt_and_repaired_by_copying(breaks: Break, leaves: int) -> None:
    it, receipt = published(breaks, shared=False)
    assert (receipt.copied_leaves, len(receipt.repaired)) == (leaves, leaves)
    trained = it.trainer.loss_module.model_loss.world_model.module[0]
    for mine, learned in zip(it.acting[0].parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, learned.to(mine.dtype))
    for mine, learned in zip(
        it.acting[2].parameters(), it.trainer.loss_module.actor_loss.actor_model.parameters(), strict=True
    ):
        assert torch.equal(mine, learned)
    assert it.hook.publish().copied_leaves == leaves, "it is copied from then on"


@pytest.mark.parametrize("breaks", [norm_weights, parametrise, quantise])
def test_a_tie_that_cannot_be_repaired_is_refused(breaks: Break) -> None:
    with pytest.raises(LayoutMismatch, match="has no source leaf") as wrong:
        published(breaks, shared=False)
    assert in_three_lines(wrong.value)
    assert "policy.player.module[0].module.model.0.weight" in str(wrong.value)


@pytest.mark.seconds
@pytest.mark.parametrize("breaks", [compile_it, compile_in_place])
def test_a_compiled_module_stays_tied(breaks: Break) -> None:
    receipt = published(breaks, shared=False)[1]
    assert (receipt.aliased_leaves, receipt.copied_bytes, receipt.repaired) == (LEAVES, 0, ())


@pytest.mark.parametrize("breaks", [halve, assign, norm_weights, parametrise, compile_it, compile_in_place])
def test_a_player_of_the_learners_own_modules_follows_what_is_done_to_them(breaks: Break) -> None:
    receipt = published(breaks, shared=True)[1]
    assert (receipt.copied_bytes, receipt.repaired) == (0, ())


@pytest.mark.parametrize("breaks", [freeze_and_replace, copy_the_player, copy_the_loss])
def test_a_player_of_the_learners_own_modules_is_repaired_when_one_is_replaced(breaks: Break) -> None:
    receipt = published(breaks, shared=True)[1]
    assert receipt.copied_leaves == len(receipt.repaired) > 0


def test_a_coupled_training_acts_with_what_it_trains() -> None:
    dreamer = make_v3()
    player = DreamerPlayer(dreamer.player)
    collector = make_dreamer_collector(player, frames=8)
    trainer = make_stock_trainer(dreamer, collector, total_frames=32)
    hook = SyncWeights(dreamer_map(dreamer.loss_module, player))
    hook.register(trainer)
    before = [parameter.detach().clone() for parameter in player.parameters()]
    seen: list[int] = []
    trainer.register_op("batch_process", lambda batch: seen.extend(batch["policy_version"].unique().tolist()))
    trainer.train()
    assert seen == [1, 2, 3, 4]
    assert [(receipt.aliased_leaves, receipt.copied_bytes) for receipt in hook.receipts] == [(LEAVES, 0)] * 5
    changed = [not torch.equal(a, b) for a, b in zip(before, player.parameters(), strict=True)]
    assert any(changed)

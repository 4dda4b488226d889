"""What the tests of the zoo share: the rows of its page, a learner, and those who name a fault."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.objectives import LossModule
from torchrl.objectives.value import GAE
from torchrl.trainers import Trainer, UpdateWeights

import rlsync
from rlsync import RlsyncError, RlsyncWarning, Source, SyncWeights
from rlsync.torchrl_plugin.examine.examine import examine
from rlsync.torchrl_plugin.examine.verdicts import findings_of
from tests.tools.parts import ACTIONS, FRAMES_PER_BATCH, make_mlp, make_ppo_loss

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "silent_syncs.md"
ACTOR = {"policy": "loss_module.actor_network"}
BATCHES = 3
TIMEOUT_S = 30.0
#: How the lines begin that say more than what moves.
REMARKS = ("unheld ", "unsent ", "unreached ", "note ")


# ------------------------------------------------------------------------------------- the page


@dataclass(frozen=True, slots=True)
class Said:
    """What one of those who name faults says of a trainer.

    Args:
        by: who.
        lines: the first line of each message; empty if nothing is wrong.
    """

    by: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A fault, as the page has it.

    Args:
        saw: what the user saw, with a link to where it was reported.
        by: who names it here.
        says: the first line of the message.
        path: the test that rebuilds it, as ``file::name``.
    """

    saw: str
    by: str
    says: str
    path: str

    def is_named(self, said: Said) -> None:
        """Fail unless the one on the page says the line on the page."""
        line = re.escape(self.says).replace(
            re.escape("..."), ".*"
        )  # for a number that differs from run to run
        assert said.by == self.by, said
        assert any(re.fullmatch(line, heard) for heard in said.lines), said


#: A line of the page: a file of tests; who says what, for the faults indented below it; or a fault, with who
#: says what unless it is indented.
_LINE = re.compile(
    r"^`(?P<file>tests/\S+)`$|^(?P<head>- \*(?P<all_by>[\w ]+)\*: `(?P<all_says>[^`]+)`)$"
    r"|^- (?P<saw>.+) \*(?P<by>[\w ]+)\*: `(?P<says>[^`]+)` \(`(?P<test>\w+)`\)$"
    r"|^  - (?P<one_saw>.+) \(`(?P<one_test>\w+)`\)$",
    re.M,
)


def rows() -> list[Row]:
    """The faults that are rebuilt here."""
    found, file, by, says = [], "", "", ""
    for line in _LINE.finditer(PAGE.read_text().split("<!-- faults -->")[1]):
        if line["file"]:
            file = line["file"]
        elif line["head"]:
            by, says = line["all_by"], line["all_says"]
        elif line["saw"]:
            found.append(Row(line["saw"], line["by"], line["says"], f"{file}::{line['test']}"))
        else:
            found.append(Row(line["one_saw"], by, says, f"{file}::{line['one_test']}"))
    return found


# ---------------------------------------------------------------------------------- the learner


def actor_of(net: nn.Module) -> ProbabilisticActor:
    """A discrete actor around a network that gives logits."""
    return ProbabilisticActor(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
        return_log_prob=True,
    )


def make_trainer(
    collector: BaseCollector,
    loss: LossModule | None = None,
    trained: Iterable[Tensor] | None = None,
    batches: int = BATCHES,
) -> Trainer:
    """A trainer of a PPO loss, or of another, without any hook that publishes.

    Args:
        collector: what collects.
        loss: the loss.
        trained: what the optimizer holds; all parameters of the loss by default.
        batches: how many it trains on.
    """
    loss = loss or make_ppo_loss(actor_of(make_mlp(ACTIONS)))
    trainer = Trainer(
        collector=collector,
        total_frames=batches * FRAMES_PER_BATCH,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        optimizer=torch.optim.Adam(list(loss.parameters() if trained is None else trained), lr=1e-2),
        progress_bar=False,
    )
    critic = dict(loss.named_children()).get("critic_network")
    if critic is not None:
        trainer.register_op("batch_process", GAE(gamma=0.99, lmbda=0.95, value_network=critic))
    return trainer


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends weights the way a user wrote it: TorchRL's hook calls it after each batch."""

    update_weights: Callable[[], object]


def sends(trainer: Trainer, update: Callable[[], object]) -> Trainer:
    """The trainer, with TorchRL's hook and a user's own way to send."""
    trainer.register_op("post_steps", UpdateWeights(sender=Sender(update)))
    return trainer


def ours(trainer: Trainer, sync_map: dict[str, str | Source] | None = None) -> Trainer:
    """The trainer, with rlsync's hook."""
    SyncWeights(sync_map or ACTOR).register(trainer)
    return trainer


def held(module: nn.Module) -> dict[str, Tensor]:
    """A copy of a module's parameters and buffers."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def same(one: nn.Module, other: nn.Module | dict[str, Tensor]) -> bool:
    """Whether two modules hold the same numbers."""
    mine, theirs = held(one), other if isinstance(other, dict) else held(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def stays_behind(trainer: Trainer, learner: nn.Module | None = None) -> bool:
    """Train without an error. Whether the learner has learned, and the collector acts as in the beginning."""
    learner = learner or trainer.loss_module.actor_network
    acting = trainer.collector.policy
    learned, acted = held(learner), copy.deepcopy(held(acting))
    trainer.train()
    return same(acting, acted) and not same(learner, learned)


# --------------------------------------------------------------------------- who names a fault


def register(trainer: Trainer, sync_map: dict[str, str | Source] | None = None) -> Said:
    """What ``SyncWeights.register`` says of a map."""
    try:
        ours(trainer, sync_map)
    except RlsyncError as error:
        return Said("register", (error.what,))
    return Said("register", ())


def first_publish(trainer: Trainer, getter: Callable[[], object]) -> Said:
    """What the drop-in ``UpdateWeights`` says of a user's getter, at its first publish."""
    hook = rlsync.UpdateWeights(trainer.collector, policy_weights_getter=getter)
    try:
        hook()
    except RlsyncError as error:
        return Said("first publish", (error.what,))
    return Said("first publish", ())


def explain(trainer: Trainer, sync_map: dict[str, str | Source] | None = None) -> Said:
    """The remarks below the plan, as ``rlsync explain`` prints them."""
    sync = SyncWeights(sync_map or ACTOR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a map may be remarked on and warned of
        sync.register(trainer)
    lines = sync.plan.table().splitlines()
    return Said("explain", tuple(" ".join(line.split()) for line in lines if line.startswith(REMARKS)))


def doctor(trainer: Trainer) -> Said:
    """What ``rlsync doctor`` finds wrong."""
    findings = findings_of(examine(trainer, TIMEOUT_S))
    return Said("doctor", tuple(finding.found for finding in findings if finding.verdict != "ok"))


def verify(trainer: Trainer) -> Said:
    """What ``VerifySync`` raises while training."""
    try:
        trainer.train()
    except RlsyncError as error:
        return Said("VerifySync", (error.what,))
    return Said("VerifySync", ())


def warned(trainer: Trainer) -> Said:
    """What rlsync warns of while training."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RlsyncWarning)
        trainer.train()
    own = [warning.message for warning in caught if issubclass(warning.category, RlsyncWarning)]
    return Said("warning", tuple(str(message).splitlines()[0] for message in own))

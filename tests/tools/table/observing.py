"""What rlsync does with a collector, seen in a short training whose policy is a canary."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync import BoundStaleness, Every, LogPolicyLag, RlsyncError, SyncWeights, VerifySync
from rlsync.core.errors import first_line
from tests.tools.parts import CanaryPolicy, make_dqn_trainer, make_small_canary
from tests.tools.table.row import Cells, Row

#: The columns.
AGES = "LogPolicyLag, BoundStaleness"
COLUMNS = ("weights by", "frames", AGES, "VerifySync")
BATCHES = 4

Made = AbstractContextManager[BaseCollector]
Make = Callable[[CanaryPolicy], Made]


def row(collector: str, scheme: str, make: Make, more: str = "") -> Row:
    """A row of the table.

    Args:
        collector: its name in TorchRL.
        scheme: what carries its weights, as a user writes it; empty if nothing was given.
        make: makes it, with a canary as its policy; the collector ends with the block.
        more: what else there is to know.
    """
    name = f"`{collector}`, {more}" if more else f"`{collector}`"
    return Row("collectors", (name, scheme and f"`{scheme}`"), partial(observed, make))


def observed(make: Make) -> Cells:
    """What rlsync does with a collector, by column."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            collector = stack.enter_context(make(make_small_canary().fill(1)))
        except RlsyncError as error:
            return {"weights by": f"refused: {first_line(error)}"}
        trainer = make_dqn_trainer(collector, total_frames=BATCHES * 20)
        trainer.canary = make_small_canary()
        return _with_hooks(trainer)


def _with_hooks(trainer: Trainer) -> Cells:
    hook = SyncWeights({"policy": "canary"})
    batches: list[TensorDictBase] = []

    def renew() -> None:
        trainer.canary.fill(hook.version + 1)

    trainer.register_op("setup", renew)
    trainer.register_op("post_steps", renew)
    trainer.register_op("batch_process", lambda batch: batches.append(batch.clone()) or batch)
    cells = {"weights by": _registered(lambda: hook.register(trainer))}
    if cells["weights by"]:
        return cells
    carrier = re.split("[:,]", hook.plan.transport)[0]
    cells["weights by"] = carrier.removeprefix(f"{type(trainer.collector).__name__}.")
    promised = "stamps may be wrong" not in hook.plan.summary()
    verify = VerifySync(hook, when=Every(1, "batches"))
    ages = (LogPolicyLag(hook), BoundStaleness(hook, 100))
    said = [_registered(partial(of_ages.register, trainer)) or "yes" for of_ages in ages]
    cells[AGES] = "; ".join(dict.fromkeys(said))
    cells["VerifySync"] = _registered(lambda: verify.register(trainer)) or "yes"
    trainer.train()
    cells["frames"] = stamps(batches) if promised else "stamps may be wrong"
    return cells


def _registered(register: Callable[[], object]) -> str:
    try:
        register()
    except RlsyncError as error:
        return "refused: " + next((short for said, short in _SHORT.items() if said in error.what), error.what)
    return ""


#: The column says the rest of what these errors say.
_SHORT = {"cannot be asked what": "cannot be asked", "frames do not carry the version": "no stamps"}


def stamps(batches: list[TensorDictBase]) -> str:
    """What the frames say, held against the canary in them."""
    if any(key not in batch.keys(True) for batch in batches for key in _KEYS):
        return "no stamp"
    wrong = 0
    seen = set()
    for batch in batches:
        columns = [batch[key].flatten().tolist() for key in (*_KEYS, "canary_min", "canary_max")]
        frames = list(zip(*columns, strict=True))
        wrong += sum(len(set(frame)) > 1 for frame in frames)
        seen |= {frame[0] for frame in frames}
    if wrong:
        return "wrong stamps"
    return "exact" if len(seen) > 1 else "never synced"


_KEYS = ("policy_version", ("next", "policy_version"))

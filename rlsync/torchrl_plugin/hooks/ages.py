"""How old frames are when the learner consumes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlsync.core.ledger import Ledger
from rlsync.torchrl_plugin.compat.stamps import STAMP

UNKNOWN = -1  #: the age of a frame that nobody knows


@dataclass(frozen=True, slots=True)
class Staleness:
    """The age of frames, one int64 entry a frame; -1 where it is unknown.

    ``versions`` counts no numbers that were lost with a killed learner; ``optim_steps`` are those since the
    stamped version was published.
    """

    versions: Tensor
    optim_steps: Tensor


def stamps_of(batch: TensorDictBase, newest: int) -> Tensor:
    """The version of each frame; -1 where it names none, as recorded ones do, or is another learner's."""
    stamps = batch.get(STAMP, None)
    if stamps is None:
        return torch.full(batch.shape, UNKNOWN, dtype=torch.int64, device=batch.device)
    return stamps.masked_fill((stamps < 0) | (stamps > newest), UNKNOWN)


def counts_by_age(stamps: Tensor, ledger: Ledger, newest: int) -> Counter[int]:
    """How many of these stamps were how many versions old when ``newest`` was the learner's version."""
    versions, counts = stamps[(stamps >= 0) & (stamps <= newest)].unique(return_counts=True)
    since, *ages = ledger.ages([newest, *versions.tolist()])
    frames: Counter[int] = Counter()
    for age, count in zip(ages, counts.tolist(), strict=True):
        frames[age - since] = count
    return frames


def staleness_of(batch: TensorDictBase, ledger: Ledger, newest: int, optim_steps: int) -> Staleness:
    """How old the frames of a batch of any shape are, if ``optim_steps`` steps are done now."""
    stamps = stamps_of(batch, newest).flatten()
    versions, place = stamps.unique(return_inverse=True)
    steps_since: list[int] = []
    for version in versions.tolist():
        since = ledger.optim_steps_since(version, optim_steps)
        if since is None:
            since = UNKNOWN
        steps_since.append(since)
    steps = torch.tensor(steps_since, dtype=torch.int64, device="cpu")
    # One that was published in the background may be newer than what the ledger has recorded.
    known = torch.tensor(ledger.ages(versions.tolist()), dtype=torch.int64, device="cpu")
    ages = known + (newest - ledger.version)
    age = torch.where(stamps == UNKNOWN, UNKNOWN, ages.to(stamps.device)[place])
    return Staleness(age, steps.to(stamps.device)[place])

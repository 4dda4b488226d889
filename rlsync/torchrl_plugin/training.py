"""What a trainer trains with, as the floors below take it."""

from __future__ import annotations

from torch import nn
from torchrl.trainers import Trainer

from rlsync.sync.trained import Training
from rlsync.torchrl_plugin.compat.trainers import optimizers


def training_of(trainer: object) -> Training:
    """The optimizers and the loss of a trainer; none of an object that is no Trainer.

    Args:
        trainer: the root of a map's sources.
    """
    if not isinstance(trainer, Trainer):
        return Training()

    def losses() -> dict[str, nn.Module]:
        loss = trainer.loss_module
        return {"loss_module": loss} if isinstance(loss, nn.Module) else {}

    return Training(lambda: optimizers(trainer), losses)

"""resolve: the plan of a sync map on a trainer; and what a trainer trains with."""

from __future__ import annotations

from torch import nn
from torchrl.trainers import Trainer

from rlsync.core.plan import SyncPlan
from rlsync.sync.resolve import SyncMap, bind_routes, plan_of, with_training
from rlsync.sync.trained import Training
from rlsync.torchrl_plugin.collectors.choose import endpoint_of
from rlsync.torchrl_plugin.compat.trainers import optimizers


def resolve(sync_map: SyncMap, trainer: Trainer) -> SyncPlan:
    """The plan of ``sync_map`` on ``trainer``, leaf by leaf, without changing either.

    Args:
        sync_map: ``{destination path on the collector: source path on the trainer}``; a
            :class:`Source` instead of a string declares a cast or exclusions.
        trainer: the trainer, with its collector.

    Returns:
        The plan; :meth:`SyncPlan.check` raises what keeps it from being carried out.

    Raises:
        SyncMapError: a path is wrong, or leads to weights that are not trained.
        ConfigError: the map is no mapping, or some of the collector's schemes are boards and some are not.

    Example:
        >>> from torch import nn
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(loss_module=nn.Linear(2, 1), collector=object())
        >>> resolve({"policy": "loss_modul"}, trainer)
        Traceback (most recent call last):
        ...
        rlsync.core.errors.SourceNotFound: no 'loss_modul' on the trainer (SimpleNamespace)
          where  path 'loss_modul', sync map, entry 1
          cure   did you mean 'loss_module'? the trainer has: loss_module, collector
    """
    endpoint = endpoint_of(trainer.collector)
    bound = bind_routes(sync_map, trainer, endpoint)
    return with_training(plan_of(bound, endpoint), bound, trainer, training_of(trainer))


def training_of(trainer: object) -> Training:
    """The optimizers and the loss of a trainer; none of an object that is no Trainer."""
    if not isinstance(trainer, Trainer):
        return Training()

    def losses() -> dict[str, nn.Module]:
        loss = trainer.loss_module
        return {"loss_module": loss} if isinstance(loss, nn.Module) else {}

    return Training(lambda: optimizers(trainer), losses)

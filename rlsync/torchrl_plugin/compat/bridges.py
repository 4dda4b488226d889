"""What TorchRL's Trainer asks of a collector, for the collectors that do not have it.

Written against torchrl 0.14.1 (2026-11). ``Trainer.train`` reads ``init_random_frames`` from every collector.
With ``async_collection`` it calls ``getattr_rb``. Remove an entry when its class has the name itself.
"""

from __future__ import annotations

import weakref
from typing import Any

from torchrl.collectors import AsyncBatchedCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector, RPCCollector


def bridge_for_trainer(collector: object) -> None:
    """Give ``collector`` what ``Trainer.train`` asks for and its class lacks; a second call changes nothing.

    Args:
        collector: the collector of a trainer. One that lacks nothing is left as it is.
    """
    for kind, bridges in _BRIDGES.items():
        if isinstance(collector, kind):
            for bridge in bridges:
                bridge(collector)


def _init_random_frames(collector: Any) -> None:
    # The learner learns from the first batch on; workers that act at random count those frames themselves.
    vars(collector).setdefault("init_random_frames", 0)


def _init_random_frames_of_nodes(collector: Any) -> None:
    shares = [arguments.get("init_random_frames", 0) for arguments in collector.collector_kwargs]
    vars(collector).setdefault("init_random_frames", sum(max(0, share) for share in shares))


def _getattr_rb(collector: Any) -> None:
    ref = weakref.ref(collector)

    def getattr_rb(attr: str) -> Any:
        present = ref()
        if present is None:
            raise ReferenceError("the collector is gone")
        return getattr(present.replay_buffer, attr)

    vars(collector).setdefault("getattr_rb", getattr_rb)


#: What is added to a collector, by its kind.
_BRIDGES = {
    AsyncBatchedCollector: (_init_random_frames, _getattr_rb),
    DistributedCollector: (_init_random_frames_of_nodes,),
    RPCCollector: (_init_random_frames_of_nodes,),
    RayCollector: (_init_random_frames_of_nodes,),
}

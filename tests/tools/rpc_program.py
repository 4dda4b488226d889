"""What an RPCCollector does, for test_distributed_collectors.py: torch makes one network of RPC a process."""

from __future__ import annotations

import sys

from torchrl.collectors.distributed import RPCCollector

from rlsync import BoardScheme, BoundStaleness, ConfigError, SyncWeights
from tests.laws.test_canary import Census
from tests.tools.parts import child_pids, make_small_canary, wait_until
from tests.torchrl_plugin.test_distributed_collectors import CANARY, ended, make_nodes, with_canary


def refused() -> None:
    """On a board."""
    try:
        make_nodes(
            RPCCollector, make_small_canary(), workers=1, weight_sync_schemes={"policy": BoardScheme()}
        )
    except ConfigError as error:
        sys.stdout.write(f"{error}\n")
    sys.stdout.write(f"left: {not wait_until(lambda: not child_pids(), 60)}\n")


def stamped() -> None:
    """With TorchRL's own scheme, by the learner."""
    with ended(make_nodes(RPCCollector, make_small_canary(), sync=True, workers=1)) as collector:
        trainer, canary = with_canary(collector)
        hook = SyncWeights(CANARY)
        hook.register(trainer)
        BoundStaleness(hook, 1, "raise").register(trainer)
        census, batches = Census(), iter(collector)
        for _ in range(10):
            canary.fill(hook.version + 1)
            hook.publish()
            census.take(next(batches))
        census.assert_clean()
        sys.stdout.write(hook.plan.notes[0])


if __name__ == "__main__":
    {"refused": refused, "stamped": stamped}[sys.argv[1]]()

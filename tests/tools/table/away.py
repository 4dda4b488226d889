"""Collectors whose workers may be on other hosts: in this process, or for RPC and Ray in a program.

`python -m tests.tools.table.away RayCollector BoardScheme ''` prints the cells of one row as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torchrl.collectors import BaseCollector
from torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)

from rlsync import BoardScheme, RayBoardScheme
from tests.tools.parts import CanaryPolicy
from tests.tools.parts.namespaces import in_a_session
from tests.tools.programs import ENDS_WITHIN_S
from tests.tools.table.observing import Made, Make, observed, row
from tests.tools.table.row import Cells, Row
from tests.torchrl_plugin.test_distributed_collectors import ended, killed, make_nodes

End = Callable[[BaseCollector], AbstractContextManager[BaseCollector]]


def _nodes(kind: type[BaseCollector], end: End, options: dict[str, Any], policy: CanaryPolicy) -> Made:
    return end(make_nodes(kind, policy, workers=1, **options))


def _board() -> dict[str, Any]:
    return {"weight_sync_schemes": {"policy": BoardScheme()}}


def _boards_on_nodes() -> dict[str, Any]:
    return {"sync": True, "weight_sync_schemes": {"policy": RayBoardScheme()}}


@contextmanager
def _actors(options: dict[str, Any], policy: CanaryPolicy) -> Iterator[BaseCollector]:
    from tests.tools.ray_cases import STAMPED, make_actors, own_ray

    with own_ray(), ended(make_actors(policy, STAMPED, **options)) as collector:
        yield collector


def _stock(kind: type[BaseCollector], end: End, **options: Any) -> Make:
    return partial(_nodes, kind, end, options)


#: Rows that need a program of their own, by collector, scheme, and what else there is to know: torch makes
#: one network of RPC a process, Ray opens ports, and TorchRL's distributed scheme hangs in a forked worker.
#: The trainer ends what stands under nullcontext.
_IN_A_PROGRAM: dict[tuple[str, str, str], Make] = {
    (DistributedCollector.__name__, "", "sync=True"): _stock(DistributedCollector, nullcontext, sync=True),
    (DistributedCollector.__name__, "", "sync=False"): _stock(DistributedCollector, nullcontext, sync=False),
    (DistributedSyncCollector.__name__, "", ""): _stock(DistributedSyncCollector, killed),
    (RPCCollector.__name__, "BoardScheme", ""): _stock(RPCCollector, ended, **_board()),
    (RPCCollector.__name__, "", "sync=True"): _stock(RPCCollector, ended, sync=True),
    (RayCollector.__name__, "BoardScheme", ""): partial(_actors, _board()),
    (RayCollector.__name__, "RayBoardScheme", "sync=True"): partial(_actors, _boards_on_nodes()),
    (RayCollector.__name__, "", ""): partial(_actors, {}),
}


def _in_a_program(*which: str) -> Cells:
    command = [sys.executable, "-m", "tests.tools.table.away", *which]
    ran, _ = in_a_session(command, alone=which[0] == RayCollector.__name__, timeout_s=ENDS_WITHIN_S / 2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return dict(json.loads(ran.stdout.splitlines()[-1]))


def _row_in_a_program(which: tuple[str, str, str]) -> Row:
    collector, scheme, more = which
    named = row(collector, scheme, _IN_A_PROGRAM[which], more)
    return Row(named.table, named.name, partial(_in_a_program, *which))


def _on_a_board(*, sync: bool) -> Row:
    make = _stock(DistributedCollector, ended, sync=sync, **_board())
    return row("DistributedCollector", "BoardScheme", make, f"sync={sync}")


ROWS = (_on_a_board(sync=True), _on_a_board(sync=False), *map(_row_in_a_program, _IN_A_PROGRAM))

if __name__ == "__main__":
    print(json.dumps(observed(_IN_A_PROGRAM[tuple(sys.argv[1:])])))  # noqa: T201

"""Collectors whose workers may be on other hosts: in this process, or for RPC and Ray in a program.

`python -m tests.table.away ray BoardScheme` prints the cells of one row as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torchrl.collectors import BaseCollector
from torchrl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RayCollector,
    RPCCollector,
)

from rlsync import BoardScheme
from tests.parts import CanaryPolicy
from tests.parts.namespaces import ALONE, may_unshare
from tests.parts.programs import ENDS_WITHIN_S
from tests.table.observing import Made, observed, row
from tests.table.row import Cells, Row
from tests.test_distributed_collectors import ended, killed, make_nodes

ROOT = Path(__file__).parents[2]
End = Callable[[BaseCollector], AbstractContextManager[BaseCollector]]


def _nodes(kind: type[BaseCollector], end: End, options: dict[str, Any], policy: CanaryPolicy) -> Made:
    return end(make_nodes(kind, policy, workers=1, **options))


def _board() -> dict[str, Any]:
    return {"weight_sync_schemes": {"policy": BoardScheme()}}


@contextmanager
def _actors(options: dict[str, Any], policy: CanaryPolicy) -> Iterator[BaseCollector]:
    from tests.ray_cases import STAMPED, make_actors, one_ray

    with one_ray(), ended(make_actors(policy, STAMPED, **options)) as collector:
        yield collector


#: Rows that need a program of their own: torch makes one network of RPC a process, and Ray opens ports.
_IN_A_PROGRAM: dict[str, Callable[[str], Callable[[CanaryPolicy], Made]]] = {
    RPCCollector.__name__: lambda scheme: partial(
        _nodes, RPCCollector, ended, {"sync": True} | (_board() if scheme else {})
    ),
    RayCollector.__name__: lambda scheme: partial(_actors, _board() if scheme else {}),
}


def _in_a_program(collector: str, scheme: str) -> Cells:
    command = [sys.executable, "-m", "tests.table.away", collector, scheme]
    if collector == RayCollector.__name__ and may_unshare("-n"):
        command = [*ALONE, *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    ended_program = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=ENDS_WITHIN_S
    )
    assert ended_program.returncode == 0, ended_program.stdout + ended_program.stderr
    return dict(json.loads(ended_program.stdout.splitlines()[-1]))


def _row_in_a_program(kind: type[BaseCollector], scheme: str, more: str = "") -> Row:
    named = row(kind.__name__, scheme, lambda policy: None, more)
    return Row(named.table, named.name, partial(_in_a_program, kind.__name__, scheme))


_NODES = DistributedCollector
ROWS = (
    *(
        row(
            _NODES.__name__,
            "BoardScheme",
            lambda policy, sync=sync: _nodes(_NODES, ended, {"sync": sync} | _board(), policy),
            f"sync={sync}",
        )
        for sync in (True, False)
    ),
    *(
        row(_NODES.__name__, "", partial(_nodes, _NODES, killed, {"sync": sync}), f"sync={sync}")
        for sync in (True, False)
    ),
    row(DistributedSyncCollector.__name__, "", partial(_nodes, DistributedSyncCollector, killed, {})),
    _row_in_a_program(RPCCollector, "BoardScheme"),
    _row_in_a_program(RPCCollector, "", "sync=True"),
    _row_in_a_program(RayCollector, "BoardScheme"),
    _row_in_a_program(RayCollector, ""),
)

if __name__ == "__main__":
    collector, scheme = sys.argv[1:]
    print(json.dumps(observed(_IN_A_PROGRAM[collector](scheme))))  # noqa: T201

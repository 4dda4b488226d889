"""The state of a run's nodes, in a file that others can read while it runs. This file does not need Ray."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlsync.core.whole_file import write_whole
from rlsync.transport.contract import ReaderStatus


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node whose workers act."""

    node: str  # where it is
    version: int  # the newest on its board; 0 while it has said nothing
    workers: tuple[ReaderStatus, ...]  # as it said last

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.node}: version {self.version}", *(f"  {worker}" for worker in self.workers)]
        )


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A run on a cluster at one moment.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "status.json"
        >>> status = ClusterStatus(4242, 0.0, 7, (NodeStatus("a", 7, ()),), lost=0, rollouts_lost=0)
        >>> status.write(file)
        >>> ClusterStatus.read(file) == status
        True
    """

    pid: int  # of the learner
    at_s: float  # when this was written, seconds since the epoch
    version: int  # the newest published one
    nodes: tuple[NodeStatus, ...]  # those whose workers act
    lost: int  # agents that were lost so far
    rollouts_lost: int  # rollouts known to have been lost with them

    @property
    def workers(self) -> tuple[ReaderStatus, ...]:
        return tuple(worker for node in self.nodes for worker in node.workers)

    def __str__(self) -> str:
        age_s = max(0.0, time.time() - self.at_s)
        nodes = "1 node acts" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes act"
        headline = f"newest version {self.version}; {nodes}, {self.lost} lost so far; told {age_s:.0f} s ago"
        return "\n".join([headline, *map(str, self.nodes)])

    def write(self, file: Path) -> None:
        """Write it, so that a reader finds the old or the new file whole."""
        text = json.dumps(asdict(self))
        write_whole(file, lambda beside: beside.write_text(text))

    @classmethod
    def read(cls, file: Path) -> ClusterStatus:
        fields: dict[str, Any] = json.loads(file.read_text())
        nodes = tuple(
            NodeStatus(it["node"], it["version"], tuple(ReaderStatus(**worker) for worker in it["workers"]))
            for it in fields.pop("nodes")
        )
        return cls(nodes=nodes, **fields)

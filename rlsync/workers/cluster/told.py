"""What a run on a cluster tells of its nodes, in a file that others can read while it runs."""

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
    """A node whose workers act.

    Args:
        node: where it is.
        version: the newest version on its board; 0 while it has said nothing.
        workers: its workers, as it said last.
    """

    node: str
    version: int
    workers: tuple[ReaderStatus, ...]

    def __str__(self) -> str:
        return "\n".join(
            [f"{self.node}: version {self.version}", *(f"  {worker}" for worker in self.workers)]
        )


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A run on a cluster at one moment.

    Args:
        pid: the learner's process.
        at_s: when this was told, seconds since the epoch.
        version: the newest published version.
        nodes: those whose workers act.
        lost: agents that were lost so far.
        rollouts_lost: rollouts known to have been lost with them.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "told.json"
        >>> told = ClusterStatus(4242, 0.0, 7, (NodeStatus("a", 7, ()),), lost=0, rollouts_lost=0)
        >>> told.write(file)
        >>> ClusterStatus.read(file) == told
        True
    """

    pid: int
    at_s: float
    version: int
    nodes: tuple[NodeStatus, ...]
    lost: int
    rollouts_lost: int

    @property
    def workers(self) -> tuple[ReaderStatus, ...]:
        """The workers of all nodes."""
        return tuple(worker for node in self.nodes for worker in node.workers)

    def __str__(self) -> str:
        age_s = max(0.0, time.time() - self.at_s)
        nodes = "1 node acts" if len(self.nodes) == 1 else f"{len(self.nodes)} nodes act"
        told = f"newest version {self.version}; {nodes}, {self.lost} lost so far; told {age_s:.0f} s ago"
        return "\n".join([told, *map(str, self.nodes)])

    def write(self, file: Path) -> None:
        """Write it, so that a reader finds the old or the new file whole.

        Args:
            file: where.
        """
        text = json.dumps(asdict(self))
        write_whole(file, lambda beside: beside.write_text(text))

    @classmethod
    def read(cls, file: Path) -> ClusterStatus:
        """What :meth:`write` wrote.

        Args:
            file: where.
        """
        said: dict[str, Any] = json.loads(file.read_text())
        nodes = tuple(
            NodeStatus(it["node"], it["version"], tuple(ReaderStatus(**worker) for worker in it["workers"]))
            for it in said.pop("nodes")
        )
        return cls(nodes=nodes, **said)

"""The endpoints of an inference server, and of the AsyncBatchedCollector that has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from rlsync.core.errors import ConfigError
from rlsync.tensors.layout import LeafSpec
from rlsync.torchrl_plugin.collectors.board import BoardEndpoint
from rlsync.torchrl_plugin.collectors.foreign import ForeignEndpoint
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.served_server import specs_of

#: The argument of a server, or of the collector that has one, that puts it on a board.
WITH_A_BOARD_SERVER = "weight_sync=rlsync.BoardScheme()"


class ServerEndpoint(BoardEndpoint):
    """A server that reads a board: one reader, which adopts between two batches."""

    def __init__(self, scheme: BoardScheme, holder: object) -> None:
        self._scheme = scheme
        self._holder = holder
        self._served = scheme.serving(holder)
        super().__init__(scheme.publisher, {self._served.destination: scheme.adopt})

    def connect(self, publish_default: Callable[[], object]) -> None:
        self._scheme.init_on_sender(model_id=self._served.destination, context=self._holder)
        super().connect(publish_default)

    @property
    def description(self) -> str:
        place = "a process" if self._served.in_a_process else "a thread, with a policy of its own"
        return f"board: an inference server in {place}, {self._adopted()} between batches, one copy a publish"

    @property
    def in_flight(self) -> bool:
        return True  # the server answers while the learner uses a batch

    @property
    def stamped(self) -> bool:
        return self._served.stamped

    @property
    def notes(self) -> tuple[str, ...]:
        if self.stamped:
            return ()
        return (
            "frames are not stamped: leave policy_version_key at 'policy_version', and declare it in the "
            "response_spec of a transport that has one",
        )


class OtherServerEndpoint(ForeignEndpoint):
    """A server whose weights do not come from a board."""

    def __init__(self, collector: object) -> None:
        super().__init__(collector, [])

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"this transport {self.unkept}; {WITH_A_BOARD_SERVER} keeps them",)

    @property
    def unkept(self) -> str:
        return (
            "does not keep rlsync's promises: policy_version on frames is the server's own count of updates, "
            "not the published version"
        )

    @property
    def in_flight(self) -> bool:
        return True

    def specs(self, destination: str) -> list[LeafSpec] | None:
        return specs_of(self.collector)

    def verification(self) -> NoReturn:
        raise ConfigError(
            "this inference server cannot be asked what it acts with",
            f"VerifySync.register; the collector is a {type(self.collector).__name__}",
            f"{WITH_A_BOARD_SERVER} lets it answer",
        )

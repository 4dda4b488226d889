"""The endpoints of collectors and inference servers that read a board."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from rlsync.core.errors import DestinationNotFound
from rlsync.core.path import Path, parse
from rlsync.core.plan import no_destination
from rlsync.core.user_input import did_you_mean, nearest_name
from rlsync.sync.acts import Acting
from rlsync.sync.adopter import Adopt
from rlsync.sync.endpoint import Endpoint
from rlsync.sync.verification import Verification
from rlsync.sync.workers_publisher import BoardCollector, WorkersPublisher
from rlsync.tensors.layout import LeafSpec
from rlsync.torchrl_plugin.compat.collectors import collects_in_the_background
from rlsync.torchrl_plugin.ending.waits import await_newest
from rlsync.torchrl_plugin.scheme import BoardScheme
from rlsync.torchrl_plugin.worker import AdoptAt
from rlsync.transport.rules import Key


class BoardEndpoint(Endpoint):
    """Workers that read one board. Destinations that ``adopt`` does not name adopt by alias."""

    publisher: WorkersPublisher

    def __init__(
        self, publisher: WorkersPublisher, adopt: Mapping[str, Adopt], adopt_at: AdoptAt = "rollout"
    ) -> None:
        # one list, which grows
        self.publisher = publisher
        self.destinations = publisher.destinations
        self.adopts_within_rollouts = adopt_at != "rollout"
        self._adopt = adopt

    @property
    def stamped(self) -> bool:
        return True

    @property
    def description(self) -> str:
        return f"board: {self.num_workers} worker processes, {self._adopted()}, one copy a publish"

    @property
    def notes(self) -> tuple[str, ...]:
        within = "workers adopt at every policy call: one rollout may have several versions"
        if self.adopts_within_rollouts:
            return (within,)
        return ()

    def _adopted(self) -> str:
        modes: set[Adopt] = set()
        words: list[str] = []
        for name in self.destinations:
            mode = self._adopt.get(name, "alias")
            modes.add(mode)
            words.append(f"{mode} ({name})")
        if len(modes) == 1:
            return f"adopted by {modes.pop()}"
        return "adopted by " + ", ".join(words)

    @property
    def num_workers(self) -> int:
        return self.publisher.collector.num_workers

    @property
    def in_flight(self) -> bool:
        collector = self.publisher.collector
        return isinstance(collector, BoardCollector) or collects_in_the_background(collector)

    def connect(self, publish_default: Callable[[], object]) -> None:
        self.publisher.publish_default = publish_default

    def locate(self, path: Path, where: str) -> Key:
        inside = [name for name in self.destinations if path.startswith(parse(name))]
        if not inside:
            raise no_destination(str(path), where, self.destinations)
        destination = max(inside, key=len)
        prefix = path.below(parse(destination)).leaf_prefix()
        self._check_prefix(destination, prefix, path, where)
        return destination, prefix

    def _check_prefix(self, destination: str, prefix: str, path: Path, where: str) -> None:
        specs = self.specs(destination)
        if not prefix or specs is None:
            return
        parents: set[str] = set()
        for spec in specs:
            if spec.name == prefix or spec.name.startswith(prefix + "."):
                return
            parents.add(spec.name.rpartition(".")[0])
        parents.discard("")
        near = nearest_name(prefix, parents)
        problem = f"no leaves under {prefix!r} in {destination!r}"
        cure = did_you_mean(near) + f"modules: {', '.join(sorted(parents))}"
        raise DestinationNotFound(problem, f"path {str(path)!r}, {where}", cure)

    def specs(self, destination: str) -> list[LeafSpec] | None:
        return self.publisher.specs(destination)

    def acting(self, sent: Collection[str]) -> Acting:
        return self.publisher.acting()

    def wait(self, timeout_s: float) -> None:
        await_newest(self.publisher, timeout_s)

    def verification(self) -> Verification:
        return Verification(self.publisher, lambda: self.num_workers)


class ServerEndpoint(BoardEndpoint):
    """A server that reads a board: one reader, which adopts between two batches."""

    def __init__(self, scheme: BoardScheme, holder: object) -> None:
        self._scheme = scheme
        self._holder = holder
        self._served = scheme.link.serve(holder, scheme)
        super().__init__(scheme.publisher, {self._served.destination: scheme.adopt})

    def connect(self, publish_default: Callable[[], object]) -> None:
        self._scheme.init_on_sender(model_id=self._served.destination, context=self._holder)
        super().connect(publish_default)

    @property
    def description(self) -> str:
        if self._served.in_a_process:
            place = "a process"
        else:
            place = "a thread, with a policy of its own"
        return f"board: an inference server in {place}, {self._adopted()} between batches, one copy a publish"

    in_flight = True  # the server answers while the learner uses a batch

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

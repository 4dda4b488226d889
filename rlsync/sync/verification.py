"""Whether the weights that act are those that were published: what is asked, answered and compared.

A question is about the newest published version. A worker answers at the end of the first rollout that it
makes with that version or a later one: the digests of its buffers and extra state as they were before the
rollout, if it adopted them for it, and the digests of its parameters after it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

from torch import Tensor

from rlsync.core import machine
from rlsync.core.errors import ConfigError
from rlsync.sync.publisher import Publisher
from rlsync.sync.sample import Image, Judgement, Sample, Shadow, sampling
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Kind, Layout
from rlsync.tensors.leaves import Leaf
from rlsync.transport.contract import Note, Subscriber

#: ``judge(sample, images)``: see :func:`rlsync.sync.behaviour.judge`.
Judge = Callable[[Sample, Sequence[Image]], Judgement]

_IMAGES = 3  #: the version before the question, the newest one and the next
#: The learner compares outputs if its copies of the model take less: of each image, and in the call of a part.
_SHARE_OF_FREE_MEMORY = 0.5
_COPIES = _IMAGES + 1
_IMAGE_BYTES = 1 << 27  #: more while they take no more: with fast updates, rollouts begin later

#: ``digests(parameters)``: of what acts now, by destination: of the parameters, or of all other leaves.
Digests = Callable[[bool], dict[str, int]]


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """What one worker answers: digests by destination."""

    asked: int  #: the number of the question
    version: int  #: what it acted with
    kept: dict[str, int]  #: digests of the parameters, taken after the rollout
    #: Digests of buffers and extra state, taken before the rollout; empty if the worker did not adopt for it.
    arrived: dict[str, int]
    spent_s: float  #: what the digests took

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WorkerAnswer:
        return cls(**json.loads(data))


@dataclass(frozen=True, slots=True)
class Deviation:
    """A worker that does not act with what was published."""

    what: str  #: what is wrong, with the version
    where: str  #: the worker, its pid and the destination
    cure: str = "find the code that writes to the worker's weights or keeps it from adopting; restart the worker"


#: Where the weights arrived, and something else is computed with them.
OUTPUTS_CURE = (
    "rlsync explain lists how the two modules differ; let the policy read its weights at each call, through "
    "the same layers in the same order"
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a question has brought to light so far."""

    done: bool  #: whether there is nothing left to wait for
    answered: int = 0  #: workers that have answered
    whole: int = 0  #: those among them whose answers covered buffers and extra state
    waiting: tuple[str, ...] = ()  #: living workers that have not answered yet, in words
    deviations: tuple[Deviation, ...] = ()
    #: How the outputs of each worker that sent some compare with the learner's, if that was asked.
    behaviour: tuple[Judgement, ...] = ()
    #: What the question has cost, if outputs were compared: the learner's time, and the slowest worker's.
    comparing_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prints:
    """Digests of a destination: of its parameters, and of its buffers and extra state."""

    parameters: int
    others: int

    @classmethod
    def of(cls, leaves: Iterable[tuple[Kind, Tensor]]) -> Prints:
        parameters_and_others: tuple[list[Tensor], list[Tensor]] = [], []
        for kind, tensor in leaves:
            parameters_and_others[kind != "parameter"].append(tensor)
        return cls(*map(digest, parameters_and_others))


def _deviations(published: Mapping[str, Prints], answer: WorkerAnswer, who: str) -> list[Deviation]:
    """Compare one worker's answer with what was published under the version that it is about."""
    deviations = []
    for destination, prints in published.items():
        wrong = []
        if answer.kept.get(destination) != prints.parameters:
            wrong.append("parameters")
        if answer.arrived and answer.arrived.get(destination) != prints.others:
            wrong.append("buffers or extra state")
        if wrong:
            leaves = " and the ".join(wrong)
            problem = f"the {leaves} that act are not those published as version {answer.version}"
            deviations.append(Deviation(problem, f"destination {destination!r} of {who}"))
    return deviations


@dataclass(eq=False)
class Verification:
    """Asks the workers that read a publisher's transport what they act with.

    While answers are out, every published version is digested; at other times publishes cost no more.
    ConfigError if another verification asks this publisher's workers: two would share one question and accuse
    falsely.
    """

    publisher: Publisher
    num_workers: Callable[[], int]
    called: Callable[[int], str] = "worker {}".format

    def __post_init__(self) -> None:
        publisher = self.publisher
        if publisher.verified:
            problem = "the workers are verified already"
            cure = "register one VerifySync for each SyncWeights"
            raise ConfigError(problem, "a second verification of one collector", cure)
        publisher.verified = True
        publisher.seen.append(self._see)
        self._question = 0
        self._open = False
        self._published: dict[int, dict[str, Prints]] = {}
        self._watched_at: int | None = None  #: the newest version when :meth:`watch` was called
        self._judge: Judge | None = None
        self._lacking = ""  # why there is no room to compare outputs
        #: by version, in order; 0 is the one before the question
        self._images: dict[int, Image] = {}
        self._judged: dict[int, Judgement] = {}
        self._spent_s: dict[int, float] = {}  #: of each worker that has answered

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time that the block takes, if outputs are compared."""
        compares = self.publisher.compares
        began = time.perf_counter()
        try:
            yield
        finally:
            if compares:
                self.publisher.comparing_s += time.perf_counter() - began

    def watch(self) -> None:
        """From the next publish on, copy what its sources hold.

        What a policy computed is compared with them, not with an image of them that may be wrong itself.
        """
        publisher = self.publisher
        if self._watched_at is None:
            underway = publisher.underway  # filled already, and not visible
            if underway is None:
                self._watched_at = publisher.version
            else:
                self._watched_at = underway.stamp.version
            self._begin_to_compare()
            publisher.comparing_s = 0.0

    def _begin_to_compare(self) -> None:
        self._lacking = machine.lacking(_COPIES * self.publisher.image_bytes, _SHARE_OF_FREE_MEMORY)
        self.publisher.compares = not self._lacking

    @property
    def _keeps_images(self) -> bool:
        return self._judge is not None and not self._lacking

    @property
    def watched(self) -> bool:
        """Whether :meth:`watch` was called, and the version that :meth:`ask` asks about has its sources."""
        if self._watched_at is None:
            return False
        # A question about the next version is in time for its publish.
        return (
            self.publisher.version > self._watched_at
            or self.publisher.transport.newest_leaves() is None
        )

    def ask(self, judge: Judge | None = None) -> int:
        """Ask every worker anew.

        ``judge`` compares what its policy computed with what the sources held at the publish, or without
        :meth:`watch`, with what was published. Returns the lowest version wanted.
        """
        self.publisher.join()
        self._judge = judge
        self._open = True
        self._published = {}
        self._images = {}
        self._judged = {}
        self._spent_s = {}
        if judge is not None:
            self._watched_at = None
            self._begin_to_compare()
        with self._counted():
            return self._ask()

    def _ask(self) -> int:
        publisher = self.publisher
        newest = publisher.transport.newest_leaves()
        before = publisher.transport.leaves_before()
        if self._keeps_images:
            self._images[0] = {}
            if before is not None:
                self._images[0] = _copied(*before)
        if newest is not None:
            self._remember(publisher.transport.newest_stamp.version, *newest)
        # A transport that keeps no copy can be asked about the next version only.
        lowest = publisher.version + (newest is None)
        self._question = publisher.transport.ask(lowest)
        return lowest

    def hear(self) -> Found:
        """What the workers have answered so far; it compares each answer once."""
        with self._counted():
            news = self._hear()
        if not self._open:
            self._images = {}
            self.publisher.compares = self._watched_at is not None and not self._lacking
        if news.behaviour:
            slowest_s = max(self._spent_s.values(), default=0.0)
            news = replace(news, comparing_s=self.publisher.comparing_s + slowest_s)
        return news

    def _hear(self) -> Found:
        transport = self.publisher.transport
        answered = whole = 0
        waiting: list[str] = []
        wrong: list[Deviation] = []
        known = {status.reader: status for status in transport.status()}
        for worker in range(self.num_workers()):
            status = known.get(worker)
            answer = self._answer(worker)
            if answer is None:
                if status is None or status.alive:  # SyncWeights.wait reports the dead
                    waiting.append(str(status or f"worker {worker}, which never attached"))
                continue
            answered += 1
            whole += bool(answer.arrived)
            self._spent_s.setdefault(worker, answer.spent_s)
            pid = "unknown" if status is None else status.pid
            who = f"{self.called(worker)} (pid {pid})"
            other_weights = _deviations(self._published[answer.version], answer, who)
            judged = self._judgement(worker)
            # With other weights, other outputs are no news.
            if other_weights:
                wrong += other_weights
            else:
                wrong += [Deviation(problem, who, OUTPUTS_CURE) for problem in judged.wrong]
        self._open = self._open and bool(waiting)
        behaviour = tuple(self._judged.values())
        return Found(not waiting, answered, whole, tuple(waiting), tuple(wrong), behaviour)

    def _judgement(self, worker: int) -> Judgement:
        """Compare a worker's sample once."""
        if self._judge is not None and worker not in self._judged:
            why = "no sample of a version whose image was kept"
            if self._lacking:
                why = f"outputs: {self._lacking}"
            judged = Judgement(uncompared=(why,))
            note = self.publisher.transport.note(worker, Note.SAMPLE)
            if note is not None:
                sample = Sample.from_bytes(note)
                self._spent_s[worker] += sample.spent_s
                if sample.asked == self._question and sample.version in self._images:
                    before = max(version for version in self._images if version < sample.version)
                    images = (self._images[sample.version], self._images[before])
                    judged = self._judge(sample, images)
            self._judged[worker] = judged
        return self._judged.get(worker, Judgement())

    def _answer(self, worker: int) -> WorkerAnswer | None:
        """What a worker has answered to the present question; None if nothing yet."""
        note = self.publisher.transport.note(worker, Note.ANSWER)
        if note is None:
            return None
        answer = WorkerAnswer.from_json(note)
        if answer.asked != self._question or answer.version not in self._published:
            return None
        return answer

    def _see(self, version: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        with self._counted():
            self._remember(version, layout, tensors)

    def _remember(self, version: int, layout: Layout, tensors: Sequence[Tensor | None]) -> None:
        """Digest the newest version: the transport's copy, or what was given where it keeps none."""
        if not self._open:
            return
        # The copy: buffers may have changed since, while a thread was copying the rest.
        layout, tensors = self.publisher.transport.newest_leaves() or (layout, tensors)
        leaves: dict[str, list[tuple[Kind, Tensor]]] = {}
        kinds: dict[str, dict[str, Kind]] = {}
        for entry in layout.entries:
            destination = entry.destination
            leaf = entry.leaf
            tensor = tensors[entry.owner]
            if destination not in kinds:
                specs = self.publisher.specs(destination) or ()
                kinds[destination] = {spec.name: spec.kind for spec in specs}
            if not leaf.excluded and tensor is not None:  # a worker keeps its own value of those
                kind = kinds[destination].get(leaf.name, leaf.kind)
                leaves.setdefault(destination, []).append((kind, tensor.to(leaf.dtype)))
        self._published[version] = {name: Prints.of(each) for name, each in leaves.items()}

        if self._keeps_images:
            size = 1 + sum(tensor.nbytes for tensor in tensors if tensor is not None)
            at_most = max(_IMAGES, min(_IMAGE_BYTES // size, 32))
            if len(self._images) < at_most:
                self._images[version] = _copied(layout, tensors, self.publisher.sources)


def _copied(
    layout: Layout, tensors: Sequence[Tensor | None], sources: Image | None = None
) -> Image:
    """A copy of a version, but of the leaves of which ``sources`` has one."""
    image = dict(sources or {})
    for entry in layout.entries:
        key = (entry.destination, entry.leaf.name)
        tensor = tensors[entry.owner]
        if key not in image and tensor is not None:
            image[key] = tensor.clone()
    return image


@dataclass(eq=False)
class Answers:
    """Answers the learner's questions about the version that acts, around each rollout of one subscriber."""

    subscriber: Subscriber
    digests: Digests
    #: the names of the leaves that versions bring to a destination
    arrive: Callable[[str], Collection[str]]
    fresh: bool = False  #: whether the next rollout is the first with its version
    shadow: Callable[[], Shadow] | None = None  #: how to call what acts once more
    answered: int = 0  #: the last question that was answered

    @contextmanager
    def around(self, version: int) -> Iterator[None]:
        """Answer for the rollout in the block.

        Buffers are digested before it, if they have just arrived, for forward() changes them; parameters must
        still be as published after it.
        """
        asked = self.subscriber.asked
        fresh = self.fresh
        self.fresh = False
        if asked in (0, self.answered):
            yield
            return
        began = time.perf_counter()
        arrived: dict[str, int] = {}
        if fresh:
            arrived = self.digests(False)
        spent_s = time.perf_counter() - began
        with ExitStack() as stack:
            if self.shadow is not None:
                sample = sampling(self.shadow(), asked, version, self.arrive, self.subscriber)
                stack.enter_context(sample)
            yield
        began = time.perf_counter()
        parameters = self.digests(True)
        spent_s += time.perf_counter() - began
        answer = WorkerAnswer(asked, version, parameters, arrived, spent_s)
        self.subscriber.leave_note(answer.to_json(), Note.ANSWER)
        self.answered = asked


def digests_of(leaves: Iterable[Leaf], names: Iterable[str], *, parameters: bool) -> int:
    """The digest of a module's live parameters, or of all its other leaves, in the order of ``names``."""
    live = {leaf.name: leaf for leaf in leaves if (leaf.kind == "parameter") is parameters}
    return digest(live[name].read() for name in names if name in live)

"""The contract of a transport: what a publisher calls on the learner's side, and an adopter on a worker's.

Everything above this floor talks to transports through these two protocols. The suite in
``rlsync/testing/test_transports.py`` holds every transport to the laws:

1. **Whole.** A publish makes a new version visible as a whole, or raises (or is coalesced) and changes
   nothing.
2. **Numbered by the caller.** The caller gives the stamp (generation and version). A stamp that is not
   greater than the newest one is refused. A transport never counts.
3. **Monotonic.** An adoption takes the newest version. What a subscriber acts with never falls, and a
   subscriber refuses a lower generation.
4. **Exact.** What an adoption hands out is what was published under that stamp, leaf for leaf. An entry
   given as ``None`` has the value that it had in the version before.
5. **Nobody waits.** Neither side waits for the other, however the other ended.

Who owns memory, and until when:

- A publish with ``later`` is joined by the caller before the next one, and before :meth:`Transport.lay_out`.
- The tensors given to :meth:`Transport.publish` are the caller's again when it returns, except those named in
  ``later``: these must not be written to before :meth:`Transport.join` returns. On an accelerator this means:
  not by what the caller queues before then.
- The views given to ``apply`` are the transport's. They are read-only. They stay as they are until ``apply``
  returns, or, if it returned true, until the subscriber's next adoption.
- What :meth:`Transport.newest_leaves` returns is the transport's, read-only, and good until the next publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from torch import Tensor

from rlsync.core.errors import ConfigError, RlsyncError, first_line
from rlsync.core.extensions import imported, transports
from rlsync.core.ledger import Stamp
from rlsync.core.user_input import check_choice
from rlsync.tensors.layout import Layout

#: ``apply(version, layout, views)`` writes the views of one version, one for each entry of the layout, into
#: what acts. It returns whether it goes on reading the views; then they stay as they are until the next
#: adoption.
Apply = Callable[[int, Layout, Sequence[Tensor]], bool]


class Note(Enum):
    """What a subscriber may leave for the learner to read at any time."""

    LEAVES = "leaves"  #: which leaves each destination has in this worker
    ANSWER = "answer"  #: what this worker acted with, when it was asked
    SAMPLE = "sample"  #: what its policy computed then, see rlsync.sync.behaviour
    ACTING = "acting"  #: which of its leaves do not act, as it found out before its first frame


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """What a transport knows of one reader."""

    reader: int  #: its number, a worker's index
    pid: int
    alive: bool  #: whether it still reads
    state: str  #: ``"running"``, ``"stopped"``, if that can be seen, or ``"dead"``
    adopted_version: int  #: the version it acts with; 0 before its first adoption
    lag_versions: int  #: newest published version minus the adopted one
    heartbeat_age_s: float  #: seconds since it last began a rollout

    def __str__(self) -> str:
        act = "acts" if self.alive else "acted"
        return (
            f"worker {self.reader} (pid {self.pid}, {self.state}, {act} with version {self.adopted_version}, "
            f"{self.lag_versions} behind, last seen {self.heartbeat_age_s:.1f} s ago)"
        )


@runtime_checkable
class TellsAtOnce(Protocol):
    """A transport that can tell what its readers act with without asking the system about each."""

    def adopted(self, below: int) -> list[int]:
        """The version that each reader with a number below this one adopted last, also one that has died since.

        0 where there is none, or it has left by itself.
        """

    def age_s(self, reader: int) -> float:
        """Seconds since a reader began a rollout."""

    def lives(self, reader: int) -> bool:
        """Whether a reader is attached and did not die."""


class Transport(Protocol):
    """The learner's end; used from one thread."""

    @property
    def handle(self) -> Handle:
        """What a worker needs to subscribe."""

    @property
    def layout(self) -> Layout | None:
        """What the coming publishes carry; ``None`` before :meth:`lay_out`."""

    @property
    def newest_stamp(self) -> Stamp:
        """The stamp that readers see; :data:`rlsync.core.ledger.NOTHING` before the first publish."""

    @property
    def background(self) -> bool:
        """Whether a thread copies the leaves named in ``later`` after :meth:`publish` has returned."""

    @property
    def through_host(self) -> bool:
        """Whether every version passes through host memory, whatever devices the leaves are on."""

    def lay_out(self, layout: Layout) -> None:
        """Say what the coming publishes carry. Readers go on with what they have."""

    def publish(
        self, tensors: Sequence[Tensor | None], later: Set[int] = frozenset(), *, stamp: Stamp
    ) -> int | None:
        """Publish one version.

        Args:
            tensors: one for each entry of the layout that owns its bytes, in order; ``None`` keeps the
                value of the version before. Other dtypes are cast.
            later: numbers of those that may be copied after this has returned. Nobody may write to them
                before :meth:`join`.
            stamp: generation and number of this version.

        Returns:
            The version; or ``None`` when the publish was coalesced: no room was free, nothing was written,
            and the caller's next publish carries the weights.

        Raises:
            LayoutMismatch: a tensor does not have the shape of its leaf.
            PublishError: the stamp is not greater than the newest one, or an entry without a version before
                is ``None``.
            BoardClosed: the transport was closed.
        """

    def join(self) -> None:
        """Wait until the last version is visible; where :meth:`publish` puts nothing off, it is already.

        Raises:
            PublishError: a tensor named in ``later`` was written to; that version is not published.
        """
        return

    def newest_leaves(self) -> tuple[Layout, Sequence[Tensor]] | None:
        """The newest version: its layout and one tensor for each entry that owns its bytes.

        Returns:
            ``None`` when this transport keeps no copy of what it published. A publish through such a
            transport needs not be complete: it changes the leaves that it brings.
        """
        return None

    def leaves_before(self) -> tuple[Layout, Sequence[Tensor]] | None:
        """The version before the newest one, likewise; ``None`` if it is not kept or had another layout."""
        return None

    def status(self) -> list[ReaderStatus]:
        """One entry for each reader that attached and did not leave by itself.

        It may ask the system about each, so it is for whoever prints, or watches at a pace of its own. After
        each batch a learner asks :class:`TellsAtOnce`, where a transport is one.
        """

    def wait(self, version: int, timeout_s: float, readers: Iterable[int] | None = None) -> None:
        """Wait until readers have adopted ``version`` or a newer one.

        Args:
            version: the version to wait for.
            timeout_s: give up after this many seconds.
            readers: their numbers; by default those attached now, of which there must be one.

        Raises:
            WorkerLost: at once, when a reader is dead.
            AdoptionTimeout: the deadline passed.
        """

    def ask(self, lowest: int) -> int:
        """Ask all readers what they act with.

        Args:
            lowest: readers answer when they have acted with this version or a newer one.

        Returns:
            The number of the question, which the answers carry.
        """

    def note(self, reader: int, kind: Note) -> bytes | None:
        """What a reader left with :meth:`Subscriber.leave_note`; ``None`` when there is nothing."""
        return None

    def close(self) -> None:
        """Close. Readers keep what they act with. Closing twice does no harm."""
        return


class Subscriber(Protocol):
    """A worker's end; used in the thread that acts.

    A subscriber is made with an :data:`Apply`, by which it writes into what acts.
    """

    @property
    def version(self) -> int:
        """The version adopted last; 0 before the first."""

    @property
    def newest(self) -> int:
        """The newest published version. Cheap: it is asked while frames are made."""

    @property
    def asked(self) -> int:
        """The number of the learner's last question; 0 when it is not about the version adopted last."""

    def adopt(self) -> int:
        """Adopt the newest version.

        Returns:
            The version that acts from now on; 0 when nothing was published yet.

        Raises:
            PublishError: the newest version is of a lower generation than the one adopted last.
        """

    def begin(self) -> int:
        """Adopt for a rollout that begins now: the newest version, unless a plan says which.

        Returns and raises as :meth:`adopt` does.
        """
        return self.adopt()

    @property
    def closed_by_learner(self) -> bool:
        """Whether the learner has closed the transport or died."""

    @property
    def learner_died(self) -> bool:
        """Whether the learner is gone and did not close the transport."""

    @property
    def closed(self) -> bool:
        """Whether this subscriber was closed."""

    def leave_note(self, note: bytes, kind: Note) -> None:
        """Tell the learner something that it may read at any time; replaces an earlier note of this kind."""

    def forget(self) -> None:
        """Give back the views that are leased; the next :meth:`adopt` takes the newest version again."""
        return

    def close(self) -> None:
        """Stop reading."""


class Handle(Protocol):
    """How a worker finds a transport; small, and picklable where workers are processes."""

    def subscribe(self, apply: Apply, reader: int | None = None) -> Subscriber:
        """Attach.

        Args:
            apply: writes a version into what acts.
            reader: this worker's number; ``None`` takes the first free one.

        Raises:
            BoardClosed: the learner has closed the transport or died.
            PublishError: a living worker has this number.
        """


def transport_named(name: str) -> Transport:
    """Make a transport; ConfigError if there is none of this name, or what its entry point makes is none."""
    entry_points = transports()
    check_choice("transport", name, entry_points, f"transport={name!r}")
    where = f"transport {name!r}, at {entry_points[name].value}"
    make = imported(entry_points[name], "transport")
    try:
        transport: Transport = make()
    except RlsyncError:
        raise
    except Exception as error:  # a package's code may raise anything
        problem = f"making a transport raised {type(error).__name__}: {first_line(error)}"
        cure = "name a class, or a function, that is called without arguments"
        raise ConfigError(problem, where, cure) from error
    public = [member for member in vars(Transport) if not member.startswith("_")]
    lacking = [member for member in public if not hasattr(transport, member)]
    if lacking:
        cure = (
            "inherit rlsync.transport.contract.Transport, and see docs/how_to/write_a_transport.md"
        )
        raise ConfigError(f"a transport lacks {', '.join(lacking)}", where, cure)
    return transport

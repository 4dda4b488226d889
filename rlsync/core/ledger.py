"""The ledger: the one owner of version numbers.

Transports carry versions and never count. Whoever publishes draws the number here and records it here, so
that a relay cannot renumber, a resumed learner cannot repeat, and "how old is version 812?" has one answer.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlsync.core.errors import ConfigError, PublishError
from rlsync.core.whole_file import record_in, write_whole

HISTORY = 4096  #: Versions that a ledger remembers. Older ones have an unknown age.
BLOCK = 1000  #: numbers that are reserved with one write of a file


class Stamp(NamedTuple):
    """Names one set of published weights; a newer one is greater, (2, 11) after a resume than (1, 15)."""

    #: which life of the learner published it, from 1; 0 before anything was published
    generation: int
    version: int  #: from 1; 0 before anything was published


NOTHING = Stamp(0, 0)  #: before the first publish

#: The key under which a frame says which version made the recurrent state that it began with.
STATE_VERSION = "state_version"

NO_VERSION = -1  #: what stands there where a step began with zeros, or where frames are not stamped


@dataclass(frozen=True, slots=True)
class Publication:
    """What the ledger knows of one version."""

    stamp: Stamp
    #: optimizer steps done when it was published; ``None`` when nobody counted them
    optim_steps: int | None
    #: when, in seconds since the epoch; ``None`` for versions of an earlier life
    time_s: float | None


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the file of reserved numbers holds: the run's name, and a number above which none was used."""

    run_id: str
    up_to: int

    def __post_init__(self) -> None:
        if not (isinstance(self.run_id, str) and isinstance(self.up_to, int)):
            raise TypeError("run_id is text, and up_to a number")


class ReservedNumbers:
    """Numbers that a file reserves, a block at a time, before use: no later life of the run repeats one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._first = self._last = self._used = 0
        reserved = self._read()
        self.run_id = reserved.run_id or uuid.uuid4().hex[:12]
        if not reserved.run_id:
            self._write(Reserved(self.run_id, reserved.up_to))

    def at_least(self, number: int) -> int:
        """The lowest reserved number that is not below ``number``; writes the file if a block is used up."""
        if number > self._last:
            self._first = max(number, self._read().up_to + 1)
            self._last = self._first + BLOCK - 1
            self._write(Reserved(self.run_id, self._last))
        self._used = max(number, self._first)
        return self._used

    def give_back(self) -> None:
        """Let the next life begin right after what was used, if nobody has reserved numbers since."""
        if self._used < self._last == self._read().up_to:
            self._last = self._used
            self._write(Reserved(self.run_id, self._last))

    def _read(self) -> Reserved:
        cure = 'write {"run_id": "any", "up_to": N} there, N being the highest version of the run'
        return record_in(self._file, Reserved, "the reserved version numbers", cure) or Reserved(
            "", 0
        )

    def _write(self, reserved: Reserved) -> None:
        text = json.dumps(asdict(reserved)) + "\n"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, lambda beside: beside.write_text(text), durable=True)


class Ledger:
    """Gives out version numbers and remembers when each of the newest ``history`` was published.

    Laws: a number is one more than the one before, is never given out twice in one generation, and is used
    up only by :meth:`record`, that is by a publish that succeeded. A resumed learner is the next generation
    and goes on from the number in its checkpoint. With :meth:`reserve_in`, it goes on after every number that
    a life before it may have used, also after its checkpoint. ``generation`` is that of the first versions;
    0 is older than any learner's.
    """

    def __init__(self, history: int = HISTORY, *, generation: int = 1) -> None:
        self._history = history
        self._newest = Stamp(generation, 0)
        self._known: OrderedDict[int, Publication] = OrderedDict()
        self._optim_steps: Callable[[], int] | None = None
        self._numbers: ReservedNumbers | None = None
        # after the first of two numbers, until the second one
        self._lost: list[tuple[int, int]] = []

    @property
    def version(self) -> int:
        """The newest published version; 0 before the first."""
        return self._newest.version

    @property
    def generation(self) -> int:
        """Which life of the learner this is, from 1."""
        return self._newest.generation

    @property
    def next(self) -> Stamp:
        """The stamp for the coming publish; the same one until it is recorded."""
        version = self._newest.version + 1
        if self._numbers is not None:
            version = self._numbers.at_least(version)
        return self._newest._replace(version=version)

    @property
    def run_id(self) -> str:
        """Which run the numbers belong to, its resumed lives included; empty if they are not reserved."""
        if self._numbers is None:
            return ""
        return self._numbers.run_id

    def reserve_in(self, file: str | Path) -> None:
        """Reserve numbers in this file before they are used. The lives of one run have one file.

        The file is written once for each :data:`BLOCK` numbers. A second call changes nothing. ConfigError:
        it is a folder, or holds something else.
        """
        if Path(file).is_dir():
            raise ConfigError(f"{file} is a folder", "versions_file", "name a file")
        if self._numbers is None:
            self._numbers = ReservedNumbers(Path(file).absolute())

    def give_back(self) -> None:
        """The learner ends by itself: give back the reserved numbers that were not used."""
        if self._numbers is not None:
            self._numbers.give_back()

    def count_with(self, optim_steps: Callable[[], int]) -> None:
        """Ask ``optim_steps()`` at every publish how many optimizer steps were done.

        When it says 0 now, none had been done at the publishes so far either.
        """
        self._optim_steps = optim_steps
        if optim_steps() == 0:
            for version, known in self._known.items():
                if known.optim_steps is None and known.stamp.generation == self.generation:
                    self._known[version] = Publication(known.stamp, 0, known.time_s)

    def record(self, stamp: Stamp) -> None:
        """Remember a publish that succeeded; a PublishError if ``stamp`` is not :attr:`next`."""
        if stamp != self.next:
            problem = f"version {stamp.version} of generation {stamp.generation} was not given out"
            where = f"Ledger.record; next is version {self.next.version} of generation {self.generation}"
            raise PublishError(problem, where, "publish with the stamp that Ledger.next gives")
        steps = None if self._optim_steps is None else self._optim_steps()
        if stamp.version > self.version + 1:
            self._lost.append((self.version, stamp.version - 1))
        self._newest = stamp
        self._remember(Publication(stamp, steps, time.time()))

    def known(self, version: int) -> Publication | None:
        """What is remembered of a version; ``None`` when nothing is."""
        return self._known.get(version)

    def optim_steps_since(self, version: int, now: int) -> int | None:
        """Optimizer steps from a version's publish to ``now``; ``None`` when the ledger does not know."""
        known = self._known.get(version)
        if known is None or known.optim_steps is None:
            return None
        return now - known.optim_steps

    def ages(self, versions: Iterable[int]) -> list[int]:
        """How many versions each of these is old. Numbers that a killed life has lost do not count."""
        ages = []
        for version in versions:
            lost = sum(last - first for first, last in self._lost if version <= first)
            ages.append(self.version - version - lost)
        return ages

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower number again."""
        self._newest = self._newest._replace(version=max(self.version, version))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the ledger.

        The newest stamp, ``(version, optimizer steps)`` of what is remembered, and which numbers were lost.
        """
        published = []
        for version, known in self._known.items():
            if known.optim_steps is not None:
                published.append((version, known.optim_steps))
        newest = {"version": self.version, "generation": self.generation}
        return newest | {"published": published, "lost": list(self._lost)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin the life after the one that wrote ``state_dict``. No ``"generation"`` means 1."""
        generation = max(self.generation, int(state_dict.get("generation", 1)) + 1)
        version = int(state_dict["version"])
        self._lost = [(int(first), int(last)) for first, last in state_dict.get("lost", ())]
        if self.version > version:
            self._lost.append((version, self.version))
        self._newest = Stamp(generation, max(self.version, version))
        published: Iterable[tuple[int, int]] = state_dict["published"]
        self._known.clear()
        for version, steps in published:
            self._remember(Publication(Stamp(generation - 1, int(version)), int(steps), None))

    def _remember(self, publication: Publication) -> None:
        self._known[publication.stamp.version] = publication
        while len(self._known) > self._history:
            self._known.popitem(last=False)

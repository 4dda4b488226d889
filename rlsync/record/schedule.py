"""The schedule of a run: what decides it, given its config and seed, in a few bytes for each rollout.

The file ``schedule.bin``, little-endian, is only ever appended to::

    head      8 bytes "RLSCHED\\0", u32 format, u32 zero
    blocks    u32 size, u32 CRC-32, then that many bytes: whole records, one after the other

    record    u8 kind, then
      0 text      u32 size, UTF-8 JSON: {"begin": facts}, {"leaves": names}, or {event: ..., "ms": ...}
      1 consumed  u16 worker, u16 life, u32 number, u32 version, u32 ms
      2 dropped   the same: a rollout that the learner threw away because no slot was free
      3 publish   u32 version, u32 optimizer steps, u32 ms
      4 digests   u32 version, u16 count, then a u64 for each of the leaves that were named last

A rollout stands where the learner took it, a publish where it became visible, so the file's order is the
order of both. ``number`` counts the rollouts of a worker over all its lives, ``ms`` the milliseconds since
the life of the run began. ``version`` acted in the first frame of a rollout; if others followed, at policy
calls, an event ``adopted`` before it says which, from which frames on (``at``, as the batch has them, flat).
``EVERYBODY`` stands for all workers of a collector that makes a batch of one rollout of each. A run that is
killed loses what it had not written: at most one block.
"""

from __future__ import annotations

import json
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from rlsync.core.errors import ConfigError

MAGIC = b"RLSCHED\0"
FORMAT = 1
EVERYBODY = 0xFFFF  #: the worker of a rollout that all workers made together

_TEXT, _CONSUMED, _DROPPED, _PUBLISH, _DIGESTS = range(5)
_HEAD = struct.Struct("<8sII")
_BLOCK = struct.Struct("<II")
_SIZED = struct.Struct("<BI")
_ROLLOUT = struct.Struct("<BHHIII")
_PUBLISHED = struct.Struct("<BIII")
_PRINTS = struct.Struct("<BIH")
_MOST = 2**32 - 1

#: A block is written when it has this many bytes, and with each digest, checkpoint and end.
BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout that the learner took from a worker."""

    worker: int
    life: int  #: how often the worker had been started before
    number: int  #: of the worker's rollouts, over all its lives
    version: int  #: that its frames are stamped with
    ms: int
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """A version that became visible."""

    version: int
    optim_steps: int
    ms: int


@dataclass(slots=True)
class Life:
    """One life of a run: what its file says from a beginning to the next."""

    facts: dict[str, Any]  #: what it ran with
    #: in the order in which they came
    events: list[Rollout | Published] = field(default_factory=list)
    #: by version, the digest of each leaf by its name
    digests: dict[int, dict[str, int]] = field(default_factory=dict)
    #: checkpoints, resumes, adoptions in rollouts, how updates are made from which one on, the end
    notes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rollouts(self) -> list[Rollout]:
        return [event for event in self.events if isinstance(event, Rollout)]

    @property
    def publishes(self) -> list[Published]:
        return [event for event in self.events if isinstance(event, Published)]

    @property
    def optim_steps(self) -> dict[int, int]:
        """After how many optimizer steps each version was published."""
        return {publish.version: publish.optim_steps for publish in self.publishes}

    def plan(self, workers: int) -> dict[int, list[Rollout]]:
        """The rollouts of each worker, in order."""
        plan: dict[int, list[Rollout]] = {worker: [] for worker in range(workers)}
        for rollout in self.rollouts:
            plan[rollout.worker].append(rollout)
        return plan

    def between(self, begin_ms: float, end_ms: float) -> Life:
        events = [event for event in self.events if begin_ms <= event.ms <= end_ms]
        notes = [note for note in self.notes if begin_ms <= note["ms"] <= end_ms]
        return Life(self.facts, events, notes=notes)

    def spans(self) -> Iterator[tuple[Rollout, int]]:
        """Each rollout, and when the one before it of the same worker was taken."""
        newest_ms: dict[int, int] = {}
        for rollout in self.rollouts:
            yield rollout, newest_ms.get(rollout.worker, self.events[0].ms)
            newest_ms[rollout.worker] = rollout.ms


@dataclass(frozen=True)
class FixedLag(Sequence[Rollout]):
    """A computed life, and the rollouts of any worker in it.

    Rollout n begins when the learner has learned from those up to n-1-``lag`` of all workers, and the first
    of a life when it has learned from all before. Its ``version`` is how often a batch was asked for by then.
    """

    lag: int
    workers: int
    per_batch: int  #: rollouts
    per_life: int | None = None  #: rollouts of each worker; None: there is one life

    def __getitem__(self, number: int) -> Rollout:  # type: ignore[override]  # there are no slices
        before = 0
        if self.per_life is not None:
            before = number - number % self.per_life
        learned = before + max(0, number - before - self.lag)
        batches = learned * self.workers // self.per_batch
        return Rollout(EVERYBODY, life=0, number=number, version=batches + 1, ms=0)

    def __len__(self) -> int:
        return sys.maxsize  # until the learner ends

    def begins_with(self, version: int) -> bool:
        """Whether there is a rollout of this version: with many workers most batches let none begin."""
        learned = -(-(version - 1) * self.per_batch // self.workers)
        return learned * self.workers // self.per_batch == version - 1

    @property
    def rollouts(self) -> Iterator[Rollout]:
        for number in count():
            for worker in range(self.workers):
                yield replace(self[number], worker=worker)


class ScheduleWriter:
    """Appends a life to a schedule, and cuts off a half block at its end; ConfigError: it is none."""

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        if file.exists() and file.stat().st_size:
            whole_bytes = _HEAD.size
            for block in _blocks(file):
                whole_bytes += _BLOCK.size + len(block)
            self._file = file.open("r+b", buffering=0)
            self._file.truncate(whole_bytes)
            self._file.seek(whole_bytes)
        else:
            self._file = file.open("wb", buffering=0)
            self._file.write(_HEAD.pack(MAGIC, FORMAT, 0))
        self._block = bytearray()
        self._names: Sequence[str] | None = None
        self._began_ns = time.monotonic_ns()
        self._text({"begin": dict(facts)})
        self.flush()

    def rollout(
        self, worker: int, life: int, number: int, version: int, *, dropped: bool = False
    ) -> None:
        """Note a rollout that the learner has taken just now."""
        if dropped:
            kind = _DROPPED
        else:
            kind = _CONSUMED
        self._block += _ROLLOUT.pack(kind, worker, life & 0xFFFF, number, version, self._ms())
        if len(self._block) >= BLOCK_BYTES:
            self.flush()

    def publish(self, version: int, optim_steps: int) -> None:
        """Note a version that has become visible just now."""
        self._block += _PUBLISHED.pack(_PUBLISH, version, optim_steps, self._ms())

    def digests(self, version: int, of_leaves: Mapping[str, int]) -> None:
        """Note what was published as a version, and write all that was noted."""
        names = list(of_leaves)
        if names != self._names:
            self._names = names
            self._text({"leaves": names})
        self._block += _PRINTS.pack(_DIGESTS, version, len(names))
        self._block += struct.pack(f"<{len(names)}Q", *of_leaves.values())
        self.flush()

    def note(self, event: str, facts: Mapping[str, object]) -> None:
        """Note anything else that happens, with facts about it, and write all that was noted."""
        self._text({"event": event, **facts, "ms": self._ms()})
        self.flush()

    def flush(self) -> None:
        """Write what was noted as one block, in one call, so that a killed run leaves no half one."""
        if self._block and not self._file.closed:
            self._file.write(_BLOCK.pack(len(self._block), zlib.crc32(self._block)) + self._block)
            self._block.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _text(self, content: Mapping[str, object]) -> None:
        text = json.dumps(content).encode()
        self._block += _SIZED.pack(_TEXT, len(text)) + text

    def _ms(self) -> int:
        return min(_MOST, (time.monotonic_ns() - self._began_ns) // 1_000_000)


def named(worker: int) -> str:
    """What a worker of a schedule is called where people read of it."""
    if worker == EVERYBODY:
        return "all workers"
    return f"worker {worker}"


def lives_in(file: Path) -> list[Life]:
    """The lives of the run that wrote this schedule, in a row; ConfigError: unreadable, or no rollouts."""
    lives: list[Life] = []
    leaves: Sequence[str] = ()
    for block in _blocks(file):
        for record in _records(block):
            match record:
                case Rollout() | Published():
                    lives[-1].events.append(record)
                case version, digests:
                    lives[-1].digests[version] = dict(zip(leaves, digests, strict=True))
                case {"begin": facts}:
                    lives.append(Life(facts))
                case {"leaves": names}:
                    leaves = names
                case {}:
                    lives[-1].notes.append(record)
    if not any(life.rollouts for life in lives):
        cure = "let it run until it has written a block, or to its end"
        raise ConfigError("the schedule has no rollouts yet", str(file), cure)
    return lives


#: A text; or a version, and the digest of each of the leaves that were named last.
_Record: TypeAlias = dict[str, Any] | Rollout | Published | tuple[int, tuple[int, ...]]


def _records(block: bytes) -> Iterator[_Record]:
    at = 0
    while at < len(block):
        kind = block[at]
        if kind == _TEXT:
            _, text_bytes = _SIZED.unpack_from(block, at)
            at += _SIZED.size
            yield json.loads(block[at : at + text_bytes])
            at += text_bytes
        elif kind in (_CONSUMED, _DROPPED):
            _, worker, life, number, version, ms = _ROLLOUT.unpack_from(block, at)
            dropped = kind == _DROPPED
            yield Rollout(worker, life, number=number, version=version, ms=ms, dropped=dropped)
            at += _ROLLOUT.size
        elif kind == _PUBLISH:
            _, version, optim_steps, ms = _PUBLISHED.unpack_from(block, at)
            yield Published(version, optim_steps, ms)
            at += _PUBLISHED.size
        else:
            _, version, leaves = _PRINTS.unpack_from(block, at)
            at += _PRINTS.size
            yield version, struct.unpack_from(f"<{leaves}Q", block, at)
            at += 8 * leaves


def _blocks(file: Path) -> Iterator[bytes]:
    """The blocks of a schedule; what a killed run has not completed at its end is left out."""
    try:
        data = file.read_bytes()
    except OSError as error:
        cure = "name the folder of a run that has written one (populations write none): without it, none can "
        cure += "be compared or made again"
        raise ConfigError(f"no schedule: {error.strerror}", str(file), cure) from error
    cure = "copy the file anew from the machine that wrote it"
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise ConfigError("this file is no schedule of a run", str(file), cure)
    newest = _HEAD.unpack_from(data)[1]
    if newest > FORMAT:
        problem = f"the schedule has format {newest}, and this rlsync reads {FORMAT}"
        raise ConfigError(problem, str(file), "use the rlsync that wrote it, or a newer one")
    at = _HEAD.size
    while at + _BLOCK.size <= len(data):
        size, check = _BLOCK.unpack_from(data, at)
        block = data[at + _BLOCK.size : at + _BLOCK.size + size]
        if len(block) < size:
            return
        if zlib.crc32(block) != check:
            raise ConfigError(f"the schedule is damaged in the block at byte {at}", str(file), cure)
        yield block
        at += _BLOCK.size + size


@dataclass(frozen=True, slots=True)
class Comparison:
    """The digests of two runs, or of two lives of one."""

    equal: int  #: versions whose digests are the same
    last_equal: int  #: the newest of them before the first unequal one; 0 if there is none
    unequal: int = 0  #: the first version whose digests differ; 0 if there is none
    leaves: tuple[str, ...] = ()  #: the leaves that differ in it
    #: what happened between the last equal and the first unequal version, in words
    window: str = ""
    #: the number that the unequal version has in the other run; a resumed run has other ones
    others: int = 0
    alone: tuple[int, int] = (0, 0)  #: digests of each run for which the other has none
    #: Of two runs: the optimizer steps after which ``last_equal`` was published, and ``unequal``, and the last
    #: digest of either. Zeros for lives of one, whose versions have the same numbers.
    updates: tuple[int, int, int] = (0, 0, 0)

    @property
    def is_equal(self) -> bool:
        """Whether all digests of both are the same, and there are some."""
        return self.equal > 0 and not self.unequal and not any(self.alone)

    def after(self, before: Comparison | None) -> Comparison:
        """This one and that of the lives before, all of whose digests are equal, as one."""
        if before is None:
            return self
        return replace(
            self, equal=before.equal + self.equal, last_equal=self.last_equal or before.last_equal
        )

    def __str__(self) -> str:
        if not self.equal and not self.unequal:
            return "no version has digests in both; sync.digest_every=1 gives each version one"
        equal = f"{self.equal} digests of {self.equal}"
        if not self.unequal and any(self.alone):
            one, other = self.alone
            return (
                f"{self._equal_up_to()}, where both runs have digests: {equal}\n"
                f"not compared: {one} digests of the first run and {other} of the second. "
                "The other run has none after as many optimizer steps"
            )
        if not self.unequal:
            return f"{self._equal_up_to()}: {equal}"
        names = list(self.leaves[:8])
        if len(self.leaves) > 8:
            names.append("...")
        leaves = ", ".join(names)
        before = "no version before is equal"
        if self.last_equal:
            before = self._equal_up_to()
        return (
            f"unequal at {self._unequal_at()}: {len(self.leaves)} leaves: {leaves}\n"
            f"{before}; since then {self.window}"
        )

    def _equal_up_to(self) -> str:
        equal, _, last = self.updates
        if last:
            return f"equal up to update {equal:,} of {last:,}"
        return f"equal up to version {self.last_equal}"

    def _unequal_at(self) -> str:
        _, unequal, last = self.updates
        if not last:
            return f"version {self.unequal}"
        versions = f"version {self.unequal}"
        if self.others != self.unequal:
            versions += f", {self.others} in the second run"
        return f"update {unequal:,} ({versions})"


def compared(one: Life, other: Life) -> Comparison:
    """Compare the digests of the versions that both lives have."""
    both = one.digests.keys() & other.digests.keys()
    return _compared(one, other, dict(zip(both, both, strict=True)))


def runs_compared(one: Sequence[Life], other: Sequence[Life]) -> Comparison:
    """Compare the digests of two runs, each with all its lives, after as many optimizer steps.

    A resumed run has other version numbers than one that was not interrupted. Of a step made twice the last
    time counts.
    """
    ours = _as_one(one)
    theirs = _as_one(other)
    our_newest = _newest_after(ours)
    their_newest = _newest_after(theirs)
    both = sorted(our_newest.keys() & their_newest.keys())
    pairs = {our_newest[steps]: their_newest[steps] for steps in both}
    comparison = _compared(ours, theirs, pairs)
    steps = {version: after for after, version in our_newest.items()}
    return replace(
        comparison,
        alone=(len(our_newest) - len(both), len(their_newest) - len(both)),
        updates=(
            steps.get(comparison.last_equal, 0),
            steps.get(comparison.unequal, 0),
            max([0, *our_newest, *their_newest]),
        ),
    )


def _as_one(lives: Sequence[Life]) -> Life:
    """A run as one life: version numbers never come twice."""
    whole = Life(lives[0].facts)
    for life in lives:
        whole.events += life.events
        whole.digests |= life.digests
        whole.notes += life.notes
    return whole


def _newest_after(life: Life) -> dict[int, int]:
    """The newest version with digests that was published after so many optimizer steps, by their number."""
    optim_steps = life.optim_steps
    newest: dict[int, int] = {}
    for version in sorted(life.digests):
        if life.digests[version]:
            newest[optim_steps[version]] = version
    return newest


def _compared(one: Life, other: Life, pairs: Mapping[int, int]) -> Comparison:
    """Compare the digests of a version of one life with those of a version of the other."""
    equal = 0
    last = 0
    for version in sorted(pairs):
        ours = one.digests[version]
        theirs = other.digests[pairs[version]]
        unequal = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        if unequal:
            return Comparison(
                equal,
                last,
                unequal=version,
                leaves=tuple(unequal),
                window=window(one, last, version) + _other_ways(one, other),
                others=pairs[version],
            )
        if ours:  # of nothing, nothing can be said
            equal += 1
            last = version
    return Comparison(equal, last)


def window(life: Life, after: int, until: int) -> str:
    """Which updates and rollouts lie between the publishes of two versions, in words."""
    inside = []
    began = after == 0
    for event in life.events:
        if isinstance(event, Rollout):
            if began:
                inside.append(event)
        elif event.version == until:
            break
        else:
            began = began or event.version == after
    steps = life.optim_steps
    first = steps.get(after, 0) + 1
    updates = f"updates {first} to {steps.get(until, 0)}, {len(inside)} rollouts"
    return "; ".join([updates, *_by_worker(inside)])


def _other_ways(one: Life, other: Life) -> str:
    """How updates were made, where two lives differ in it as far as both went, in words."""
    ours = _ways(one)
    theirs = _ways(other)
    both = min(len(ours), len(theirs))
    if ours[:both] == theirs[:both]:
        return ""
    return f"; updates were made {', '.join(ours)}, and in the other {', '.join(theirs)}"


def _ways(life: Life) -> list[str]:
    """How updates were made from which one on, each in words."""
    notes = [note for note in life.notes if note["event"] == "updates"]
    return [f"{note['way']} from {note['update']} on" for note in notes]


def _by_worker(rollouts: Iterable[Rollout]) -> Iterator[str]:
    numbers_of: dict[int, list[int]] = {}
    for rollout in rollouts:
        numbers_of.setdefault(rollout.worker, []).append(rollout.number)
    for worker, numbers in sorted(numbers_of.items()):
        yield f"{named(worker)}: {min(numbers)} to {max(numbers)}"

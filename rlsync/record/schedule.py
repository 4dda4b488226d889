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
from typing import Any

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

    def plan(self, workers: int) -> dict[int, list[Rollout]]:
        """The rollouts of each worker, in order."""
        plan: dict[int, list[Rollout]] = {worker: [] for worker in range(workers)}
        for rollout in self.rollouts:
            plan[rollout.worker].append(rollout)
        return plan

    def between(self, begin_ms: float, end_ms: float) -> Life:
        events = [event for event in self.events if begin_ms <= event.ms <= end_ms]
        return Life(
            self.facts,
            events,
            {},
            [note for note in self.notes if begin_ms <= note["ms"] <= end_ms],
        )

    def spans(self) -> Iterator[tuple[Rollout, int]]:
        """Each rollout, and when the one before it of the same worker was taken."""
        taken: dict[int, int] = {}
        for rollout in self.rollouts:
            yield rollout, taken.get(rollout.worker, self.events[0].ms)
            taken[rollout.worker] = rollout.ms


def lag_in_words(lag: int | None, *, in_process: bool = False) -> str:
    """How old the weights are that workers act with; ``in_process``: the learner's own process acts."""
    if in_process:
        return "lag 0: the learner's own process acts between its updates"
    if lag is None:
        return "no fixed lag: workers act with the newest version"
    if lag < 2:
        return f"lag {lag}: workers {'act while the learner learns' if lag else 'wait for each update'}"
    return f"lag {lag}: workers act up to {lag} rollouts ahead of the learner"


@dataclass(frozen=True)
class FixedLag(Sequence[Rollout]):
    """A computed life, and the rollouts of any worker in it.

    Rollout n begins when the learner has learned from those up to n-1-``lag`` of all workers. Its ``version``
    is how often a batch was asked for by then.
    """

    lag: int
    workers: int
    per_batch: int  #: rollouts

    def __getitem__(self, number: Any) -> Any:
        batches = max(0, number - self.lag) * self.workers // self.per_batch
        return Rollout(EVERYBODY, 0, number, batches + 1, 0)

    def __len__(self) -> int:
        return sys.maxsize  # until the learner ends

    @property
    def rollouts(self) -> Iterator[Rollout]:
        return (replace(self[number], worker=w) for number in count() for w in range(self.workers))


class ScheduleWriter:
    """Appends a life to a schedule, and cuts off a half block at its end; ConfigError: it is none."""

    def __init__(self, file: Path, facts: Mapping[str, Any]) -> None:
        if file.exists() and file.stat().st_size:
            whole = sum(len(block) + _BLOCK.size for block in _blocks(file)) + _HEAD.size
            self._file = file.open("r+b", buffering=0)
            self._file.truncate(whole)
            self._file.seek(whole)
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
        kind = _DROPPED if dropped else _CONSUMED
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

    def note(self, event: str, **what: object) -> None:
        """Note anything else that happens, and write all that was noted."""
        self._text({"event": event, **what, "ms": self._ms()})
        self.flush()

    def flush(self) -> None:
        """Write what was noted as one block, in one call, so that a killed run leaves no half one."""
        if self._block and not self._file.closed:
            self._file.write(_BLOCK.pack(len(self._block), zlib.crc32(self._block)) + self._block)
            self._block.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _text(self, what: Mapping[str, object]) -> None:
        data = json.dumps(what).encode()
        self._block += _SIZED.pack(_TEXT, len(data)) + data

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
    names: Sequence[str] = ()
    for block in _blocks(file):
        at = 0
        while at < len(block):
            kind = block[at]
            if kind == _TEXT:
                _, size = _SIZED.unpack_from(block, at)
                at += _SIZED.size
                text = json.loads(block[at : at + size])
                at += size
                if "begin" in text:
                    lives.append(Life(text["begin"]))
                elif "leaves" in text:
                    names = text["leaves"]
                else:
                    lives[-1].notes.append(text)
            elif kind in (_CONSUMED, _DROPPED):
                _, worker, life, number, version, ms = _ROLLOUT.unpack_from(block, at)
                lives[-1].events.append(
                    Rollout(worker, life, number, version, ms, kind == _DROPPED)
                )
                at += _ROLLOUT.size
            elif kind == _PUBLISH:
                _, *numbers = _PUBLISHED.unpack_from(block, at)
                lives[-1].events.append(Published(*numbers))
                at += _PUBLISHED.size
            else:
                _, version, count = _PRINTS.unpack_from(block, at)
                at += _PRINTS.size
                prints = struct.unpack_from(f"<{count}Q", block, at)
                lives[-1].digests[version] = dict(zip(names, prints, strict=True))
                at += 8 * count
    if not any(life.rollouts for life in lives):
        cure = "let it run until it has written a block, or to its end"
        raise ConfigError("the schedule has no rollouts yet", str(file), cure)
    return lives


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
                f"equal up to version {self.last_equal}, where both runs have digests: {equal}\n"
                f"not compared: {one} digests of the first run and {other} of the second. "
                "The other run has none after as many optimizer steps"
            )
        if not self.unequal:
            return f"equal up to version {self.last_equal}: {equal}"
        leaves = ", ".join(self.leaves[:8]) + (", ..." if len(self.leaves) > 8 else "")
        if self.last_equal:
            before = f"equal up to version {self.last_equal}"
        else:
            before = "no version before is equal"
        if self.others not in (0, self.unequal):
            others = f" ({self.others} in the second run)"
        else:
            others = ""
        return (
            f"unequal at version {self.unequal}{others}: {len(self.leaves)} leaves: {leaves}\n"
            f"{before}; since then {self.window}"
        )


def compared(one: Life, other: Life) -> Comparison:
    """Compare the digests of the versions that both lives have."""
    return _compared(
        one, other, {version: version for version in one.digests.keys() & other.digests.keys()}
    )


def runs_compared(one: Sequence[Life], other: Sequence[Life]) -> Comparison:
    """Compare the digests of two runs, each with all its lives, after as many optimizer steps.

    A resumed run has other version numbers than one that was not interrupted. Of a step made twice the last
    time counts.
    """
    ours = _as_one(one)
    theirs = _as_one(other)
    after = _newest_after(ours)
    afters = _newest_after(theirs)
    both = sorted(after.keys() & afters.keys())
    found = _compared(ours, theirs, {after[steps]: afters[steps] for steps in both})
    return replace(found, alone=(len(after) - len(both), len(afters) - len(both)))


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
    steps = {publish.version: publish.optim_steps for publish in life.publishes}
    return {steps[version]: version for version in sorted(life.digests) if life.digests[version]}


def _compared(one: Life, other: Life, pairs: Mapping[int, int]) -> Comparison:
    """Compare the digests of a version of one life with those of a version of the other."""
    equal = last = 0
    for version in sorted(pairs):
        ours = one.digests[version]
        theirs = other.digests[pairs[version]]
        differ = tuple(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        if differ:
            told = window(one, last, version) + _other_ways(one, other)
            return Comparison(equal, last, version, differ, told, pairs[version])
        if ours:  # of nothing, nothing can be said
            equal = equal + 1
            last = version
    return Comparison(equal, last)


def window(life: Life, after: int, until: int) -> str:
    """Which updates and rollouts lie between the publishes of two versions, in words."""
    steps = {publish.version: publish.optim_steps for publish in life.publishes}
    inside = []
    began = after == 0
    for event in life.events:
        if isinstance(event, Rollout):
            inside += [event] if began else []
        elif event.version == until:
            break
        else:
            began = began or event.version == after
    told = f"updates {steps.get(after, 0) + 1} to {steps.get(until, 0)}, {len(inside)} rollouts"
    return told + "".join(f"; {each}" for each in _by_worker(inside))


def _other_ways(one: Life, other: Life) -> str:
    """How updates were made, where two lives differ in it as far as both went, in words."""
    ways = [[note for note in life.notes if note["event"] == "updates"] for life in (one, other)]
    if all((a["way"], a["update"]) == (b["way"], b["update"]) for a, b in zip(*ways, strict=False)):
        return ""
    told = (", ".join(f"{note['way']} from {note['update']} on" for note in its) for its in ways)
    return "; updates were made " + ", and in the other ".join(told)


def _by_worker(rollouts: Iterable[Rollout]) -> Iterator[str]:
    numbers: dict[int, list[int]] = {}
    for rollout in rollouts:
        numbers.setdefault(rollout.worker, []).append(rollout.number)
    for worker, its in sorted(numbers.items()):
        yield f"{named(worker)}: {min(its)} to {max(its)}"

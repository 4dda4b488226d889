"""Decisions as frozen data: routes, rows, verdicts, plans, and the receipt of a publish."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from operator import attrgetter

from rlsync.core import errors
from rlsync.core.crossing import CPU, Crossing, crossings
from rlsync.core.user_input import did_you_mean, nearest_name

POLICY = "policy"  #: the destination of the one policy that a collector has; TorchRL's name for it


class Verdict(str, Enum):
    """What happens to one leaf at a publish."""

    ALIASED = "aliased"  #: source and destination are the same memory: nothing moves
    COPIED = "copied"  #: the bytes are copied
    CAST = "cast"  #: the bytes are copied into another dtype, which the map declares
    #: the leaf is spread over the ranks of the learner, and each rank brings its part
    SHARDED = "sharded"
    MISSING = "missing"  #: the destination has this leaf, the source does not
    UNEXPECTED = "unexpected"  #: the source has this leaf, the destination does not
    MISMATCH = "mismatch"  #: shapes or dtypes of the two leaves differ

    def __str__(self) -> str:
        return self.value


#: How the name of a setting ends that is the share which a dropout drops in its present mode.
DROPS = ".drops"

#: How the name of a setting ends that is the class of a layer which acts with statistics of its own batch.
BATCH_STATISTICS = ".batch_statistics"

#: A publish moves the bytes of leaves with these verdicts.
MOVED = frozenset({Verdict.COPIED, Verdict.CAST, Verdict.SHARDED})

REFUSED = frozenset({Verdict.MISSING, Verdict.UNEXPECTED, Verdict.MISMATCH})


@dataclass(frozen=True, slots=True)
class Source:
    """A source with options. Use it in a sync map instead of a string.

    Args:
        path: where the weights come from, a path on the trainer.
        dtype: a publish casts the weights to this dtype, for example ``"bfloat16"`` or
            ``torch.bfloat16``; ``None`` keeps the dtype of each leaf.
        exclude: glob patterns of leaf names, relative to ``path``; these leaves are not sent.
        idle: glob patterns of leaf names, relative to ``path``; these leaves are sent, and need not act:
            no output of the policy depends on them, as on a critic that travels along.

    Raises:
        ConfigError: a string is given in place of several patterns.

    Example:
        >>> Source("loss_module.actor_network", exclude=("*.running_mean",)).path
        'loss_module.actor_network'
    """

    path: str
    dtype: object = None
    exclude: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, patterns in (("exclude", self.exclude), ("idle", self.idle)):
            # A text's characters would be the patterns, and "*" is every leaf.
            several = isinstance(patterns, tuple | list)
            if not several or not all(isinstance(each, str) for each in patterns):
                example = patterns if isinstance(patterns, str) else "*.bias"
                problem = f"{name} takes several patterns"
                where = f"Source({name}={patterns!r})"
                raise errors.ConfigError(problem, where, f"write {name}=({example!r},)")


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of a sync map, paths in standard spelling. Patterns are globs of leaf names in the route."""

    destination: str  #: where the weights go, a path on the collector
    source: str  #: where they come from, a path on the trainer
    dtype: str = ""  #: the declared dtype, for example ``"bfloat16"``; empty when none is declared
    exclude: tuple[str, ...] = ()  #: patterns; these leaves are not sent
    idle: tuple[str, ...] = ()  #: patterns; these leaves need not act

    def __str__(self) -> str:
        return f"{self.destination} <- {self.source}"


@dataclass(frozen=True, slots=True)
class Row:
    """The decision for one leaf."""

    #: full name of the destination leaf; if it is missing, the name it should have
    destination: str
    source: str  #: full name of the source leaf; if it is missing, the name it should have
    verdict: Verdict  #: what a publish does with the leaf
    kind: str  #: ``"parameter"``, ``"buffer"`` or ``"extra_state"``
    shape: tuple[int, ...]  #: shape of the destination leaf (of the source leaf when unexpected)
    dtype: str  #: dtype of the same leaf, for example ``"float32"``
    payload_bytes: int  #: bytes that one publish moves for this leaf; 0 when aliased
    note: str = ""  #: the reason for the verdict, if it needs one
    #: the device of the source leaf, like ``"cuda:0"``; empty if it is missing
    source_device: str = ""
    #: That of the destination leaf; several, with commas, if workers differ; empty if unknown.
    device: str = ""
    #: whether no output of what acts depends on it, and its source does not declare it
    idle: bool = False


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """A sync map resolved leaf by leaf.

    Example:
        >>> actor = Route("policy", "loss_module.actor_network")
        >>> weight = Row("policy.w", f"{actor.source}.w", Verdict.COPIED, "parameter", (2, 3), "float32", 24)
        >>> plan = SyncPlan((actor,), (weight,), "board: 2 workers, alias")
        >>> plan.check().payload_bytes
        24
    """

    routes: tuple[Route, ...]  #: the map
    rows: tuple[Row, ...]  #: one decision for every leaf of every destination
    transport: str  #: how the weights travel, for example ``"board: 2 workers, alias"``
    trigger: str = ""  #: when to publish, in words; empty for a plan without a hook
    notes: tuple[str, ...] = ()  #: other things the reader should know
    #: Parameters of destinations whose source no optimizer of the trainer holds; empty if there is none.
    unheld: tuple[str, ...] = ()
    #: Parameters that an optimizer holds, of networks that are or contain a source, and that are not sent.
    unsent: tuple[str, ...] = ()
    #: Leaves of what acts, beside those of destinations that are parts of it; in one process, untrained ones.
    unreached: tuple[str, ...] = ()
    #: How numbers, modes and plain tensors of the workers' modules differ from the learner's, by name.
    differs: Mapping[str, str] = field(default_factory=dict)
    #: Layers that act with the statistics of a worker's few rows, such as BatchNorm in training mode.
    batch_statistics: tuple[str, ...] = ()
    #: What workers keep that older weights computed, and act with, by name: whether copies would end that.
    outlives: Mapping[str, bool] = field(default_factory=dict)
    through_host: bool = False  #: whether every version passes through host memory, as on a board

    @property
    def payload_bytes(self) -> int:
        """Bytes moved by one publish."""
        return sum(row.payload_bytes for row in self.rows)

    @property
    def crossings(self) -> tuple[Crossing, ...]:
        """What goes from which device to which."""
        of_leaves = []
        for row in self.rows:
            crossing = Crossing(
                row.source_device,
                row.device,
                self.through_host,
                aliased_leaves=int(row.verdict is Verdict.ALIASED),
                copied_bytes=row.payload_bytes,
            )
            of_leaves.append(crossing)
        return crossings(of_leaves)

    def count(self, verdict: Verdict) -> int:
        """How many leaves have this verdict.

        Args:
            verdict: for example ``Verdict.COPIED``.
        """
        return sum(row.verdict is verdict for row in self.rows)

    def refused(self) -> tuple[Row, ...]:
        """The rows whose verdict makes the plan impossible."""
        return tuple(row for row in self.rows if row.verdict in REFUSED)

    def check(self) -> SyncPlan:
        """Return this plan, or raise if it cannot work.

        Raises:
            LayoutMismatch: a leaf is missing, unexpected or a mismatch.
            NothingToSync: the routes contain no leaf at all.
            DoesNotAct: no parameter of a route acts.
        """
        bad = self.refused()
        if bad:
            raise self._layout_error(bad)
        if not self.rows:
            problem = "the sync map covers no tensor"
            where = "; ".join(map(str, self.routes)) or "an empty sync map"
            raise errors.NothingToSync(
                problem, where, "name a module that has parameters or buffers"
            )
        parameters = [row for row in self.rows if row.kind == "parameter"]
        for route in self.routes:
            of_route = f"{route.destination}."
            sent = [row for row in parameters if row.destination.startswith(of_route)]
            if sent and all(row.idle for row in sent):
                where = f"{route}, {len(sent)} of {len(sent)} parameters"
                raise errors.DoesNotAct(*_idle(sent, where))
        return self

    def warnings(self) -> Iterator[errors.RlsyncWarning]:
        """Of parameters that do not act, of older ones that do, of dropout, and of batch statistics."""
        idle = [row for row in self.rows if row.idle]
        where = "; ".join(map(str, self.routes))
        if idle:
            yield errors.IdleLeaves(*_idle(idle, f"{where}, {len(idle)} parameters"))
        if self.outlives:
            yield errors.OlderWeightsAct(*_outlives(self.outlives, where))
        drops = []
        for name, how in self.differs.items():
            if name.endswith(DROPS):
                drops.append(f"{name} {how}")
        if drops:
            cure = "call train() or eval() on both modules, and give both the same p"
            yield errors.DropoutDiffers(listed(drops, _NAMES_IN_SUMMARY), where, cure)
        if self.batch_statistics:
            names = listed(self.batch_statistics, _NAMES_IN_SUMMARY)
            problem = f"{names} {_ACTS_WITH_BATCH}: the same observation gives other actions beside other rows"
            cure = "call eval() on the policy that the workers get, for example in a policy_factory"
            yield errors.BatchStatistics(problem, where, cure)

    def _layout_error(self, bad: tuple[Row, ...]) -> errors.SyncMapError:
        first = bad[0]
        problem = f"{first.destination} and {first.source} do not fit: {first.note}"
        cure = "build both sides from the same constructor, or fix the source path"
        if first.verdict is Verdict.MISSING:
            problem = f"{first.destination} has no source leaf {first.source}"
            alike = []
            for row in bad:
                if row.verdict is Verdict.UNEXPECTED and row.shape == first.shape:
                    alike.append(row.source)
            near = did_you_mean(nearest_name(first.source, alike))
            cure = f"{near}name the source that has it, or exclude the leaf in the route"
        elif first.verdict is Verdict.UNEXPECTED:
            problem = f"{first.source} has no destination leaf {first.destination}"
            cure = "name the source that fits, or exclude the leaf in the route"
        return errors.LayoutMismatch(
            problem, f"sync map ({_tally(bad)} of {len(self.rows)} leaves)", cure
        )

    def to_json(self) -> str:
        """The plan as JSON, in a stable form for programs."""
        payload = asdict(self) | {"payload_bytes": self.payload_bytes}
        payload["crossings"] = []
        for crossing in self.crossings:
            moved = {
                "publish_bytes": crossing.publish_bytes,
                "adoption_bytes": crossing.adoption_bytes,
            }
            payload["crossings"].append(asdict(crossing) | moved)
        return json.dumps(payload, indent=2)

    def table(self) -> str:
        """The plan as text. Each source is below its destination, and no path is shortened."""
        lines = [
            f"{'verdict':<10}  {'bytes':>12}  {'dtype':<10}  {'shape':<16}  {'device':<8}  leaf"
        ]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            head = f"{row.verdict!s:<10}  {row.payload_bytes:>12,}  {row.dtype:<10}  {shape:<16}  "
            line = f"{head}{row.device or _UNKNOWN:<8}  {row.destination}"
            if row.note:
                line += f"  ({row.note})"
            lines.append(line)
            lines.append(f"{'':<{len(head)}}{row.source_device or _UNKNOWN:<8}  <- {row.source}")
        return "\n".join([*lines, "", self._summary(all_names=True)])

    def summary(self) -> str:
        """Transport, trigger, totals and notes, one line each."""
        return self._summary(all_names=False)

    def _summary(self, *, all_names: bool) -> str:
        lines = [f"route      {route}" for route in self.routes]
        lines.append(f"transport  {self.transport}")
        if self.trigger:
            lines.append(f"trigger    {self.trigger}")
        lines.append(f"leaves     {_tally(self.rows)}, {self.payload_bytes:,} bytes a publish")

        # Where everything is in host memory, devices are no news.
        if not all({one.source, one.destination} <= {"", CPU} for one in self.crossings):
            lines.extend(f"devices    {crossing}" for crossing in self.crossings)

        # Leaves that a reader should look at, by what is odd about them.
        if all_names:
            at_most = len(self.rows) + len(self.unsent) + len(self.unreached)
        else:
            at_most = _NAMES_IN_SUMMARY
        idle = [row.destination for row in self.rows if row.idle]
        odd: dict[str, Sequence[str]] = {
            "unheld     sent, and in no optimizer (frozen, a copy, or an average)": self.unheld,
            "idle       sent, and does not act": idle,
            "outlives   computed by older weights, and acts": [*self.outlives],
            "unsent     trained, and not sent": self.unsent,
            "unreached  in the workers, and in no entry": self.unreached,
        }
        for title, names in odd.items():
            if names:
                lines.append(f"{title}: {listed(names, at_most)}")

        for name, how in self.differs.items():
            lines.append(f"differs    {name} {how}")
        if self.batch_statistics:
            layers = listed(self.batch_statistics, at_most)
            lines.append(f"batch      {_ACTS_WITH_BATCH}: {layers}")
        lines.extend(f"note       {note}" for note in self.notes)
        return "\n".join(lines)

    __str__ = table


_ACTS_WITH_BATCH = "acts with the statistics of its own batch"

IDLE = "arrives, and does not act"  #: how the note of a leaf begins that does not act
BY_COPY = "adopt='copy' reaches it"  #: how it ends if the leaf would act in copy mode


def _idle(rows: Sequence[Row], where: str) -> tuple[str, str, str]:
    """What, where and cure of leaves that arrive and do not act."""
    by_copy = all(row.note.endswith(BY_COPY) for row in rows)
    if by_copy:
        cure = (
            "give adopt='copy': the policy computes with the memory that the parameters had before"
        )
    else:
        cure = (
            "read the weights from the module at each call: keep no twin, packed, traced or quantised copy "
            "of them, and compile without freezing"
        )
    names = listed([row.destination for row in rows], _NAMES_IN_SUMMARY)
    return (
        f"{names} {IDLE}: no output changes with it",
        where,
        f"{cure}; declare leaves that need not act: Source(..., idle=('critic.*',))",
    )


def _outlives(names: Mapping[str, bool], where: str) -> tuple[str, str, str]:
    """What, where and cure of what older weights computed."""
    if all(names.values()):
        cure = "give adopt='copy': it is a view of the memory that the parameters had before"
    else:
        cure = (
            "compute it from the weights at each call, or drop it in a mark_weight_update() of its module, "
            "which rlsync calls at each adoption; carry the memory of an episode in the tensordict"
        )
    problem = f"older weights computed {listed([*names], _NAMES_IN_SUMMARY)}, which still acts with newer ones"
    return problem, where, cure


def _tally(rows: Sequence[Row]) -> str:
    counts = Counter(str(row.verdict) for row in rows)
    return ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))


_NAMES_IN_SUMMARY = 3
_UNKNOWN = "?"


def listed(names: Sequence[str], at_most: int) -> str:
    """Names in one line: the first ones, and how many more there are."""
    line = ", ".join(names[:at_most])
    if len(names) > at_most:
        line += f" and {len(names) - at_most} more"
    return line


def no_destination(wanted: str, where: str, offered: Sequence[str]) -> errors.SyncMapError:
    """The error for a destination that a collector does not offer."""
    near = did_you_mean(nearest_name(wanted, offered))
    cure = f"{near}this collector offers: {', '.join(offered) or 'nothing'}"
    return errors.DestinationNotFound(f"no destination {wanted!r}", where, cure)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The record of one publish.

    Example:
        >>> receipt = Receipt(2, "trigger", 4, 0, 0, 680, 0, 0, 5e-5, False, (), 1, 200, 10, 1.7e9)
        >>> receipt.version, receipt.copied_bytes, receipt.optim_steps
        (2, 680, 10)
    """

    #: the version that this publish made; if it was coalesced, the newest version before it
    version: int
    reason: str  #: ``"start"``, ``"resume"``, ``"trigger"``, ``"call"`` or ``"life"``
    copied_leaves: int  #: leaves whose bytes were copied, casts and sharded leaves included
    aliased_leaves: int  #: leaves that share memory with their destination
    cast_leaves: int  #: leaves copied into another dtype
    copied_bytes: int  #: bytes copied
    aliased_bytes: int  #: bytes that were not copied, because source and destination share them
    #: how many of ``copied_bytes`` were copied after the publish had returned
    background_bytes: int
    duration_s: float  #: seconds for which the publish held the learner
    #: no slot was free, so nothing was written; the next publish carries the weights
    coalesced: bool
    #: Leaves that no longer shared memory with their destination; they are copied from now on.
    repaired: tuple[str, ...]
    batches: int  #: those of the learner at the publish
    frames: int  #: those of the learner at the publish
    optim_steps: int  #: those of the learner at the publish
    time_s: float  #: seconds since the epoch
    #: Which run published it, its resumed lives included: in one run no version comes twice. Empty where
    #: version numbers are not reserved.
    run_id: str = ""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dict(zip(_FIELDS, _values(self), strict=True)))


#: asdict copies every value, which takes as long as the publish of a small network.
_FIELDS = tuple(spec.name for spec in fields(Receipt))
_values = attrgetter(*_FIELDS)

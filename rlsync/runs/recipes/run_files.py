"""What a run leaves in its folder: the names of all files, and its numbers. Loads no torch."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rlsync.runs.plain import json_of
from rlsync.seams import whole_file

RESOLVED = "config.yaml"  #: the run's config, every key with its value
PATHS = ("resume", "run_dir", "config_dir")  #: its keys that are paths
#: Its keys that belong to one run alone: a run that resumes it has its own.
OF_ONE_RUN = (*PATHS, "restarts", "objective")
RECEIPTS = "receipts.jsonl"  #: one line of JSON for each publish
#: The run's id, and the version numbers that no later life of the run gives out again.
VERSIONS = "versions.json"
SCHEDULE = "schedule.bin"  #: what decides the run, besides its config: see rlsync.record.schedule
#: What each life of the run has left that another one went on from: its config and its checkpoint, by number.
LIVES = "lives"
#: What was written after the checkpoint that a run went on from: it made that again.
ASIDE = "aside"
STALENESS = "staleness_versions.csv"  #: how many consumed steps were how many versions old
STATISTICS = "statistics.json"  #: what the run does, in numbers; see RunStatistics
EVALUATIONS = "evaluations.csv"  #: returns of the evaluated versions
BEST = "best.pt"  #: the weights of the version with the best evaluation
VIDEOS = "videos"  #: videos of evaluated versions, a folder
BEST_VIDEO = "best.gif"  #: the video of that version
CHECKPOINT = "checkpoint"  #: the trainer's state, a folder
#: That of the end of a life, where the newer one is of a run with a lag that was stopped within the next life.
LIFE_END = "life_end"
#: What a checkpoint says of its run, inside it: whether it was written within a life, and the sizes of the run's
#: files that grow line by line.
ABOUT_RUN = "run.json"
#: What the episodes of each worker go on from, inside a checkpoint at the end of a life; a folder.
ENVIRONMENTS = "environments"
DIGESTS = "digests.json"  #: size and digest of each file of a checkpoint, inside it
#: What the logger writes, a folder: CSV files under SCALARS, or TensorBoard's event files.
METRICS = "metrics"
SCALARS = "scalars"  #: the folder that TorchRL's CSVLogger makes inside METRICS
#: The address of the run's board, for ``rlsync status``. It goes when the run ends.
BOARD = "board.json"
CLUSTER = "cluster.json"  #: what a run on a cluster tells of its nodes, for ``rlsync status``
AGENTS = "agents"  #: the folders of a population's agents, by number; each is that of a run
OUTPUT = "output.txt"  #: what an agent prints
#: How, when and with what the run ended. It is not there while the run lasts, or if it was killed.
ENDED = "ended.json"
#: While the run lasts: its learner's process, and the room that is kept for ENDED on a disk that may fill up.
ROOM = ".ended.json"
#: a random number, by which rlsync knows the folder of a run that this user started
STARTED = "started"
PLOT = "plot.png"  #: the picture that ``rlsync plot`` draws
REPORT = "report.html"  #: the page that ``rlsync report`` writes
TIMELINE = "timeline.png"  #: the one that ``rlsync timeline`` draws


def video_file(frames: int) -> str:
    """The video that ``rlsync eval`` makes of the checkpoint after so many collected frames."""
    return f"eval-{frames}.gif"


def agent_folder(run: str | Path, number: int) -> Path:
    return Path(run, AGENTS, str(number))


def agents_in(run: Path) -> dict[int, Path]:
    """The folders of a population's agents that have begun, by number; none of any other run."""
    names = sorted(int(at.parent.name) for at in run.glob(f"{AGENTS}/[0-9]*/{RESOLVED}"))
    return {number: agent_folder(run, number) for number in names}


def best_agent(run: Path) -> Path:
    """The folder of a population's best agent; of any other run, the folder itself.

    It has the best evaluation, ranked as those of one run are, else the best mean return of its newest
    episodes.
    """
    agents = agents_in(run)
    if not agents:
        return run
    from rlsync.runs.evaluation.process import read_evaluations  # loads torch

    def rank(agent: Path) -> tuple[bool, float]:
        mean = -math.inf
        numbers = statistics_in(agent)
        if numbers is not None and numbers.return_mean is not None:
            mean = numbers.return_mean
        ranks = [(False, mean)]
        for evaluated in read_evaluations(agent / EVALUATIONS):
            if math.isfinite(evaluated.rank):
                ranks.append((True, evaluated.rank))
        return max(ranks)

    return max(agents.values(), key=rank)


def _said(description: str) -> Any:
    return field(metadata={"description": description})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """One life of a run in numbers. :func:`statistics_schema` says what each number means."""

    frames: int = _said("environment steps collected, those of earlier lives of the run included")
    updates: int = _said("optimizer steps, those of earlier lives of the run included")
    updates_per_frame: float | None = _said("updates / frames; null before the first frame")
    seconds: float = _said("seconds since this process began to train")
    frames_per_s: float = _said("environment steps a second, in this life")
    updates_per_s: float = _said("optimizer steps a second, in this life")
    version: int = _said("newest published version")
    published_bytes: int = _said("bytes that publishes of this life copied")
    publish_ms_p50: float | None = _said(
        "median of the milliseconds for which a publish held the learner"
    )
    publish_ms_p95: float | None = _said("95th percentile of the same")
    to_frames_ms_p50: float | None = _said(
        "median milliseconds from a publish until frames of it, or newer ones, arrived"
    )
    to_frames_ms_p95: float | None = _said("95th percentile of the same")
    adoption_ms_p50: float | None = _said(
        "median of the milliseconds from a publish until a worker began its first rollout with that version; "
        "of the versions that workers had when a batch arrived, null if the transport cannot tell"
    )
    adoption_ms_p95: float | None = _said("95th percentile of the same")
    lag_versions: int = _said(
        "versions that the slowest worker was behind when the newest batch arrived"
    )
    staleness_versions: float | None = _said(
        "mean age of the steps that were learned from, in versions"
    )
    learner_wait_s: float = _said("seconds that the learner waited for frames, in this life")
    workers_wait_s: float | None = _said(
        "seconds that all workers together waited; null if it is not known"
    )
    dropped_rollouts: int | None = _said(
        "rollouts dropped in this life, as too old or for lack of room; null: no ring"
    )
    outputs_held_version: int | None = _said(
        "newest version for which the outputs of all workers' policies were compared with the learner's, and "
        "held; null if none was yet, or nothing is compared"
    )
    outputs_held_time_s: float | None = _said("when that was seen, in seconds since the epoch")
    outputs_open: str | None = _said(
        "what the last comparison of outputs could not tell, and why; or null"
    )
    total_frames: int | None = _said("environment steps after which the run ends")
    run_id: str = _said("the run's id, as in its receipts; empty if it is not known")
    return_mean: float | None = _said(
        "mean return of the newest finished episodes; null before the first, and if it is not a finite number"
    )
    frames_by_worker: dict[str, int] | None = _said("environment steps of each worker in this life")  # noqa: RUF009
    # With a default: what 0.1.0 wrote does not have it.
    evaluations_ended: str | None = field(
        default=None,
        metadata={
            "description": "why there are no evaluations any more; null: the evaluating process works, or "
            "none was asked for"
        },
    )

    def write(self, run: Path) -> None:
        text = json_of(asdict(self)) + "\n"
        whole_file.write_whole(run / STATISTICS, lambda beside: beside.write_text(text))

    def progress(self) -> str:
        """How far the run is, in one line; what is not known yet is left out."""
        goal = self.total_frames
        frames = f"frames {self.frames:,}"
        if goal is not None:
            frames += f" / {goal:,}"
        parts = [
            frames,
            f"return {_shown(self.return_mean, '.1f', 'none')}",
            f"version {self.version}",
            f"lag {self.lag_versions}",
        ]
        if self.staleness_versions is not None:
            parts.append(f"staleness {self.staleness_versions:.1f}")
        if self.publish_ms_p50 is not None:
            parts.append(f"publish {self.publish_ms_p50:.2f} ms")
        parts.append(f"{self.frames_per_s:,.0f} frames/s")
        if goal is not None and self.frames_per_s > 0:
            parts.append(f"left {duration((goal - self.frames) / self.frames_per_s)}")
        return "  ".join(parts)

    def __str__(self) -> str:
        ratio = _shown(self.updates_per_frame, ".3g")
        waited = f"learner waited {self.learner_wait_s:.1f} s of {self.seconds:.1f} s"
        if self.workers_wait_s is not None:
            waited += f", workers together {self.workers_wait_s:.1f} s"
        if self.dropped_rollouts:
            waited += f", rollouts dropped {self.dropped_rollouts:,}"
        if self.outputs_held_version is not None:
            waited += f"; outputs of the workers held at version {self.outputs_held_version}"
            if self.outputs_held_time_s is not None:
                waited += f", {duration(time.time() - self.outputs_held_time_s)} ago"
        if self.outputs_open is not None:
            waited += f"; nothing is told of their outputs now: {self.outputs_open}"
        publish = f"median {_shown(self.publish_ms_p50)}, 95 % {_shown(self.publish_ms_p95)}"
        adopted = f"{_shown(self.adoption_ms_p50)}, {_shown(self.adoption_ms_p95)}"
        arrive = f"{_shown(self.to_frames_ms_p50, '.0f')}, {_shown(self.to_frames_ms_p95, '.0f')}"
        return (
            f"frames {self.frames:,} ({self.frames_per_s:,.0f}/s)  updates {self.updates:,} "
            f"({self.updates_per_s:,.0f}/s)  updates/frame {ratio}\n"
            f"publish ms: {publish}; until workers adopt: {adopted}; until its frames arrive: {arrive}\n"
            f"{waited}"
        )


def statistics_in(run: Path) -> RunStatistics | None:
    return whole_file.record_in(run / STATISTICS, RunStatistics, "the statistics")


def statistics_schema() -> dict[str, Any]:
    """The JSON schema of ``statistics.json``, draft 2020-12."""
    types = {
        "int": "integer",
        "str": "string",
        "float": "number",
        "int | None": ["integer", "null"],
        "str | None": ["string", "null"],
        "float | None": ["number", "null"],
        "dict[str, int] | None": ["object", "null"],
    }
    specs = fields(RunStatistics)
    properties = {spec.name: {"type": types[str(spec.type)], **spec.metadata} for spec in specs}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": STATISTICS,
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def duration(seconds: float) -> str:
    """A duration in the two largest units that it has, such as "4 min 10 s"."""
    whole = max(0, round(seconds))
    for unit, size, below, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {below}"
    return f"{whole} s"


def _shown(value: float | None, form: str = ".2f", unknown: str = "-") -> str:
    if value is None:
        return unknown
    return format(value, form)

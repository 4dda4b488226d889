"""``rlsync compare``: find the first version and leaf in which two runs differ, and the first evaluation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlsync.runs.cli.main import parser_of, print_document
from rlsync.runs.evaluation.play import Score
from rlsync.runs.evaluation.process import read_evaluations
from rlsync.runs.life.output import EXIT_FAILED
from rlsync.runs.life.run_folder import RecordedRun
from rlsync.runs.plain import json_of
from rlsync.runs.recipes.run_files import EVALUATIONS
from rlsync.seams import schedule

_EXAMPLES = """examples:
  rlsync compare runs/a runs/b
  rlsync compare runs/a runs/a/rerun-1 --json

Versions are compared that were published after as many optimizer steps, also where a resumed run gave them
other numbers; so are their evaluations.

exit status: 0 all digests of both are equal, and the scores of what both have evaluated, 1 one differs, or a
run has digests for which the other has none, 2 a schedule cannot be read or a wrong command line
"""


def main(arguments: list[str]) -> int:
    about = "Compare the recorded digests of two runs, version by version and leaf by leaf, and their evaluations."
    parser = parser_of("compare", about, _EXAMPLES)
    parser.add_argument("one", type=Path, help="a run's folder")
    parser.add_argument("other", type=Path, help="another one's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options = parser.parse_args(arguments)
    runs = []
    for folder in (options.one, options.other):
        run = RecordedRun(folder)
        run.tell_without_end(run.lives[-1])
        runs.append(run)
    one, other = runs
    comparison = schedule.runs_compared(one.lives, other.lives)
    scores = EvaluationsCompared.of(options.one, options.other)
    if options.json:
        print_document(json_of(asdict(comparison) | {"evaluations": asdict(scores)}, None))
    else:
        print(comparison)
        if scores.both:
            print(scores)
    if comparison.is_equal and scores.unequal_after is None:
        return 0
    return EXIT_FAILED


@dataclass(frozen=True, slots=True)
class EvaluationsCompared:
    """The scores of what two runs have evaluated after as many optimizer steps."""

    both: int  # how many evaluations have one in the other run
    unequal_after: int | None = None  # the optimizer steps of the first that differs

    @classmethod
    def of(cls, one: Path, other: Path) -> EvaluationsCompared:
        """Of the runs in two folders; ConfigError: a file of evaluations is damaged."""
        ours = _scores(one)
        theirs = _scores(other)
        both = sorted(ours.keys() & theirs.keys())
        unequal = (steps for steps in both if ours[steps] != theirs[steps])
        return cls(len(both), next(unequal, None))

    def __str__(self) -> str:
        if self.unequal_after is not None:
            return f"evaluations unequal after update {self.unequal_after:,}"
        return f"evaluations equal: {self.both} of {self.both}"


def _scores(run: Path) -> dict[int, str]:
    """By optimizer steps, the last time; as text, in which what is no number equals itself."""
    scores = {}
    for evaluated in read_evaluations(run / EVALUATIONS):
        score = [getattr(evaluated, spec.name) for spec in fields(Score)]
        if evaluated.optim_steps >= 0:
            scores[evaluated.optim_steps] = str(score)
    return scores

"""The name of every file in a run's folder. Recipes write some of them; the command line reads them back."""

from __future__ import annotations

#: The run's config, every key with its value.
RESOLVED = "config.yaml"
#: One line of JSON for each publish.
RECEIPTS = "receipts.jsonl"
#: How many consumed steps were how many versions old.
STALENESS = "staleness_versions.csv"
#: What the run does, in numbers; see rlsync.recipes.statistics.
STATISTICS = "statistics.json"
#: Returns of the evaluated versions.
EVALUATIONS = "evaluations.csv"
#: What a world model imagined, beside what was real.
IMAGINATION = "imagination.csv"
#: The same where observations are pictures, a folder.
IMAGINED_PICTURES = "imagination"
#: The weights of the version with the best evaluation.
BEST = "best.pt"
#: Videos of evaluated versions, a folder.
VIDEOS = "videos"
#: The video of that version.
BEST_VIDEO = "best.gif"
#: The trainer's state, a folder.
CHECKPOINT = "checkpoint"
#: What the logger writes, a folder: CSV files under SCALARS, or TensorBoard's event files.
METRICS = "metrics"
#: The folder that TorchRL's CSVLogger makes inside METRICS.
SCALARS = "scalars"
#: The address of the run's board, for ``rlsync status``. It goes when the run ends.
BOARD = "board.json"
#: What a run on a cluster tells of its nodes, for ``rlsync status``.
CLUSTER = "cluster.json"
#: The name by which a resumed run finds the agents that a learner left on a cluster.
CREW = "crew.json"
#: How, when and with what the run ended. It is not there while the run lasts, or if it was killed.
ENDED = "ended.json"
#: The picture that ``rlsync plot`` draws.
PLOT = "plot.png"


def metric_file(name: str) -> str:
    """The CSV file of one metric, below METRICS / SCALARS."""
    return f"{name}.csv"


def video_file(frames: int) -> str:
    """The video that ``rlsync eval`` makes of the checkpoint after so many collected frames."""
    return f"eval-{frames}.gif"

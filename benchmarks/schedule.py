"""The cost of a run's record, the speed of a rerun, and that of runs with a fixed lag.

    python benchmarks/schedule.py [--runs 4] [--frames 40000] [--lags 0 1 2] [--out schedule.json]

A rollout, a publish and a digest are noted many times, with the leaves of an impala network for CartPole; the
figures are medians of the learner's processor time. Then impala trains with and without the record, in turn,
is made again, and trains with each lag. The ratio of processor time and of frames a second is that of medians
within this one run: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torchrl.trainers import Trainer

from rlsync import RecordSchedule, Rerun
from rlsync.record.schedule import Comparison, ScheduleWriter
from rlsync.runs.actors.ring.reader import TakenRollout
from rlsync.runs.recipes.impala.recipe import RECIPE, make_network
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.rerun import config_of_rerun, lives_to_repeat
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig
from rlsync.runs.recipes.sync_settings import SyncConfig
from rlsync.tensors.digest import digest


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--frames", type=int, default=40_000)
    parser.add_argument("--lags", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = notes(Path(folder)) | runs(Path(folder), options.runs, options.frames, options.lags)
    for name, value in found.items():
        print(f"{name:36} {value:10.4g}")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def config(folder: Path, frames: int, digest_every: int | None, lag: int | None = None) -> Config:
    return Config(
        run_dir=str(folder),
        env=EnvConfig(id="CartPole-v1", num_envs=8),
        collector=CollectorConfig(frames_per_batch=160, lag=lag),
        sync=SyncConfig(digest_every=digest_every, verify_every_s=None),
        checkpoint_every_frames=10**12,
        recipe=ImpalaConfig(total_frames=frames, target_return=None),
    )


def notes(folder: Path) -> dict[str, float]:
    """Microseconds for one note of each kind, and bytes for a rollout and its publish."""
    writer = ScheduleWriter(folder / "s", {})
    hook = RecordSchedule(None, folder / "t")  # type: ignore[arg-type]
    hook._writer = writer
    views = {"policy_version": torch.ones(20, 8, dtype=torch.int64)}
    rollout = TakenRollout(0, 1, 2, views, torch.empty(0))
    network = make_network(ImpalaConfig(), RECIPE.probe(EnvConfig(id="CartPole-v1")))
    leaves = dict(network.named_parameters())
    before = (folder / "s").stat().st_size
    took = {
        "us a rollout": per_call(lambda: hook._taken(rollout, False), 20_000),
        "us a publish": per_call(lambda: writer.publish(7, 9), 20_000),
    }
    writer.flush()
    took["bytes a rollout and its publish"] = ((folder / "s").stat().st_size - before) / (
        6 * 20_000
    )
    took["us a digest"] = per_call(
        lambda: writer.digests(7, {name: digest([leaf]) for name, leaf in leaves.items()}), 200
    )
    return took


def per_call(call: Callable[[], object], times: int) -> float:
    """The median of six times, in microseconds of processor time."""
    took = []
    for _ in range(6):
        began = time.process_time()
        for _ in range(times):
            call()
        took.append((time.process_time() - began) / times * 1e6)
    return statistics.median(took)


def runs(folder: Path, pairs: int, frames: int, lags: list[int]) -> dict[str, float]:
    """What the record costs the learner, and how fast a rerun is and runs with a lag are, as ratios."""
    took: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    lagged = [(f"lag {lag}", 100, lag) for lag in lags]
    for pair in range(pairs):
        for name, every, lag in [("with", 100, None), ("without", None, None), *lagged]:
            given = config(folder / f"{name}-{pair}", frames, every, lag)
            Path(str(given.run_dir)).mkdir()
            took[name].append(timed(RECIPE.build(given), Trainer.train))
        recorded = config(folder / f"with-{pair}", frames, 100)
        again = folder / f"again-{pair}"
        again.mkdir()
        life, _ = lives_to_repeat(folder / f"with-{pair}", lambda _, config=recorded: config)[1]
        trainer = RECIPE.build(config_of_rerun(recorded, life, again), again=life)
        took["again"].append(
            timed(trainer, lambda trainer, life=life: check(Rerun(life).run(trainer)))
        )
    middle = {
        name: [statistics.median(each) for each in zip(*of, strict=True)]
        for name, of in took.items()
    }
    return {
        "processor time, with / without": middle["with"][0] / middle["without"][0],
        "frames a second, with / without": middle["without"][1] / middle["with"][1],
        "frames a second, rerun / run": middle["with"][1] / middle["again"][1],
        "frames a second, free run": frames / middle["with"][1],
    } | {
        f"frames a second, {name} / free": middle["with"][1] / middle[name][1]
        for name, _, _ in lagged
    }


def check(found: Comparison) -> None:
    assert found.equal, found
    assert not found.unequal, found


def timed(trainer: Trainer, train: Callable[[Trainer], object]) -> tuple[float, float]:
    """Seconds of the learner's processor time, and of the clock, without the start of the workers."""
    process, clock = time.process_time(), time.perf_counter()
    try:
        train(trainer)
    finally:
        trainer.shutdown()
    return time.process_time() - process, time.perf_counter() - clock


if __name__ == "__main__":
    main()

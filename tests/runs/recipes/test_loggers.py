"""Every logger of a run, and of a trainer of the user's own: what was logged is read back from its files."""

from __future__ import annotations

import copy
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger, WandbLogger

from rlsync import ConfigError, Every, LogPolicyLag, LogReceipts, SyncWeights
from rlsync.runs.compat.trainers import leave_out_later
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.bounds import bound_errors
from rlsync.runs.recipes.checks import errors
from rlsync.runs.recipes.run_files import METRICS
from rlsync.runs.recipes.settings import Config, LoggerConfig
from rlsync.runs.recipes.trainer import make_logger
from tests.runs.cli.test_main import SMALL, finished
from tests.runs.recipes.test_recipes import small_ppo, trained
from tests.tools.parts import FRAMES_PER_BATCH, make_collector, make_policy, make_ppo_trainer, wait_until
from tests.tools.programs import as_installed

#: metric -> its values, oldest first.
Written = dict[str, list[float]]


def in_csv(folder: Path) -> Written:
    scalars = folder / "metrics" / "scalars"
    return {
        str(file.relative_to(scalars).with_suffix("")): [
            float(line.split(",")[1]) for line in file.read_text().splitlines()
        ]
        for file in scalars.rglob("*.csv")
    }


def in_events(folder: Path) -> Written:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "metrics"))
    events.Reload()
    return {name: [e.value for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.seconds
def test_tensorboard_leaves_out_what_is_logged_again_since_a_checkpoint(tmp_path: Path) -> None:
    for begins_at in (None, 20):
        logger = TensorboardLogger(METRICS, str(tmp_path))
        if begins_at is not None:
            leave_out_later(logger, begins_at)
        for step in (10, 20, 30):
            if begins_at is None or step > begins_at:
                logger.log_scalar("return", float(step + (begins_at or 0)), step)
        logger.close()
    assert in_events(tmp_path) == {"return": [10.0, 20.0, 50.0]}
    leave_out_later(None, 20)  # a run without a logger


def in_wandb(folder: Path) -> Written:
    found: Written = {}
    for file in sorted(folder.rglob("*.wandb")):
        for record in wandb_records(file):
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                found.setdefault(name, []).append(float(item.value_json))
    return found


def wandb_records(file: Path) -> Iterator:
    """The records of an offline run: a log like LevelDB's, cut where a block of 32 kB ends."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # no record begins here
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        if at + 7 + size > len(content):  # it is being written
            return
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


LOGGERS: dict[str, tuple[Callable[[Path], Logger], Callable[[Path], Written]]] = {
    "csv": (lambda at: CSVLogger("metrics", log_dir=str(at)), in_csv),
    "tensorboard": (lambda at: TensorboardLogger("metrics", log_dir=str(at)), in_events),
    "wandb": (lambda at: WandbLogger("metrics", log_dir=str(at), mode="offline"), in_wandb),
}


@pytest.fixture
def _wandb_ends() -> Iterator[None]:
    """Nothing of wandb outlives a test: neither its process nor the variable that names it to others."""
    yield
    import wandb

    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]


@pytest.mark.processes  # wandb has a process of its own
@pytest.mark.usefixtures("_wandb_ends")
@pytest.mark.parametrize("kind", LOGGERS)
@pytest.mark.one_case
def test_lag_and_receipts_of_ones_own_trainer_reach_its_logger_by_one_line_each(
    kind: str, tmp_path: Path
) -> None:
    make, read = LOGGERS[kind]
    actor = make_policy()
    trainer = make_ppo_trainer(make_collector(copy.deepcopy(actor)), actor, total_frames=4 * FRAMES_PER_BATCH)
    trainer.logger = make(tmp_path)
    trainer._log_interval = 0  # what log_interval=0 gives its constructor: log every batch
    sync = SyncWeights({"policy": "loss_module.actor_network"}, when=Every(1, "batches"))
    sync.register(trainer)
    LogPolicyLag(sync).register(trainer)
    LogReceipts(sync).register(trainer)
    trainer.train()
    trainer.logger.close()
    # wandb writes in a process of its own, one value after the other.
    names = ("sync/version", "sync/copied_bytes", "sync/publish_ms")
    names += ("policy_lag/staleness_versions_max", "policy_lag/consumed_frames")
    wait_until(lambda: all(len(read(tmp_path).get(name, ())) == 4 for name in names), 60)
    written = read(tmp_path)
    receipts = list(sync.receipts)[1:]  # the first was published before the first frame
    assert len(receipts) == 4
    assert written["sync/version"] == [receipt.version for receipt in receipts]
    assert written["sync/copied_bytes"] == [receipt.copied_bytes for receipt in receipts]
    assert written["sync/publish_ms"] == pytest.approx([1e3 * r.duration_s for r in receipts])
    assert written["policy_lag/staleness_versions_max"] == [0.0] * 4
    assert written["policy_lag/consumed_frames"] == [float(FRAMES_PER_BATCH)] * 4


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
@pytest.mark.one_case
@pytest.mark.seconds
def test_nothing_that_was_logged_stays_in_memory_or_goes_into_a_checkpoint(kind: str, tmp_path: Path) -> None:
    """TorchRL's Trainer and CSVLogger keep every number, and the latter writes all into each checkpoint."""

    def logger_bytes(batches: int) -> int:
        folder = tmp_path / str(batches)
        config = small_ppo(run_dir=str(folder), logger=LoggerConfig(kind=kind), workers=1, batch=32)
        config.collector.num_workers = 0
        config.recipe.total_frames = 32 * batches
        trainer = ppo.RECIPE.build(config)
        trained(trainer)
        assert {len(values) for values in trainer._log_dict.values()} == {1}
        if isinstance(trainer.logger, CSVLogger):
            assert not trainer.logger.experiment.scalars
        assert len(LOGGERS[kind][1](folder)["sync/version"]) == batches
        return sum(f.stat().st_size for f in folder.rglob("checkpoint/components/*-logger/**/*.json"))

    assert logger_bytes(2) == logger_bytes(4) < 1000


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_goes_to_wandb_and_its_resumed_run_is_the_same_there(tmp_path: Path) -> None:
    offline = ("logger=wandb", "logger.kwargs.mode=offline", "logger.kwargs.project=mine")
    finished(tmp_path, "train", *offline, *SMALL, "run_dir=first")
    more = ("recipe.total_frames=1024", "resume=first", "run_dir=second")
    finished(tmp_path, "train", *offline, *SMALL, *more)
    first, second = (in_wandb(tmp_path / run) for run in ("first", "second"))
    assert len(first["sync/version"]) >= 1
    assert second["sync/version"][0] > first["sync/version"][-1]
    ids, keys = [], []
    for run in ("first", "second"):
        (file,) = (tmp_path / run / "metrics").rglob("*.wandb")
        (told,) = (r.run for r in wandb_records(file) if r.HasField("run"))
        assert (told.project, told.display_name) == ("mine", run)
        ids.append(told.run_id)
        keys.append({update.key for update in told.config.update})
    assert ids[0] == ids[1]
    assert {"seed", "recipe", "collector"} <= keys[0], "the run's config is shown beside its curves"


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_logger_without_its_package_names_the_extra_before_a_worker_starts(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    config = Config(run_dir=str(tmp_path), logger=LoggerConfig(kind=package))
    with pytest.raises(ConfigError, match=f"{package} is not installed") as refused:
        ppo.RECIPE.build(config)
    assert refused.value.cure == f"pip install 'rlsync[{package}]'"


@pytest.mark.processes
@pytest.mark.usefixtures("_wandb_ends")
def test_wandb_without_a_login_is_three_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    logger = LoggerConfig(kind="wandb", kwargs={"mode": "online"})
    with pytest.raises(ConfigError, match="wandb cannot start: No API key configured") as refused:
        make_logger(Config(run_dir=str(tmp_path), logger=logger))
    assert "logger.kwargs.mode=offline" in refused.value.cure


@pytest.mark.parametrize("kind", ["csv", "tensorboard"])
def test_an_argument_that_the_logger_does_not_take_is_refused(kind: str, tmp_path: Path) -> None:
    config = Config(run_dir=str(tmp_path), logger=LoggerConfig(kind=kind, kwargs={"colour": "red"}))
    with pytest.raises(ConfigError, match=r"does not take these arguments: .*'colour'"):
        make_logger(config)


# ------------------------------------------------------------------------- a logger of an installed package


OWN_LOGGER = """
from torchrl.record.loggers import Logger

class Silent(Logger):
    def _create_experiment(self):
        pass

class Own(Silent):
    def __init__(self, exp_name, log_dir, more):
        super().__init__(exp_name, log_dir)
        self.more = more

    def log_scalar(self, name, value, step=None):
        pass

make = Own

def nothing(**given):
    pass

class Bare:
    def __init__(self, **given):
        pass

    log_scalar = Own.log_scalar

def silent(**given):
    return Silent(**given)

def broken(**given):
    raise RuntimeError("no server")
"""


@pytest.mark.parametrize(
    ("entry", "told", "cure"),
    [
        ("nothing", "the own logger is none: it is a NoneType", "a log_scalar of its own"),
        ("Bare", "the own logger is none: it is a Bare", "Logger that has a log_scalar"),
        ("broken", "the own logger cannot start: RuntimeError: no server", "mend it, or take logger=csv"),
        ("silent", "the own logger is none: it is a Silent", "a log_scalar of its own"),
        ("make", "missing 1 required positional argument: 'more'", r"\+logger.kwargs.NAME=VALUE"),
        ("mkae", "has no attribute 'mkae'", "name what own_logger_.* has, in the entry point"),
    ],
)
def test_what_is_no_logger_is_told_before_a_worker_runs(
    entry: str, told: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_installed(tmp_path, "own", f"[rlsync.loggers]\nown = own_logger_{entry}:{entry}\n")
    (tmp_path / f"own_logger_{entry}.py").write_text(OWN_LOGGER)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"{told}.*\n  where  .*\n  cure   .*{cure}"):
        make_logger(Config(run_dir=str(tmp_path), logger=LoggerConfig(kind="own")))


def test_a_logger_of_an_installed_package_is_chosen_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_installed(tmp_path, "own", "[rlsync.loggers]\nown = own_logger:make\nlost = nowhere:make\n")
    (tmp_path / "own_logger.py").write_text(OWN_LOGGER)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(run_dir=str(tmp_path), logger=LoggerConfig(kind="own", kwargs={"more": 1}))
    assert [*bound_errors(config)] == []
    made: Any = make_logger(config)
    assert (made.exp_name, made.log_dir, made.more) == (METRICS, str(tmp_path), 1)
    lost = Config(logger=LoggerConfig(kind="lost"))
    (error,) = errors(lost)  # before anything runs
    assert "a logger cannot be imported: No module named 'nowhere'\n" in str(error)
    assert error.cure == "install what is missing; python -c 'import nowhere' shows the line"
    (error,) = bound_errors(Config(logger=LoggerConfig(kind="owm")))
    assert error.cure == "did you mean 'own'? give one of csv, tensorboard, wandb, none, lost, own"

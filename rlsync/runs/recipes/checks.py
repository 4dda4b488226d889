"""What is wrong with a config beyond its fields' bounds, as generators of errors: nothing is started or made.

``rlsync check`` lists all errors; a builder raises the first. Recipes have a method ``errors`` of their own.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlsync import ConfigError, RlsyncError
from rlsync.runs.actors.devices import device_named, device_of_each
from rlsync.runs.evaluation.play import check_packages
from rlsync.runs.recipes.bounds import bound_errors, caught, refuse
from rlsync.runs.recipes.registry import SHIPPED, recipe_named
from rlsync.runs.recipes.run_files import BEST_VIDEO
from rlsync.runs.recipes.settings import BFLOAT16, LOGGER_PACKAGES, LOGGERS, Config
from rlsync.runs.recipes.sync_settings import map_errors, trigger_errors, verify_trigger
from rlsync.seams import DATA_AT, device, extensions, machine

#: Files that a learner has open, half of them while a checkpoint is put on disk.
_FILES = 64

# Of each worker that starts.
_FILES_OF_WORKER = 3  # two pipes of its process, and what it prints
_TASKS_OF_WORKER = (
    3  # the thread that acts, one that ends it with the learner, one that watches its start
)
_LEAST_BYTES_OF_WORKER = (
    25_000_000  # that it shares with nobody: less was not seen, with the smallest of networks
)

VIDEO_KEY = "recipe.evaluation.video_every"  #: the key of an evaluation's films


def errors(config: Config) -> Iterator[RlsyncError]:
    """All that is wrong with a config, as far as its values tell: no environment is made."""
    yield from bound_errors(config)
    yield from _misfits(config)


def _misfits(config: Config) -> Iterator[RlsyncError]:
    """What is wrong though each value is within its own bounds."""
    yield from trigger_errors(config.sync.when)
    yield from map_errors(config.sync)
    yield from caught(lambda: verify_trigger(config.sync), "sync.verify_every_s")
    yield from config.env.errors()
    looks = device_errors, cluster_errors, in_process_errors, schedule_errors
    for look in (*looks, video_errors, file_errors, worker_errors, update_errors):
        yield from look(config)
    kind = config.logger.kind
    if kind in LOGGER_PACKAGES and not machine.has_package(kind):
        yield ConfigError(
            f"{kind} is not installed", "logger.kind", f"pip install 'rlsync[{kind}]'"
        )
    if (point := extensions.installed(LOGGERS).get(kind)) is not None:
        yield from caught(lambda: extensions.imported(point, "logger"), "logger.kind")
    for error in config.recipe.errors(config):
        if isinstance(error, RlsyncError):
            yield error
        else:
            where = f"errors() of {config.recipe.name!r}"
            cure = "yield rlsync.ConfigError(what, where, cure)"
            yield ConfigError(str(error), where, cure)
    yield from batch_errors(config)


def check(config: Config) -> Config:
    """The same config, or the first of :func:`errors`, which names the key, its value and what it accepts."""
    refuse(errors(config))
    return config


#: with more environments a worker gains little: it steps them one after the other
_FULL_WORKER = 16


def more_frames(config: Config) -> str | None:
    """The override with which workers make more frames a second: more environments, or workers, or a lag."""
    envs = config.env.num_envs
    collector = config.collector
    workers = collector.num_workers
    ways: dict[str, Config] = {}
    if 2 * envs <= _FULL_WORKER:
        ways[f"env.num_envs={2 * envs}"] = replace(
            config, env=replace(config.env, num_envs=2 * envs)
        )
    if machine.affine_cores() > workers + 1:
        more = replace(collector, num_workers=workers + 1)
        ways[f"collector.num_workers={workers + 1}"] = replace(config, collector=more)
    if collector.lag == 0 and workers:
        ways["collector.lag=1"] = replace(config, collector=replace(collector, lag=1))
    before = len(list(_misfits(config)))
    for word, other in ways.items():
        if len(list(_misfits(other))) <= before:
            return word
    return None


def file_errors(config: Config) -> Iterator[RlsyncError]:
    """An error if this process may not open as many files as a run needs: the run would hang somewhere."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    workers = _processes_here(config)
    needed = _FILES + _FILES_OF_WORKER * workers
    if 0 <= limit < needed:  # -1: no limit
        problem = f"this process may open {limit} files, and the run needs {needed}"
        cure = f"allow more with ulimit -n {needed}, or give fewer workers"
        yield ConfigError(problem, f"ulimit -n, collector.num_workers={workers}", cure)
    longest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= longest < 2 * DATA_AT:
        problem = f"this process may make files of {longest:,} bytes, and a board's file is {DATA_AT:,} long"
        cure = "allow longer ones with ulimit -f unlimited: it is mostly empty"
        yield ConfigError(problem, "ulimit -f", cure)


def worker_errors(config: Config) -> Iterator[RlsyncError]:
    """An error for what this machine has too little of for so many workers: they would die as they start."""
    workers = _processes_here(config)
    where = f"collector.num_workers={workers}"
    left = machine.tasks_left()
    needed = _TASKS_OF_WORKER * workers
    if left is not None and left < needed:
        problem = (
            f"{left} more processes and threads may start here, and {workers} workers need {needed}"
        )
        cure = "allow more (ulimit -u, or pids.max of the container), or give fewer workers"
        yield ConfigError(problem, where, cure)
    memory = machine.memory_bytes()
    needed = _LEAST_BYTES_OF_WORKER * workers
    if memory is not None and memory < needed:
        problem = (
            f"there are {memory:,} bytes of memory, and {workers} workers need more than {needed:,}"
        )
        cure = "give fewer workers, each with more environments (env.num_envs)"
        yield ConfigError(problem, where, cure)


def _processes_here(config: Config) -> int:
    """The worker processes of this machine."""
    if config.in_process:
        return 0
    return config.workers_per_node


def device_errors(config: Config) -> Iterator[RlsyncError]:
    """One error for each key whose device this machine lacks, or whose list does not fit the workers."""
    devices = config.collector.device
    workers = config.workers_per_node
    yield from caught(lambda: device_named(config.learner.device, "learner.device"))
    if isinstance(devices, str) or not config.in_process:
        yield from caught(lambda: device_of_each(devices, workers, "collector.device"))
    yield from caught(lambda: device_named(config.evaluation.device, "evaluation.device"))


def cluster_errors(config: Config) -> Iterator[RlsyncError]:
    """All that is wrong with the settings of a cluster. Connects to nothing."""
    cluster = config.cluster
    if cluster.here:
        return
    from rlsync.runs.actors.cluster.session import check_address

    yield from caught(lambda: check_address(cluster.address))
    if not config.recipe.acts_on_clusters():
        problem = f"the recipe {config.recipe.name!r} cannot act on a cluster"
        others = [name for name in SHIPPED if recipe_named(name).settings().acts_on_clusters()]
        cure = f"give cluster=none, or a recipe that acts on nodes: {', '.join(others)}"
        yield ConfigError(problem, f"cluster.kind={cluster.kind}", cure)
    if cluster.placement == "others" and cluster.address is None:
        problem = "a Ray that is started for this run has no other node than the learner's"
        yield ConfigError(
            problem, "cluster.placement=others", "give cluster.address, or cluster.placement=all"
        )
    for name, amount in cluster.resources.items():
        if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            problem = f"{amount!r} is no amount of a resource"
            yield ConfigError(problem, f"cluster.resources.{name}", "give a number > 0")


def in_process_errors(config: Config) -> Iterator[RlsyncError]:
    """What needs worker processes, and is asked for without any."""
    if config.collector.num_workers:
        return
    if not config.cluster.here and config.cluster.workers_per_node is None:
        problem = "the nodes of a cluster have no worker"
        yield ConfigError(problem, "collector.num_workers=0", "give 1 or more, or cluster=none")
    if not isinstance(config.collector.device, str):
        problem = "a list of devices has one for each worker, and there is no worker process"
        yield ConfigError(
            problem, "collector.device, collector.num_workers=0", "give one device, like cpu"
        )


def batch_errors(config: Config) -> Iterator[RlsyncError]:
    """An error if a batch cannot be as many steps of every environment."""
    batches = config.recipe.batches(config)
    frames = config.collector.frames_per_batch
    envs = batches.rollouts * config.env.num_envs
    if frames < 1 or envs < 1:  # bounds say it
        return
    if batches.steps * envs == frames or config.recipe.says_which_batches():
        return
    problem = f"a batch of {frames} frames is not as many steps of each of {envs} environments"
    near = max(1, frames // envs) * envs
    cure = f"give a multiple of collector.num_workers x env.num_envs = {envs}, for example {near}"
    if config.in_process:
        cure = f"give a multiple of env.num_envs = {envs}, for example {near}"
    if not config.cluster.here:
        cure = f"give a multiple of {envs}, the environments of cluster.min_nodes nodes, for example {near}"
    yield ConfigError(problem, "collector.frames_per_batch", cure)


def schedule_errors(config: Config) -> Iterator[RlsyncError]:
    """One error for each key that leaves no fixed lag, or no life to make again, where that is asked for."""
    seconds = config.sync.when.unit == "seconds"
    lag = config.collector.lag
    full = config.recipe.ring_policy()
    if lag is not None and lag > 0 and not config.cluster.here:
        problem = f"the nodes of a cluster keep no lag of {lag}"
        cure = "give collector.lag=0 (a batch has frames of the newest version alone) or null, or cluster=none"
        yield ConfigError(problem, f"collector.lag={lag}", cure)

    # With a lag each rollout has its version beforehand, so nothing may depend on the clock or on a full ring.
    here = config.cluster.here
    no_seconds = "count batches, frames or optim_steps"
    problem = "this run cannot have a fixed lag"
    if lag is not None:
        if seconds and here:
            cure = f"{no_seconds}, or give collector.lag=null"
            yield ConfigError(problem, "sync.when.unit", cure)
        if full != "block":
            cure = "give block, or give collector.lag=null"
            yield ConfigError(problem, "recipe.when_full", cure)

    # A life is made again from its record, which says which rollouts there were, and when versions came.
    if config.life_frames is None:
        return
    checks = (
        ("cluster.kind", not here, "give cluster=none"),
        ("sync.when.unit", seconds, no_seconds),
        ("recipe.when_full", full == "drop_newest", "give block or drop_oldest"),
        ("sync.digest_every", config.sync.digest_every is None, "give 100"),
    )
    for key, is_wrong, cure in checks:
        if is_wrong:
            problem = "this run cannot be made again life by life"
            yield ConfigError(problem, key, f"{cure}, or leave life_frames out")


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler, and the headers of Python, here."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    default = "g++"
    if sys.platform == "darwin":
        default = "clang++"
    return shutil.which(os.environ.get("CXX", default)) is not None and headers.exists()


def update_errors(config: Config) -> Iterator[RlsyncError]:
    """One error for each key of updates that this recipe or this machine cannot serve."""
    recipe = config.recipe
    on_cpu = config.learner.device == "cpu"
    asked = {"compile": recipe.compile == "on", "update_dtype": recipe.update_dtype == BFLOAT16}
    for key, is_asked in asked.items():
        if not is_asked or key in recipe.update_keys:
            continue
        others = [name for name in SHIPPED if key in recipe_named(name).settings.update_keys]
        problem = f"the updates of {recipe.name!r} cannot do that: only those of {', '.join(others)} have it"
        yield ConfigError(problem, f"recipe.{key}", f"leave recipe.{key} out")
    if asked["compile"] and on_cpu and not has_compiler():
        cure = "install g++ and Python's headers, or give recipe.compile=off"
        yield ConfigError("there is no C++ compiler here", "recipe.compile=on", cure)
    on_cpu |= recipe.acts_in_update_dtype and config.collector.device == "cpu"
    # None: it cannot be told
    if asked["update_dtype"] and on_cpu and device.bfloat16_instructions() == []:
        cure = "give recipe.update_dtype=float32"
        yield ConfigError("this processor has no bfloat16", "recipe.update_dtype=bfloat16", cure)


def video_errors(config: Config) -> Iterator[RlsyncError]:
    """One error if videos are asked for, and there are no evaluations, or a package is missing."""
    evaluation = config.recipe.evaluations()
    if evaluation.video_every is None:
        return
    key = f"{VIDEO_KEY}={evaluation.video_every}"
    if not evaluation.every_frames:
        cure = "give recipe.evaluation.every_frames, or video_every=null"
        yield ConfigError("there is no evaluation to film", key, cure)
    try:
        check_packages(Path(BEST_VIDEO))
    except ConfigError as error:
        yield ConfigError(error.what, key, f"{error.cure}; or video_every=null")

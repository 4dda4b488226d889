"""Resume from a checkpoint: what may change, and what TorchRL's checkpoints do not restore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LRScheduler
from torchrl.checkpoint import Checkpoint, CheckpointError
from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.actors.repeated import RepeatedUnrolls
from rlsync.runs.actors.worker import seed_after
from rlsync.runs.config.composing import is_of_0_1, nothing_in
from rlsync.runs.config.trust import check_checkpoint
from rlsync.runs.evaluation.checkpoint import Component
from rlsync.runs.recipes.bounds import Restored
from rlsync.runs.recipes.checkpoints import Taken, envs_in, places, taken
from rlsync.runs.recipes.registry import Recipe
from rlsync.runs.recipes.run_files import OF_ONE_RUN, RESOLVED
from rlsync.runs.recipes.settings import Config
from rlsync.seams import trainers, warn

#: Components of a trainer's checkpoint: the policy's weights, and TorchRL's counters.
_POLICY = "policy"
_PROGRESS = "trainer_state"


@dataclass(frozen=True, slots=True)
class Change:
    """A key that a resumed run has another value of than the run before it."""

    key: str
    before: Any
    now: Any
    kept: str = ""  #: why it cannot change; empty if it can
    #: what brings the old value back with a checkpoint; None: nothing does
    restored: Restored | None = None

    def __str__(self) -> str:
        return f"{self.key} {self.before} -> {self.now}"


def checkpoint_in(path: str, trusted: bool) -> Taken:
    """The whole checkpoint that ``resume=path`` means; an unchecked or unsafe one has to be ``trusted``."""
    folder = Path(path)
    for place in places(folder):
        check_checkpoint(place, trusted)
    checkpoint = taken(folder, trusted=trusted)
    if checkpoint is None:
        raise nothing_in(path)
    return checkpoint


def changes(before: Config, now: Config) -> list[Change]:
    """The keys that differ, besides those that belong to one run alone."""

    def differences(before: Any, now: Any, prefix: str) -> Iterator[Change]:
        for spec in fields(now):
            key = prefix + spec.name
            old = getattr(before, spec.name)
            new = getattr(now, spec.name)
            if is_dataclass(new) and type(old) is type(new):
                yield from differences(old, new, key + ".")
            elif old != new:
                yield Change(
                    key=key,
                    before=old,
                    now=new,
                    kept=spec.metadata.get("kept", ""),
                    restored=spec.metadata.get("restored"),
                )

    return [change for change in differences(before, now, "") if change.key not in OF_ONE_RUN]


def change_errors(before: Config, now: Config) -> Iterator[RlsyncError]:
    """What a run cannot resume with: another recipe, or another value of what the checkpoint holds."""
    old = before.recipe.variant()
    new = now.recipe.variant()
    if old != new:
        problem = f"cannot resume a run of {old!r} with the recipe {new!r}"
        yield ConfigError(
            problem, f"resume={now.resume}", f"add recipe={old}, or start anew without resume"
        )
        return
    for change in changes(before, now):
        if change.kept:
            problem = f"a resumed run cannot change {change}: {change.kept}"
            cure = f"leave {change.key} out, or start anew without resume"
            yield ConfigError(problem, f"resume={now.resume}", cure)


class NothingLeft(ConfigError):
    """A run that is resumed has all its frames."""


def require_fit(
    recipe: Recipe, config: Config, spaces: Any, checkpoint: Path, changed: list[Change]
) -> None:
    """Refuse, before a worker starts, a checkpoint that does not fit, or that is at its end."""
    names = Checkpoint.manifest(checkpoint)["components"]
    progress = Component()
    wanted = {_POLICY: recipe.player(config, spaces, False).weights, _PROGRESS: progress}
    parts = {name: part for name, part in wanted.items() if name in names}
    frames = 0
    try:
        Checkpoint(**parts).load(checkpoint, map_location="cpu")
        if _PROGRESS in parts:
            frames = int(progress.state["collected_frames"])
    except (CheckpointError, RuntimeError, KeyError, ValueError) as error:
        raise _misfit(error, checkpoint, changed) from error
    total = config.recipe.total_frames
    if frames >= total:
        problem = (
            f"the run has collected {frames:,} frames already, and recipe.total_frames is {total:,}"
        )
        cure = f"give more, for example recipe.total_frames={2 * frames}"
        raise NothingLeft(problem, f"resume={config.resume}", cure)


def _misfit(error: Exception, checkpoint: Path, changed: list[Change]) -> ConfigError:
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = str(root).strip().splitlines()[:2]  # torch names the tensor in the second line
    problem = " ".join(map(str.strip, lines))
    if root is not error:  # TorchRL's error prints whole tensordicts after the part's name
        problem = f"{str(error).partition(':')[0]}: {problem}"
    cure = f"repeat the overrides of the first run; its {RESOLVED} has them all"
    if changed:
        cure = f"leave out what changes the networks; changed are: {', '.join(map(str, changed))}"
    if is_of_0_1(checkpoint.parent / RESOLVED):
        cure += "; else start anew: rlsync 0.1 wrote this run, some of whose networks were others"
    return ConfigError(
        f"the checkpoint does not fit this configuration: {problem}", str(checkpoint), cure
    )


def load(trainer: Trainer, checkpoint: Path, changed: list[Change] | None = None) -> None:
    """Load a checkpoint, and put in again what was ``changed``; None: the run before is unknown."""
    settings = Settings(trainer)
    # it keeps file names, and another kind may be asked for
    logger = trainer.logger
    trainer.logger = None
    try:
        # Before TorchRL gives the weights to the workers: one that cannot take them ends.
        Checkpoint(loss_module=trainer.loss_module).load(checkpoint, map_location="cpu")
        trainer.load_from_file(checkpoint)
    except (CheckpointError, RuntimeError, KeyError, ValueError) as error:
        for cause in (error, error.__cause__):
            # it tells its own cure: a part, or a worker that died
            if isinstance(cause, RlsyncError):
                raise cause from cause.__cause__
        raise _misfit(error, checkpoint, changed or []) from error
    finally:
        trainer.logger = logger
    restored = None
    if changed is not None:
        restored = [change.restored for change in changed if change.restored is not None]
    settings.put_back(restored)
    if isinstance(trainer.collector, RepeatedUnrolls) and not _change_envs(changed or []):
        trainer.collector.load_envs(envs_in(checkpoint))
    if trainer.seed is not None:
        # Workers, which have begun with new episodes, begin once more.
        trainer.collector.set_seed(seed_after(trainer.seed, trainer.collected_frames))


def _change_envs(changed: Sequence[Change]) -> bool:
    """Whether the workers have other environments than those of the run before."""
    keys = [change.key for change in changed]
    return any(key.startswith("env.") or key == "collector.num_workers" for key in keys)


class Settings:
    """What the config has set in a trainer, put in again where a checkpoint has brought old values back."""

    def __init__(self, trainer: Trainer) -> None:
        self._optimizers = trainers.optimizers(trainer)
        self._schedulers = schedulers(trainer)
        self._groups: list[list[dict[str, Any]]] = []
        for optimizer in self._optimizers:
            self._groups.append(list(map(dict, optimizer.param_groups)))
        self._numbers = [(name, number, number.item()) for name, number in _numbers(trainer)]

    def put_back(self, changed: Sequence[Restored] | None) -> None:
        """Put in again what the config has changed; None if unknown: then all options of optimizers."""
        self._put_back_numbers(changed or ())
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            pairs = zip(optimizer.param_groups, groups, strict=True)
            for index, (group, fresh) in enumerate(pairs):
                options: Iterable[str] = fresh
                if changed is not None:
                    options = _changed_options(changed, optimizer, index)
                for name in options:
                    _put_back(group, fresh, name)
        for scheduler in self._schedulers:
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]

    def _put_back_numbers(self, changed: Sequence[Restored]) -> None:
        names = {place.buffer for place in changed if place.buffer}
        absent = names.difference(name for name, _, _ in self._numbers)
        if absent:
            problem = f"no buffer is called {', '.join(sorted(absent))}, so no old value is replaced there"
            cure = "correct the name, unless the builder itself uses the setting"
            warn(RlsyncWarning(problem, "in_buffer(...) in the recipe's settings", cure))
        for name, number, fresh in self._numbers:
            if name in names:
                with torch.no_grad():
                    number.fill_(fresh)


def _changed_options(
    changed: Sequence[Restored], optimizer: optim.Optimizer, group: int
) -> Iterator[str]:
    """The options of one group of an optimizer that the config has changed."""
    for place in changed:
        if place.group in (None, group) and place.optimizer in ("", type(optimizer).__name__):
            yield place.option


def _put_back(group: dict[str, Any], fresh: dict[str, Any], name: str) -> None:
    if name not in group or name not in fresh or isinstance(group[name], Tensor):
        return
    if name in ("params", "initial_lr"):
        return
    if name != "lr":
        group[name] = fresh[name]
        return
    # A schedule lowers "lr" and keeps the rate that it began with as "initial_lr". Both change in proportion.
    base = "lr"
    if "initial_lr" in group:
        base = "initial_lr"
    old = group[base]
    new = fresh.get(base, fresh["lr"])
    if old == new:
        return
    if old:
        group["lr"] = group["lr"] * (new / old)
    else:
        group["lr"] = new
    group[base] = new


def schedulers(trainer: Trainer) -> list[LRScheduler]:
    return [value for value in _held_by_hooks(trainer) if isinstance(value, LRScheduler)]


def _numbers(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """The buffers of one number in the loss module, and in modules that registered hooks hold, by name."""
    numbers: dict[int, tuple[str, Tensor]] = {}  # by identity: several owners may have one
    for owner in [trainer.loss_module, *_held_by_hooks(trainer)]:
        if not isinstance(owner, nn.Module):
            continue
        for name, buffer in owner.named_buffers():
            if buffer.numel() == 1 and buffer.is_floating_point():
                numbers[id(buffer)] = name.rpartition(".")[2], buffer
    return list(numbers.values())


def _held_by_hooks(trainer: Trainer) -> list[object]:
    values: list[object] = []
    for hook in trainers.registered_modules(trainer):
        values += [hook, *vars(hook).values()]
    return values

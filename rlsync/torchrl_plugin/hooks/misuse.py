"""Errors and warnings of hooks that are registered in a way in which they could do nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch.optim.optimizer import register_optimizer_step_post_hook
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import ConfigError, NothingPublished, warn
from rlsync.core.plan import SyncPlan, Verdict
from rlsync.core.trigger import Counters
from rlsync.sync.endpoint import Endpoint
from rlsync.torchrl_plugin.compat import trainers, wrap_batches

if TYPE_CHECKING:  # which uses what is here
    from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights

_PATIENCE = 10  #: so many batches without a call, or calls without progress, raise a warning


def no_trainer(hook: object, or_else: str = "") -> ConfigError:
    """The error of a hook that met no trainer; ``or_else`` is another cure, and ends in ", or "."""
    name = type(hook).__name__
    problem = f"this {name} has no trainer yet, so it can do nothing"
    cure = f"{or_else}call hook.register(trainer) in place of trainer.register_op(stage, hook)"
    return ConfigError(problem, f"{name}, called before it was bound to a trainer", cure)


def require(kind: type, given: object, hook: object, cure: str = "give your trainer") -> None:
    """Refuse a hook that was given something else, such as a loss in place of its trainer."""
    if not isinstance(given, kind):
        name = type(hook).__name__
        raise ConfigError(
            f"{name} needs a {kind.__name__}, got a {type(given).__name__}", name, cure
        )


def require_trainer(hook: Any, trainer: Trainer, who: str) -> None:
    """Refuse a trainer to which a hook that publishes is not bound."""
    if hook.trainer is not trainer:
        problem = f"this {type(hook).__name__} is not bound to that trainer"
        raise ConfigError(
            problem, who, "register it on the same trainer first; make one for each trainer"
        )


def refuse_arguments(hook: object, given: tuple[object, ...]) -> None:
    """Refuse the arguments of a stage at which the hook has no place."""
    if given:
        name = type(hook).__name__
        problem = f"this {name} takes no arguments, and was called with {type(given[0]).__name__}"
        cure = "register it at a stage without arguments (post_steps, post_optim or post_epoch), "
        cure += "or call hook.register(trainer), which chooses one"
        raise ConfigError(problem, f"the stage at which {name} is registered", cure)


def refuse_background(trainer: Trainer, endpoint: Endpoint) -> None:
    """Refuse background publishes that the transport cannot make, or no optimizer's step could join."""
    if not endpoint.publisher.transport.background:
        problem = "weights of this collector are not published in the background"
        cure = "leave it out, or use a process collector with a BoardScheme"
        raise ConfigError(
            problem, f"SyncWeights(background=True), transport {endpoint.description}", cure
        )
    if not trainers.optimizers(trainer):
        problem = "this trainer has no optimizer before whose step a publish could be joined"
        cure = "give the trainer its optimizer, or leave background out"
        raise ConfigError(problem, "SyncWeights(background=True)", cure)


def refuse_shards_in_background(plan: SyncPlan) -> None:
    """Refuse to publish sharded leaves in the background: all ranks bring their parts at once."""
    sharded = plan.count(Verdict.SHARDED)
    if sharded:
        problem = f"{sharded} leaves are sharded over ranks, which bring their parts at once"
        raise ConfigError(problem, "SyncWeights(background=True)", "leave background out")


@runtime_checkable
class _Feeds(Protocol):
    """A hook that publishes to a collector, or calls a sender that does."""

    @property
    def feeds(self) -> object: ...


def is_fed(trainer: Trainer, collector: object) -> bool:
    """Whether a hook of the trainer publishes to a collector, as far as anybody can tell."""
    hooks = [*trainers.registered_modules(trainer), *trainers.operations(trainer)]
    hooks += trainers.stock_update_weights(trainer)
    feeds = [hook.feeds for hook in hooks if isinstance(hook, _Feeds)]
    return any(fed is collector or not isinstance(fed, BaseCollector) for fed in feeds)


def notice_silence(collector: BaseCollector, what: str, publishes: Callable[[], object]) -> None:
    """Warn, after the first batches that a loop or trainer uses, if ``publishes()`` has not changed."""
    first = None
    batches = 0
    done = False

    def watched(used: Iterator[Any]) -> Iterator[Any]:
        nonlocal first, batches, done
        for batch in used:
            if done:
                yield batch
                continue
            first = publishes() if first is None else first
            steps: list[object] = []
            watch = register_optimizer_step_post_hook(lambda *_, steps=steps: steps.append(None))
            try:
                yield batch
            finally:
                watch.remove()
            trainer = trainers.training_now()
            batches += bool(steps)
            fed = publishes() != first or (trainer is not None and is_fed(trainer, collector))
            done = fed or trainer is not None or batches == _PATIENCE
            if done and not fed:
                if trainer is None:
                    loop = "a loop without a Trainer"
                else:
                    loop = type(trainer).__name__
                where = f"{loop}, after the first batches of its {type(collector).__name__}"
                cure = "rlsync.SyncWeights({'policy': 'loss_module.actor_network'}).register(trainer), or "
                cure += "collector.update_policy_weights_(...) in a loop"
                warn(NothingPublished(what, where, cure))

    wrap_batches(collector, watched)


class RegistersItself(TrainerHookBase):
    """A hook that ``register_op`` cannot register: it has several places. Checkpoints have nothing of it."""

    def __call__(self, *given: object) -> None:
        """Refuse to be an operation."""
        name = type(self).__name__
        problem = f"{name} is not an operation of one stage"
        cure = "call hook.register(trainer) instead: it registers what is needed at each stage"
        raise ConfigError(problem, f"trainer.register_op(stage, {name}(...))", cure)

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load.

        Args:
            state_dict: not used.
        """


class Calls:
    """Notices that the bound trainer does not call a publishing hook, whose trigger reads ``units``."""

    def __init__(self, hook: str, units: frozenset[str]) -> None:
        self._hook = hook
        self._has_clock = "seconds" in units
        self._batches = 0  # since the last call, with optimizer steps
        self._calls = 0  # since the last progress
        self._steps = 0
        self._progress = 0.0

    def batch_done(self, optim_steps: int) -> None:
        """A batch of the hook's trainer is done, which has made so many optimizer steps."""
        if optim_steps == self._steps:
            return  # nothing was learned from it: a warm-up
        self._steps = optim_steps
        self._batches += 1
        if self._batches == _PATIENCE:
            problem = f"this {self._hook} is bound to the trainer, which does not call it"
            where = f"the last {_PATIENCE} batches, {optim_steps} optimizer steps"
            cure = "trainer.register_op('post_steps', hook), or call hook.register(trainer)"
            warn(NothingPublished(problem, where, cure))

    def published(self) -> None:
        """The hook published, whoever asked it to."""
        self._batches = 0

    def called(self, now: Counters) -> None:
        """The hook was called, with these counters of its trainer."""
        self._batches = 0
        progress = now.batches + now.frames + now.optim_steps  # none of them ever falls
        if progress != self._progress or self._has_clock:
            self._progress = progress
            self._calls = 0
            return
        self._calls += 1
        if self._calls == _PATIENCE:
            problem = f"this {self._hook} is called, but not by the trainer to which it is bound"
            where = f"the last {_PATIENCE} calls, after {now.batches} batches of that trainer"
            cure = "bind the hook to the trainer that calls it; in a loop of your own, call hook.publish()"
            warn(NothingPublished(problem, where, cure))


def require_stamps(sync: SyncWeights, who: str) -> None:
    """Refuse a hook whose versions are not those of the frames that its trainer consumes."""
    if sync.trainer is not None and sync.collector is not sync.trainer.collector:
        problem = "the frames that this trainer consumes carry the versions of another hook"
        where = f"{who}, with the SyncWeights of another {type(sync.collector).__name__}"
        raise ConfigError(problem, where, "pass the SyncWeights of the trainer's own collector")
    endpoint = sync.bound.endpoint
    if not endpoint.stamped:
        problem = "frames do not carry the version that acted"
        raise ConfigError(problem, f"{who} on this trainer's collector", "; ".join(endpoint.notes))

"""How a trainer publishes its weights: by which hook, from which sources, to which destinations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer
from torchrl.trainers import UpdateWeights as StockUpdateWeights

from rlsync.core.errors import NothingLearns, SourceNotFound
from rlsync.core.path import parse, walk
from rlsync.sync.trained import unheld, unsent
from rlsync.tensors.compare import excluded
from rlsync.tensors.device import Covered
from rlsync.tensors.leaves import Leaf, Leaves
from rlsync.torchrl_plugin.collectors.choose import training_of
from rlsync.torchrl_plugin.compat import trainers
from rlsync.torchrl_plugin.hooks.publish_hook import PublishHook
from rlsync.torchrl_plugin.hooks.sync_weights import SyncWeights
from rlsync.torchrl_plugin.hooks.update_weights import UpdateWeights

#: Where TorchRL's losses keep the network that acts, the most common first.
_USUAL_SOURCES = (
    "loss_module.actor_network",
    "loss_module.value_network",
    "loss_module.local_value_network",
)


@dataclass(frozen=True, slots=True)
class FoundSource:
    """Where the weights for one destination come from."""

    destination: str
    description: str  #: the path of the source, or words if it has no path
    weights: Callable[[], object]  #: returns the live module, tensordict or mapping to send
    exclude: tuple[str, ...] = ()  #: glob patterns of leaves that are not sent
    has_path: bool = False  #: whether ``description`` is a path on the trainer

    def leaves(self) -> Leaves:
        return Leaves(self.weights(), self.description)

    def sent(self) -> list[Leaf]:
        return [leaf for leaf in self.leaves().leaves if not excluded(leaf.name, self.exclude)]

    def read(self) -> dict[str, Tensor]:
        """A copy of each leaf that is sent."""
        return {leaf.name: leaf.read().detach().clone() for leaf in self.sent()}

    def parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters that are sent, by the name of their destination."""
        parameters = (leaf for leaf in self.sent() if leaf.kind == "parameter")
        return [(f"{self.destination}.{leaf.name}", leaf.read()) for leaf in parameters]


@dataclass(frozen=True, slots=True)
class FoundSync:
    """The hook that publishes."""

    description: str  #: the hook in words; empty when there is none
    by_rlsync: bool
    sources: tuple[FoundSource, ...]
    publish: Callable[[], object]  #: publishes once, without asking the hook's interval or trigger
    hook: SyncWeights | None = None  #: if it is one


def sync_of(trainer: Trainer) -> FoundSync:
    """How ``trainer`` publishes, if it does; SourceNotFound for a source that does not exist."""
    for hook in trainers.registered_modules(trainer):
        if isinstance(hook, PublishHook) and _may_reach(hook.feeds, trainer.collector):
            sources = _sources_of_ours(trainer, hook)
            description = f"rlsync.{type(hook).__name__}, {hook.when}"
            sync = FoundSync(description, True, tuple(sources), hook.publish)
            if isinstance(hook, SyncWeights):
                return replace(sync, hook=hook)
            return sync
    for registered in trainers.stock_update_weights(trainer):
        if not _may_reach(registered.feeds, trainer.collector):
            continue
        stock = registered.hook
        sources = _sources_of(trainer, stock.weight_update_map, stock.policy_weights_getter)
        description = f"TorchRL's {type(stock).__name__}"
        return FoundSync(description, False, tuple(sources), partial(_publish_once, stock))
    return FoundSync("", False, tuple(_usual_source(trainer)), lambda: None)


def _may_reach(feeds: object, collector: object) -> bool:
    """Whether what a hook feeds is the collector, or a sender, which may reach it."""
    return feeds is collector or not isinstance(feeds, BaseCollector)


def _publish_once(stock: StockUpdateWeights) -> None:
    """Call a copy of the hook that sends at every call. The counter of the hook itself does not change."""
    hook = copy.copy(stock)
    hook.update_weights_interval = 1
    hook.interval_unit = "batches"
    hook()


def _sources_of_ours(trainer: Trainer, hook: PublishHook) -> Iterator[FoundSource]:
    match hook:
        case SyncWeights():
            for route in hook.plan.routes:
                yield _at_path(trainer, route.destination, route.source, route.exclude)
        case UpdateWeights():
            yield from _sources_of(trainer, hook.weight_update_map, hook.policy_weights_getter)


def _sources_of(
    trainer: Trainer, sync_map: Mapping[str, str] | None, getter: Callable[[], object] | None
) -> Iterator[FoundSource]:
    if sync_map is not None:
        for destination, path in sync_map.items():
            yield _at_path(trainer, destination, path)
    elif getter is not None:
        yield FoundSource("policy", "what its policy_weights_getter returns", getter)
    else:
        yield from _usual_source(trainer)


def _usual_source(trainer: Trainer) -> Iterator[FoundSource]:
    """The trained policy, found by the usual names in TorchRL's losses."""
    for path in _USUAL_SOURCES:
        try:
            source = _at_path(trainer, "policy", path)
        except SourceNotFound:
            continue
        if isinstance(source.weights(), nn.Module):
            yield source
            return


def _at_path(
    trainer: Trainer, destination: str, path: str, exclude: tuple[str, ...] = ()
) -> FoundSource:
    find = partial(walk, trainer, parse(path), error=SourceNotFound, root_name="the trainer")
    weights = partial(find, where=f"source of {destination!r}")
    source = FoundSource(destination, path, weights, exclude, has_path=True)
    source.weights()
    return source


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is sent and not trained, and what is trained and not sent."""

    #: sources with parameters, none of which an optimizer holds; not stuck ones
    untrained: tuple[str, ...]
    unheld: tuple[str, ...]  #: single parameters, of the other sources, that no optimizer holds
    stuck: tuple[NothingLearns, ...]  #: why the optimizers cannot change sources
    #: parameters of the sources' networks that an optimizer holds and nobody sends
    unsent: tuple[str, ...]
    unreached: tuple[str, ...]  #: what SyncPlan has under this name, if the hook has a plan


def coverage_of(trainer: Trainer, sync: FoundSync) -> Coverage:
    """Compare what the hook sends with what the optimizers of the trainer hold."""
    training = training_of(trainer)
    trained = Covered(training.parameters())
    untrained: list[str] = []
    single: list[str] = []
    stuck: list[NothingLearns] = []
    networks: dict[str, nn.Module] = {}
    sent: list[Tensor] = []
    for source in sync.sources:
        network = None
        if source.has_path:
            network = training.network_of(trainer, parse(source.description))
        if network is not None:
            networks.update([network])
        sent += [leaf.read() for leaf in source.sent()]

        # A source is stuck, or untrained as a whole, or some of its parameters are untrained.
        parameters = dict(source.parameters())
        names = unheld(parameters.items(), trained)
        why = training.why_nothing_learns(source.description, parameters.values(), network)
        if why is not None:
            stuck.append(why)
        if not names or len(names) < len(parameters):
            single += names
        elif why is None:
            untrained.append(source.description)
    unreached: tuple[str, ...] = ()
    if sync.hook is not None:
        unreached = sync.hook.plan.unreached
    return Coverage(
        untrained=tuple(untrained),
        unheld=tuple(single),
        stuck=tuple(stuck),
        unsent=unsent(networks, sent, trained),
        unreached=unreached,
    )

"""dreamer_map: what a Dreamer loss and a Dreamer player are made of, found by type, and brought together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn
from torchrl import modules
from torchrl.objectives import (
    DreamerActorLoss,
    DreamerModelLoss,
    DreamerV3ActorLoss,
    DreamerV3ModelLoss,
)

from rlsync.core.errors import ConfigError
from rlsync.core.path import parse
from rlsync.core.plan import Source

#: Parameters of DreamerV3's prior that predict the state without an observation. A player always observes.
NOT_ACTING = ("rnn_to_prior_projector.*",)

_UNIT = (modules.RSSMRollout, modules.RSSMRolloutV3, modules.RSSMStateEstimatorV3)


@dataclass(frozen=True, slots=True)
class Unit:
    """A TensorDictModule, a rollout or DreamerV3's state estimator, which is not taken apart any further."""

    path: str  #: from the module that was taken apart, joined by dots
    module: Any

    @property
    def inner(self) -> object:
        """What a TensorDictModule wraps; of others, the unit itself."""
        if isinstance(self.module, TensorDictModule):
            return self.module.module
        return self.module

    @property
    def learns(self) -> bool:
        """Whether it has anything to send."""
        leaves = chain(self.module.parameters(), self.module.buffers())
        return next(leaves, None) is not None


@dataclass(frozen=True, slots=True)
class PlayerParts:
    version: int  #: 1 or 3
    encoders: tuple[Unit, ...]  #: what is called before the posterior, in order
    posterior: Unit  #: of DreamerV3 perhaps the state estimator
    actors: tuple[Unit, ...]  #: what has weights and is none of the others, in order
    prior: Unit  #: the posterior's own unit if that is the state estimator

    @property
    def estimates(self) -> bool:
        """Whether a state estimator makes the belief, before the posterior; else the prior does."""
        return self.prior is self.posterior


@dataclass(frozen=True, slots=True)
class LossParts:
    """The parts of a loss, or of several, that a player acts with."""

    version: int  #: 1 or 3
    #: what has weights and is called before the recurrent model, in order
    encoders: tuple[Unit, ...]
    rollout: Unit  #: the recurrent model
    actors: tuple[Unit, ...]  #: the units of the actor that have weights


def dreamer_map(
    loss: nn.Module | Mapping[str, nn.Module], player: nn.Module, *, destination: str = "policy"
) -> dict[str, str | Source]:
    """The sync map that brings the weights of a Dreamer loss to a player of several modules.

    A Dreamer player is put together from parts of the world model (encoder, posterior, prior) and from the
    actor. The loss keeps them in another order, with a decoder and heads beside them. This finds the parts on
    both sides by their type, and writes one entry for each.

    Args:
        loss: the trainer's ``loss_module``: a ``DreamerV3Loss``, or a module that has a world model's loss
            and an actor's loss. Losses that the trainer keeps by other names are given as
            ``{path on the trainer: loss}``.
        player: what acts: the policy of the collector, for example of ``TensorDictSequential(encoder,
            RSSMStateEstimatorV3(prior, posterior), actor)``. It may be wrapped in
            :class:`rlsync.DreamerPlayer`.
        destination: the path of the player on the collector.

    Returns:
        A map for :class:`rlsync.SyncWeights`. A player has parameters that take no part in acting,
        ``prior.rnn_to_prior_projector``: DreamerV3's are excluded, and keep the values that they begin with;
        DreamerV1's are declared as ``idle``.

    Raises:
        ConfigError: the loss or the player is not made of TorchRL's parts of DreamerV1 or DreamerV3, or they
            do not fit together.
        PathSyntaxError: the destination, or the name of a loss, is no path.

    Source: Hafner et al., https://arxiv.org/abs/1912.01603 and https://arxiv.org/abs/2301.04104.

    Example:
        >>> from torch import nn
        >>> dreamer_map(nn.Linear(1, 1), nn.Linear(1, 1))
        Traceback (most recent call last):
        ...
        rlsync.core.errors.ConfigError: there is no DreamerModelLoss or DreamerV3ModelLoss
          where  losses: loss_module is Linear
          cure   give a loss and a player of TorchRL's DreamerV1 or V3; for others write the map by hand
    """
    if isinstance(loss, Mapping):
        losses = dict(loss)
    else:
        losses = {"loss_module": loss}
    trained = parts_of_losses(losses)
    acts = parts_of_player(player)
    where = f"player, {type(player).__name__}"
    if trained.version != acts.version:
        problem = (
            f"the losses are DreamerV{trained.version}'s and the player is DreamerV{acts.version}'s"
        )
        cure = "build the player from the modules of the world model and of the actor"
        raise ConfigError(problem, where, cure)

    # One entry for each part. What does not act is excluded from DreamerV3's, and idle in DreamerV1's.
    pairs = [
        *_paired("encoder", _learning(acts.encoders), trained.encoders, where),
        *_dynamics(acts, trained),
        *_paired("actor", acts.actors, trained.actors, where),
    ]
    sync_map: dict[str, str | Source] = {}
    for to, path, unused in pairs:
        source = str(parse(path))
        target = str(parse(f"{destination}.{to}"))
        if not unused:
            sync_map[target] = source
        elif acts.version == 3:
            sync_map[target] = Source(source, exclude=unused)
        else:
            sync_map[target] = Source(source, idle=unused)
    return sync_map


#: Path in the player, path on the trainer, what takes no part in acting.
_Pair = tuple[str, str, tuple[str, ...]]


def _paired(
    what: str, acting: tuple[Unit, ...], trained: tuple[Unit, ...], where: str
) -> Iterator[_Pair]:
    if len(acting) != len(trained):
        problem = f"the player has {len(acting)} modules as {what}, the loss trains {len(trained)}"
        paths = [unit.path for unit in acting]
        cure = f"build the player's {what} from the modules of the loss, one for one"
        raise ConfigError(problem, f"{where}: {', '.join(paths)}", cure)
    for to, source in zip(acting, trained, strict=True):
        yield to.path, source.path, ()


def _dynamics(acts: PlayerParts, trained: LossParts) -> Iterator[_Pair]:
    rollout = trained.rollout.path
    if acts.estimates:
        estimator = acts.posterior.path
        yield f"{estimator}.prior", f"{rollout}.rssm_prior.module", NOT_ACTING
        yield f"{estimator}.posterior", f"{rollout}.rssm_posterior.module", ()
    else:
        yield acts.posterior.path, f"{rollout}.rssm_posterior", ()
        yield f"{acts.prior.path}.module", f"{rollout}.rssm_prior.module", NOT_ACTING


def units(module: nn.Module, path: str = "") -> Iterator[Unit]:
    """The units of the module at ``path``, in the order of its children."""
    plain = isinstance(module, TensorDictModule) and not isinstance(module, TensorDictSequential)
    if isinstance(module, _UNIT) or plain:
        yield Unit(path, module)
    elif isinstance(module, (TensorDictModuleBase, nn.ModuleList)):
        for name, child in module.named_children():
            yield from units(child, _joined(path, name))


def parts_of_player(player: nn.Module) -> PlayerParts:
    """Find the parts of what acts; ConfigError if it is no player of DreamerV1 or DreamerV3."""
    inside = list(units(player))
    where = f"player, {type(player).__name__}"

    # What makes the state: an estimator of DreamerV3, or a posterior and a prior of either version.
    estimators = _of_kind(inside, modules.RSSMStateEstimatorV3)
    if estimators:
        estimator = _one(estimators, "RSSMStateEstimatorV3", where)
        _check_estimator(estimator, where)
        version = 3
        posterior = estimator
        prior = estimator
    else:
        posterior = _one(
            _wrapping(inside, modules.RSSMPosterior, modules.RSSMPosteriorV3),
            "RSSMStateEstimatorV3, RSSMPosterior or RSSMPosteriorV3",
            where,
        )
        priors = _wrapping(inside, modules.RSSMPrior, modules.RSSMPriorV3)
        prior = _one(priors, "RSSMPrior or RSSMPriorV3", where)
        version = 1
        if isinstance(prior.inner, modules.RSSMPriorV3):
            version = 3

    # What comes before it encodes, what comes after it acts.
    at = inside.index(posterior)
    encoders = tuple(inside[:at])
    actors = tuple(unit for unit in _learning(inside[at + 1 :]) if unit is not prior)
    if encoders and actors:
        return PlayerParts(version, encoders, posterior, actors, prior)
    if encoders:
        missing = "actor after"
    else:
        missing = "encoder before"
    problem = f"the player has no {missing} its posterior"
    cure = "compose it as encoder, state and actor, as TorchRL's Dreamer examples do"
    raise ConfigError(problem, where, cure)


def _check_estimator(estimator: Unit, where: str) -> None:
    module = estimator.module
    if isinstance(module.prior, modules.RSSMPosteriorV3) or module.posterior is None:
        problem = "the state estimator is not made of a prior and then a posterior"
        cure = "RSSMStateEstimatorV3(prior, posterior)"
        raise ConfigError(problem, f"{where}, {estimator.path}", cure)


def parts_of_losses(losses: dict[str, nn.Module]) -> LossParts:
    """The parts of losses that a player acts with, by path; ConfigError: no losses of a Dreamer."""
    # The losses of the world model and of the actor may be losses, or parts of them.
    below: list[Unit] = []
    kinds: list[str] = []
    for path, loss in losses.items():
        kinds.append(f"{path} is {type(loss).__name__}")
        for name, module in loss.named_modules():
            below.append(Unit(_joined(path, name), module))
    where = f"losses: {', '.join(kinds)}"
    models = _of_kind(below, DreamerModelLoss, DreamerV3ModelLoss)
    actors = _of_kind(below, DreamerActorLoss, DreamerV3ActorLoss)
    model = _one(models, "DreamerModelLoss or DreamerV3ModelLoss", where)
    actor = _one(actors, "DreamerActorLoss or DreamerV3ActorLoss", where)
    version = 1
    if isinstance(model.module, DreamerV3ModelLoss):
        version = 3
    of_actor = 1
    if isinstance(actor.module, DreamerV3ActorLoss):
        of_actor = 3
    if version != of_actor:
        problem = f"the world model is DreamerV{version}'s and the actor is DreamerV{of_actor}'s"
        raise ConfigError(problem, where, "give both losses of one version")

    # In the world model, what comes before the recurrent model encodes; what comes after it decodes.
    inside = list(units(model.module.world_model, f"{model.path}.world_model"))
    rollouts = _of_kind(inside, modules.RSSMRollout, modules.RSSMRolloutV3)
    rollout = _one(rollouts, "RSSMRollout or RSSMRolloutV3", where)
    encoders = _learning(inside[: inside.index(rollout)])
    acting = _learning(units(actor.module.actor_model, f"{actor.path}.actor_model"))
    return LossParts(version, encoders, rollout, acting)


def state_shapes(parts: PlayerParts) -> dict[str, tuple[int, ...]]:
    """What a player carries, as shapes by key; ConfigError if the prior does not know an action's."""
    prior: Any
    if parts.estimates:
        prior = parts.prior.module.prior
    else:
        prior = parts.prior.inner
    if parts.version == 1:
        width = prior.state_dim
    else:
        width = prior.num_categoricals * prior.num_classes
    shapes: dict[str, tuple[int, ...]] = {"state": (width,), "belief": (prior.rnn_hidden_dim,)}
    if not parts.estimates:
        return shapes
    if prior.action_shape is None:
        problem = "the prior does not know the shape of an action"
        cure = "give it action_spec or action_shape"
        raise ConfigError(
            problem, f"player, {parts.prior.path}.prior, {type(prior).__name__}", cure
        )
    return {**shapes, "previous_action": tuple(prior.action_shape)}


def _learning(parts: Iterable[Unit]) -> tuple[Unit, ...]:
    return tuple(unit for unit in parts if unit.learns)


def _of_kind(parts: Iterable[Unit], *kinds: type) -> list[Unit]:
    return [unit for unit in parts if isinstance(unit.module, kinds)]


def _wrapping(parts: Iterable[Unit], *kinds: type) -> list[Unit]:
    return [unit for unit in parts if isinstance(unit.inner, kinds)]


def _one(candidates: list[Unit], kinds: str, where: str) -> Unit:
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        problem = f"there is {len(candidates)} of {kinds}"
        paths = [unit.path or "itself" for unit in candidates]
        where = f"{where} ({', '.join(paths)})"
    else:
        problem = f"there is no {kinds}"
    cure = "give a loss and a player of TorchRL's DreamerV1 or V3; for others write the map by hand"
    raise ConfigError(problem, where, cure)


def _joined(path: str, name: str) -> str:
    if path and name:
        return f"{path}.{name}"
    return path or name

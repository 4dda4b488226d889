"""dreamer_map: what a Dreamer loss and a Dreamer player are made of, found by type, and brought together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
        return any(True for _ in self.module.parameters()) or any(
            True for _ in self.module.buffers()
        )


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
    losses = dict(loss) if isinstance(loss, Mapping) else {"loss_module": loss}
    trained = parts_of_losses(losses)
    acts = parts_of_player(player)
    where = f"player, {type(player).__name__}"
    if trained.version != acts.version:
        problem = (
            f"the losses are DreamerV{trained.version}'s and the player is DreamerV{acts.version}'s"
        )
        cure = "build the player from the modules of the world model and of the actor"
        raise ConfigError(problem, where, cure)
    pairs = [
        *_paired(
            "encoder", tuple(unit for unit in acts.encoders if unit.learns), trained.encoders, where
        ),
        *_dynamics(acts, trained),
        *_paired("actor", acts.actors, trained.actors, where),
    ]
    sync_map: dict[str, str | Source] = {}
    for to, path, unused in pairs:
        source = str(parse(path))
        declared = {"exclude" if acts.version == 3 else "idle": unused}
        if unused:
            sync_map[str(parse(f"{destination}.{to}"))] = Source(source, **declared)
        else:
            sync_map[str(parse(f"{destination}.{to}"))] = source
    return sync_map


#: Path in the player, path on the trainer, what takes no part in acting.
_Pair = tuple[str, str, tuple[str, ...]]


def _paired(
    what: str, acting: tuple[Unit, ...], trained: tuple[Unit, ...], where: str
) -> Iterator[_Pair]:
    if len(acting) != len(trained):
        said = f"the player has {len(acting)} modules as {what}, the loss trains {len(trained)}"
        cure = f"build the player's {what} from the modules of the loss, one for one"
        raise ConfigError(said, f"{where}: {', '.join(unit.path for unit in acting)}", cure)
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
    estimators = [unit for unit in inside if isinstance(unit.module, modules.RSSMStateEstimatorV3)]
    if estimators:
        posterior = prior = _one(estimators, "RSSMStateEstimatorV3", where)
        version = 3
        if (
            isinstance(prior.module.prior, modules.RSSMPosteriorV3)
            or prior.module.posterior is None
        ):
            problem = "the state estimator is not made of a prior and then a posterior"
            raise ConfigError(
                problem, f"{where}, {prior.path}", "RSSMStateEstimatorV3(prior, posterior)"
            )
    else:
        kinds = (modules.RSSMPosterior, modules.RSSMPosteriorV3)
        posteriors = [u for u in inside if isinstance(u.inner, kinds)]
        priors = [
            u for u in inside if isinstance(u.inner, (modules.RSSMPrior, modules.RSSMPriorV3))
        ]
        posterior = _one(
            posteriors, "RSSMStateEstimatorV3, RSSMPosterior or RSSMPosteriorV3", where
        )
        prior = _one(priors, "RSSMPrior or RSSMPriorV3", where)
        version = 3 if isinstance(prior.inner, modules.RSSMPriorV3) else 1
    at = inside.index(posterior)
    encoders = tuple(inside[:at])
    actors = tuple(unit for unit in inside[at + 1 :] if unit.learns and unit is not prior)
    if not encoders or not actors:
        problem = (
            f"the player has no {'actor after' if encoders else 'encoder before'} its posterior"
        )
        cure = "compose it as encoder, state and actor, as TorchRL's Dreamer examples do"
        raise ConfigError(problem, where, cure)
    return PlayerParts(version, encoders, posterior, actors, prior)


def parts_of_losses(losses: dict[str, nn.Module]) -> LossParts:
    """The parts of losses that a player acts with, by path; ConfigError: no losses of a Dreamer."""
    where = "losses: " + ", ".join(
        f"{path} is {type(loss).__name__}" for path, loss in losses.items()
    )
    below = [
        Unit(_joined(path, name), module)
        for path, loss in losses.items()
        for name, module in loss.named_modules()
    ]
    models = [
        unit for unit in below if isinstance(unit.module, (DreamerModelLoss, DreamerV3ModelLoss))
    ]
    actors = [
        unit for unit in below if isinstance(unit.module, (DreamerActorLoss, DreamerV3ActorLoss))
    ]
    model = _one(models, "DreamerModelLoss or DreamerV3ModelLoss", where)
    actor = _one(actors, "DreamerActorLoss or DreamerV3ActorLoss", where)
    version = 3 if isinstance(model.module, DreamerV3ModelLoss) else 1
    of_actor = 3 if isinstance(actor.module, DreamerV3ActorLoss) else 1
    if version != of_actor:
        problem = f"the world model is DreamerV{version}'s and the actor is DreamerV{of_actor}'s"
        raise ConfigError(problem, where, "give both losses of one version")
    made = list(units(model.module.world_model, f"{model.path}.world_model"))
    kinds = (modules.RSSMRollout, modules.RSSMRolloutV3)
    rollout = _one(
        [u for u in made if isinstance(u.module, kinds)], "RSSMRollout or RSSMRolloutV3", where
    )
    encoders = tuple(unit for unit in made[: made.index(rollout)] if unit.learns)
    acting = units(actor.module.actor_model, f"{actor.path}.actor_model")
    return LossParts(version, encoders, rollout, tuple(unit for unit in acting if unit.learns))


def state_shapes(parts: PlayerParts) -> dict[str, tuple[int, ...]]:
    """What a player carries, as shapes by key; ConfigError if the prior does not know an action's."""
    prior: Any = parts.prior.module.prior if parts.estimates else parts.prior.inner
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


def _one(found: list[Unit], what: str, where: str) -> Unit:
    if len(found) == 1:
        return found[0]
    given = "no" if not found else f"{len(found)} of"
    if not found:
        places = ""
    else:
        places = f" ({', '.join(unit.path or 'itself' for unit in found)})"
    cure = "give a loss and a player of TorchRL's DreamerV1 or V3; for others write the map by hand"
    raise ConfigError(f"there is {given} {what}", where + places, cure)


def _joined(path: str, name: str) -> str:
    if path and name:
        return f"{path}.{name}"
    return path or name

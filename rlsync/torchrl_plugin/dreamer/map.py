"""dreamer_map: the sync map of a Dreamer player."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from rlsync.core.errors import ConfigError
from rlsync.core.path import parse
from rlsync.core.plan import Source
from rlsync.torchrl_plugin.dreamer.parts import (
    LossParts,
    PlayerParts,
    Unit,
    parts_of_losses,
    parts_of_player,
)

#: Parameters of DreamerV3's prior that predict the state without an observation. A player always observes.
NOT_ACTING = ("rnn_to_prior_projector.*",)


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
        A map for :class:`rlsync.SyncWeights`. DreamerV3's player has parameters that take no part in acting,
        ``prior.rnn_to_prior_projector``: they are excluded, and keep the values that they begin with.

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
    trained, acts = parts_of_losses(losses), parts_of_player(player)
    where = f"player, {type(player).__name__}"
    if trained.version != acts.version:
        raise ConfigError(
            f"the losses are DreamerV{trained.version}'s and the player is DreamerV{acts.version}'s",
            where,
            "build the player from the modules of the world model and of the actor",
        )
    pairs = [
        *_paired("encoder", tuple(unit for unit in acts.encoders if unit.learns), trained.encoders, where),
        *_dynamics(acts, trained),
        *_paired("actor", acts.actors, trained.actors, where),
    ]
    return {
        str(parse(f"{destination}.{to}")): _source(str(parse(path)), exclude) for to, path, exclude in pairs
    }


def _source(path: str, exclude: tuple[str, ...]) -> str | Source:
    return Source(path, exclude=exclude) if exclude else path


_Pair = tuple[str, str, tuple[str, ...]]


def _paired(what: str, acting: tuple[Unit, ...], trained: tuple[Unit, ...], where: str) -> Iterator[_Pair]:
    if len(acting) != len(trained):
        raise ConfigError(
            f"the player has {len(acting)} modules as {what}, the loss trains {len(trained)}",
            f"{where}: {', '.join(unit.path for unit in acting)}",
            f"build the player's {what} from the modules of the loss, one for one",
        )
    for to, source in zip(acting, trained, strict=True):
        yield to.path, source.path, ()


def _dynamics(acts: PlayerParts, trained: LossParts) -> Iterator[_Pair]:
    rollout = trained.rollout.path
    unused = NOT_ACTING if acts.version == 3 else ()
    if acts.estimates:
        estimator = acts.posterior.path
        yield f"{estimator}.prior", f"{rollout}.rssm_prior.module", unused
        yield f"{estimator}.posterior", f"{rollout}.rssm_posterior.module", ()
    else:
        yield acts.posterior.path, f"{rollout}.rssm_posterior", ()
        yield f"{acts.prior.path}.module", f"{rollout}.rssm_prior.module", unused

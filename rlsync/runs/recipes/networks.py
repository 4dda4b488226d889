"""Small networks, and workers' copies of them in another dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torchrl import modules

from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.actors.player import Player
from rlsync.runs.recipes.encoder import Encoded, Encoder, Masked
from rlsync.runs.recipes.normalize import Standardized
from rlsync.runs.recipes.settings import ModelConfig, NormalizeConfig
from rlsync.runs.recipes.sync_settings import SyncConfig
from rlsync.seams import dtype_named, sendable

if TYPE_CHECKING:  # workers load this module with their networks, and probe no environment
    from rlsync.runs.recipes.spaces import Spaces

#: What may follow a hidden layer, by the names that configs have.
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MixedMLP(modules.MLP):
    """An MLP that computes in the dtype of its weights and returns float32."""

    def forward(self, *inputs: Tensor) -> Tensor:
        dtype = self[0].weight.dtype  # functional calls put plain tensors in the parameters' place
        cast = [tensor.to(dtype) for tensor in inputs]
        return super().forward(*cast).float()


class FreeScale(nn.Module):
    """Adds to the locations of normal distributions the logarithms of their scales, for ``DiagonalGaussian``.

    They are learned, and do not depend on what is observed. ``initial`` is the logarithm of the first ones.
    """

    def __init__(self, size: int, initial: float = 0.0) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((size,), float(initial)))

    def forward(self, loc: Tensor) -> Tensor:
        return with_scale(loc, self.log_scale)


def with_scale(loc: Tensor, log_scale: Tensor) -> Tensor:
    """``[..., 2 * size]``: the locations ``[..., size]``, then for each the same ``[size]``."""
    return torch.cat([loc, log_scale.expand_as(loc)], -1)


class NormedLinear(nn.Sequential):
    """A linear layer behind a batch normalisation, with the numbers of CrossQ's authors."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True) -> None:
        norm = nn.BatchNorm1d(inputs, eps=1e-3, momentum=0.01)
        norm.num_batches_tracked = None  # it counts for nothing beside a momentum
        super().__init__(norm, nn.Linear(inputs, outputs, bias))

    @property
    def weight(self) -> Any:
        return self[1].weight


def mlp(
    features: int,
    outputs: int,
    hidden: list[int],
    *,
    last_gain: float,
    activation: type[nn.Module] = nn.Tanh,
    layer_class: type[nn.Module] = nn.Linear,
    initial_weights: str = "orthogonal",
) -> MixedMLP:
    """A network with orthogonal weights, of which a small ``last_gain`` makes its first outputs small.

    Or with torch's own ``initial_weights``.
    """
    net = MixedMLP(
        features,
        outputs,
        num_cells=hidden,
        activation_class=activation,
        layer_class=layer_class,
    )
    if initial_weights == "torch":
        return net
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
    nn.init.orthogonal_(layers[-1].weight, last_gain)
    return net


class Seeing(Protocol):
    """The settings of a recipe that say how its networks see observations."""

    hidden: list[int]

    @property
    def model(self) -> ModelConfig: ...

    @property
    def normalize(self) -> NormalizeConfig: ...


class Sight(NamedTuple):
    """How the networks of a recipe see observations, and what stands behind."""

    observations: Observations
    encoder: Encoder | None  #: None: a row is numbers alone, and networks take it as it is
    features: int  #: what the layers behind take
    hidden: list[int]  #: widths of the hidden layers behind
    #: largest distance from 0 of a normalised number; None: nothing is normalised, or the encoder does it
    clip: float | None

    @classmethod
    def of(cls, recipe: Seeing, spaces: Spaces) -> Sight:
        """Make an encoder, if one is needed.

        Args:
            recipe: how pictures are seen, the layers that numbers go through, and what is normalised.
            spaces: of the environment.

        Raises:
            ConfigError: pictures are too small for their torso.
        """
        observations = spaces.observations
        clip = recipe.normalize.clip_of_observations
        encoder: Encoder | None = None
        if observations.pictures:
            encoder = Encoder(
                observations,
                torso=recipe.model.torso,
                hidden=recipe.model.hidden,
                numbers=recipe.hidden,
                channels_last=recipe.model.channels_last,
                clip=clip,
            )
            return cls(observations, encoder, encoder.features, [], None)
        if observations.mask is not None:
            encoder = Encoder(observations)
        return cls(observations, encoder, observations.features, recipe.hidden, clip)

    def behind(self, net: nn.Module) -> nn.Module:
        """A network of rows, from one that takes ``features``, and whatever else follows them."""
        if self.clip is not None:
            net = Standardized(net, self.features, self.clip)
        if self.encoder is not None:
            net = Encoded(self.encoder, net)
        return net

    def choosing(self, net: nn.Module) -> nn.Module:
        """As :meth:`behind`, of outputs for each choice: those that a mask forbids are the least there are."""
        if self.observations.mask is None:
            return self.behind(net)
        return Masked(self.behind(net), self.observations)


def workers_dtype(sync: SyncConfig) -> torch.dtype | None:
    """The dtype in which workers hold their networks, if the sync map declares one."""
    for route in sync.map:
        if route.dtype:
            return dtype_named(route.dtype)
    return None


def workers_player(sync: SyncConfig, player: Player, device: torch.device) -> Player:
    """What workers act with: ``player``, or a copy of it.

    The copy is in host memory, if the learner is on another ``device``, and has its networks in the dtype
    that the map declares.
    """
    if workers_dtype(sync) is None and device == CPU:
        return player
    copy = sendable.copied(player, "the player", player.modules, type(player).__name__)
    for module in copy.modules.values():
        module.to(CPU)
    cast_as_workers(sync, copy)
    return copy


def cast_as_workers(sync: SyncConfig, player: Player) -> None:
    """Put a player's networks into the dtype that the map declares, in which workers act."""
    dtype = workers_dtype(sync)
    for module in player.modules.values():
        for part in module.modules():
            # The bounds of actions are leaves of td3's TanhModule; players hold them as numbers.
            if isinstance(part, (Encoder, MixedMLP, FreeScale, modules.TanhModule)):
                part.to(dtype=dtype)


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype: float32, or a wider one if a tensor has it."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]

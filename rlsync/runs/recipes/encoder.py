"""What networks see of an observation: features ``[..., F]``, by a torso for each of its parts.

A torso is an MLP for numbers, and convolutions for a picture; features are joined. A mask of actions is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsync import ConfigError
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.recipes.normalize import PICTURES_EVERY, Standardized

TORSOS = ("mlp", "nature", "impala")


class Pixels(nn.Module):
    """Pixels as numbers: bytes / 255; with a ``clip`` less their mean, by their deviation, cut to it.

    Mean and deviation are those of each number of an observation in all that was seen, which whoever trains
    the network says. They are buffers, so each version of the weights has its own, and workers act with those
    that it was made with.
    """

    def __init__(self, shape: Sequence[int], clip: float | None, channels_last: bool) -> None:
        super().__init__()
        self.clip = clip
        self.channels_last = channels_last
        if self.normalizes:
            self.mean = nn.Buffer(torch.zeros(*shape))
            self.variance = nn.Buffer(torch.ones(*shape))
            self.seen = nn.Buffer(torch.zeros(()))

    @property
    def normalizes(self) -> bool:
        return self.clip is not None

    @torch.no_grad()
    def follow(self, pixels: Tensor) -> None:
        """Take unrolls ``[S, B, *shape]`` into account, of every eighth step."""
        new = pixels[::PICTURES_EVERY].flatten(0, 1)
        variance, mean = torch.var_mean(_as_numbers(new), 0, correction=0)
        self.seen.add_(len(new))
        share = len(new) / self.seen
        error = mean - self.mean
        self.variance.add_(share * (variance - self.variance + (1 - share) * error**2))
        self.mean.add_(share * error)

    def forward(self, pixels: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        numbers = _as_numbers(pixels, layout)
        if self.clip is not None:
            spread = (self.variance + 1e-5).rsqrt()
            numbers.sub_(self.mean).mul_(spread).clamp_(-self.clip, self.clip)
        return numbers


def _as_numbers(pixels: Tensor, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A copy of pictures as floats, bytes / 255.

    Bytes come into the layout of the convolutions first, and are divided in place: floats are four times as
    much, and new memory is slow.
    """
    if pixels.is_floating_point():
        return pixels.to(memory_format=layout, copy=True)
    return pixels.to(torch.get_default_dtype(), memory_format=layout).div_(255)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), 3x3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x)), inplace=True))


def make_torso(name: str, shape: Sequence[int], hidden: Sequence[int]) -> nn.Sequential:
    """The torso of this name, whose last width in ``hidden`` is the number of features.

    ConfigError for other observations. "nature": Mnih et al. 2015, doi 10.1038/nature14236; "impala": arXiv
    1802.01561.
    """
    _check_torso(name, shape, hidden)
    if name == "mlp":
        return nn.Sequential(*_dense(int(shape[0]), hidden, nn.Tanh))
    if name == "nature":
        convolutions = _nature(int(shape[0]))
    else:
        convolutions = _impala(int(shape[0]))
    body = nn.Sequential(*convolutions)
    device = next(body.parameters()).device
    try:
        with torch.no_grad():
            flat = body(torch.zeros(1, *shape, device=device)).numel()
    except RuntimeError as error:
        problem = f"pixels of {shape[1]} x {shape[2]} are too small for the torso {name!r}"
        cure = "resize them to 84 x 84, or take the torso 'mlp' on vectors"
        raise ConfigError(problem, f"observation shape {list(shape)}", cure) from error
    # The last ReLU comes after Flatten: before it, its backward pass would mix memory formats and be slow.
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.ReLU(inplace=True), *_dense(flat, hidden, nn.ReLU)
    )


def _check_torso(name: str, shape: Sequence[int], hidden: Sequence[int]) -> None:
    if name not in TORSOS:
        raise ConfigError(
            f"there is no torso {name!r}", "torso", f"give one of {', '.join(TORSOS)}"
        )
    if name == "mlp":
        dims = 1
        takes = "vectors [features]"
    else:
        dims = 3
        takes = "pixels [channels, height, width]"
    if len(shape) != dims:
        cure = "give 'mlp' for vectors, 'nature' or 'impala' for pixels"
        raise ConfigError(
            f"the torso {name!r} takes {takes}", f"observation shape {list(shape)}", cure
        )
    if not hidden or min(hidden) < 1:
        problem = f"a torso cannot have layers of widths {list(hidden)}"
        raise ConfigError(problem, "hidden", "give one width or more, above zero")


def _nature(channels: int) -> list[nn.Module]:
    convolutions = [
        nn.Conv2d(channels, 32, 8, stride=4),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.Conv2d(64, 64, 3),
    ]
    layers: list[nn.Module] = []
    for convolution in convolutions:
        nn.init.orthogonal_(convolution.weight, 2**0.5)
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers += [convolution, nn.ReLU(inplace=True)]
    return layers[:-1]


def _impala(channels: int) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in (16, 32, 32):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
        layers += [Residual(width), Residual(width)]
        channels = width
    return layers


def _dense(inputs: int, widths: Sequence[int], activation: type[nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [linear(inputs, width, gain=2**0.5), activation()]
        inputs = width
    return layers


def linear(inputs: int, outputs: int, *, gain: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def convolutions_in(module: nn.Module) -> str:
    """The name of the torso that a module is or holds, if that has convolutions; otherwise empty.

    Example:
        >>> convolutions_in(make_torso("impala", (3, 12, 12), (8,)))
        'impala'
        >>> convolutions_in(make_torso("mlp", (4,), (8,)))
        ''
    """
    layers = list(module.modules())
    if any(isinstance(layer, Residual) for layer in layers):
        return "impala"
    for layer in layers:
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (8, 8):
            return "nature"
    return ""


#: Widths of the dense layers of each torso, where nothing else is asked for.
HIDDEN = {"mlp": (64, 64), "nature": (512,), "impala": (256,)}

#: The least number of rows and columns of which the convolutions of ``nature`` leave something.
_SEEN_BY_NATURE = 36


def torso_for(picture: Sequence[int]) -> str:
    """The torso that ``auto`` takes for a picture: that of DQN, if it is not too small for it.

    Args:
        picture: [channels, height, width].

    Example:
        >>> torso_for((4, 84, 84)), torso_for((3, 7, 7))
        ('nature', 'impala')
    """
    if min(picture[1:]) < _SEEN_BY_NATURE:
        return "impala"
    return "nature"


class Encoder(nn.Module):
    """Features of observations that are more than numbers; it takes rows, or their parts by name.

    Args:
        observations: what a row is made of.
        torso: of pictures: ``"auto"``, ``"nature"`` or ``"impala"``.
        hidden: widths of the dense layers behind convolutions; None: those of the torso.
        numbers: widths of the layers that numbers go through beside pictures. Without pictures they are
            features as they are.
        channels_last: whether convolutions run channels-last.
        clip: where normalised pixels, and the numbers beside them, are cut; None: they are not normalised. See
            :class:`Pixels` and :class:`~rlsync.runs.recipes.normalize.Standardize`.

    Raises:
        ConfigError: a picture is too small for the torso, or a width does not fit.

    Example:
        >>> import numpy as np
        >>> from gymnasium.spaces import Box, Dict
        >>> from rlsync.runs.actors.envs.observations import observations_of
        >>> space = Dict(speed=Box(-1, 1, (2,)), camera=Box(0, 255, (84, 84, 3), np.uint8))
        >>> observations = observations_of(space, "mine")
        >>> encoder = Encoder(observations, numbers=(16,))
        >>> rows = torch.zeros(5, 7, *observations.shape, dtype=torch.uint8)
        >>> encoder(rows).shape, encoder.features
        (torch.Size([5, 7, 528]), 528)
    """

    def __init__(
        self,
        observations: Observations,
        *,
        torso: str = "auto",
        hidden: Sequence[int] | None = None,
        numbers: Sequence[int] = (),
        channels_last: bool = False,
        clip: float | None = None,
    ) -> None:
        super().__init__()
        self.observations = observations
        self.features = observations.features
        self.numbers: nn.Module = nn.Identity()
        if self.features and observations.pictures and numbers:
            self.numbers = make_torso("mlp", (self.features,), numbers)
            self.features = numbers[-1]
        if observations.features and observations.pictures and clip is not None:
            self.numbers = Standardized(self.numbers, observations.features, clip)
        # By the order of the parts.
        self.pixels = nn.ModuleList()
        self.torsos = nn.ModuleList()
        for part in observations.pictures:
            name = torso_for(part.shape) if torso == "auto" else torso
            widths = HIDDEN.get(name, ()) if hidden is None else hidden
            self.pixels.append(Pixels(part.shape, clip, channels_last))
            self.torsos.append(make_torso(name, part.shape, widths))
            self.features += widths[-1]

    def forward(self, rows: Tensor | Mapping[str, Tensor]) -> Tensor:
        observations = self.observations
        if not self.torsos:
            return observations.numbers(rows)
        features = []
        dtype = self._dtype()
        if observations.features:
            features.append(self.numbers(observations.numbers(rows).to(dtype)))
        parts = observations.split(rows)
        eyes = zip(observations.pictures, self.pixels, self.torsos, strict=True)
        for part, as_numbers, torso in eyes:
            picture = parts[part.name]
            lead = picture.shape[: picture.ndim - 3]
            pixels = as_numbers(picture.reshape(-1, *part.shape)).to(dtype)
            features.append(torso(pixels).reshape(*lead, -1))
        joined = torch.cat(features, -1)
        # In bfloat16 only layers compute; a network in float64 stays so.
        return joined.to(torch.promote_types(joined.dtype, torch.float32))

    def follow(self, rows: Tensor) -> None:
        """Take unrolls ``[S, B, *shape]`` into account, where pictures are normalised by what was seen."""
        parts = self.observations.split(rows)
        for part, pixels in zip(self.observations.pictures, self.pixels, strict=True):
            assert isinstance(pixels, Pixels)
            if pixels.normalizes:
                pixels.follow(parts[part.name])

    def _dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        # not of parameters(): functional calls put plain tensors in their place
        first: Any = next(self.torsos[0].children())
        dtype: torch.dtype = first.weight.dtype
        return dtype


class Encoded(nn.Module):
    """A network behind an :class:`Encoder`: it takes an observation, and whatever else follows it."""

    def __init__(self, encoder: Encoder, net: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.net = net

    def forward(self, observation: Tensor | Mapping[str, Tensor], *others: Tensor) -> Tensor:
        features: Tensor = self.net(self.encoder(observation), *others)
        return features


class Masked(nn.Module):
    """A network whose outputs for actions that the observation's mask forbids are the least there are.

    Args:
        net: takes observations ``[..., *shape]``; its outputs ``[..., n]`` are one for each choice.
        observations: what a row is made of; it has a mask.
    """

    def __init__(self, net: nn.Module, observations: Observations) -> None:
        super().__init__()
        self.net = net
        self.observations = observations

    def forward(self, observation: Tensor | Mapping[str, Tensor]) -> Tensor:
        return only_allowed(self.net(observation), self.observations, observation)


def only_allowed(
    outputs: Tensor, observations: Observations, observation: Tensor | Mapping[str, Tensor]
) -> Tensor:
    """Outputs ``[..., n]`` with the least finite number for each choice that is not allowed.

    That is finite, so that an entropy and a divergence of such logits are.

    Args:
        outputs: logits or values, one for each choice.
        observations: what a row is made of. Without a mask nothing changes.
        observation: the rows, or their parts by name.
    """
    allowed = observations.allowed(observation)
    if allowed is None:
        return outputs
    return outputs.masked_fill(~allowed, torch.finfo(outputs.dtype).min)

"""Torsos: observations [N, ...] to features [N, F]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlsync.core.errors import ConfigError

TORSOS = ("mlp", "shallow", "deep")


class PixelConv2d(nn.Conv2d):
    """A convolution that takes uint8 pixels and computes with pixels / 255.

    It divides the weights, which are few, instead of the pixels. bfloat16 represents 0 to 255 exactly, so
    under autocast pixels are converted to it directly. With ``channels_last`` it converts the pixels so that
    the convolutions after it use that format as well.
    """

    def __init__(
        self, inputs: int, outputs: int, size: int, *, stride: int, padding: int, channels_last: bool
    ) -> None:
        super().__init__(inputs, outputs, size, stride=stride, padding=padding)
        self.channels_last = channels_last

    def forward(self, pixels: Tensor) -> Tensor:
        if self.channels_last:  # before the conversion to float: a quarter of the bytes
            pixels = pixels.contiguous(memory_format=torch.channels_last)
        if pixels.dtype != torch.uint8:
            return super().forward(pixels)
        device = pixels.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else self.weight.dtype
        return self._conv_forward(pixels.to(dtype), self.weight * (1 / 255), self.bias)


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), 3x3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x)), inplace=True))


def make_torso(
    name: str, shape: Sequence[int], hidden: Sequence[int], *, channels_last: bool = False
) -> nn.Sequential:
    """The torso of this name, or ConfigError if there is none or it takes no such observations.

    Its last layer's width is the number of features. ``"mlp"`` takes vectors; ``"shallow"`` (the convolutions
    of the DQN agent) and ``"deep"`` (15 convolutions in residual blocks) take pixels [C, H, W], and have
    layers of the widths ``hidden`` after the convolutions.

    Source: "shallow": Mnih et al. 2015, doi 10.1038/nature14236; "deep": IMPALA, arXiv 1802.01561, figure 3.
    """
    _check_torso(name, shape, hidden)
    if name == "mlp":
        return nn.Sequential(*_dense(int(shape[0]), hidden, nn.Tanh))
    convolutions = (_shallow if name == "shallow" else _deep)(int(shape[0]), channels_last)
    try:
        with torch.no_grad():
            flat = nn.Sequential(*convolutions)(torch.zeros(1, *shape)).numel()
    except RuntimeError as error:
        raise ConfigError(
            f"pixels of {shape[1]} x {shape[2]} are too small for the torso {name!r}",
            f"observation shape {list(shape)}",
            "resize them to 84 x 84, or take the torso 'mlp' on vectors",
        ) from error
    # The last ReLU comes after Flatten: before it, its backward pass would mix memory formats and be slow.
    return nn.Sequential(*convolutions, nn.Flatten(), nn.ReLU(inplace=True), *_dense(flat, hidden, nn.ReLU))


def _check_torso(name: str, shape: Sequence[int], hidden: Sequence[int]) -> None:
    if name not in TORSOS:
        raise ConfigError(f"there is no torso {name!r}", "torso", f"give one of {', '.join(TORSOS)}")
    dims = 1 if name == "mlp" else 3
    if len(shape) != dims:
        takes = "vectors [features]" if dims == 1 else "pixels [channels, height, width]"
        raise ConfigError(
            f"the torso {name!r} takes {takes}",
            f"observation shape {list(shape)}",
            "give 'mlp' for vectors, 'shallow' or 'deep' for pixels",
        )
    if not hidden or min(hidden) < 1:
        raise ConfigError(
            f"a torso cannot have layers of widths {list(hidden)}",
            "hidden",
            "give one width or more, above zero",
        )


def _shallow(channels: int, channels_last: bool) -> list[nn.Module]:
    first = PixelConv2d(channels, 32, 8, stride=4, padding=0, channels_last=channels_last)
    convolutions = [first, nn.Conv2d(32, 64, 4, stride=2), nn.Conv2d(64, 64, 3)]
    layers: list[nn.Module] = []
    for convolution in convolutions:
        nn.init.orthogonal_(convolution.weight, 2**0.5)
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers += [convolution, nn.ReLU(inplace=True)]
    return layers[:-1]


def _deep(channels: int, channels_last: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    before = channels
    for width in (16, 32, 32):
        layers.append(
            nn.Conv2d(before, width, 3, padding=1)
            if layers
            else PixelConv2d(before, width, 3, stride=1, padding=1, channels_last=channels_last)
        )
        layers += [nn.MaxPool2d(3, stride=2, padding=1), Residual(width), Residual(width)]
        before = width
    return layers


def _dense(inputs: int, widths: Sequence[int], activation: type[nn.Module]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in widths:
        layer = nn.Linear(inputs, width)
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
        layers += [layer, activation()]
        inputs = width
    return layers

"""The layers of an ImpalaNet: torsos (observations [N, ...] to features [N, F]), LSTM, passes in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlsync import ConfigError

TORSOS = ("mlp", "nature", "impala")


class Pixels(nn.Module):
    """Pixels as numbers: bytes / 255; with ``normalize`` less their mean, by their deviation, cut to 5.

    Mean and deviation are those of each number of an observation in all that :meth:`follow` saw. They are
    buffers, so each version of the weights has its own, and workers act with those that it was made with.
    """

    def __init__(self, shape: Sequence[int], normalize: bool, channels_last: bool) -> None:
        super().__init__()
        self.normalize = normalize
        self.channels_last = channels_last
        if normalize:
            self.mean = nn.Buffer(torch.zeros(*shape))
            self.variance = nn.Buffer(torch.ones(*shape))
            self.seen = nn.Buffer(torch.zeros(()))

    @torch.no_grad()
    def follow(self, pixels: Tensor) -> None:
        """Take unrolls ``[S, B, *shape]`` into account: every eighth step, as neighbours are much alike."""
        new = pixels[::8].flatten(0, 1)
        variance, mean = torch.var_mean(new / _unit(new), 0, correction=0)
        self.seen.add_(len(new))
        share = len(new) / self.seen
        error = mean - self.mean
        self.variance.add_(share * (variance - self.variance + (1 - share) * error**2))
        self.mean.add_(share * error)

    def forward(self, pixels: Tensor) -> Tensor:
        numbers = pixels / _unit(pixels)
        if self.normalize:  # in place: an unroll's floats are many, and new memory is slow
            numbers.sub_(self.mean).mul_((self.variance + 1e-5).rsqrt()).clamp_(-5, 5)
        if self.channels_last:
            return numbers.contiguous(memory_format=torch.channels_last)
        return numbers


def _unit(pixels: Tensor) -> int:
    if pixels.is_floating_point():
        return 1
    return 255


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


class EpisodicLSTM(nn.Module):
    """One LSTM layer over time-first features; the state is zeroed before each step that begins an episode.

    On a CPU (T=21, B=8, 256 units) it takes as long as nn.LSTM. That, run in segments between resets, takes
    1.4 times as long with two resets and five times with one at every step.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.inward = nn.Linear(inputs, 4 * units)
        self.recurrent = nn.Linear(units, 4 * units, bias=False)
        nn.init.orthogonal_(self.inward.weight)
        nn.init.orthogonal_(self.recurrent.weight)
        nn.init.zeros_(self.inward.bias)
        with torch.no_grad():
            # Without this the forget gate starts half closed, and the cell forgets within a few steps.
            self.inward.bias[units : 2 * units] = 1.0

    def forward(self, features: Tensor, is_init: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [T, N, units], and states [T, N, 2, units] (output and cell) without gradient."""
        carries = (~is_init).to(features.dtype).unsqueeze(-1)
        h, c = state.unbind(1)
        outputs = []
        cells = []
        for gates, mask in zip(self.inward(features).unbind(), carries.unbind(), strict=True):
            h, c = self._cell(gates, h * mask, c * mask)
            outputs.append(h)
            cells.append(c)
        stacked = torch.stack(outputs)
        return stacked, torch.stack([stacked.detach(), torch.stack(cells).detach()], 2)

    def step(self, features: Tensor, is_init: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`forward`, without T: the outputs [N, units] and the state after the step."""
        h, c = state.masked_fill(is_init.view(-1, 1, 1), 0.0).unbind(1)
        h, c = self._cell(self.inward(features), h, c)
        return h, torch.stack([h.detach(), c.detach()], 1)

    def _cell(self, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        gates = torch.addmm(gates, h, self.recurrent.weight.t())
        opened, fresh = gates.split((3 * self.units, self.units), -1)
        enter, forget, leave = opened.sigmoid().chunk(3, -1)
        c = torch.addcmul(forget * c, enter, fresh.tanh())
        return leave * c.tanh(), c


#: More slices than threads: a thread that shares its core with a worker is slower, and takes fewer.
_SLICES_PER_THREAD = 2


def split_pass(
    run: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], inputs: Tensor, threads: int
) -> Tensor:
    """``run(inputs)``, slice by slice along the first dimension, in ``threads`` threads at once.

    And so backward; gradients are summed in a fixed order. Torch's own threads wait for each other after
    every operation, which costs more than it gains where workers use the same cores. ``inputs`` get no
    gradient.
    """
    out: Tensor = _SplitPass.apply(run, inputs, threads, *parameters)
    return out


class _SplitPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], inputs: Tensor, threads: int, *parameters: Tensor
    ) -> Tensor:
        slices = inputs.chunk(threads * _SLICES_PER_THREAD)
        ctx.parameters = parameters
        ctx.threads = threads
        ctx.outs = _each(threads, torch.enable_grad()(run), slices)
        return torch.cat([out.detach() for out in ctx.outs])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        outs = ctx.outs
        ctx.outs = None
        grads = grad.split(list(map(len, outs)))
        parameters = [ctx.parameters] * len(outs)
        of_slices = _each(ctx.threads, torch.autograd.grad, outs, parameters, grads)
        summed = []
        for first, *later in zip(*of_slices, strict=True):
            summed.append(sum(later, first))
        return (None, None, None, *summed)


def _each(threads: int, run: Callable[..., Any], *arguments: Sequence[Any]) -> list[Any]:
    """What ``run`` gives for each.

    An error waits for all threads: one that works on a parameter holds a lock of torch and waits for
    Python's, and the next pass would hold Python's and wait for torch's, for ever.
    """
    pool = _pool(threads)
    futures = []
    for each in zip(*arguments, strict=True):
        futures.append(pool.submit(run, *each))
    wait(futures)
    return [future.result() for future in futures]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="split_pass")

"""What an ImpalaNet has between its torso and its outputs: an LSTM; and passes of a torso in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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

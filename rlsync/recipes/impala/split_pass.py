"""One pass of a module over a batch, forward and backward, in slices that several threads share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: More slices than threads: a thread that shares its core with a worker is slower, and takes fewer.
_SLICES_PER_THREAD = 2


def split_pass(
    run: Callable[[Tensor], Tensor], parameters: Sequence[Tensor], inputs: Tensor, threads: int
) -> Tensor:
    """``run(inputs)``, slice by slice along the first dimension, in ``threads`` threads at once.

    The backward pass also goes slice by slice. The gradients of the slices are summed in a fixed order, so
    the result does not depend on which thread was faster. Torch's own threads split every operation and wait
    for each other after each one: where workers use the same cores, that costs more than it gains.

    Each row of the result of ``run`` depends on the same row of its input alone. The ``parameters`` get
    gradients, once; the input gets none.

    Source: torch.autograd.Function; autograd may run in several threads on graphs that share their leaves.
    """
    out: Tensor = _SplitPass.apply(run, inputs, threads, *parameters)
    return out


class _SplitPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], inputs: Tensor, threads: int, *parameters: Tensor
    ) -> Tensor:
        slices = inputs.chunk(threads * _SLICES_PER_THREAD)
        ctx.parameters, ctx.threads = parameters, threads
        ctx.outs = list(_pool(threads).map(partial(_with_graph, run), slices))
        return torch.cat([out.detach() for out in ctx.outs])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        outs, ctx.outs = ctx.outs, None
        grads = grad.split([len(out) for out in outs])
        found = _pool(ctx.threads).map(partial(_gradients, ctx.parameters), outs, grads)
        summed = [sum(later, first) for first, *later in zip(*found, strict=True)]
        return (None, None, None, *summed)


def _with_graph(run: Callable[[Tensor], Tensor], part: Tensor) -> Tensor:
    with torch.enable_grad():
        return run(part)


def _gradients(parameters: Sequence[Tensor], out: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, parameters, grad)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="split_pass")

"""Are all numbers of a tensor finite?"""

from __future__ import annotations

import cmath

import torch
from torch import Tensor

from rlsync.tensors.sharded import own_part


@torch.no_grad()
def all_finite(tensor: Tensor, becomes: torch.dtype) -> bool:
    """Whether every number of ``tensor`` is finite, also after a cast to ``becomes``.

    Of a sharded tensor, the part that this process holds is looked at.

    Example:
        >>> big = torch.tensor([1e30])
        >>> all_finite(big, torch.float32), all_finite(big, torch.float16)
        (True, False)
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    cast = own_part(tensor).to(becomes)
    # A number that is not finite makes the sum so. The sum of finite ones may overflow: then look closely.
    return cmath.isfinite(cast.sum().item()) or bool(torch.isfinite(cast).all())

"""How often autograd saw a tensor written to: a cheap sign that it changed."""

from __future__ import annotations

from torch import Tensor


def writes(tensor: Tensor) -> int:
    """Autograd's count of the writes to a tensor; 0 for inference tensors, which have none.

    It does not see writes through ``.data``, nor those of fused optimizers.

    Example:
        >>> import torch
        >>> weight = torch.zeros(2)
        >>> before = writes(weight)
        >>> _ = weight.add_(1)
        >>> writes(weight) - before
        1
    """
    return 0 if tensor.is_inference() else tensor._version

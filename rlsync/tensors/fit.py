"""Fit: weights that are sent again and again are matched with their destination once for each structure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlsync.tensors.compare import fitted
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.tensordicts import is_tensordict

#: What must be the same for a tensor to fit where another one did.
Form = tuple[type, torch.Size, torch.dtype, torch.layout]


class Fit:
    """Names the tensors of modules, tensordicts and mappings as their destination does.

    The first time, every leaf is compared with the destination's by name, shape and dtype; see
    :func:`rlsync.tensors.compare.fitted`. Afterwards, weights of the same structure are recognised: a
    tensordict by its keys, a module by itself and its tree. Then only the form of each tensor is compared.

    Args:
        where: the name of the weights in error messages.
        against: the name of the destination's leaves in error messages.

    Example:
        >>> fit = Fit("the weights", "of the worker")
        >>> expected = Leaves(nn.Linear(2, 1), "policy").specs()
        >>> sorted(fit.named(nn.Linear(2, 1), expected))
        ['bias', 'weight']
    """

    def __init__(self, where: str, against: str) -> None:
        self._where = where
        self._against = against
        self._expected: Sequence[LeafSpec] | None = None
        self._structure: object = None
        self._names: list[str] = []
        self._forms: list[Form] = []

    def named(self, weights: object, expected: Sequence[LeafSpec] | None) -> dict[str, Tensor]:
        """The tensors of ``weights`` under the destination's names.

        Args:
            weights: a module, tensordict or mapping.
            expected: the leaves of the destination; ``None`` if they are not known.

        Raises:
            LayoutMismatch: a leaf is missing, unexpected, or does not fit.
        """
        structure, tensors = self._read(weights)
        known = bool(tensors) and expected is self._expected and structure == self._structure
        if known and _forms(tensors) == self._forms:
            return dict(zip(self._names, tensors, strict=True))
        found = fitted(weights, self._where, expected, self._against)
        same = len(tensors) == len(found) and all(map(_is, tensors, found.values()))
        self._expected, self._structure = expected, structure if same else None
        self._names, self._forms = list(found), _forms(found.values())
        return found

    def _read(self, weights: object) -> tuple[object, Sequence[Tensor]]:
        """What tells this structure from others, and its tensors; none where it cannot be told cheaply."""
        if isinstance(weights, nn.Module) and not is_tensordict(weights):
            known = self._structure
            if not isinstance(known, Leaves) or known.root is not weights or not known.unchanged():
                known = Leaves(weights, self._where, shards=True)
            return (known, ()) if known.extra else (known, known.tensors())
        if not is_tensordict(weights):
            return None, ()
        items: list[tuple[Any, Any]] = list(weights.items(include_nested=True, leaves_only=True))
        tensors = [value for _, value in items]
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            return None, ()
        return [key for key, _ in items], tensors


def _forms(tensors: Iterable[Tensor]) -> list[Form]:
    return [(t.__class__, t.shape, t.dtype, t.layout) for t in tensors]


def _is(one: object, other: object) -> bool:
    return one is other

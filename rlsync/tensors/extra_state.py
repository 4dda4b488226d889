"""Extra state and state dicts as flat tensors, and back: nested mappings, sequences, tensors, numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.tensordicts import is_tensordict


def flatten_state(state: object, prefix: str, where: str) -> Iterator[tuple[str, Tensor]]:
    """Flatten extra state or a state dict: nested mappings, sequences, tensors and numbers."""
    match state:
        case None:
            return
        case Tensor():
            yield prefix, state
        case bool() | int() | float():
            yield prefix, torch.tensor(state, dtype=_number_dtype(state))
        case _ if isinstance(state, Mapping) or is_tensordict(state):
            for key, value in state.items():
                yield from flatten_state(value, f"{prefix}.{key}" if prefix else str(key), where)
        case list() | tuple():
            for i, value in enumerate(state):
                yield from flatten_state(value, f"{prefix}.{i}" if prefix else str(i), where)
        case _:
            raise LayoutMismatch(
                f"{prefix or 'the mapping'} holds a {type(state).__name__}, which cannot be sent",
                where,
                "keep tensors and numbers in extra state, or exclude the leaf in the route",
            )


def rebuild_state(template: Any, prefix: str, leaves: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`flatten_state`: ``template`` with the values of ``leaves``; others stay."""
    match template:
        case Tensor():
            return leaves[prefix].to(template.dtype, copy=True) if prefix in leaves else template
        case bool() | int() | float():
            return type(template)(leaves[prefix].item()) if prefix in leaves else template
        case _ if isinstance(template, Mapping) or is_tensordict(template):
            rebuilt: Any = copy.copy(template)
            for key, value in template.items():
                rebuilt[key] = rebuild_state(value, f"{prefix}.{key}", leaves)
            return rebuilt
        case list() | tuple():
            values = [rebuild_state(v, f"{prefix}.{i}", leaves) for i, v in enumerate(template)]
            named = isinstance(template, tuple) and type(template) is not tuple
            return type(template)(*values) if named else type(template)(values)
    return template


def _number_dtype(number: bool | int | float) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.float64

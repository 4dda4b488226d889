"""Flat images in Ray's object store."""

from __future__ import annotations

import ctypes
from typing import Any

import ray
import torch
from torch import Tensor


def put_image(flat: Tensor) -> ray.ObjectRef:
    """Copy a flat image into the object store, once.

    Args:
        flat: one-dimensional ``uint8``, on the CPU.

    Returns:
        Its address. The image stays in the store while somebody has the address.
    """
    return ray.put(flat.numpy())


def image_at(address: ray.ObjectRef, timeout_s: float) -> Tensor:
    """A flat image from the object store, in the memory of the store of this node: nothing is copied here.

    Args:
        address: from :func:`put_image`, in whatever process.
        timeout_s: how long to wait until it has come to this node, seconds.

    Returns:
        Its bytes, for reading only.

    Raises:
        ray.exceptions.GetTimeoutError: it has not come in time.
        ray.exceptions.RayError: it is lost, or its owner is gone.
    """
    held: Any = ray.get(address, timeout=timeout_s)
    # Torch warns of arrays that are read-only, as these are, so it gets the memory by its address.
    memory = (ctypes.c_uint8 * held.nbytes).from_address(held.ctypes.data)
    memory.held = held  # it is the store's while this array lives
    return torch.frombuffer(memory, dtype=torch.uint8)

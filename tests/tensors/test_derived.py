"""What is derived from weights is dropped when they are replaced: by torch, and by what a user keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from rlsync.tensors.derived import keepers, outdate
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target, write

X = torch.ones(1, 4)


class Counting(nn.Module):
    told = 0

    def mark_weight_update(self) -> None:
        self.told += 1


def test_each_part_that_keeps_something_is_told_once() -> None:
    shared, other = Counting(), Counting()
    parts = keepers(
        [nn.Sequential(nn.Linear(2, 2), shared), nn.ModuleList([shared, other]), None, "no module"]
    )
    assert parts == (shared, other)
    outdate(parts)
    assert (shared.told, other.told) == (1, 1)


def test_casts_of_an_autocast_block_do_not_outlive_the_weights() -> None:
    net = nn.Linear(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        before = net(X)
        with torch.no_grad():
            net.weight.mul_(2)
        assert torch.equal(net(X), before), "torch keeps the cast until the block ends"
        outdate(())
        assert not torch.equal(net(X), before)


def test_weights_of_a_cached_block_do_not_outlive_what_they_are_made_of() -> None:
    net = parametrizations.weight_norm(nn.Linear(4, 2))
    with parametrize.cached():
        before = net(X)
        with torch.no_grad():
            net.parametrizations.weight.original0.mul_(2)
        assert torch.equal(net(X), before), "torch keeps the weight until the block ends"
        outdate(())
        assert not torch.equal(net(X), before)


@pytest.mark.parametrize("way", ["alias", "copy", "write"])
def test_an_adoption_is_a_write_that_autograd_counts(way: str) -> None:
    """A cache that asks for ``_version``, as an optimizer's step changes it, is renewed."""
    module = nn.BatchNorm1d(2)
    views = [tensor.clone() for tensor in Leaves(module, "policy").tensors()]
    live = [module.weight, module.bias, module.running_mean]
    before = [tensor._version for tensor in live]
    if way == "write":
        leaves = Leaves(module, "policy")
        write(leaves, dict(zip(leaves.names, views, strict=True)))
    else:
        target = Target(module, "policy", Leaves(module, "policy").specs())
        (target.alias if way == "alias" else target.copy)(views)
    assert all(tensor._version > version for tensor, version in zip(live, before, strict=True))


@pytest.mark.parametrize("way", ["alias", "copy"])
def test_weights_that_were_made_in_inference_mode_are_adopted(way: str) -> None:
    with torch.inference_mode():
        module = nn.Linear(2, 2)
    target = Target(module, "policy", Leaves(module, "policy").specs())
    (target.alias if way == "alias" else target.copy)([torch.ones(2, 2), torch.ones(2)])
    assert module.weight.tolist() == [[1, 1], [1, 1]]

"""Tensors that are made of other tensors: a leaf for each part, and no memory that two could share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from rlsync.core.errors import LayoutMismatch
from rlsync.core.plan import Verdict
from rlsync.tensors.compare import Fit, compare
from rlsync.tensors.device import Covered
from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves, memory_key
from rlsync.tensors.parts import form_of, memory_of, part_names, remade, with_parts
from rlsync.tensors.target import Target, forget_memory, materialise, write
from tests.tools.parts.quantised import (
    Biased,
    Closed,
    Fleeting,
    Quantised,
    biased,
    make_quantised_mlp,
    move,
    quantise,
    quantised,
)

WEIGHTS = ["2.weight.values", "2.weight.scale", "4.weight.values", "4.weight.scale"]


def specs(root: object) -> dict[str, LeafSpec]:
    return {spec.name: spec for spec in Leaves(root, "policy").specs()}


def refusal(root: object) -> LayoutMismatch:
    with pytest.raises(LayoutMismatch) as raised:
        Leaves(root, "policy").specs()
    assert len(str(raised.value).splitlines()) == 3
    return raised.value


def outputs(net: nn.Module) -> Tensor:
    with torch.no_grad():
        return net(torch.linspace(-1, 1, 12).view(3, 4))


# ---------------------------------------------------------------------------------- what is a leaf


def test_each_part_is_a_leaf_and_two_weights_of_one_shape_are_neither_tied_nor_one_memory() -> None:
    net = make_quantised_mlp()
    found = specs(net)
    assert [name for name in found if ".weight." in name] == WEIGHTS
    assert all(not spec.tie for spec in found.values())
    assert found["2.weight.values"].dtype is torch.int8
    assert {found[name].kind for name in WEIGHTS} == {"parameter"}
    assert memory_key(net[2].weight) != memory_key(net[4].weight)
    assert Leaves(net, "policy").tensors()[2] is net[2].weight.values


def test_parts_of_parts_are_leaves_under_their_dotted_names() -> None:
    assert part_names(make_quantised_mlp(biased)[2].weight) == ["inner.values", "inner.scale", "bias"]
    assert {"2.weight.inner.scale", "4.weight.bias"} <= set(specs(make_quantised_mlp(biased)))


def test_weights_that_share_a_part_or_are_one_weight_are_tied_part_by_part() -> None:
    net = make_quantised_mlp()
    net[4].weight.scale = net[2].weight.scale
    ties = {name: spec.tie for name, spec in specs(net).items() if spec.tie}
    assert ties == {"4.weight.scale": "2.weight.scale"}
    net[4].weight = net[2].weight
    ties = {name: spec.tie for name, spec in specs(net).items() if spec.tie}
    assert ties == {"4.weight.values": "2.weight.values", "4.weight.scale": "2.weight.scale"}


def test_tensordicts_state_dicts_and_buffers_are_taken_apart_too() -> None:
    whole = quantise(torch.ones(2, 2))
    module = nn.Module()
    module.register_buffer("table", whole)
    assert {name: spec.kind for name, spec in specs(module).items()} == {
        "table.values": "buffer",
        "table.scale": "buffer",
    }
    for root in (TensorDict({"a": {"w": whole}}), TensorDictParams(TensorDict({"a": {"w": whole}}))):
        assert list(specs(root)) == ["a.w.values", "a.w.scale"]
    assert list(specs(nn.Linear(2, 2).state_dict() | {"weight": whole})) == [
        "weight.values",
        "weight.scale",
        "bias",
    ]


def test_a_layout_says_of_what_its_parts_are() -> None:
    layout = Layout.build({"policy": list(specs(make_quantised_mlp()).values())})
    assert Layout.from_json(layout.to_json()) == layout
    assert {entry.leaf.whole for entry in layout.entries if ".weight." in entry.leaf.name} == {
        "Quantised float32[8, 8] of values, scale {'shift': 0.0}"
    }


# ---------------------------------------------------------------------------------- what is refused


class Lazy(nn.Module):
    """Holds one tensor as a buffer."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", tensor)


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def _freed() -> Tensor:
    tensor = torch.zeros(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def _nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Closed(torch.zeros(3)), "table, a Closed, has no memory of its own"),
        (_fake, "table, a FakeTensor, has no memory of its own"),
        (_freed, "table, a Tensor, has no memory of its own"),
        (lambda: torch._efficientzerotensor(3), "table, a Tensor, has no memory of its own"),
        (lambda: _nested(torch.strided), "table is nested"),
        (lambda: _nested(torch.jagged), "table is nested"),
        (lambda: torch.zeros(3).to_sparse(), "table is torch.sparse_coo"),
        (lambda: torch.zeros(3, dtype=torch.complex64).conj(), "table is a view that changes the numbers"),
        (lambda: Fleeting(torch.zeros(3, dtype=torch.int8), torch.ones(1)), "table.values is another tensor"),
        (lambda: Quantised(torch.zeros(3).to_sparse(), torch.ones(1)), "table.values is torch.sparse_coo"),
    ],
)
def test_what_has_no_bytes_of_its_own_is_refused_by_name(make: Callable[[], Tensor], what: str) -> None:
    assert refusal(Lazy(make())).what.startswith(what)


def test_tensors_inside_a_transform_of_torch_func_are_refused() -> None:
    def probe(x: Tensor) -> Tensor:
        assert "has no memory of its own" in refusal(Lazy(x)).what
        assert x not in Covered([x])
        return x

    torch.vmap(probe)(torch.zeros(2, 3))
    torch.func.grad(lambda x: probe(x).sum())(torch.zeros(3))


def test_an_attribute_is_the_way_out_for_what_cannot_be_sent() -> None:
    module = nn.Linear(2, 2)
    assert "plain attribute" in refusal(Lazy(Closed(torch.zeros(3)))).cure
    module.table = Closed(torch.zeros(3))
    assert list(specs(module)) == ["weight", "bias"]


# ------------------------------------------------------------------------------- identity, contents


def test_tensors_without_memory_cover_nothing_and_tensors_of_parts_what_their_parts_cover() -> None:
    one, other = quantise(torch.ones(4, 4)), quantise(torch.ones(4, 4))
    covered = Covered([one])
    assert one in covered
    assert one.scale in covered
    assert other not in covered
    assert other.values not in covered
    assert Closed(torch.zeros(4, 4)) not in Covered([Closed(torch.zeros(4, 4))])


def test_a_digest_covers_each_part() -> None:
    weight = quantise(torch.linspace(-1, 1, 16).view(4, 4))
    assert digest([weight]) == digest(memory_of(weight))
    before = digest([weight])
    weight.scale.mul_(2)
    assert digest([weight]) != before


def test_a_tensor_of_the_same_form_is_made_of_other_parts() -> None:
    weight = biased(torch.ones(2, 2))
    zeros = map(torch.zeros_like, memory_of(weight))
    other = with_parts(weight, dict(zip(part_names(weight), zeros, strict=True)))
    assert isinstance(other, Biased)
    assert form_of(other) == form_of(weight)
    assert bool((other.numbers() == 0).all())
    assert not set(map(memory_key, memory_of(remade(weight, torch.clone)))) & set(
        map(memory_key, memory_of(weight))
    )


def test_what_a_part_belongs_to_must_be_the_same_on_both_sides() -> None:
    def verdicts(source: nn.Module, cast_to: torch.dtype | None = None) -> dict[str, str]:
        there = Leaves(quantised(nn.Linear(2, 2)), "policy").specs()
        found = compare(Leaves(source, "source").specs(), there, cast_to=cast_to)
        return {one.name: one.note for one in found if one.verdict is not Verdict.COPIED}

    assert verdicts(quantised(nn.Linear(2, 2))) == {}
    # A scale keeps its dtype: what it belongs to would be of another form.
    assert list(verdicts(quantised(nn.Linear(2, 2)), torch.bfloat16)) == ["bias"]
    shifted = verdicts(quantised(nn.Linear(2, 2), lambda weight: quantise(weight, 0.5)))
    assert list(shifted) == ["weight.values", "weight.scale"]
    assert "{'shift': 0.5}, and there of Quantised float32[2, 2]" in shifted["weight.scale"]
    assert set(verdicts(nn.Linear(2, 2))) == {"weight.values", "weight.scale", "weight"}


def test_live_parts_are_aliased_where_they_are_the_same_memory() -> None:
    net, twin = make_quantised_mlp(), make_quantised_mlp()
    live, others = (Leaves(one, "policy") for one in (net, twin))

    def aliased(there: Leaves) -> set[str]:
        tensors = [dict(zip(one.names, one.tensors(), strict=True)) for one in (live, there)]
        found = compare(
            live.specs(), there.specs(), source_tensors=tensors[0], destination_tensors=tensors[1]
        )
        return {one.name for one in found if one.verdict is Verdict.ALIASED}

    assert aliased(live) == set(live.names)
    assert aliased(others) == set()
    twin[2].weight = net[2].weight
    assert aliased(Leaves(twin, "policy")) == {"2.weight.values", "2.weight.scale"}


# -------------------------------------------------------------------------- reading what is there now


def test_a_new_weight_of_the_same_form_is_read_and_another_form_is_noticed() -> None:
    net = make_quantised_mlp()
    leaves = Leaves(net, "policy")
    quantised(net[2])
    assert leaves.unchanged()
    assert leaves.tensors()[2] is net[2].weight.values
    net[2].weight.shift = 0.5
    assert not leaves.unchanged()
    net[2].weight = nn.Parameter(torch.zeros(8, 8))
    assert not leaves.unchanged()


def test_weights_that_are_sent_again_and_again_are_named_part_by_part() -> None:
    net = make_quantised_mlp()
    expected = Leaves(net, "policy").specs()
    fit = Fit("policy", "in the workers")
    for weights in (net, net.state_dict(), TensorDict.from_module(net)):
        for _ in range(2):
            assert list(fit.named(weights, expected)) == [spec.name for spec in expected]
    net[2].weight.shift = 0.5
    with pytest.raises(LayoutMismatch, match=r"weight\.values' does not fit"):
        fit.named(net, expected)


# --------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("whole", [quantise, biased])
@pytest.mark.parametrize("way", ["alias", "copy", "write"])
def test_every_way_to_adopt_reaches_the_parts(way: str, whole: Callable[[Tensor], Tensor]) -> None:
    source, acts = make_quantised_mlp(whole), make_quantised_mlp(whole)
    leaves = Leaves(source, "source")
    for seed in range(3):
        move(source, seed)
        views = [tensor.detach().clone() for tensor in leaves.tensors()]
        if way == "write":
            write(Leaves(acts, "policy"), dict(zip(leaves.names, views, strict=True)))
        else:
            target = Target(acts, "policy", leaves.specs())
            assert target.current()
            (target.alias if way == "alias" else target.copy)(views)
            if way == "alias":
                assert list(map(memory_key, Leaves(acts, "policy").tensors())) == list(map(memory_key, views))
                target.own()
        assert torch.equal(outputs(acts), outputs(source))


def test_a_part_that_is_a_buffer_too_keeps_memory_that_can_be_written_to() -> None:
    layer = quantised(nn.Linear(2, 2))
    layer.register_buffer("scale", layer.weight.scale)
    leaves = Leaves(layer, "policy")
    views = [tensor.detach().clone() for tensor in leaves.tensors()]
    target = Target(layer, "policy", leaves.specs())
    target.alias(views)
    layer.scale.mul_(2)
    assert layer.weight.scale is layer.scale
    assert memory_key(layer.scale) not in {memory_key(view) for view in views}


def test_a_module_without_memory_is_pickled_small_and_gets_tensors_of_the_same_form() -> None:
    net = make_quantised_mlp(biased)
    blank = copy.deepcopy(net)
    forget_memory(blank)
    assert {part.device.type for tensor in blank.parameters() for part in memory_of(tensor)} == {"meta"}
    arrived = pickle.loads(pickle.dumps(blank))
    materialise(arrived)
    assert Leaves(arrived, "policy").specs() == Leaves(net, "policy").specs()
    write(
        Leaves(arrived, "policy"),
        dict(zip(*(Leaves(net, "p").names, Leaves(net, "p").tensors()), strict=True)),
    )
    assert torch.equal(outputs(arrived), outputs(net))


def test_leaves_are_put_together_to_call_a_module_with_them() -> None:
    net, other = make_quantised_mlp(biased), make_quantised_mlp(biased)
    move(other, 1)
    leaves = Leaves(other, "policy")
    weights = Leaves(net, "policy").put_together(dict(zip(leaves.names, leaves.tensors(), strict=True)))
    called = torch.func.functional_call(net, weights, (torch.linspace(-1, 1, 12).view(3, 4),))
    assert torch.equal(called, outputs(other))

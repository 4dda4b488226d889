"""The destination side: what an adoption writes, and where."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict, from_modules
from tensordict.nn import TensorDictParams
from torch import nn
from torchrl.collectors.utils import _make_meta_policy

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.layout import Layout, LeafSpec
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.target import Target, is_compiled, materialise, write


class Normaliser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"mean": torch.zeros(2), "count": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.state = state


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.body.weight
        self.normaliser = Normaliser()


def arriving(source: nn.Module) -> tuple[list[LeafSpec], list[torch.Tensor]]:
    """The leaves of ``source`` and views of an image that carries them, as from a board."""
    leaves = Leaves(source, "learner")
    layout = Layout.build({"policy": leaves.specs()})
    views = layout.views(torch.zeros(layout.image_bytes, dtype=torch.uint8))
    with torch.no_grad():
        for view, tensor in zip(views, leaves.tensors(), strict=True):
            view.copy_(tensor)
    return leaves.specs(), views


def trained() -> Net:
    source = Net()
    with torch.no_grad():
        for i, tensor in enumerate([*source.parameters(), *source.buffers()]):
            tensor.fill_(i + 1)
    source.normaliser.state = {"mean": torch.tensor([3.0, 4.0]), "count": 12}
    return source


def assert_same(module: Net, source: Net) -> None:
    for name, tensor in source.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(module.state_dict()[name], tensor), name
    assert module.normaliser.state["mean"].tolist() == source.normaliser.state["mean"].tolist()
    assert module.normaliser.state["count"] == source.normaliser.state["count"]
    assert type(module.normaliser.state["count"]) is int


def test_copy_writes_every_leaf_into_the_modules_own_memory() -> None:
    source, module = trained(), Net()
    pointers = {n: t.data_ptr() for n, t in [*module.named_parameters(), *module.named_buffers()]}
    leaves, views = arriving(source)
    Target(module, "policy", leaves).copy(views)
    assert_same(module, source)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.data_ptr() == pointers[name], name
    for view in views:
        view.zero_()
    assert_same(module, source)


def test_alias_points_parameters_at_the_views_and_copies_what_forward_mutates() -> None:
    source, module = trained(), Net()
    parameters = dict(module.named_parameters())
    buffers = {name: t.data_ptr() for name, t in module.named_buffers()}
    leaves, views = arriving(source)
    Target(module, "policy", leaves).alias(views)
    assert_same(module, source)
    by_name = dict(zip([leaf.name for leaf in leaves], views, strict=True))
    for name, parameter in module.named_parameters():
        assert parameter is parameters[name], "the Parameter objects stay"
        assert parameter.data_ptr() == by_name[name].data_ptr()
    for name, buffer in module.named_buffers():
        assert buffer.data_ptr() == buffers[name]
        assert buffer.data_ptr() != by_name[name].data_ptr()
    assert module.head.weight is module.body.weight
    module.norm(torch.randn(4, 2))
    assert by_name["norm.num_batches_tracked"].item() != module.norm.num_batches_tracked.item()
    module.normaliser.state["mean"].fill_(-1.0)
    assert by_name["normaliser._extra_state.mean"].tolist() == [3.0, 4.0]


def test_own_gives_the_memory_back_and_keeps_the_values() -> None:
    source, module = trained(), Net()
    leaves, views = arriving(source)
    target = Target(module, "policy", leaves)
    target.alias(views)
    target.own()
    for view in views:
        view.zero_()
    assert_same(module, source)
    assert module.head.weight is module.body.weight


def test_copy_after_alias_and_own_leaves_the_views_alone() -> None:
    source, module = trained(), Net()
    leaves, views = arriving(source)
    kept = [view.clone() for view in views]
    target = Target(module, "policy", leaves)
    target.alias(views)
    target.own()
    target.copy([torch.zeros_like(view) for view in views])
    assert module.body.weight.unique().tolist() == [0.0]
    assert all(torch.equal(a, b) for a, b in zip(views, kept, strict=True))


def test_requires_grad_and_gradients_are_left_as_they_were() -> None:
    source, module = trained(), Net()
    module.body.bias.requires_grad_(False)
    leaves, views = arriving(source)
    for adopt in (Target(module, "policy", leaves).alias, Target(module, "policy", leaves).copy):
        adopt(views)
        assert module.body.weight.requires_grad
        assert not module.body.bias.requires_grad
        assert module.body.weight.grad is None


def test_some_leaves_may_stay_at_home() -> None:
    source, module = trained(), Net()
    leaves, views = arriving(source)
    chosen = [i for i, leaf in enumerate(leaves) if leaf.name == "body.bias"]
    before = module.body.weight.clone()
    Target(module, "policy", [leaves[i] for i in chosen]).copy([views[i] for i in chosen])
    assert torch.equal(module.body.bias, source.body.bias)
    assert torch.equal(module.body.weight, before)
    assert module.normaliser.state["count"] == 0


def test_part_of_an_extra_state_may_stay_at_home() -> None:
    source, module = trained(), Net()
    module.normaliser.state["count"] = 5
    leaves, views = arriving(source)
    chosen = [i for i, leaf in enumerate(leaves) if not leaf.name.endswith("._extra_state.count")]
    target = Target(module, "policy", [leaves[i] for i in chosen])
    target.copy([views[i] for i in chosen])
    assert module.normaliser.state["mean"].tolist() == [3.0, 4.0]
    assert module.normaliser.state["count"] == 5


def test_an_lstm_acts_with_aliased_weights() -> None:
    source, module = nn.LSTM(2, 3, num_layers=2), nn.LSTM(2, 3, num_layers=2)
    leaves, views = arriving(source)
    target = Target(module, "policy", leaves)
    x = torch.randn(5, 1, 2)
    for adopt in (target.alias, target.copy):
        adopt(views)
        assert torch.equal(module(x)[0], source(x)[0])


def test_a_weight_normed_layer_acts_with_aliased_weights() -> None:
    make = nn.utils.parametrizations.weight_norm
    source, module = make(nn.Linear(2, 3)), make(nn.Linear(2, 3))
    leaves, views = arriving(source)
    Target(module, "policy", leaves).alias(views)
    x = torch.randn(4, 2)
    assert torch.equal(module(x), source(x))


def test_a_wrapped_destination_takes_the_leaves_of_a_plain_source() -> None:
    source, inner = trained(), Net()
    leaves, views = arriving(source)
    Target(nn.DataParallel(inner), "policy", leaves).copy(views)
    assert_same(inner, source)


def test_empty_leaves_and_scalars_are_adopted() -> None:
    source, module = nn.Module(), nn.Module()
    for holder, value in ((source, 5.0), (module, 0.0)):
        holder.empty = nn.Parameter(torch.empty(0, 3))
        holder.scalar = nn.Parameter(torch.tensor(value))
        holder.register_buffer("flag", torch.tensor(bool(value)))
    leaves, views = arriving(source)
    target = Target(module, "policy", leaves)
    for adopt in (target.alias, target.copy):
        adopt(views)
        assert module.scalar.item() == 5.0
        assert module.flag.item() is True
        assert module.empty.shape == (0, 3)


def test_write_copies_what_arrives_by_name_casts_and_leaves_the_rest() -> None:
    module = Net()
    before = module.body.weight.clone()
    pointer = module.body.bias.data_ptr()
    arrived = {
        "body.bias": torch.tensor([1.0, 2.0], dtype=torch.float64),
        "norm.num_batches_tracked": torch.tensor(7),
        "normaliser._extra_state.mean": torch.tensor([5.0, 6.0]),
        "normaliser._extra_state.count": torch.tensor(9),
        "elsewhere": torch.ones(3),
    }
    write(Leaves(module, "policy"), arrived)
    assert module.body.bias.tolist() == [1.0, 2.0]
    assert module.body.bias.dtype is torch.float32
    assert module.body.bias.data_ptr() == pointer
    assert module.norm.num_batches_tracked.item() == 7
    assert module.normaliser.state["mean"].tolist() == [5.0, 6.0]
    assert module.normaliser.state["count"] == 9
    assert torch.equal(module.body.weight, before)


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (LeafSpec("body.wieght", "parameter", (2, 2), torch.float32), "no leaf 'body.wieght'"),
        (LeafSpec("body.weight", "parameter", (2, 1), torch.float32), r"float32\[2, 1\] arrives"),
        (LeafSpec("body.weight", "parameter", (4,), torch.float32), r"has float32\[2, 2\]"),
        (LeafSpec("body.weight", "parameter", (2, 2), torch.float64), r"float64\[2, 2\] arrives"),
    ],
)
def test_a_leaf_that_does_not_fit_is_refused_in_three_lines(leaf: LeafSpec, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said) as caught:
        Target(Net(), "policy", [leaf])
    assert len(str(caught.value).splitlines()) == 3


def test_a_tie_that_the_arriving_leaves_do_not_have_is_refused() -> None:
    untied = nn.Module()
    untied.a, untied.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    tied = nn.Module()
    tied.a = tied.b = nn.Parameter(torch.zeros(2))
    leaves, _ = arriving(untied)
    with pytest.raises(LayoutMismatch):
        Target(tied, "policy", leaves)


# ---------------------------------------------------------------------------------- compiled


def test_a_module_is_compiled_if_a_part_of_it_is() -> None:
    plain = nn.Linear(1, 1)
    assert not is_compiled(plain)
    assert is_compiled(torch.compile(plain))
    in_place = nn.Linear(1, 1)
    in_place.compile()
    assert is_compiled(in_place)
    nested = nn.Sequential(nn.Sequential(torch.compile(nn.Linear(1, 1))))
    assert is_compiled(nested)
    assert not is_compiled(nn.Sequential(plain))
    assert not is_compiled({"w": torch.ones(1)})


def test_parameters_on_another_device_are_not_pointed_at_the_views() -> None:
    leaves, views = arriving(nn.Linear(1, 1))
    at_home, away = nn.Linear(1, 1), nn.Linear(1, 1, device="meta")
    assert Target(at_home, "policy", leaves).alias(views), "the views are read from now on"
    assert not Target(away, "policy", leaves).alias(views)
    assert away.weight.device.type == "meta"


# ---------------------------------------------------------------------------------- materialise


def test_materialise_replaces_meta_memory_and_keeps_what_is_known() -> None:
    with torch.device("meta"):
        module = Net()
    module.body.bias.requires_grad_(False)
    module.norm.register_buffer("passing", torch.zeros(3, device="meta"), persistent=False)
    materialise(module)
    tensors = [*module.parameters(), *module.buffers()]
    assert {t.device.type for t in tensors} == {"cpu"}
    assert isinstance(module.body.weight, nn.Parameter)
    assert not module.body.bias.requires_grad
    assert module.head.weight is module.body.weight, "ties are kept"
    assert "passing" not in module.norm.state_dict()
    assert module.norm.num_batches_tracked.dtype is torch.int64

    source = trained()
    module.normaliser.state = {"mean": torch.zeros(2), "count": 0}
    leaves, views = arriving(source)
    Target(module, "policy", leaves).copy(views)
    assert_same(module, source)


def test_materialise_leaves_real_memory_alone() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    weight = module[0].weight
    before = weight.clone()
    materialise(module)
    assert module[0].weight is weight
    assert torch.equal(weight, before)


def test_materialise_reaches_into_tensordicts_of_parameters() -> None:
    module = nn.Module()
    module.nets = from_modules(
        *[nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(2)], as_module=True
    )
    module.target = TensorDictParams(module.nets.data.clone(), no_convert=True)
    module.flat = TensorDictParams(TensorDict.from_module(nn.Linear(1, 1)))
    kinds = {spec.name: spec.kind for spec in Leaves(module, "learner").specs()}

    # as TorchRL sends a policy to its workers
    with _make_meta_policy(module):
        arrived = copy.deepcopy(module)
    materialise(arrived)
    leaves = Leaves(arrived, "policy")
    assert {spec.name: spec.kind for spec in leaves.specs()} == kinds
    assert {spec.device for spec in leaves.specs()} == {"cpu"}
    assert {t.device.type for t in [*arrived.parameters(), *arrived.buffers()]} == {"cpu"}

    specs, views = arriving(module)
    Target(arrived, "policy", specs).copy(views)
    for live, sent in zip(leaves.tensors(), Leaves(module, "learner").tensors(), strict=True):
        assert torch.equal(live, sent)

"""Leaves: every tensor of a module under its own name, and nothing that cannot be sent."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call

from rlsync.core.errors import LayoutMismatch
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves, flatten_state, memory_key, rebuild_state, unwrap

# Slow machines are no failures.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def test_a_traced_module_has_the_leaves_that_its_code_computes_with() -> None:
    traced = torch.jit.trace(nn.Sequential(nn.Linear(2, 1)), torch.zeros(1, 2))
    leaves = Leaves(traced, "the policy")
    assert leaves.names == ["0.weight", "0.bias"]
    assert leaves.unchanged()
    with torch.no_grad():
        for tensor in leaves.tensors():
            tensor.fill_(1.0)
    assert traced(torch.ones(1, 2)).item() == 3.0


class Statistics(nn.Module):
    """Extra state as normalisers keep it: tensors, numbers, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = {
            "count": 3,
            "rate": 0.5,
            "frozen": False,
            "moments": {"mean": torch.zeros(2), "history": [torch.ones(1), None, 7]},
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Everything(nn.Module):
    """A parameter, both kinds of buffers, extra state, ties and holes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)
        self.tied = nn.Linear(2, 3, bias=False)
        self.tied.weight = self.body[0].weight
        self.also_body = self.body
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("passing", torch.zeros(1, dtype=torch.int64), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("none", None)
        self.statistics = Statistics()


@pytest.fixture(scope="module")
def one_process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store: Path = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def specs(root: object) -> dict[str, LeafSpec]:
    return {spec.name: spec for spec in Leaves(root, "policy").specs()}


def names(root: object) -> list[str]:
    return Leaves(root, "policy").names


def refusal(root: object) -> LayoutMismatch:
    with pytest.raises(LayoutMismatch) as caught:
        Leaves(root, "policy").specs()
    error = caught.value
    assert len(str(error).splitlines()) == 3
    assert error.where == "policy"
    return error


# ---------------------------------------------------------------------------------- what is a leaf


def test_parameters_all_buffers_and_extra_state_are_leaves_under_their_dotted_names() -> None:
    found = specs(Everything())
    kinds = {name: spec.kind for name, spec in found.items()}
    assert {n for n, k in kinds.items() if k == "parameter"} == {
        *("body.0.weight", "body.1.weight", "body.1.bias", "head.weight", "head.bias"),
        *("tied.weight", "also_body.0.weight", "also_body.1.weight", "also_body.1.bias"),
    }
    assert {n for n, k in kinds.items() if k == "buffer"} == {
        *("kept", "passing"),
        *(f"body.1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")),
        *(f"also_body.1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert {n.removeprefix("statistics._extra_state.") for n, k in kinds.items() if "ext" in k} == {
        *("count", "rate", "frozen", "moments.mean", "moments.history.0", "moments.history.2"),
    }


def test_the_names_are_those_torch_gives() -> None:
    module = Everything()
    of_torch = dict(module.named_parameters(remove_duplicate=False))
    of_torch |= dict(module.named_buffers(remove_duplicate=False))
    found = specs(module)
    assert {n for n, s in found.items() if s.kind != "extra_state"} == set(of_torch)
    for name, tensor in of_torch.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].dtype is tensor.dtype


def test_each_leaf_reads_the_present_tensor_of_the_module() -> None:
    module = Everything()
    leaves = Leaves(module, "policy")
    values = dict(zip(leaves.names, leaves.tensors(), strict=True))
    assert values["head.weight"] is module.head.weight
    assert values["passing"] is module.passing

    module.head.weight = nn.Parameter(torch.ones(2, 3))
    module.passing = torch.ones(1, dtype=torch.int64)
    module.statistics.state["count"] = 4
    values = dict(zip(leaves.names, leaves.tensors(), strict=True))
    assert values["head.weight"] is module.head.weight
    assert values["passing"] is module.passing
    assert values["statistics._extra_state.count"].item() == 4


def test_numbers_in_extra_state_keep_their_type_and_value() -> None:
    found = specs(Everything())
    prefix = "statistics._extra_state."
    assert found[prefix + "count"].dtype is torch.int64
    assert found[prefix + "rate"].dtype is torch.float64
    assert found[prefix + "frozen"].dtype is torch.bool
    assert found[prefix + "count"].shape == ()


def test_ties_are_kept_by_the_name_seen_first() -> None:
    found = specs(Everything())
    assert found["tied.weight"].tie == "body.0.weight"
    assert found["also_body.0.weight"].tie == "body.0.weight"
    assert found["also_body.1.running_var"].tie == "body.1.running_var"
    assert found["body.0.weight"].tie == ""
    assert found["head.weight"].tie == ""


def test_two_parameters_that_share_their_data_are_tied_and_part_of_one_is_not() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.arange(4.0))
    module.b = nn.Parameter(module.a.data)
    module.first_half = nn.Parameter(module.a.data[:2])
    module.transposed = nn.Parameter(module.a.data.view(2, 2).t())
    found = specs(module)
    assert found["b"].tie == "a"
    assert found["first_half"].tie == ""
    assert found["transposed"].tie == ""


def test_empty_tensors_are_leaves_and_never_tied() -> None:
    module = nn.Module()
    module.a = nn.Parameter(torch.empty(0))
    module.b = nn.Parameter(torch.empty(0))
    assert [s.tie for s in specs(module).values()] == ["", ""]


def test_equal_numbers_of_extra_state_are_not_taken_for_ties() -> None:
    module = Statistics()
    module.state = [1, 1, 1.0, True]
    assert [s.tie for s in specs(module).values()] == [""] * 4


def test_meta_modules_can_be_described_and_keep_their_ties() -> None:
    with torch.device("meta"):
        module = nn.Module()
        module.a = nn.Linear(2, 2, bias=False)
        module.b = nn.Linear(2, 2, bias=False)
        module.b.weight = module.a.weight
        module.c = nn.Linear(2, 2, bias=False)
    assert {n: s.tie for n, s in specs(module).items()} == {
        "a.weight": "",
        "b.weight": "a.weight",
        "c.weight": "",
    }


# ---------------------------------------------------------------------------------- wrappers


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_data_parallel_names_are_unwrapped_also_in_the_middle() -> None:
    inner = net()
    assert names(nn.DataParallel(inner)) == names(inner)
    outer = nn.ModuleDict({"encoder": nn.DataParallel(inner), "head": nn.Linear(2, 1)})
    assert names(outer) == names(nn.ModuleDict({"encoder": inner, "head": nn.Linear(2, 1)}))


def test_distributed_data_parallel_names_are_unwrapped_also_in_the_middle(
    one_process_group: None,
) -> None:
    inner = net()
    plain = names(inner)
    wrapped = nn.parallel.DistributedDataParallel(inner)
    assert names(wrapped) == plain
    assert names(nn.Sequential(wrapped)) == [f"0.{name}" for name in plain]
    assert Leaves(wrapped, "policy").tensors()[0] is inner[0].weight


@pytest.mark.seconds
def test_torch_compile_names_are_unwrapped_also_in_the_middle() -> None:
    inner = net()
    compiled = torch.compile(inner)
    assert any("_orig_mod" in name for name, _ in compiled.named_parameters())
    assert names(compiled) == names(inner)
    assert names(nn.Sequential(compiled)) == [f"0.{name}" for name in names(inner)]
    assert unwrap(compiled, "policy") is inner


def test_wrappers_on_wrappers_are_unwrapped(one_process_group: None) -> None:
    inner = net()
    stack = torch.compile(nn.DataParallel(torch.compile(nn.parallel.DistributedDataParallel(inner))))
    assert names(nn.ModuleDict({"a": stack})) == [f"a.{name}" for name in names(inner)]


def test_activation_checkpoints_are_unwrapped_also_inside_other_wrappers() -> None:
    inner = net()
    wrapped = nn.Sequential(checkpoint_wrapper(inner[0]), torch.compile(checkpoint_wrapper(inner[1])))
    assert names(wrapped) == names(inner)
    assert names(checkpoint_wrapper(wrapped)) == names(inner)
    assert unwrap(checkpoint_wrapper(inner), "policy") is inner


compiled = partial(torch.compile, backend="eager")


@pytest.mark.parametrize("wrap", [nn.DataParallel, checkpoint_wrapper, compiled])
def test_a_leaf_knows_the_path_by_which_torch_finds_it_through_wrappers(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    wrapped = nn.Sequential(wrap(nn.Linear(2, 2)), Statistics())
    leaves = Leaves(wrapped, "policy")
    tensors = {leaf.name: torch.zeros(leaf.read().shape) for leaf in leaves.leaves[:2]}
    called = functional_call(wrapped, leaves.put_together(tensors), torch.ones(1, 2))
    assert called.tolist() == [[0.0, 0.0]]


def test_a_module_compiled_in_place_keeps_its_names() -> None:
    inner = net()
    plain = names(inner)
    inner.compile()
    assert names(inner) == plain


def test_the_users_own_module_attribute_is_no_wrapper() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert names(Holder()) == ["module.weight", "module.bias"]


# ---------------------------------------------------------------------------------- kinds of roots


def test_a_tensordict_module_has_the_leaves_of_its_network() -> None:
    policy = TensorDictModule(net(), in_keys=["observation"], out_keys=["action"])
    assert names(policy) == [f"module.{name}" for name in names(net())]


def test_tensordict_params_are_leaves_under_the_names_of_their_module() -> None:
    network = net()
    params = TensorDictParams(TensorDict.from_module(network, as_module=True))
    found = specs(params)
    assert set(found) == set(names(network))
    assert found["0.weight"].kind == "parameter"
    assert found["1.running_mean"].kind == "buffer"


def test_tensordict_params_in_a_module_are_found_under_its_attribute() -> None:
    holder = nn.Module()
    holder.qvalue_network_params = TensorDictParams(TensorDict.from_module(net()))
    leaves = Leaves(holder, "loss_module")
    assert set(leaves.names) == {f"qvalue_network_params.{name}" for name in names(net())}
    assert {s.kind for s in leaves.specs()} == {"parameter", "buffer"}
    read = dict(zip(leaves.names, leaves.tensors(), strict=True))
    with torch.no_grad():
        holder.qvalue_network_params["0", "weight"].data.fill_(5.0)
    again = dict(zip(leaves.names, leaves.tensors(), strict=True))
    assert again["qvalue_network_params.0.weight"].data_ptr() == (
        read["qvalue_network_params.0.weight"].data_ptr()
    )
    assert again["qvalue_network_params.0.weight"].unique().tolist() == [5.0]


def test_a_stack_of_critics_has_leaves_with_a_leading_dimension() -> None:
    stacked = TensorDict.from_modules(nn.Linear(2, 1), nn.Linear(2, 1), as_module=True)
    assert specs(stacked)["weight"].shape == (2, 1, 2)


def test_a_plain_tensordict_with_nesting_and_non_tensors_has_its_tensors_as_leaves() -> None:
    td = TensorDict({"a": {"b": torch.ones(2)}, "c": torch.zeros(1), "note": "text"})
    assert set(names(td)) == {"a.b", "c"}


def test_extra_state_inside_a_tensordict_keeps_the_name_it_has_in_a_module() -> None:
    td = TensorDict({"norm": {"__extra_state__": {"mean": torch.zeros(2)}}})
    assert {n: s.kind for n, s in specs(td).items()} == {"norm._extra_state.mean": "extra_state"}


def test_a_state_dict_has_the_names_of_its_module() -> None:
    module = net()
    assert names(module.state_dict()) == names(module)
    assert set(names({"body": {"w": torch.ones(1)}, "steps": 3})) == {"body.w", "steps"}


@pytest.mark.parametrize("root", [3, "policy", None, [torch.ones(1)], torch.ones(1)])
def test_what_holds_no_weights_is_refused(root: object) -> None:
    assert "holds no weights" in refusal(root).what


# ---------------------------------------------------------------------------------- special modules


def test_weight_norm_is_described_by_the_tensors_that_are_trained() -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    assert set(names(module)) == {name for name, _ in module.named_parameters()}
    assert "parametrizations.weight.original0" in names(module)
    assert "weight" not in names(module)


def test_spectral_norm_brings_its_power_iteration_vectors() -> None:
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3))
    expected = {n for n, _ in module.named_parameters()} | {n for n, _ in module.named_buffers()}
    assert set(names(module)) == expected
    assert {s.kind for s in specs(module).values()} == {"parameter", "buffer"}


def test_an_lstm_has_all_its_weights_and_none_twice() -> None:
    module = nn.LSTM(2, 3, num_layers=2, bidirectional=True)
    assert names(module) == [name for name, _ in module.named_parameters()]
    assert not any(spec.tie for spec in specs(module).values())


def test_a_lazy_module_is_refused_until_it_ran_once() -> None:
    module = nn.Sequential(nn.LazyLinear(3))
    error = refusal(module)
    assert "0.weight is not initialised yet" in error.what
    assert "run the module once" in error.cure
    module(torch.ones(1, 2))
    assert specs(module)["0.weight"].shape == (3, 2)


def test_a_sharded_parameter_is_refused_where_whole_tensors_are_needed(one_process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    module = nn.Linear(2, 2, bias=False)
    module.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)]))
    error = refusal(nn.Sequential(module))
    assert "0.weight is sharded" in error.what
    assert "gather" in error.cure
    assert "is sharded" in refusal({"w": module.weight}).what
    described = Leaves(nn.Sequential(module), "net", shards=True).specs()
    assert [(spec.name, spec.shape) for spec in described] == [("0.weight", (2, 2))]


def test_fully_sharded_modules_are_refused_where_whole_tensors_are_needed(one_process_group: None) -> None:
    from torch.distributed.fsdp import fully_shard

    module = nn.Sequential(nn.Linear(2, 2))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh)
    assert "is sharded" in refusal(module).what


@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz")
def test_sparse_and_quantised_tensors_are_refused() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.eye(2).to_sparse())
    assert "mask is torch.sparse_coo" in refusal(module).what
    module = nn.Module()
    module.register_buffer("q", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    assert refusal(module).what.startswith("q is ")


def test_extra_state_that_is_neither_tensor_nor_number_is_refused_by_name() -> None:
    module = nn.Sequential(Statistics())
    module[0].state = {"name": "running"}
    error = refusal(module)
    assert error.what == "0._extra_state.name holds a str, which cannot be sent"
    assert "exclude" in error.cure


# ---------------------------------------------------------------------------------- changes


def test_a_module_that_stays_as_it_is_is_unchanged_whatever_its_values() -> None:
    module = Everything()
    leaves = Leaves(module, "policy")
    module.head.weight = nn.Parameter(torch.ones(2, 3))
    module.head.weight.data = torch.zeros(2, 3)
    module.kept = torch.ones(2)
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    assert leaves.unchanged()


def _replace_child(m: Everything) -> None:
    m.head = nn.Linear(3, 2)


def _replace_deep_child(m: Everything) -> None:
    m.body[1] = nn.BatchNorm1d(3)


def _add_child(m: Everything) -> None:
    m.extra = nn.Linear(1, 1)


def _add_parameter(m: Everything) -> None:
    m.head.scale = nn.Parameter(torch.ones(1))


def _add_buffer(m: Everything) -> None:
    m.body[0].register_buffer("seen", torch.zeros(1))


def _delete_parameter(m: Everything) -> None:
    del m.head.bias


def _wrap_child(m: Everything) -> None:
    m.head = nn.DataParallel(m.head)


def _drop_child(m: Everything) -> None:
    m.head = None


@pytest.mark.parametrize(
    "change",
    [
        *(_replace_child, _replace_deep_child, _add_child, _add_parameter, _add_buffer),
        *(_delete_parameter, _wrap_child, _drop_child),
    ],
)
def test_a_changed_module_tree_is_noticed(change: Any) -> None:
    module = Everything()
    leaves = Leaves(module, "policy")
    assert leaves.unchanged()
    change(module)
    assert not leaves.unchanged()


def test_a_deleted_child_is_noticed_and_raises_nothing() -> None:
    module = Everything()
    leaves = Leaves(module, "policy")
    del module.head
    assert not leaves.unchanged()


def test_a_renamed_child_is_noticed() -> None:
    module = nn.Sequential(OrderedDict(a=nn.Linear(1, 1)))
    leaves = Leaves(module, "policy")
    module._modules["b"] = module._modules.pop("a")
    assert not leaves.unchanged()


@pytest.mark.parametrize("name", ["absent", "none"])
def test_a_declared_leaf_that_gets_its_tensor_late_is_noticed(name: str) -> None:
    module = Everything()
    leaves = Leaves(module, "policy")
    setattr(module, name, nn.Parameter(torch.ones(1)))
    assert not leaves.unchanged()


def test_a_leaf_set_to_none_is_noticed() -> None:
    module = Everything()
    leaves = Leaves(module, "policy")
    module.kept = None
    assert not leaves.unchanged()


def test_a_wrapper_whose_inner_module_is_replaced_is_noticed() -> None:
    root = nn.DataParallel(net())
    leaves = Leaves(root, "policy")
    root.module = net()
    assert not leaves.unchanged()


# ---------------------------------------------------------------------------------- extra state

numbers = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
states = st.recursive(
    st.one_of(st.none(), numbers, numbers.map(torch.tensor)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc_", min_size=1, max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype is b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(states)
def test_extra_state_survives_being_flattened_and_rebuilt(state: Any) -> None:
    leaves = dict(flatten_state(state, "x", "policy"))
    assert same(state, rebuild_state(state, "x", leaves))


@given(states)
def test_names_of_extra_state_are_unique_below_their_prefix(state: Any) -> None:
    flat = [name for name, _ in flatten_state(state, "m._extra_state", "policy")]
    assert len(flat) == len(set(flat))
    assert all(n == "m._extra_state" or n.startswith("m._extra_state.") for n in flat)


def test_rebuilt_tensors_are_copies() -> None:
    state = {"mean": torch.ones(2)}
    arriving = {"x.mean": torch.zeros(2)}
    rebuilt: Any = rebuild_state(state, "x", arriving)
    arriving["x.mean"].fill_(9.0)
    assert rebuilt["mean"].tolist() == [0.0, 0.0]
    assert state["mean"].tolist() == [1.0, 1.0]


def test_ordered_dicts_and_tensordicts_come_back_as_what_they_were() -> None:
    state = OrderedDict(b=1, a=TensorDict({"m": torch.ones(2)}))
    leaves = dict(flatten_state(state, "x", "policy"))
    leaves["x.a.m"] = torch.zeros(2)
    rebuilt: Any = rebuild_state(state, "x", leaves)
    assert type(rebuilt) is OrderedDict
    assert isinstance(rebuilt["a"], TensorDict)
    assert rebuilt["a"]["m"].tolist() == [0.0, 0.0]


Moments = namedtuple("Moments", ["mean", "count"])


def test_named_tuples_in_extra_state_come_back_as_what_they_were() -> None:
    state = Moments(torch.ones(2), 3)
    leaves = dict(flatten_state(state, "x", "policy"))
    rebuilt: Any = rebuild_state(state, "x", leaves)
    assert type(rebuilt) is Moments
    assert rebuilt.count == 3


def test_default_dicts_in_extra_state_come_back_as_what_they_were() -> None:
    state = defaultdict(int, steps=3)
    leaves = dict(flatten_state(state, "x", "policy"))
    rebuilt: Any = rebuild_state(state, "x", leaves)
    assert rebuilt == {"steps": 3}
    assert type(rebuilt) is defaultdict


def test_two_leaves_of_one_name_are_refused() -> None:
    module = Statistics()
    module.state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    refusal(module)


# ---------------------------------------------------------------------------------- memory


def test_memory_keys_are_equal_for_the_same_memory_only() -> None:
    base = torch.arange(6.0)
    assert memory_key(base) == memory_key(base.view(6)) == memory_key(nn.Parameter(base))
    others = [base[1:], base[:5], base.view(2, 3), base.view(torch.int32), base.clone()]
    assert len({memory_key(t) for t in [base, *others]}) == 6
    square = torch.zeros(3, 3)
    assert memory_key(square) != memory_key(square.t()), "the same memory, read in another order"

"""Which leaves act: each is changed alone, and nothing else is, then or later."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from rlsync.core import machine
from rlsync.sync.acts import Acting, Call, examined, mid_episode, undisturbed
from tests.tools.parts.acting import Functional, Packed, Spare, Twin


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Cured(nn.Module):
    """Makes what it computes with at each call, as the page of silent syncs advises."""

    def __init__(self, compute: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.nets, self.compute = nn.ModuleList([mlp(), mlp()]), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.nets, x)


def functional(nets: nn.ModuleList, x: Tensor) -> Tensor:
    return sum(functional_call(net, dict(net.named_parameters()), (x,)) for net in nets)


def stacked(nets: nn.ModuleList, x: Tensor) -> Tensor:
    base = copy.deepcopy(nets[0])
    return vmap(lambda held: functional_call(base, held, (x,)))(stack_module_state(list(nets))[0])


def quantised(nets: nn.ModuleList, x: Tensor) -> Tensor:
    def rounded(layer: nn.Linear, x: Tensor) -> Tensor:
        scale = layer.weight.abs().max() / 127
        return nn.functional.linear(x, (layer.weight / scale).round() * scale, layer.bias)

    return sum(rounded(net[2], net[1](rounded(net[0], x))) for net in nets)


class Choice(nn.Module):
    """Returns the choice alone: other weights often lead to the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).argmax(-1)


class Coarse(nn.Module):
    """Rounds what it returns: with somewhat larger weights it returns the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) / 100).round()


class Restless(nn.Module):
    """Dropout, batch statistics, counters, random numbers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.norm, self.b = (
            nn.Linear(4, 8),
            nn.Dropout(0.5),
            nn.BatchNorm1d(8),
            nn.Linear(8, 2),
        )
        self.calls, self.seen, self.kept = 0, [], torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.kept += 1
        self.new = x
        return self.b(self.norm(self.drop(self.a(x)))) + np.random.rand() + random.random()


class Deep(nn.Sequential):
    """So many leaves that gradients speak for most."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(4, 4) for _ in range(16)))


def call_of(module: nn.Module) -> Call:
    def call(plain: bool) -> Sequence[Tensor]:
        observation = torch.zeros(3, 4)
        return [module(observation if plain else mid_episode(observation))]

    return call


def of(module: nn.Module, *, alias: bool = True) -> Acting:
    return examined({"policy": module}, call_of(module), alias=["policy"] if alias else [])


@pytest.mark.seconds
@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        mlp,
        Choice,
        Coarse,
        Deep,
        Restless,
        lambda: nn.Sequential(nn.Linear(4, 1), nn.ReLU(), nn.Linear(1, 2)),  # its one unit may be dead
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2)).eval(),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)),
        lambda: mlp().bfloat16().float(),
        lambda: torch.jit.trace(mlp(), torch.zeros(3, 4)),
        *(partial(Cured, compute) for compute in (functional, stacked, quantised)),
    ],
)
def test_a_policy_that_computes_with_its_leaves_raises_no_alarm(
    make: Callable[[], nn.Module], alias: bool
) -> None:
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()  # as a head that begins with zeros
    found = of(module, alias=alias)
    assert (found.idle, found.unknown) == ({}, {})


@pytest.mark.parametrize("make", [Functional, Twin])
def test_a_policy_that_computes_with_detached_tensors_is_reached_by_copy_alone(
    make: Callable[[], nn.Module],
) -> None:
    found = of(make())
    assert len(found.idle["policy"]) == 4
    assert found.by_copy
    assert of(make(), alias=False).idle == {}


@pytest.mark.parametrize("alias", [True, False])
def test_a_weight_that_is_packed_at_the_first_call_does_not_act(alias: bool) -> None:
    module = Packed()
    weight = module.net.weight.detach().clone()
    found = of(module, alias=alias)
    assert found.idle == {"policy": ("net.weight",)}
    assert not found.by_copy
    assert module.packed is None  # the next call packs the weights that are there then
    assert torch.equal(module.net.weight, weight)


def test_the_one_leaf_that_does_not_act_is_named_among_many_that_do() -> None:
    assert of(Spare()).idle == {"policy": ("spare.weight", "spare.bias")}
    deep = Deep()
    deep.spare = nn.Linear(4, 4)
    deep.forward = lambda x: nn.Sequential(*list(deep)[:16])(x)  # type: ignore[method-assign]
    assert of(deep).idle == {"policy": ("spare.weight", "spare.bias")}


@pytest.mark.parametrize("alias", [True, False])
def test_nothing_is_changed_by_the_examination(alias: bool) -> None:
    torch.manual_seed(3)
    module = Restless()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    memory = [parameter.data_ptr() for parameter in module.parameters()]
    numbers = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    of(module, alias=alias)
    assert (module.calls, module.seen, module.kept.tolist()) == (0, [], [0, 0])
    assert "new" not in vars(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [parameter.data_ptr() for parameter in module.parameters()] == memory
    assert all(parameter.requires_grad and parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (np.random.get_state()[1] == numbers[1]).all()
    assert random.getstate() == numbers[2]


class Large(nn.Module):
    """64 leaves of 4 MB, all of which act."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.ones(1_000_000) for _ in range(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(part[0] for part in self.parts)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone tells the peak of memory")
def test_an_examination_takes_the_memory_of_one_copy_of_the_model() -> None:
    def kilobytes(name: str) -> int:
        return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]

    module = Large()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken now
    before = kilobytes("VmRSS")
    assert of(module) == Acting()
    assert 256e6 < 1024 * (kilobytes("VmHWM") - before) < 1.3 * 256e6


def test_without_memory_for_a_copy_older_weights_are_not_tried_and_the_worker_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 10**9)
    assert of(Large()).unknown == {"policy": "it wants 0.3 GB of memory for a while, and 1.0 GB are free"}

    # What needs no copy is found out, but not what a copy would cure.
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 10)
    by_alias = of(Functional())
    assert (len(by_alias.idle["policy"]), by_alias.by_copy) == (4, False)
    by_copy = of(Functional(), alias=False)
    assert (by_copy.idle, list(by_copy.unknown)) == ({}, ["policy"])


def test_a_module_that_the_policy_does_not_contain_is_not_judged() -> None:
    policy, transform = mlp(), nn.Linear(2, 2)
    found = examined({"env.transform[0]": transform}, call_of(policy), alias=[], within=policy)
    assert found.idle == {}
    assert list(found.remarks()) == [
        "whether the leaves of env.transform[0] act was not examined: the policy does not contain it"
    ]


def test_outputs_that_differ_by_themselves_are_not_judged() -> None:
    module, count = mlp(), iter(range(1000))
    found = examined({"policy": module}, lambda _: [module(torch.ones(1, 4)) + next(count)], alias=[])
    assert found.idle == {}
    assert "different outputs" in found.unknown["policy"]


def test_what_workers_found_out_is_put_together() -> None:
    settings = {"policy": {"by": "1", "of": "1"}}
    outlives = {"policy": ("policy.a",)}
    one = Acting({"policy": ("a",)}, {}, ("policy.twin",), True, settings, outlives)
    other = Acting({"policy": ("a", "b")}, {"env": "why"}, (), True, {"policy": {"by": "2", "of": "1"}})
    found = Acting.of_all([one, Acting.from_json(other.to_json())])
    settings = {"policy": {"by": "1 or 2", "of": "1"}}
    expected = Acting({"policy": ("a", "b")}, {"env": "why"}, ("policy.twin",), True, settings, outlives)
    assert found == expected
    assert found.is_idle("policy", "b")
    assert not found.is_idle("other", "b")
    assert not Acting.of_all([one, Acting({"policy": ["b"]})]).by_copy


def test_undisturbed_gives_back_what_the_block_replaced() -> None:
    module = Restless()
    first = module.a
    with undisturbed(module):
        module.a = nn.Linear(1, 1)
        del module.drop
    assert module.a is first
    assert isinstance(module.drop, nn.Dropout)

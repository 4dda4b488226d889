"""What older weights computed, and acts with newer ones: it is named, and nothing else is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rlsync.sync.acts import Acting, examined, mid_episode
from tests.tools.parts.acting import Attention, Packed, Told, ToldAttention, Twice
from tests.tools.parts.sizes import ACTIONS, OBSERVATIONS

both_ways = pytest.mark.parametrize("alias", [True, False])


def of(module: nn.Module, *, alias: bool) -> Acting:
    def call(plain: bool) -> list[Tensor]:
        observation = torch.zeros(3, OBSERVATIONS)
        return [module(observation if plain else mid_episode(observation))]

    return examined({"policy": module}, call, alias=["policy"] if alias else [])


def by_address(weight: Tensor) -> object:
    return weight.data_ptr()


def by_version(weight: Tensor) -> object:
    return weight._version


def called(module: nn.Module) -> nn.Module:
    """As a collector does when it is made."""
    module(torch.zeros(3, OBSERVATIONS))
    return module


class Recurrent(nn.Module):
    """Carries its state from step to step: as an attribute, or as a buffer."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(OBSERVATIONS, 4), nn.Linear(4, ACTIONS)
        self.buffer = buffer
        if buffer:
            self.register_buffer("state", torch.zeros(3, 4))
        else:
            self.state = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        return self.head(self.state)


class Meant(Recurrent):
    """Says that its state may be of older weights."""

    def mark_weight_update(self) -> None:
        """Keep it."""


class Frames(nn.Module):
    """Remembers the last observations, in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = nn.Linear(2 * OBSERVATIONS, ACTIONS), deque[Tensor](maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        self.last.append(x.clone())
        return self.net(torch.cat([self.last[0], self.last[-1]], -1))


class Answered(nn.Module):
    """Gives its last answer again if it sees the same once more."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen, self.answer = nn.Linear(OBSERVATIONS, ACTIONS), torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.equal(self.seen, x):
            self.seen, self.answer = x.clone(), self.net(x)
        return self.answer


class Nested(nn.Module):
    """Keeps keys in a list of a tuple of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.cache = nn.Linear(OBSERVATIONS, ACTIONS), {"layers": ([],)}

    def forward(self, x: Tensor) -> Tensor:
        self.cache["layers"][0].append(self.net(x))
        return torch.stack(self.cache["layers"][0]).mean(0)


class View(nn.Module):
    """Acts with its weight, and with a view that it made when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(OBSERVATIONS, ACTIONS)
        self.turned = self.net.weight.detach().t()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x @ self.turned


class Choosing(nn.Module):
    """Returns the choice alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).argmax(-1)


class Normed(nn.Sequential):
    """Statistics of a layer inside, which are of the weights before it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(OBSERVATIONS, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Linear(8, ACTIONS))


@both_ways
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Attention, ("policy.keys", "policy.values")),
        (lambda: torch.compile(Attention(), backend="eager"), None),
        (Twice, ("policy.packed",)),
        (lambda: called(Twice()), ("policy.packed",)),
        (partial(Twice, by_address), None),
        (Answered, ("policy.answer",)),
        (Nested, ("policy.cache",)),
        (partial(Recurrent, buffer=False), ("policy.state",)),
        (lambda: Choosing(Attention()), None),
    ],
)
def test_what_older_weights_computed_is_named(
    make: Callable[[], nn.Module], names: tuple[str, ...] | None, alias: bool
) -> None:
    found = of(make(), alias=alias)
    assert (found.idle, found.unknown, found.by_copy) == ({}, {}, False)
    assert found.outlives.keys() == {"policy"}
    if names is not None:
        assert found.outlives["policy"] == names


@both_ways
@pytest.mark.parametrize(
    "make",
    [
        partial(Attention, live=True),
        ToldAttention,
        Told,
        partial(Twice, by_version),
        partial(Twice, live=True),
        partial(Recurrent, buffer=True),
        partial(Meant, buffer=False),
        Frames,
        Normed,
        lambda: Normed().eval(),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(OBSERVATIONS, ACTIONS)),
        lambda: Choosing(nn.Linear(OBSERVATIONS, ACTIONS)),
    ],
)
def test_memory_that_is_not_of_weights_is_no_alarm(make: Callable[[], nn.Module], alias: bool) -> None:
    found = of(make(), alias=alias)
    assert (found.idle, found.outlives, found.unknown) == ({}, {}, {})


def test_a_view_of_the_memory_that_weights_leave_is_named_and_ends_by_copy() -> None:
    found = of(View(), alias=True)
    assert (found.outlives, found.by_copy) == ({"policy": ("policy.turned",)}, True)
    assert of(View(), alias=False).outlives == {}


@both_ways
def test_the_module_is_left_as_it_was(alias: bool) -> None:
    module, cache = View(), Attention()
    x = torch.ones(3, OBSERVATIONS)
    cache(x)
    before = module(x), [key.clone() for key in cache.keys]
    of(module, alias=alias)
    of(cache, alias=alias)
    assert torch.equal(module(x), before[0])
    assert module.turned.data_ptr() == module.net.weight.data_ptr()
    assert all(map(torch.equal, cache.keys, before[1]))
    assert len(cache.values) == 1


def test_what_all_parameters_act_through_is_said_once() -> None:
    found = of(Packed(), alias=False)
    assert found.idle == {"policy": ("net.weight",)}

"""What cannot be pickled for a worker, or copied, is refused by the name of its layer, with a way out."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import utils

from rlsync.core.errors import ConfigError
from rlsync.tensors.sendable import check_sendable, copied
from tests.tools.programs import fresh_python
from tests.tools.running import in_three_lines

WAY_OUT = "pass policy_factory=make_policy"


class Keeps(nn.Module):
    """Keeps its hidden layer, with the graph that computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.hidden = self.layer(torch.ones(4))


class Renamed(nn.Linear):
    """Has the name of another class by the time that it is pickled."""


AsItWas = Renamed


class Renamed(nn.Linear):  # type: ignore[no-redef]
    """The class that has the name now."""


def holding(value: object) -> nn.Module:
    layer = nn.Linear(4, 2)
    layer.extra = value
    return layer


def check(layer: nn.Module, start_method: str = "spawn") -> None:
    policy = nn.Sequential(nn.Sequential(nn.Linear(4, 4), layer))
    modules = {"policy": policy}
    check_sendable(policy, "policy", modules, where="here", start_method=start_method, way_out=WAY_OUT)


ODD: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "parametrized": (
        lambda: utils.parametrizations.spectral_norm(nn.Linear(4, 2)),
        r"\(ParametrizedLinear\) .*: torch does not pickle parametrizations",
        WAY_OUT,
    ),
    "old weight_norm": (
        lambda: utils.weight_norm(nn.Linear(4, 2)),
        r"\(Linear\) .*: torch.nn.utils.weight_norm keeps a weight with the graph that computed it",
        f"use torch.nn.utils.parametrizations.weight_norm, and {WAY_OUT}",
    ),
    "graph": (
        Keeps,
        r"\(Keeps\) .*: its hidden is a tensor with the graph",
        f"keep hidden.detach(), or {WAY_OUT}",
    ),
    "lambda": (
        lambda: holding(lambda: None),
        r"\(Linear\) .*: its extra: Can't pickle",
        f"define it at the top level of a module, or {WAY_OUT}",
    ),
    "lock": (
        lambda: holding(threading.Lock()),
        r"\(Linear\) .*: its extra: cannot pickle '_thread.lock' object",
        f"leave it out in __getstate__, or {WAY_OUT}",
    ),
    "defined again": (
        lambda: AsItWas(4, 2),
        r"\(Renamed\) .*: the class Renamed was defined again",
        "put the class into a module (a file), which defines it once, or make the policy anew",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ODD)
def test_the_layer_that_cannot_be_pickled_is_named_with_its_cure(kind: str) -> None:
    make, says, cure = ODD[kind]
    with pytest.raises(ConfigError, match=rf"^policy\.0\.1 {says}") as raised:
        check(make())
    assert raised.value.cure == cure
    assert raised.value.where == "here, start method 'spawn'"
    assert in_three_lines(raised.value)
    check(make(), "fork")


@pytest.mark.parametrize(
    "make",
    [
        nn.BatchNorm1d,
        lambda size: holding(multiprocessing.get_context("spawn").Lock()),
        lambda size: nn.Linear(size, size).requires_grad_(False),
        lambda size: nn.Linear(1 << 20, 1 << 20, device="meta"),
    ],
)
def test_what_a_process_that_starts_can_receive_passes(make: Callable[[int], nn.Module]) -> None:
    check(make(3))


def test_what_is_around_the_layers_is_named_as_a_whole() -> None:
    with pytest.raises(ConfigError, match=r"^the player cannot be sent to worker processes: Can't pickle"):
        check_sendable(
            [lambda: None],
            "the player",
            {},
            where="here",
            start_method="forkserver",
            way_out=WAY_OUT,
        )


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_what_cannot_be_copied_is_named_with_its_cure() -> None:
    module = nn.Sequential(utils.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(
        ConfigError, match=r"^policy\.0 \(Linear\) cannot be copied: torch\.nn\.utils"
    ) as raised:
        copied(module, "policy", {"policy": module}, "here")
    assert raised.value.cure == "use torch.nn.utils.parametrizations.weight_norm"
    copied(utils.parametrizations.weight_norm(nn.Linear(4, 2)), "policy", {}, "here")


NOTEBOOK = """
from torch import nn
from rlsync.core.errors import ConfigError
from rlsync.tensors.sendable import check_sendable
class Net(nn.Linear):
    pass
policy = nn.Sequential(Net(2, 2))
modules = {"policy": policy}
check_sendable(policy, "policy", modules, where="here", start_method="fork", way_out="")
way_out = "pass policy_factory=..."
try:
    check_sendable(policy, "policy", modules, where="here", start_method="forkserver", way_out=way_out)
except ConfigError as error:
    print(error)
"""


@pytest.mark.processes
@pytest.mark.seconds
def test_a_class_of_a_program_without_a_file_is_sent_into_a_module() -> None:
    said = fresh_python("-c", NOTEBOOK).stdout
    assert said.startswith("policy.0 (Net) cannot be sent to worker processes: Net is defined in a program")
    assert "put it into a module (a file) and import it from there, or pass policy_factory=..." in said

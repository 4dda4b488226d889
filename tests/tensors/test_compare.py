"""Weights that are sent again and again: matched once, and still refused when they no longer fit."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn

from rlsync.core.errors import LayoutMismatch
from rlsync.core.plan import Verdict
from rlsync.tensors import compare
from rlsync.tensors.compare import Fit, named_like
from rlsync.tensors.layout import LeafSpec
from rlsync.tensors.leaves import Leaves


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


EXPECTED = Leaves(net(), "policy").specs()
FORMS = {
    "module": lambda module: module,
    "tensordict": TensorDict.from_module,
    "params": lambda module: TensorDictParams(TensorDict.from_module(module)),
    "state dict": lambda module: module.state_dict(),
    "wrapped": lambda module: TensorDict({"module": TensorDict.from_module(module)}),
}


def tied(**ties: str) -> list[LeafSpec]:
    """Leaves by name, with the leaf that each is tied to."""
    return [LeafSpec(name, "parameter", (2,), torch.float32, tie) for name, tie in ties.items()]


@pytest.mark.parametrize(
    ("source", "verdict"),
    [
        (tied(a="", b="a", c=""), Verdict.COPIED),
        (tied(b="", a="b", c=""), Verdict.COPIED),  # the same tie, seen from the other side
        (tied(a="", b="", c=""), Verdict.MISMATCH),
        (tied(a="", c="", b="c"), Verdict.MISMATCH),
    ],
)
def test_leaves_that_the_destination_ties_must_be_tied_to_each_other_in_the_source(
    source: list[LeafSpec], verdict: Verdict
) -> None:
    found = {c.name: c.verdict for c in compare.compare(source, tied(a="", b="a", c=""))}
    assert found == {"a": Verdict.COPIED, "b": verdict, "c": Verdict.COPIED}


@pytest.fixture
def matched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that names were matched in full."""
    counted: list[int] = []
    honest = compare.fitted
    monkeypatch.setattr(compare, "fitted", lambda *args: counted.append(1) or honest(*args))
    return counted


@pytest.mark.parametrize("form", list(FORMS))
def test_every_send_gives_the_present_tensors_under_the_names_of_the_destination(form: str) -> None:
    fit, module = Fit("the weights", "of the worker"), net()
    weights = FORMS[form](module)
    for number in (1.0, 2.0, 3.0):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(number)
        found = fit.named(weights, EXPECTED)
        assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert {float(tensor.detach().max()) for tensor in found.values()} == {number}


@pytest.mark.parametrize("form", ["module", "tensordict", "params", "wrapped"])
def test_names_are_matched_once_for_each_structure(form: str, matched: list[int]) -> None:
    fit, module = Fit("the weights", "of the worker"), net()
    for _ in range(5):
        fit.named(FORMS[form](module), EXPECTED)
    assert len(matched) == 1


def test_another_tensordict_of_the_same_structure_is_recognised(matched: list[int]) -> None:
    fit = Fit("the weights", "of the worker")
    for _ in range(3):
        module = net()
        found = fit.named(TensorDict.from_module(module), EXPECTED)
        assert found["0.weight"] is module[0].weight
    assert len(matched) == 1


def test_a_tensor_that_changed_its_shape_or_dtype_is_refused_after_any_number_of_sends() -> None:
    fit, module = Fit("the weights", "of the worker"), net()
    weights = TensorDict.from_module(module)
    for _ in range(3):
        fit.named(weights, EXPECTED)
    for wrong in (torch.zeros(3, 3), torch.zeros(3, 2, dtype=torch.float64)):
        spoiled = TensorDict({("0", "weight"): wrong, ("0", "bias"): torch.zeros(3)})
        spoiled["1"] = weights["1"]
        with pytest.raises(LayoutMismatch, match=r"'0\.weight'"):
            fit.named(spoiled, EXPECTED)
    assert list(fit.named(weights, EXPECTED)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_leaf_that_went_missing_is_refused_after_any_number_of_sends() -> None:
    fit, module = Fit("the weights", "of the worker"), net()
    for _ in range(3):
        fit.named(module, EXPECTED)
    module[1].bias = None
    with pytest.raises(LayoutMismatch, match=r"'1\.bias'"):
        fit.named(module, EXPECTED)


def test_a_rebound_parameter_is_sent_as_it_is_now() -> None:
    fit, module = Fit("the weights", "of the worker"), net()
    for _ in range(3):
        fit.named(module, EXPECTED)
    module[0].weight = nn.Parameter(torch.full((3, 2), 8.0))
    assert fit.named(module, EXPECTED)["0.weight"] is module[0].weight


def test_leaves_that_become_known_later_are_compared_then(matched: list[int]) -> None:
    fit, module = Fit("the weights", "of the worker"), nn.Linear(5, 5)
    fit.named(module, None)
    with pytest.raises(LayoutMismatch):
        fit.named(module, EXPECTED)
    assert len(matched) == 2


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_the_prefix_of_a_wrapper_is_left_out_if_names_then_match(prefix: str) -> None:
    weight = LeafSpec("0.weight", "parameter", (1,), torch.float32)
    assert named_like([f"{prefix}0.weight"], [weight]) == ["0.weight"]

"""V-trace: against reference vectors, against direct sums, against TorchRL's function, and at its edges."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrl.objectives.value.functional import generalized_advantage_estimate

from rlsync.core.errors import ConfigError
from rlsync.runs.recipes.impala import Categorical, Trust, TrustRegion, vtrace

# Slow machines are no failures.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

DATA = Path(__file__).parents[2] / "data"
VTRACE = json.loads((DATA / "vtrace.json").read_text())
LASER = json.loads((DATA / "laser.json").read_text())
TOLERANCE = 1e-9
ROUNDING = 1e-15


def doubles(numbers: list[Any] | float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance)


def exact(found: Tensor, expected: list[float]) -> None:
    """Equal to within the rounding of a few operations in float64."""
    torch.testing.assert_close(found, doubles(expected), rtol=ROUNDING, atol=ROUNDING)


def unroll(seed: int, *shape: int) -> dict[str, Tensor]:
    """Random steps in float64, with ends of both kinds, and next values that agree with the values."""
    g = torch.Generator().manual_seed(seed)
    value = torch.randn(shape[0] + 1, *shape[1:], generator=g, dtype=torch.float64)
    terminated = torch.rand(shape, generator=g) < 0.15
    truncated = torch.rand(shape, generator=g) < 0.15
    hidden = torch.randn(shape, generator=g, dtype=torch.float64)
    return {
        "log_rho": torch.randn(shape, generator=g, dtype=torch.float64),
        "reward": torch.randn(shape, generator=g, dtype=torch.float64),
        "value": value[:-1],
        "next_value": torch.where(truncated, hidden, value[1:]),
        "terminated": terminated,
        "truncated": truncated,
    }


def never(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


# ---------------------------------------------------------------------------------- references


@pytest.mark.parametrize("case", VTRACE, ids=lambda case: f"{case['case']}-{case['params']}")
def test_targets_and_advantages_are_those_of_the_reference(case: dict[str, Any]) -> None:
    targets, advantages = vtrace(
        doubles(case["log_rho"]),
        doubles(case["reward"]),
        doubles(case["V"]),
        doubles(case["V_next"]),
        terminated=doubles(case["terminated"]).bool(),
        truncated=doubles(case["truncated"]).bool(),
        gamma=case["gamma"],
        **case["params"],
    )
    exact(targets, case["vs"])
    exact(advantages, case["adv"])


@pytest.mark.parametrize("number", range(len(LASER)))
def test_a_trust_region_decides_and_corrects_as_the_reference_does(number: int) -> None:
    case = LASER[number]
    behaviour, target = doubles(case["behaviour_logits"]), doubles(case["target_logits"])
    head, action = Categorical(behaviour.shape[-1]), torch.tensor(case["action"])
    kl = (head.kl if case["kl_against"] == "mu" else head.kl_implied)(target, behaviour)
    trust = TrustRegion(case["threshold"], case["kl_against"], case["gate_delta"]).decide(kl)
    assert close(kl, doubles(case["kl"]))
    assert trust.accepted.tolist() == [bool(beta) for beta in case["beta"]]
    log_rho = head.score(target, action)[0] - head.score(behaviour, action)[0]
    assert close(log_rho.exp(), doubles(case["rho"]))
    value = doubles(case["value"])
    targets, advantages = vtrace(
        log_rho,
        doubles(case["reward"]),
        value,
        torch.cat([value[1:], doubles([case["bootstrap"]])]),
        terminated=never(len(value)),
        truncated=never(len(value)),
        gamma=case["gamma"],
        trust=trust,
    )
    exact(targets, case["vs"])
    exact(advantages, case["adv"])


@given(
    st.integers(0, 10_000),
    st.integers(1, 7),
    st.floats(0, 1),
    st.floats(0.1, 3),
    st.floats(0.1, 3),
    st.floats(0.1, 3),
    st.floats(0, 1),
)
def test_targets_and_advantages_are_those_that_the_paper_writes(
    seed: int, steps: int, gamma: float, rho_bar: float, c_bar: float, pg_rho_bar: float, lam: float
) -> None:
    parts = unroll(seed, steps)
    bounds = {"rho_bar": rho_bar, "c_bar": c_bar, "pg_rho_bar": pg_rho_bar}
    targets, advantages = vtrace(**parts, gamma=gamma, lam=lam, **bounds)
    ratio, value = parts["log_rho"].exp().tolist(), parts["value"].tolist()
    for start in range(steps):
        expected, weight = value[start], 1.0
        for t in range(start, steps):
            following = 0.0 if parts["terminated"][t] else parts["next_value"][t].item()
            error = parts["reward"][t].item() + gamma * following - value[t]
            expected += weight * min(rho_bar, ratio[t]) * error
            if parts["terminated"][t] or parts["truncated"][t]:
                break
            weight *= gamma * lam * min(c_bar, ratio[t])
        assert math.isclose(targets[start].item(), expected, rel_tol=1e-9, abs_tol=1e-9)
        ended = parts["terminated"][start] or parts["truncated"][start] or start == steps - 1
        following = parts["next_value"][start].item() if ended else targets[start + 1].item()
        following = lam * following + (1 - lam) * parts["next_value"][start].item()
        following = 0.0 if parts["terminated"][start] else following
        error = parts["reward"][start].item() + gamma * following - value[start]
        expected = min(pg_rho_bar, ratio[start]) * error
        assert math.isclose(advantages[start].item(), expected, rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("lam", [0.0, 0.4, 0.95, 1.0])
def test_on_policy_the_advantages_are_those_of_torchrl_s_gae(lam: float) -> None:
    parts = unroll(11, 12, 5)
    parts["log_rho"] = torch.zeros(12, 5, dtype=torch.float64)
    targets, advantages = vtrace(**parts, gamma=0.95, lam=lam)
    column = {key: part.unsqueeze(-1) for key, part in parts.items()}
    # As float64 tensors: it keeps discounts that are Python numbers in float32.
    theirs, returns = generalized_advantage_estimate(
        doubles(0.95),
        doubles(lam),
        column["value"],
        column["next_value"],
        column["reward"],
        column["terminated"] | column["truncated"],
        column["terminated"],
        time_dim=0,
    )
    torch.testing.assert_close(advantages, theirs.squeeze(-1), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(targets, returns.squeeze(-1), rtol=1e-14, atol=1e-14)


# ---------------------------------------------------------------------------------- laws


def test_trailing_dimensions_are_independent_unrolls() -> None:
    parts = unroll(1, 6, 3, 2)
    together = vtrace(**parts, gamma=0.9, rho_bar=1.5)
    for i in range(3):
        for j in range(2):
            alone = vtrace(**{k: v[:, i, j] for k, v in parts.items()}, gamma=0.9, rho_bar=1.5)
            assert close(together[0][:, i, j], alone[0])
            assert close(together[1][:, i, j], alone[1])


def test_a_termination_does_not_read_the_next_value_and_a_truncation_does() -> None:
    parts = unroll(4, 3) | {"terminated": never(3), "truncated": never(3)}
    parts["next_value"] = parts["next_value"].index_fill(0, torch.tensor([1]), math.nan)
    middle = torch.arange(3) == 1
    for both in (parts | {"terminated": middle}, parts | {"terminated": middle, "truncated": middle}):
        assert all(result.isfinite().all() for result in vtrace(**both, gamma=0.9))
    assert vtrace(**parts | {"truncated": middle}, gamma=0.9)[1][1].isnan()


def test_trusting_every_step_changes_nothing() -> None:
    parts = unroll(6, 5, 2)
    everywhere = Trust(torch.ones(5, 2, dtype=torch.bool), gate_delta=True)
    for plain, trusted in zip(
        vtrace(**parts, gamma=0.9), vtrace(**parts, gamma=0.9, trust=everywhere), strict=True
    ):
        assert torch.equal(plain, trusted)


def test_no_gradient_flows_and_no_input_changes() -> None:
    parts = unroll(7, 5)
    kept = {key: part.clone() for key, part in parts.items()}
    learning = parts | {"value": parts["value"].clone().requires_grad_()}
    assert not any(result.requires_grad for result in vtrace(**learning, gamma=0.9))
    assert all(torch.equal(parts[key], kept[key]) for key in parts)


def test_bfloat16_is_summed_in_float32() -> None:
    parts = {k: v if v.dtype == torch.bool else v.bfloat16() for k, v in unroll(8, 40).items()}
    exact = {k: v if v.dtype == torch.bool else v.double() for k, v in parts.items()}
    targets, _ = vtrace(**parts, gamma=0.99)
    assert targets.dtype == torch.float32
    assert close(targets.double(), vtrace(**exact, gamma=0.99)[0], 1e-5)


@pytest.mark.seconds
def test_it_compiles_into_one_graph() -> None:
    parts = unroll(10, 5, 3)
    values = {"gamma": 0.9, "rho_bar": 2.0, "lam": 0.8}
    compiled = torch.compile(lambda: vtrace(**parts, **values), fullgraph=True, backend="aot_eager")
    for traced, plain in zip(compiled(), vtrace(**parts, **values), strict=True):
        torch.testing.assert_close(traced, plain)


# ---------------------------------------------------------------------------------- refusals


def test_tensors_of_different_shapes_are_refused_although_they_would_broadcast() -> None:
    parts = unroll(9, 4, 1) | {"value": torch.zeros(4, 3)}
    with pytest.raises(ConfigError, match=r"value \[4, 3\]"):
        vtrace(**parts, gamma=0.9)
    with pytest.raises(ConfigError, match="T > 0"):
        vtrace(**unroll(9, 0), gamma=0.9)


@pytest.mark.parametrize(
    "wrong", [{"gamma": 1.1}, {"lam": -0.1}, {"rho_bar": 0.0}, {"c_bar": math.nan}], ids=str
)
def test_a_value_out_of_its_range_is_refused(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name} cannot be"):
        vtrace(**unroll(9, 4), **({"gamma": 0.9} | wrong))


@pytest.mark.parametrize(("threshold", "reference"), [(0.0, "mu"), (math.nan, "mu"), (0.3, "pi")])
def test_a_trust_region_that_cannot_be_is_refused(threshold: float, reference: str) -> None:
    with pytest.raises(ConfigError, match="give"):
        TrustRegion(threshold, reference)

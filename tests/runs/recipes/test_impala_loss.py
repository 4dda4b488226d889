"""ImpalaLoss: on-policy it is A2C, off-policy it corrects, and optimizer, loss and map share one network."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from rlsync import SyncWeights, resolve
from rlsync.core.errors import ConfigError
from rlsync.runs.recipes.bounds import bound_errors
from rlsync.runs.recipes.impala import (
    Categorical,
    DiagonalGaussian,
    ImpalaLoss,
    ImpalaNet,
    MultiCategorical,
    PolicyHead,
    TrustRegion,
    check_batch,
    concatenate,
    vtrace,
)
from rlsync.runs.recipes.impala.recipe import make_loss
from rlsync.runs.recipes.impala.settings import ImpalaConfig, LossSettings, UnrollReplayConfig
from tests.tools.parts import make_collector

STEPS, ENVS, FEATURES = 6, 4, 5
HEADS = {
    "categorical": Categorical(3),
    "choices": MultiCategorical((3, 2)),
    "gaussian": DiagonalGaussian(2),
}
LOSSES = ("loss_policy", "loss_baseline", "loss_entropy")


def make_net(head: PolicyHead | None = None, **settings: Any) -> ImpalaNet:
    """In float64, and with a policy that is not nearly uniform."""
    net = ImpalaNet((FEATURES,), head or HEADS["categorical"], hidden=(16,), **settings).double()
    with torch.no_grad():
        net.policy.weight *= 100
    return net


def make_batch(
    net: ImpalaNet, *, steps: int = STEPS, envs: int = ENVS, terminate: float = 0.1, truncate: float = 0.1
) -> TensorDict:
    """Unrolls that a random policy took; every key of the contract."""
    terminated = torch.rand(steps, envs) < terminate
    truncated = (torch.rand(steps, envs) < truncate) & ~terminated
    params = torch.randn(steps, envs, net.head.width, dtype=torch.float64)
    action, log_prob = net.head.act(params)
    index = truncated.nonzero()
    return TensorDict(
        {
            "observation": torch.randn(steps + 1, envs, FEATURES, dtype=torch.float64),
            "is_init": torch.cat([torch.rand(1, envs) < 0.5, terminated | truncated]),
            "action": action.to(net.head.action_dtype),
            "reward": 2 * torch.randn(steps, envs, dtype=torch.float64),
            "terminated": terminated,
            "truncated": truncated,
            "behaviour_log_prob": log_prob,
            "behaviour_params": params,
            "policy_version": torch.ones(steps, envs, dtype=torch.int64),
            "recurrent_state": torch.randn(envs, *net.state_shape, dtype=torch.float64),
            "last_action": net.head.act(params[0])[0].to(net.head.action_dtype),
            "last_reward": torch.randn(envs, dtype=torch.float64),
            "replayed": torch.arange(envs) % 2 == 1,
            "final_observation": torch.randn(len(index), FEATURES, dtype=torch.float64),
            "final_index": index,
        }
    )


def seen_by(net: ImpalaNet, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    """Policy parameters and values of a network without an LSTM, observation by observation."""
    out = net(batch["observation"], batch["is_init"], net.initial_state(batch["is_init"].shape[1]))
    return out.params, out.value


def on_policy(net: ImpalaNet, batch: TensorDict) -> TensorDict:
    """The same batch, as if ``net`` itself had taken its actions."""
    with torch.no_grad():
        params = seen_by(net, batch)[0][:-1]
        log_prob = net.head.score(params, batch["action"])[0]
    return batch.copy().update({"behaviour_params": params, "behaviour_log_prob": log_prob})


def total(out: TensorDictBase) -> Tensor:
    return sum(out[key] for key in LOSSES)


def gradients(module: nn.Module, loss: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, module.parameters(), strict=True)]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


# ---------------------------------------------------------------------------------- the right gradient


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_on_policy_its_gradient_is_that_of_a2c_with_n_step_returns(head: PolicyHead) -> None:
    net = make_net(head)
    batch = on_policy(net, make_batch(net, terminate=0.2, truncate=0.3))
    inf = float("inf")
    bounds = {"rho_bar": inf, "c_bar": inf, "pg_rho_bar": inf}
    loss = ImpalaLoss(net, gamma=0.9, **bounds, entropy_coeff=0.02, baseline_coeff=0.5)
    params, value = seen_by(net, batch)
    finals = net.torso(batch["final_observation"])
    hidden = dict(
        zip(map(tuple, batch["final_index"].tolist()), net.value(finals).squeeze(-1).detach(), strict=True)
    )
    log_prob, entropy = head.score(params[:-1], batch["action"])
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(ENVS):
        returns = value[STEPS, b].detach()
        for t in reversed(range(STEPS)):
            if batch["terminated"][t, b]:
                returns = torch.zeros_like(returns)
            elif batch["truncated"][t, b]:
                returns = hidden[t, b]
            returns = batch["reward"][t, b] + 0.9 * returns
            advantage = returns - value[t, b]
            expected = expected - log_prob[t, b] * advantage.detach() + 0.25 * advantage.square()
            expected = expected - 0.02 * entropy[t, b]
    assert batch["truncated"].any()
    assert batch["terminated"].any()
    out = loss(batch)
    assert torch.isclose(out["mean_rho"], torch.ones_like(out["mean_rho"]))
    assert_same(gradients(net, total(out)), gradients(net, expected / (STEPS * ENVS)))


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_off_policy_its_gradient_is_the_one_that_v_trace_s_definition_gives(head: PolicyHead) -> None:
    net = make_net(head)
    batch = make_batch(net, truncate=0.0)
    options = {"gamma": 0.9, "rho_bar": 1.2, "lam": 0.9}
    out = ImpalaLoss(net, **options, entropy_coeff=0.0, baseline_coeff=0.5)(batch)
    params, value = seen_by(net, batch)
    log_prob = head.score(params[:-1], batch["action"])[0]
    targets, advantages = vtrace(
        (log_prob - batch["behaviour_log_prob"]).detach(),
        batch["reward"],
        value[:-1].detach(),
        value[1:].detach(),
        terminated=batch["terminated"],
        truncated=batch["truncated"],
        **options,
    )
    expected = (-log_prob * advantages + 0.25 * (targets - value[:-1]).square()).mean()
    assert_same(gradients(net, total(out)), gradients(net, expected))


# ---------------------------------------------------------------------------------- one pass


@pytest.mark.parametrize("lstm", [0, 8], ids=["plain", "lstm"])
def test_the_network_runs_once_and_again_for_final_observations_only(lstm: int) -> None:
    net = make_net(lstm=lstm)
    sizes: list[int] = []
    net.torso.register_forward_hook(lambda _torso, inputs, _out: sizes.append(len(inputs[0])))
    batch = make_batch(net, truncate=0.3)
    total(ImpalaLoss(net, trust_region=TrustRegion(0.5))(batch)).backward()
    assert sizes == [(STEPS + 1) * ENVS, len(batch["final_index"])]
    sizes.clear()
    total(ImpalaLoss(net)(make_batch(net, truncate=0.0))).backward()
    assert sizes == [(STEPS + 1) * ENVS]


@pytest.mark.parametrize("lstm", [0, 8], ids=["plain", "lstm"])
def test_a_truncation_bootstraps_from_what_it_hid_and_not_from_the_next_episode(lstm: int) -> None:
    net = make_net(lstm=lstm, last_action=True, last_reward=True)
    batch = make_batch(net, envs=1, terminate=0.0, truncate=0.0)
    batch["truncated"][2, 0] = batch["is_init"][3, 0] = True
    batch.update(
        {"final_observation": torch.ones(1, FEATURES).double(), "final_index": torch.tensor([[2, 0]])}
    )
    base = one_step_error(net, batch, 2)
    unseen, seen = batch.clone(), batch.clone()
    unseen["observation"][3:] += 1
    seen["final_observation"] += 1
    assert torch.equal(one_step_error(net, unseen, 2), base)
    assert not torch.equal(one_step_error(net, seen, 2), base)


def one_step_error(net: ImpalaNet, batch: TensorDict, t: int) -> Tensor:
    """The policy gradient of step t alone, through its advantage: other steps have none."""
    only = batch.clone()
    only["behaviour_log_prob"][torch.arange(STEPS) != t] = float("inf")  # their ratio is zero
    return ImpalaLoss(net, rho_bar=1e9, pg_rho_bar=1e9)(only)["loss_policy"].detach()


def test_the_next_observation_of_the_unroll_is_bootstrapped_after_its_last_step() -> None:
    net = make_net()
    batch = make_batch(net, envs=1, terminate=0.0, truncate=0.0)
    other = batch.clone()
    other["observation"][-1] += 1
    last = STEPS - 1
    assert not torch.equal(one_step_error(net, batch, last), one_step_error(net, other, last))


def test_last_actions_and_rewards_are_those_of_the_step_before() -> None:
    net = make_net(last_action=True, last_reward=True)
    given: dict[str, Tensor] = {}

    def keep(_net: nn.Module, inputs: tuple[Tensor, ...], _out: object) -> None:
        given.update(last_action=inputs[3], last_reward=inputs[4])

    net.register_forward_hook(keep)
    batch = make_batch(net)
    ImpalaLoss(net)(batch)
    for kind in ("action", "reward"):
        assert torch.equal(given[f"last_{kind}"][0], batch[f"last_{kind}"])
        assert torch.equal(given[f"last_{kind}"][1:], batch[kind])


# ---------------------------------------------------------------------------------- options


def test_sums_are_means_times_the_steps() -> None:
    net = make_net()
    batch = make_batch(net)
    means, sums = ImpalaLoss(net)(batch), ImpalaLoss(net, reduction="sum")(batch)
    for key in LOSSES:
        torch.testing.assert_close(sums[key], means[key] * STEPS * ENVS)


def test_rewards_are_clipped_when_asked_to() -> None:
    net = make_net()
    batch = make_batch(net)
    clipped = batch.copy().set("reward", batch["reward"].clamp(-1, 1))
    expected, raw = ImpalaLoss(net)(clipped), ImpalaLoss(net)(batch)
    found = ImpalaLoss(net, reward_clipping="clip")(batch)
    assert torch.equal(found["loss_policy"], expected["loss_policy"])
    assert not torch.equal(found["loss_policy"], raw["loss_policy"])


def test_coefficients_scale_their_losses_and_can_be_assigned_in_a_run() -> None:
    net = make_net()
    batch = make_batch(net)
    loss = ImpalaLoss(net, entropy_coeff=0.01, baseline_coeff=0.5)
    before = loss(batch)
    loss.entropy_coeff, loss.baseline_coeff = 0.03, 0.25
    after = loss(batch)
    torch.testing.assert_close(after["loss_entropy"], 3 * before["loss_entropy"])
    torch.testing.assert_close(after["loss_baseline"], before["loss_baseline"] / 2)
    assert torch.equal(after["loss_policy"], before["loss_policy"])


@pytest.mark.parametrize("gate_delta", [False, True])
@pytest.mark.parametrize("reference", ["mu", "implied"])
def test_rejected_steps_teach_neither_policy_nor_baseline(reference: str, gate_delta: bool) -> None:
    net = make_net()
    batch = make_batch(net)
    params = seen_by(net, batch)[0][:-1].detach()
    kl = (net.head.kl if reference == "mu" else net.head.kl_implied)(params, batch["behaviour_params"])
    threshold = kl.median().item()
    accepted = kl < threshold
    loss = ImpalaLoss(net, trust_region=TrustRegion(threshold, reference, gate_delta))
    out = loss(batch)
    assert torch.isclose(out["rejected_fraction"], 1 - accepted.double().mean())
    assert torch.isclose(out["kl"], kl.mean())
    taught = gradients_at_outputs(loss, batch)
    rejected = [grad[~accepted].abs().max() for grad in taught]
    assert rejected == [0, 0]
    assert all((grad[accepted].abs() > 0).any() for grad in taught)


def test_the_implied_reference_follows_rho_bar() -> None:
    net = make_net()
    batch = make_batch(net)
    target = seen_by(net, batch)[0][:-1].detach().softmax(-1)
    bounded = torch.minimum(0.5 * batch["behaviour_params"].softmax(-1), target)
    implied = bounded / bounded.sum(-1, keepdim=True)
    kl = (target * (target / implied).log()).sum(-1)
    region = TrustRegion(kl.median().item(), "implied")
    out = ImpalaLoss(net, rho_bar=0.5, trust_region=region)(batch)
    torch.testing.assert_close(out["kl"], kl.mean())
    torch.testing.assert_close(out["rejected_fraction"], (kl >= region.threshold).double().mean())


def gradients_at_outputs(loss: ImpalaLoss, batch: TensorDict) -> list[Tensor]:
    """What policy and baseline losses teach each step: norms of gradients at the network's outputs."""
    outputs: list[Any] = []
    handle = loss.actor_network.register_forward_hook(lambda _net, _inputs, out: outputs.append(out))
    out = loss(batch)
    handle.remove()
    (policy,) = torch.autograd.grad(out["loss_policy"], outputs[0].params, retain_graph=True)
    (baseline,) = torch.autograd.grad(out["loss_baseline"], outputs[0].value, retain_graph=True)
    return [policy[:-1].norm(dim=-1), baseline[:-1].abs()]


def test_a_wide_trust_region_is_none() -> None:
    net = make_net()
    batch = make_batch(net)
    wide, none = ImpalaLoss(net, trust_region=TrustRegion(1e9))(batch), ImpalaLoss(net)(batch)
    assert all(torch.equal(wide[key], none[key]) for key in LOSSES)
    assert wide["rejected_fraction"] == 0


def test_targets_are_of_scaled_rewards_which_are_then_clipped() -> None:
    net = make_net()
    batch = make_batch(net)
    loss = ImpalaLoss(net, reward_clipping="clip")
    loss.scaled = lambda reward: reward / 3 + 0.1
    wanted = ImpalaLoss(net)(batch.clone().set("reward", (batch["reward"] / 3 + 0.1).clamp(-1, 1)))
    for name, value in loss(batch).items():
        assert torch.equal(value, wanted[name]), name
    assert (batch["reward"].abs() > 1).any(), "the batch has the environment's"


def test_scaled_rewards_are_no_input_of_a_network_that_takes_the_last_one() -> None:
    net = make_net(last_reward=True)
    batch = make_batch(net)
    loss = ImpalaLoss(net)
    entropy = loss(batch)["entropy"]
    loss.scaled = torch.zeros_like
    assert torch.equal(loss(batch)["entropy"], entropy)


def test_entropy_on_online_data_leaves_replayed_unrolls_out() -> None:
    net = make_net()
    batch = make_batch(net, truncate=0.0)
    loss = ImpalaLoss(net, entropy_on="online", entropy_coeff=1.0)
    entropy = net.head.score(seen_by(net, batch)[0][:-1], batch["action"])[1]
    expected = -(entropy * ~batch["replayed"]).sum() / (STEPS * ENVS)
    torch.testing.assert_close(loss(batch)["loss_entropy"], expected)
    everywhere = ImpalaLoss(net, entropy_coeff=1.0)(batch)
    torch.testing.assert_close(everywhere["loss_entropy"], -entropy.mean())
    torch.testing.assert_close(everywhere["entropy"], entropy.mean())
    assert torch.equal(loss(batch)["loss_policy"], everywhere["loss_policy"])


def test_a_perfect_baseline_explains_all_variance_and_scalars_carry_no_gradient() -> None:
    net = make_net()
    with torch.no_grad():
        net.value.weight.zero_()
        net.value.bias.fill_(2.0)
    batch = make_batch(net, terminate=0.0, truncate=0.0)
    batch["reward"].fill_(2.0 * (1 - 0.9))
    out = ImpalaLoss(net, gamma=0.9)(batch)
    torch.testing.assert_close(out["loss_baseline"], torch.zeros_like(out["loss_baseline"]))
    torch.testing.assert_close(out["mean_value_target"], torch.full_like(out["mean_value_target"], 2.0))
    random = ImpalaLoss(net)(make_batch(net))
    assert random["explained_variance"] < 1
    assert 0 < random["clipped_fraction"] < 1
    assert {key for key in random.keys() if random[key].requires_grad} == {*LOSSES}  # noqa: SIM118


# ---------------------------------------------------------------------------------- formats


def test_bfloat16_stays_in_the_network() -> None:
    net = ImpalaNet((4, 84, 84), Categorical(3), torso="nature")
    fast = ImpalaNet((4, 84, 84), Categorical(3), torso="nature", bfloat16=True, channels_last=True)
    fast.load_state_dict(net.state_dict())
    never = torch.zeros(3, 2, dtype=torch.bool)
    batch = TensorDict(
        {
            "observation": torch.randint(0, 256, (4, 2, 4, 84, 84), dtype=torch.uint8),
            "is_init": torch.zeros(4, 2, dtype=torch.bool),
            "action": torch.randint(0, 3, (3, 2)),
            "reward": torch.randn(3, 2),
            "terminated": never,
            "truncated": never,
            "behaviour_log_prob": torch.full((3, 2), 1 / 3).log(),
        }
    )
    exact, option = ImpalaLoss(net)(batch), ImpalaLoss(fast)(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside = ImpalaLoss(net)(batch)
    for fuzzy in (option, outside):
        assert {fuzzy[key].dtype for key in fuzzy.keys()} == {torch.float32}  # noqa: SIM118
        assert not torch.equal(fuzzy["loss_baseline"], exact["loss_baseline"])
        for key in LOSSES:
            torch.testing.assert_close(fuzzy[key], exact[key], rtol=0.1, atol=0.02)


@pytest.mark.seconds
@pytest.mark.parametrize("lstm", [0, 8], ids=["plain", "lstm"])
@pytest.mark.thorough
def test_the_whole_loss_compiles_into_one_graph_with_final_observations_and_without(lstm: int) -> None:
    net = make_net(lstm=lstm, last_action=True, last_reward=True)
    loss = ImpalaLoss(net, trust_region=TrustRegion(0.5), entropy_on="online")
    # Traced and differentiated as by default, without waiting for a C++ compiler.
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    without = make_batch(net, truncate=0.0).exclude("final_observation", "final_index")
    for batch in (without, make_batch(net, truncate=0.4), make_batch(net, truncate=0.3), without):
        eager, traced = loss(batch), compiled(batch)
        for key in loss.out_keys:
            torch.testing.assert_close(traced[key], eager[key])
        assert_same(gradients(net, total(traced)), gradients(net, total(eager)))


# ---------------------------------------------------------------------------------- one set of parameters


def test_it_is_a_loss_module_that_says_what_it_reads_and_writes() -> None:
    net = make_net(lstm=8, last_action=True)
    loss = ImpalaLoss(net, trust_region=TrustRegion(0.5), entropy_on="online")
    assert isinstance(loss, LossModule)
    batch = make_batch(net, truncate=0.0)
    out = loss(batch.select(*loss.in_keys))
    assert set(loss.out_keys) == set(out.keys())
    assert all(out[key].shape == () for key in out.keys())  # noqa: SIM118
    for key in loss.in_keys:
        with pytest.raises(ConfigError, match=f"'{key}'"):
            ImpalaLoss(net, trust_region=TrustRegion(0.5), entropy_on="online")(batch.exclude(key))


def test_loss_optimizer_and_copies_see_one_set_of_parameters() -> None:
    net = make_net()
    loss = ImpalaLoss(net)
    assert loss.actor_network is net
    assert [id(p) for p in loss.parameters()] == [id(p) for p in net.parameters()]
    assert set(loss.state_dict()) == {f"actor_network.{name}" for name in net.state_dict()}
    twin, batch = copy.deepcopy(loss), make_batch(net)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    before = {name: p.clone() for name, p in twin.actor_network.named_parameters()}
    total(twin(batch)).backward()
    optimizer.step()
    assert not any(torch.equal(p, before[name]) for name, p in twin.actor_network.named_parameters())
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


class ActingNet(ImpalaNet, TensorDictModuleBase):
    """The same network, as a policy that a collector calls with frames."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def forward(self, frames: TensorDictBase) -> TensorDictBase:
        observation = frames["observation"].unsqueeze(0)
        out = self.step(observation, torch.zeros(1, dtype=torch.bool), self.initial_state(1))
        return frames.set("action", nn.functional.one_hot(self.head.mode(out.params)[0], 2))


def test_the_map_publishes_policy_and_value_from_the_actor_network() -> None:
    learner, acting = (make(ImpalaNet), make(ActingNet))
    collector = make_collector(acting)
    trainer = Trainer(
        collector=collector,
        total_frames=40,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=ImpalaLoss(learner),
        progress_bar=False,
    )
    sync_map = {"policy": "loss_module.actor_network"}
    plan = resolve(sync_map, trainer)
    assert {row.source.split("actor_network.")[-1] for row in plan.rows} == set(learner.state_dict())
    assert {str(row.verdict) for row in plan.rows} == {"copied"}
    hook = SyncWeights(sync_map)
    hook.register(trainer)
    hook.publish()
    next(iter(collector))
    policy = collector.policy
    for name, parameter in learner.state_dict().items():
        assert torch.equal(policy.state_dict()[name], parameter), name
    trainer.shutdown()


def make(kind: Callable[..., ImpalaNet]) -> ImpalaNet:
    return kind((4,), Categorical(2), hidden=(8,))


# ---------------------------------------------------------------------------------- batches


def test_batches_are_joined_unroll_by_unroll_final_observations_included() -> None:
    net = make_net(lstm=8, last_action=True, last_reward=True)
    loss = ImpalaLoss(net, reduction="sum", trust_region=TrustRegion(0.5), entropy_on="online")
    parts = [make_batch(net, envs=envs, truncate=rate) for envs, rate in ((2, 0.4), (1, 0.0), (3, 0.4))]
    parts[1] = parts[1].exclude("final_observation", "final_index")
    joined = concatenate(parts)
    check_batch(joined, net)
    assert joined["reward"].shape == (STEPS, 6)
    for key in LOSSES:
        torch.testing.assert_close(loss(joined)[key], sum(loss(part)[key] for part in parts))


def test_batches_that_do_not_fit_each_other_are_not_joined() -> None:
    batch = make_batch(make_net())
    with pytest.raises(ConfigError, match="no 'replayed'"):
        concatenate([batch, batch.exclude("replayed")])
    with pytest.raises(ConfigError, match="no batch has 'rewards'"):
        concatenate([batch.copy().set("rewards", batch["reward"])])


def spoiled(**changes: Callable[[Tensor], Tensor]) -> Callable[[TensorDict], TensorDict]:
    def spoil(batch: TensorDict) -> TensorDict:
        return batch.clone().update({key: change(batch[key].clone()) for key, change in changes.items()})

    return spoil


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda b: b.clone().rename_key_("observation", "observations"), "rename 'observations'"),
        (spoiled(observation=lambda x: x[:-1]), r"'observation' is \[6, 4, 5\]"),
        (spoiled(action=lambda x: x.unsqueeze(-1)), r"'action' is \[6, 4, 1\]"),
        (spoiled(action=lambda x: x.float()), "of torch.float32, not"),
        (spoiled(reward=lambda x: x.flatten()), "not .T, B."),
        (spoiled(terminated=lambda x: x.long()), "'terminated' is"),
        (spoiled(recurrent_state=lambda x: x[:, 0]), "'recurrent_state' is"),
        (spoiled(is_init=lambda x: ~x), "'is_init' of what follows do not agree"),
        (lambda b: b.exclude("final_index", "final_observation"), "has no final observation"),
        (spoiled(final_index=lambda x: x.flip(1) % 4), "has no final observation"),
    ],
)
def test_a_batch_that_breaks_the_contract_is_refused(spoil: Callable, says: str) -> None:
    net = make_net(lstm=8)
    batch = make_batch(net, truncate=0.4)
    check_batch(batch, net)
    for use in (lambda b: check_batch(b, net), ImpalaLoss(net)):
        with pytest.raises(ConfigError, match=says) as refused:
            use(spoil(batch))
        assert len(str(refused.value).splitlines()) == 3


def test_a_later_truncation_without_its_final_observation_is_refused_too() -> None:
    net = make_net()
    loss = ImpalaLoss(net)
    loss(make_batch(net))
    with pytest.raises(ConfigError, match="0 final observations are given"):
        loss(make_batch(net, truncate=0.4).exclude("final_index", "final_observation"))


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 1.1},
        {"lam": -0.1},
        {"rho_bar": 0.0},
        {"c_bar": float("nan")},
        {"pg_rho_bar": -1.0},
        {"reward_clipping": "sign"},
        {"reduction": "none"},
        {"entropy_on": "replayed"},
    ],
    ids=str,
)
def test_an_option_out_of_its_range_is_refused(settings: Any) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name} cannot be"):
        ImpalaLoss(make_net(), **settings)


def test_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="rho_baar"):
        ImpalaLoss(make_net(), rho_baar=1.0)


def test_a_loss_shows_the_names_and_the_defaults_of_its_options() -> None:
    shown = inspect.signature(ImpalaLoss.__init__).parameters
    assert list(shown)[:2] == ["self", "actor_network"]
    defaults = {name: option.default for name, option in list(shown.items())[2:]}
    assert defaults == vars(LossSettings())


# Another value than the default, for every key of the config that a setting of the loss comes from.
OTHER = {
    "gamma": 0.5,
    "rho_bar": 2.0,
    "c_bar": 2.0,
    "pg_rho_bar": 2.0,
    "vtrace_lambda": 0.5,
    "entropy_coeff": 0.5,
    "baseline_coeff": 0.5,
    "reward_clipping": "clip",
    "reduction": "sum",
}
REPLAY = {"ratio": 1.0, "threshold": 0.5, "reference": "implied", "gate_delta": True, "entropy_on": "online"}


def test_every_setting_of_the_loss_can_be_given_in_the_config_and_arrives() -> None:
    config = ImpalaConfig(**OTHER, replay=UnrollReplayConfig(**REPLAY))
    loss = make_loss(config, make_net())
    assert loss.settings == config.loss_settings()
    given, plain = vars(loss.settings), vars(LossSettings())
    assert [name for name in plain if given[name] == plain[name]] == []
    assert given == {
        **{key: value for key, value in OTHER.items() if key != "vtrace_lambda"},
        "lam": OTHER["vtrace_lambda"],
        "entropy_on": "online",
        "trust_region": TrustRegion(0.5, "implied", gate_delta=True),
    }
    assert (loss.entropy_coeff, loss.baseline_coeff) == (0.5, 0.5)


def test_the_config_has_the_defaults_and_the_ranges_of_the_loss() -> None:
    assert ImpalaConfig().loss_settings() == LossSettings()
    for name, wrong in (("rho_bar", 0.0), ("vtrace_lambda", 1.5), ("reduction", "none")):
        (error,) = bound_errors(ImpalaConfig(**{name: wrong}))
        assert error.where == name
        with pytest.raises(ConfigError, match="cannot be"):
            ImpalaConfig(**{name: wrong}).loss_settings()
    (error,) = bound_errors(UnrollReplayConfig(threshold=0.0))
    assert error.where == "threshold"


def test_without_a_replay_the_settings_of_the_replay_have_no_effect() -> None:
    assert (
        ImpalaConfig(replay=UnrollReplayConfig(**REPLAY | {"ratio": 0.0})).loss_settings() == LossSettings()
    )


def test_an_implied_policy_of_gaussians_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="no closed form"):
        ImpalaLoss(make_net(HEADS["gaussian"]), trust_region=TrustRegion(0.3, "implied"))
    ImpalaLoss(make_net(HEADS["gaussian"]), trust_region=TrustRegion(0.3))


@pytest.mark.parametrize(
    ("key", "settings"),
    [("behaviour_params", {"trust_region": TrustRegion(0.5)}), ("replayed", {"entropy_on": "online"})],
)
def test_an_option_whose_data_is_missing_is_refused_and_not_skipped(key: str, settings: Any) -> None:
    net = make_net()
    batch = make_batch(net).exclude(key)
    ImpalaLoss(net)(batch)
    with pytest.raises(ConfigError, match=f"has no '{key}'"):
        ImpalaLoss(net, **settings)(batch)

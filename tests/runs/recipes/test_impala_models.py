"""IMPALA's networks: a loop of steps is an unroll, formats change speed only, heads are distributions."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch import distributions as dist

from rlsync.core.errors import ConfigError
from rlsync.runs.recipes.impala import (
    Categorical,
    DiagonalGaussian,
    Finals,
    ImpalaNet,
    MultiCategorical,
    PolicyHead,
)
from rlsync.runs.recipes.impala.heads import HeadDistribution
from rlsync.runs.recipes.impala.layers import EpisodicLSTM

PIXELS = (4, 84, 84)
STEPS, ENVS = 7, 3
HEADS = {
    "categorical": Categorical(5),
    "equal choices": MultiCategorical((3, 3)),
    "unequal choices": MultiCategorical((4, 1, 2)),
    "gaussian": DiagonalGaussian(2),
}


def observations(shape: tuple[int, ...], *lead: int) -> Tensor:
    if len(shape) == 3:
        return torch.randint(0, 256, (*lead, *shape), dtype=torch.uint8)
    return torch.randn(*lead, *shape)


def begins() -> Tensor:
    """Episodes begin at different times in each environment, in one not at the start, in one twice."""
    is_init = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    is_init[0, :2] = True
    is_init[3, 1] = is_init[4, 2] = is_init[5, 2] = True
    return is_init


def unroll_inputs(net: ImpalaNet) -> dict[str, Tensor]:
    return {
        "observation": observations(net.observation_shape, STEPS, ENVS),
        "is_init": begins(),
        "state": torch.randn(ENVS, *net.state_shape),
        "last_action": net.head.act(torch.randn(STEPS, ENVS, net.head.width))[0],
        "last_reward": 3 * torch.randn(STEPS, ENVS),
    }


def stepped(net: ImpalaNet, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    state, params, values, states = inputs["state"], [], [], []
    for t in range(STEPS):
        now = {key: inputs[key][t] for key in ("observation", "is_init", "last_action", "last_reward")}
        out = net.step(state=state, **now)
        state = out.state
        params.append(out.params)
        values.append(out.value)
        states.append(state)
    return torch.stack(params), torch.stack(values), states


# ---------------------------------------------------------------------------------- steps and unrolls


@pytest.mark.seconds
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("last", [False, True], ids=["", "last"])
@pytest.mark.parametrize("lstm", [0, 16], ids=["plain", "lstm"])
@pytest.mark.parametrize("torso", ["mlp", "nature", "impala"])
@pytest.mark.each_pair
def test_a_loop_of_steps_gives_what_an_unroll_gives(
    torso: str, lstm: int, last: bool, head: PolicyHead
) -> None:
    shape = (6,) if torso == "mlp" else PIXELS
    net = ImpalaNet(shape, head, torso=torso, lstm=lstm, last_action=last, last_reward=last)
    inputs = unroll_inputs(net)
    with torch.no_grad():
        net.policy.weight *= 100  # it starts near zero, and would hide differences
        params, values, _ = stepped(net, inputs)
        unrolled = net(**inputs)
    torch.testing.assert_close(unrolled.params, params, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(unrolled.value, values, rtol=1e-5, atol=1e-5)
    assert unrolled.params.std() > 1e-3
    assert unrolled.final_value is None


def test_what_was_before_an_episode_does_not_reach_into_it() -> None:
    net = ImpalaNet((6,), Categorical(5), lstm=8, last_action=True, last_reward=True)
    inputs = unroll_inputs(net)
    other = inputs | {key: inputs[key].clone() for key in ("observation", "last_action", "last_reward")}
    other["state"] = inputs["state"] + 1
    other["observation"][:3, 1] += 1
    # The action and the reward that led to the first observation are those of the episode before.
    other["last_action"][:4, 1] = (inputs["last_action"][:4, 1] + 1) % 5
    other["last_reward"][:4, 1] *= -1
    a, b = net(**inputs), net(**other)
    assert torch.equal(a.value[3:, 1], b.value[3:, 1])
    assert torch.equal(a.params[3:, 1], b.params[3:, 1])
    assert not torch.equal(a.value[:3, 1], b.value[:3, 1])
    assert not torch.equal(a.value[0, 2], b.value[0, 2])  # its episode goes on, with its state


def test_the_last_action_and_the_clipped_last_reward_are_seen() -> None:
    net = ImpalaNet((6,), Categorical(5), last_action=True, last_reward=True)
    inputs = unroll_inputs(net) | {"is_init": torch.zeros(STEPS, ENVS, dtype=torch.bool)}
    base = net(**inputs).value
    assert (net(**inputs | {"last_action": (inputs["last_action"] + 1) % 5}).value != base).all()
    large = inputs | {"last_reward": torch.full((STEPS, ENVS), 2.0)}
    larger = inputs | {"last_reward": torch.full((STEPS, ENVS), 9.0)}
    assert torch.equal(net(**large).value, net(**larger).value)
    assert not torch.equal(net(**large).value, base)


@pytest.mark.parametrize("lstm", [0, 8], ids=["plain", "lstm"])
def test_final_observations_are_valued_with_the_state_after_their_step(lstm: int) -> None:
    net = ImpalaNet((6,), Categorical(5), lstm=lstm, last_action=True, last_reward=True)
    inputs = unroll_inputs(net)
    finals = Finals(
        torch.randn(2, 6),
        torch.tensor([2, 4]),
        torch.tensor([1, 2]),
        torch.tensor([3, 0]),
        torch.tensor([0.5, -0.5]),
    )
    given = net(**inputs, finals=finals).final_value
    assert given is not None
    assert not given.requires_grad
    _, _, states = stepped(net, inputs)
    for k, (t, b) in enumerate([(2, 1), (4, 2)]):
        alone = net.step(
            finals.observation[k : k + 1],
            torch.zeros(1, dtype=torch.bool),
            states[t][b : b + 1],
            finals.last_action[k : k + 1],
            finals.last_reward[k : k + 1],
        )
        torch.testing.assert_close(given[k], alone.value[0], rtol=1e-5, atol=1e-6)


def test_the_lstm_is_torch_s_where_no_episode_ends() -> None:
    ours, theirs = EpisodicLSTM(5, 8), nn.LSTM(5, 8)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(_their_order(ours.inward.weight, 8))
        theirs.weight_hh_l0.copy_(_their_order(ours.recurrent.weight, 8))
        theirs.bias_ih_l0.copy_(_their_order(ours.inward.bias, 8))
        theirs.bias_hh_l0.zero_()
    features, state = torch.randn(9, 3, 5), torch.randn(3, 2, 8)
    outputs, states = ours(features, torch.zeros(9, 3, dtype=torch.bool), state)
    expected, (h, c) = theirs(features, (state[None, :, 0].contiguous(), state[None, :, 1].contiguous()))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(states[-1], torch.stack([h[0], c[0]], 1))


def _their_order(ours: Tensor, units: int) -> Tensor:
    """Ours: enter, forget, leave, fresh. torch's: enter, forget, fresh, leave."""
    enter, forget, leave, fresh = ours.split(units)
    return torch.cat([enter, forget, fresh, leave])


def test_every_parameter_learns() -> None:
    for torso in ("mlp", "nature", "impala"):
        shape = (6,) if torso == "mlp" else PIXELS
        net = ImpalaNet(shape, Categorical(5), torso=torso, lstm=8, last_action=True, last_reward=True)
        out = net(**unroll_inputs(net))
        (out.params.square().sum() + out.value.square().sum()).backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters()), torso


# ---------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("torso", ["nature", "impala"])
def test_uint8_pixels_mean_their_255th(torso: str) -> None:
    net = ImpalaNet(PIXELS, Categorical(5), torso=torso)
    pixels = observations(PIXELS, 4)
    is_init, state = torch.zeros(4, dtype=torch.bool), net.initial_state(4)
    as_bytes, as_floats = net.step(pixels, is_init, state), net.step(pixels / 255, is_init, state)
    torch.testing.assert_close(as_bytes.value, as_floats.value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(as_bytes.params, as_floats.params, rtol=1e-4, atol=1e-5)


def test_normalised_pixels_lose_the_mean_of_what_was_learned_from_and_are_in_its_deviations() -> None:
    net = ImpalaNet(PIXELS, Categorical(5), torso="nature", channels_last=True, clip=5.0)
    pixels: Any = net.pixels
    inputs = unroll_inputs(net)
    unrolls = [torch.randint(0, high, (17, ENVS, *PIXELS), dtype=torch.uint8) for high in (9, 256, 90)]
    torch.testing.assert_close(pixels(unrolls[1][0]), unrolls[1][0] / 255, rtol=1e-4, atol=1e-4)
    for unroll in unrolls:
        net.follow(unroll)
    with torch.no_grad():  # acting and judging change nothing
        net(**inputs | {"observation": unrolls[0][:STEPS]})
        net.step(unrolls[0][0], begins()[0], net.initial_state(ENVS))
    taken = torch.cat([unroll[::8].flatten(0, 1) for unroll in unrolls]).double() / 255
    wanted = (unrolls[0][0] / 255 - taken.mean(0)) / (taken.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(pixels(unrolls[0][0]).double(), wanted.clamp(-5, 5), rtol=1e-4, atol=1e-4)
    assert {"pixels.mean", "pixels.variance"} <= dict(TensorDict.from_module(net).flatten_keys(".")).keys()


@pytest.mark.each_value
@pytest.mark.parametrize("torso", ["nature", "impala"])
@pytest.mark.parametrize("stored_last", [False, True], ids=["stored-first", "stored-last"])
@pytest.mark.seconds
def test_channels_last_gives_the_same_values_gradients_and_parameters(torso: str, stored_last: bool) -> None:
    plain = ImpalaNet(PIXELS, Categorical(5), torso=torso)
    last = ImpalaNet(PIXELS, Categorical(5), torso=torso, channels_last=True)
    last.load_state_dict(plain.state_dict())
    inputs = unroll_inputs(plain)
    pixels = inputs["observation"]
    if stored_last:
        pixels = pixels.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    a, b = plain(**inputs), last(**inputs | {"observation": pixels})
    torch.testing.assert_close(a.value, b.value, rtol=1e-4, atol=1e-5)
    a.value.sum().backward()
    b.value.sum().backward()
    for p, q in zip(plain.parameters(), last.parameters(), strict=True):
        assert q.is_contiguous()  # a board copies leaves of one layout
        if p.grad is not None and q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)


def test_pixels_that_are_stored_channels_last_are_not_reordered() -> None:
    net = ImpalaNet(PIXELS, Categorical(5), torso="nature", channels_last=True)
    stored = torch.zeros(STEPS, ENVS, 84, 84, 4, dtype=torch.uint8)
    flat = stored.permute(0, 1, 4, 2, 3).flatten(0, 1)
    seen: list[Tensor] = []
    pixels: Any = net.pixels
    pixels.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    net(stored.permute(0, 1, 4, 2, 3), begins(), net.initial_state(ENVS))
    assert flat.data_ptr() == stored.data_ptr() == seen[0].data_ptr()
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("torso", ["nature", "impala"])
def test_with_the_option_all_convolutions_run_channels_last(torso: str) -> None:
    net = ImpalaNet(PIXELS, Categorical(5), torso=torso, channels_last=True)
    outputs: list[Tensor] = []
    for convolution in convolutions(net.torso):
        convolution.register_forward_hook(lambda _module, _inputs, out: outputs.append(out))
    net.step(observations(PIXELS, 2), torch.zeros(2, dtype=torch.bool), net.initial_state(2))
    assert outputs
    assert all(out.is_contiguous(memory_format=torch.channels_last) for out in outputs)


@pytest.mark.seconds
@pytest.mark.parametrize("outside", [False, True], ids=["option", "caller's autocast"])
def test_bfloat16_is_for_the_torso_alone(outside: bool) -> None:
    plain = ImpalaNet(PIXELS, Categorical(5), torso="nature", lstm=8)
    fast = ImpalaNet(PIXELS, Categorical(5), torso="nature", lstm=8, bfloat16=not outside)
    fast.load_state_dict(plain.state_dict())
    dtypes: dict[str, torch.dtype] = {}
    for name in ("torso.2", "policy", "lstm.inward"):
        module = fast.get_submodule(name)
        module.register_forward_hook(lambda _m, _i, out, name=name: dtypes.update({name: out.dtype}))
    inputs = unroll_inputs(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        out = fast(**inputs)
    assert dtypes == {"torso.2": torch.bfloat16, "policy": torch.float32, "lstm.inward": torch.float32}
    assert out.value.dtype == out.params.dtype == torch.float32
    torch.testing.assert_close(out.value, plain(**inputs).value, rtol=0.05, atol=0.05)


def test_a_net_in_float64_stays_so() -> None:
    net = ImpalaNet((6,), Categorical(5), lstm=8, last_action=True, last_reward=True).double()
    inputs = unroll_inputs(net)
    inputs |= {"observation": inputs["observation"].double(), "state": inputs["state"].double()}
    assert net(**inputs).value.dtype == torch.float64
    assert net.initial_state(2).dtype == torch.float64


def test_a_net_travels_to_another_process() -> None:
    net = ImpalaNet((6,), DiagonalGaussian(2), lstm=8)
    copy = pickle.loads(pickle.dumps(net))
    inputs = unroll_inputs(net)
    assert copy.head == net.head
    assert torch.equal(copy(**inputs).value, net(**inputs).value)


def test_torsos_are_the_published_ones() -> None:
    nature = ImpalaNet(PIXELS, Categorical(5), torso="nature").torso
    resnet = ImpalaNet((3, 72, 96), Categorical(5), torso="impala").torso
    sizes = [(m.out_channels, m.kernel_size[0], m.stride[0]) for m in convolutions(nature)]
    assert sizes == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    assert [m.out_channels for m in convolutions(resnet)] == [16] * 5 + [32] * 10
    dense = [m for torso in (nature, resnet) for m in torso.modules() if isinstance(m, nn.Linear)]
    assert [(m.in_features, m.out_features) for m in dense] == [(3136, 512), (9 * 12 * 32, 256)]


def convolutions(torso: nn.Module) -> list[nn.Conv2d]:
    return [module for module in torso.modules() if isinstance(module, nn.Conv2d)]


# ---------------------------------------------------------------------------------- heads


def theirs(head: PolicyHead, params: Tensor, action: Tensor) -> list[tuple[dist.Distribution, Tensor]]:
    """The distributions of the parts of an action, with these."""
    match head:
        case Categorical():
            return [(dist.Categorical(logits=params), action)]
        case MultiCategorical(nvec=nvec):
            logits = params.split(nvec, -1)
            return [(dist.Categorical(logits=each), action[..., i]) for i, each in enumerate(logits)]
    loc, log_scale = params.chunk(2, -1)
    return [(dist.Independent(dist.Normal(loc, log_scale.exp()), 1), action)]


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_agrees_with_torch_distributions(head: PolicyHead) -> None:
    params, other = 0.5 * torch.randn(2, 4, 3, head.width, dtype=torch.float64)
    action = head.act(other)[0]
    log_prob, entropy = head.score(params, action)
    parts, others = theirs(head, params, action), theirs(head, other, action)
    log_probs = [part.log_prob(part_of_action) for part, part_of_action in parts]
    torch.testing.assert_close(log_prob, torch.stack(log_probs).sum(0))
    torch.testing.assert_close(entropy, torch.stack([part.entropy() for part, _ in parts]).sum(0))
    kls = [dist.kl_divergence(ours, there) for (ours, _), (there, _) in zip(parts, others, strict=True)]
    torch.testing.assert_close(head.kl(params, other), torch.stack(kls).sum(0))


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_head_is_a_distribution_for_torchrls_losses(head: PolicyHead) -> None:
    params = torch.randn(50, head.width)
    distribution = HeadDistribution(params, head)
    drawn = distribution.sample((7,))
    assert drawn.shape == (7, 50, *head.action_shape)
    log_prob, entropy = head.score(params.expand(7, -1, -1), drawn)
    assert torch.equal(distribution.log_prob(drawn), log_prob)
    assert torch.equal(distribution.entropy(), entropy[0])
    assert torch.equal(distribution.deterministic_sample, head.mode(params))


def masked(head: PolicyHead, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of which the last two of each choice, as far as it has more than two, are of invalid actions."""
    nvec = head.nvec if isinstance(head, MultiCategorical) else (head.width,)
    valid = torch.cat([torch.arange(n) < max(1, n - 2) for n in nvec])
    params = 20 * torch.randn(300, head.width, dtype=dtype)
    return params.masked_fill(~valid, torch.finfo(dtype).min).requires_grad_(), valid


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["categorical", "equal choices", "unequal choices"])
def test_what_is_invalid_is_never_chosen_and_no_number_of_the_loss_becomes_infinite(
    name: str, dtype: torch.dtype
) -> None:
    head = HEADS[name]
    (params, valid), (other, _) = masked(head, dtype), masked(head, dtype)
    action, drawn_log_prob = head.act(params)
    for chosen in (action, head.mode(params)):
        assert not head.encode(chosen)[:, ~valid].any()
    log_prob, entropy = head.score(params, action)
    numbers = [drawn_log_prob, log_prob, entropy, head.kl(params, other)]
    if name == "categorical":
        numbers.append(head.kl_implied(params, other))
    assert all(number.isfinite().all() for number in numbers)
    assert (entropy >= 0).all()
    sum(number.sum() for number in numbers).backward()
    for gradient in (params.grad, other.grad):
        assert gradient is not None
        assert gradient.isfinite().all()
        assert not gradient[:, ~valid].any()


@pytest.mark.parametrize("head", [MultiCategorical((2, 3)), DiagonalGaussian(1)])
def test_a_head_whose_implied_policy_has_no_closed_form_says_so(head: PolicyHead) -> None:
    params = torch.zeros(1, head.width)
    with pytest.raises(ConfigError, match="has no closed form"):
        head.kl_implied(params, params)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_an_action_carries_the_log_probability_that_the_loss_will_find(head: PolicyHead) -> None:
    params = torch.randn(50, head.width)
    action, log_prob = head.act(params)
    torch.testing.assert_close(log_prob, head.score(params, action)[0])
    assert action.shape == (50, *head.action_shape)
    assert action.dtype == head.action_dtype
    assert head.encode(action).shape == (50, head.features)
    assert (head.score(params, head.mode(params))[0] >= log_prob - 1e-5).all()


def test_a_scale_stays_at_its_bound() -> None:
    head, action = DiagonalGaussian(1, min_log_scale=-2.0, max_log_scale=1.0), torch.zeros(1, 1)
    for outside, bound in ((-9.0, -2.0), (9.0, 1.0)):
        params, at_bound = torch.tensor([[0.3, outside]]), torch.tensor([[0.3, bound]])
        assert torch.equal(head.score(params, action)[0], head.score(at_bound, action)[0])


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_generator_decides_what_is_drawn(head: PolicyHead) -> None:
    params = torch.randn(50, head.width)
    first, second = (head.act(params, torch.Generator().manual_seed(7))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, head.act(params)[0])


def test_actions_are_drawn_with_their_probabilities() -> None:
    probabilities = torch.tensor([0.6, 0.25, 0.1, 0.05])
    drawn = Categorical(4).act(probabilities.log().expand(40_000, 4))[0]
    torch.testing.assert_close(drawn.bincount(minlength=4) / 40_000, probabilities, rtol=0, atol=0.01)
    for others in ((2, 4), (4, 4)):
        logits = torch.cat([torch.randn(others[0]), probabilities.log()])
        drawn = MultiCategorical(others).act(logits.expand(40_000, -1))[0]
        first = logits[: others[0]].softmax(-1)
        torch.testing.assert_close(
            drawn[:, 0].bincount(minlength=others[0]) / 40_000, first, rtol=0, atol=0.01
        )
        torch.testing.assert_close(
            drawn[:, 1].bincount(minlength=4) / 40_000, probabilities, rtol=0, atol=0.01
        )
        together = (drawn == torch.tensor([1, 0])).all(-1).float().mean()
        torch.testing.assert_close(together, first[1] * 0.6, rtol=0, atol=0.01)
    params = torch.tensor([1.0, -2.0, 0.5, -1.0])
    values = DiagonalGaussian(2).act(params.expand(40_000, 4))[0]
    torch.testing.assert_close(values.mean(0), params[:2], rtol=0, atol=0.03)
    torch.testing.assert_close(values.std(0), params[2:].exp(), rtol=0.02, atol=0)


@pytest.mark.parametrize("rho_bar", [0.3, 1.0, 2.5, float("inf")])
def test_the_implied_policy_is_the_one_whose_value_v_trace_estimates(rho_bar: float) -> None:
    params, other = torch.randn(2, 7, 4, dtype=torch.float64)
    bounded = torch.minimum(rho_bar * other.softmax(-1), params.softmax(-1))
    implied = dist.Categorical(probs=bounded / bounded.sum(-1, keepdim=True))
    expected = dist.kl_divergence(dist.Categorical(logits=params), implied)
    torch.testing.assert_close(Categorical(4).kl_implied(params, other, rho_bar), expected)


def test_a_head_sums_bfloat16_in_float32() -> None:
    for head in HEADS.values():
        params = torch.randn(4, head.width).bfloat16()
        action, log_prob = head.act(params)
        assert log_prob.dtype == torch.float32
        torch.testing.assert_close(log_prob, head.score(params.float(), action)[0])


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("shape", "settings", "says"),
    [
        ((4,), {"torso": "wide"}, "there is no torso 'wide'"),
        ((4,), {"torso": "impala"}, "takes pixels"),
        (PIXELS, {}, "takes vectors"),
        ((4, 20, 20), {"torso": "nature"}, "too small"),
        ((4,), {"hidden": ()}, "widths"),
        ((4,), {"lstm": -1}, "lstm=-1"),
    ],
)
def test_a_net_that_cannot_be_is_refused(shape: tuple[int, ...], settings: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        ImpalaNet(shape, Categorical(2), **settings)
    assert len(str(refused.value).splitlines()) == 3


@pytest.mark.parametrize("missing", ["last_action", "last_reward"])
def test_an_input_that_the_net_takes_must_be_given(missing: str) -> None:
    net = ImpalaNet((6,), Categorical(5), last_action=True, last_reward=True)
    inputs = unroll_inputs(net)
    del inputs[missing]
    with pytest.raises(ConfigError, match=missing):
        net(**inputs)


# ---------------------------------------------------------------------------------- the torso in threads


@pytest.mark.each_value
@pytest.mark.parametrize("bfloat16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("torso", "lstm"), [("mlp", 16), ("nature", 0), ("impala", 16)])
@pytest.mark.seconds
def test_a_torso_in_threads_gives_the_same_outputs_and_gradients(
    torso: str, lstm: int, bfloat16: bool
) -> None:
    net = ImpalaNet((6,) if torso == "mlp" else PIXELS, HEADS["categorical"], torso=torso, lstm=lstm)
    net.in_bfloat16 = bfloat16
    inputs = unroll_inputs(net)
    outs, grads = [], []
    for threads in (1, 3):
        net.torso_threads = threads
        net.zero_grad()
        out = net(**inputs)
        (out.params.square().sum() + out.value.sum()).backward()
        outs.append(torch.cat([out.params.flatten(), out.value.flatten()]).detach())
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(outs[1], outs[0], **tolerance)
    assert (grads[1] - grads[0]).norm() < (2e-2 if bfloat16 else 1e-5) * grads[0].norm()
    assert grads[0].norm() > 0.1


def test_the_gradient_of_a_torso_in_threads_is_the_same_every_time() -> None:
    net = ImpalaNet(PIXELS, HEADS["categorical"], torso="nature", torso_threads=2)
    inputs, grads = unroll_inputs(net), []
    for _ in range(4):
        net.zero_grad()
        net(**inputs).value.square().sum().backward()
        grads.append([p.grad.clone() for p in net.torso.parameters() if p.grad is not None])
    for later in grads[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(later, grads[0], strict=True))


def test_frozen_parameters_of_a_torso_in_threads_get_no_gradient() -> None:
    net = ImpalaNet(PIXELS, HEADS["categorical"], torso="nature", torso_threads=2)
    frozen = next(net.torso.parameters()).requires_grad_(False)
    net(**unroll_inputs(net)).value.sum().backward()
    assert frozen.grad is None
    assert all(p.grad is not None for p in net.torso.parameters() if p.requires_grad)


def test_a_network_with_a_torso_in_threads_still_travels_to_workers() -> None:
    net = ImpalaNet(PIXELS, HEADS["categorical"], torso="nature", torso_threads=2)
    net(**unroll_inputs(net)).value.sum().backward()  # the threads are running now
    copied = pickle.loads(pickle.dumps(net))
    inputs = unroll_inputs(net)
    with torch.no_grad():
        torch.testing.assert_close(copied(**inputs).value, net(**inputs).value)


def test_an_error_in_one_thread_reaches_the_caller_and_the_next_pass_runs() -> None:
    net = ImpalaNet(PIXELS, HEADS["categorical"], torso="nature", torso_threads=2)
    inputs = unroll_inputs(net)
    for _ in range(5):  # a thread that went on could stop the next pass for ever
        with pytest.raises(RuntimeError, match="expected input"):
            net(**(inputs | {"observation": inputs["observation"][:, :, :3]}))
        net(**inputs).value.sum().backward()


def test_a_torso_runs_in_one_thread_at_least() -> None:
    with pytest.raises(ConfigError, match="torso_threads=0"):
        ImpalaNet(PIXELS, HEADS["categorical"], torso="nature", torso_threads=0)

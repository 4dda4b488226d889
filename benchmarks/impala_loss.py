"""Learner steps per second of ImpalaLoss and of TorchRL's VTrace + A2CLoss, forward and backward.

    python benchmarks/impala_loss.py [--steps 20] [--envs 8] [--torso nature] [--lstm 0] [--threads 1]
                                     [--repeats 9] [--out FILE]

The batch has T x B steps of 84 x 84 x 4 uint8 pixels. "steps/s" is T * B divided by the median time of one
loss and its backward pass, without the optimizer. "torso" is the number of observations that go through the
torso for each step. All variants have the same network and take turns in one run. Compare ratios: machines
are shared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import ActorValueOperator, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import VTrace

from rlsync.runs.recipes.impala import Categorical, ImpalaLoss, ImpalaNet

ACTIONS = 6
PIXELS = (4, 84, 84)
FORMATS = {
    "fp32": {},
    "channels_last": {"channels_last": True},
    "bf16": {"bfloat16": True},
    "bf16 + channels_last": {"bfloat16": True, "channels_last": True},
}
STORED_LAST = "bf16 + channels_last, stored so"
THEIRS = "TorchRL VTrace + A2CLoss, fp32"


class Counted:
    """One variant: a loss to call, and the number of observations that its torso computed."""

    def __init__(self, loss: Callable[[], torch.Tensor], torso: nn.Module) -> None:
        self.loss = loss
        self.torso = torso
        self.seen = 0
        torso.register_forward_hook(self._count)

    def _count(
        self, _torso: nn.Module, inputs: tuple[torch.Tensor, ...], _features: object
    ) -> None:
        self.seen += inputs[0].shape[:-3].numel()

    def once(self) -> None:
        self.seen = 0
        for parameter in self.torso.parameters():
            parameter.grad = None
        self.loss().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--torso", default="nature", choices=["nature", "impala"])
    parser.add_argument("--lstm", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    net = ImpalaNet(PIXELS, Categorical(ACTIONS), torso=options.torso, lstm=options.lstm)
    batch = make_batch(options.steps, options.envs, net)
    variants = {name: ours(net, options, settings, batch) for name, settings in FORMATS.items()}
    variants[STORED_LAST] = ours(
        net, options, FORMATS["bf16 + channels_last"], stored_channels_last(batch)
    )
    if not options.lstm:
        variants[THEIRS] = theirs(net, batch)
    rows = measured(variants, options.steps * options.envs, options.repeats)
    print(
        f"T={options.steps} B={options.envs} {options.torso} lstm={options.lstm}, {options.threads} thread(s)"
    )
    print(f"{'variant':>32} {'ms':>8} {'steps/s':>8} {'x fp32':>7} {'torso':>6}")
    for name, ms, rate, ratio, torso in rows:
        print(f"{name:>32} {ms:>8.1f} {rate:>8.0f} {ratio:>7.2f} {torso:>6.2f}")
    if options.out:
        fields = ("variant", "ms", "steps_per_s", "ratio", "torso_per_step")
        options.out.write_text(
            json.dumps([dict(zip(fields, row, strict=True)) for row in rows], indent=1)
        )


def make_batch(steps: int, envs: int, net: ImpalaNet) -> TensorDict:
    never = torch.zeros(steps, envs, dtype=torch.bool)
    action, log_prob = net.head.act(torch.zeros(steps, envs, net.head.width))
    return TensorDict(
        {
            "observation": torch.randint(0, 256, (steps + 1, envs, *PIXELS), dtype=torch.uint8),
            "is_init": torch.zeros(steps + 1, envs, dtype=torch.bool),
            "action": action,
            "reward": torch.randn(steps, envs),
            "terminated": never,
            "truncated": never,
            "behaviour_log_prob": log_prob,
            "recurrent_state": net.initial_state(envs),
        }
    )


def stored_channels_last(batch: TensorDict) -> TensorDict:
    """The same batch with pixels stored channels-last, so that no reordering is needed."""
    pixels = batch["observation"].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return batch.copy().set("observation", pixels)


def ours(net: ImpalaNet, options: argparse.Namespace, settings: dict, batch: TensorDict) -> Counted:
    formatted = ImpalaNet(PIXELS, net.head, torso=options.torso, lstm=options.lstm, **settings)
    formatted.load_state_dict(net.state_dict())
    loss = ImpalaLoss(formatted)

    def total() -> torch.Tensor:
        return sum(value for key, value in loss(batch).items() if key.startswith("loss_"))

    return Counted(total, formatted.torso)


def theirs(net: ImpalaNet, batch: TensorDict) -> Counted:
    """TorchRL's parts, combined as in its own IMPALA script: actor and critic share a torso."""
    torso = _FlatTorso(nn.Sequential(net.pixels, net.torso))
    body = ActorValueOperator(
        TensorDictModule(torso, in_keys=["observation"], out_keys=["features"]),
        ProbabilisticActor(
            TensorDictModule(net.policy, in_keys=["features"], out_keys=["logits"]),
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        ),
        ValueOperator(net.value, in_keys=["features"]),
    )
    actor, critic = body.get_policy_operator(), body.get_value_operator()
    advantage = VTrace(gamma=0.99, actor_network=actor, value_network=critic)
    loss = A2CLoss(actor, critic)
    frames = _their_batch(batch)

    def total() -> torch.Tensor:
        out = loss(advantage(frames.copy()))
        return sum(value for key, value in out.items() if key.startswith("loss_"))

    return Counted(total, torso)


class _FlatTorso(nn.Module):
    """A torso for observations with any number of leading dimensions."""

    def __init__(self, torso: nn.Module) -> None:
        super().__init__()
        self.torso = torso

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        lead = pixels.shape[:-3]
        return self.torso(pixels.reshape(-1, *pixels.shape[-3:])).unflatten(0, lead)


def _their_batch(batch: TensorDict) -> TensorDict:
    steps = {key: batch[key].transpose(0, 1) for key in ("reward", "terminated", "truncated")}
    done = steps["terminated"] | steps["truncated"]
    pixels = batch["observation"].transpose(0, 1)
    nexts = {
        "observation": pixels[:, 1:].contiguous(),
        "reward": steps["reward"].unsqueeze(-1),
        "terminated": steps["terminated"].unsqueeze(-1),
        "done": done.unsqueeze(-1),
    }
    frames = {
        "observation": pixels[:, :-1].contiguous(),
        "action": batch["action"].transpose(0, 1),
        "action_log_prob": batch["behaviour_log_prob"].transpose(0, 1),
        "next": TensorDict(nexts, done.shape),
    }
    return TensorDict(frames, done.shape)


def measured(variants: dict[str, Counted], steps: int, repeats: int) -> list[tuple]:
    """The median milliseconds of each. They take turns, so that other load affects all of them."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 1):
        for name, variant in variants.items():
            started = time.perf_counter()
            variant.once()
            times[name].append((time.perf_counter() - started) * 1e3)
    ms = {name: statistics.median(took[1:]) for name, took in times.items()}
    return [
        (name, ms[name], steps / ms[name] * 1e3, ms["fp32"] / ms[name], variant.seen / steps)
        for name, variant in variants.items()
    ]


if __name__ == "__main__":
    main()

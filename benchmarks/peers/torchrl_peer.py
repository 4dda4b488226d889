"""TorchRL's MultiAsyncCollector, VTrace and A2CLoss on Pong. It reports its steps.

    python benchmarks/peers/torchrl_peer.py --seconds 60 [--workers 2] [--envs 8] [--rollout 32]
                                            [--torso nature] [--no-shifted] [--no-channels-last]

The settings are the fastest of TorchRL: ale-py's C++ vector environment under TorchRL's wrapper,
VTrace(shifted=True), which computes the value of each observation once, and channels-last convolutions. The
network has the layers of rlsync's torsos, shared by actor and critic. Each collector batch (one worker's
rollout) is one optimizer step, and the weights are sent to the workers after each step. Steps are those that
the learner has trained on.

The policy returns a version number with its logits: a buffer that the learner counts up, and that travels
with the weights. So the lag is that of the weights that acted, independent of TorchRL's stamps.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial

import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import EnvBase, GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import VTrace
from torchrl.weight_update import SharedMemWeightSyncScheme

from rlsync.runs.recipes.impala import Categorical, ImpalaNet

PIXELS = (4, 84, 84)
ACTIONS = 6
REPORT_EVERY_S = 0.5


class Flat(nn.Module):
    """A torso with a head, for observations with any number of leading dimensions."""

    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.torso = torso
        self.head = head

    def forward(self, pixels: Tensor) -> Tensor:
        lead = pixels.shape[:-3]
        return self.head(self.torso(pixels.reshape(-1, *pixels.shape[-3:]))).unflatten(0, lead)


class Versioned(Flat):
    """The policy: computes logits, and returns the version of its weights."""

    version: Tensor

    def __init__(self, torso: nn.Module, head: nn.Module) -> None:
        super().__init__(torso, head)
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(pixels), self.version.expand(pixels.shape[:-3]).clone()


def vector_env(envs: int) -> EnvBase:
    """ale-py's C++ vector environment under TorchRL's wrapper, the fastest way for a TorchRL user."""
    ale = AtariVectorEnv(
        "pong",
        envs,
        num_threads=1,
        repeat_action_probability=0.0,
        autoreset_mode=AutoresetMode.SAME_STEP,
        reward_clipping=False,
    )
    return GymWrapper(ale, categorical_action_encoding=True)


class Learner:
    """Makes one optimizer step for each batch of one worker."""

    def __init__(self, torso: str, *, shifted: bool, channels_last: bool) -> None:
        net = ImpalaNet(PIXELS, Categorical(ACTIONS), torso=torso, channels_last=channels_last)
        seen = nn.Sequential(net.pixels, net.torso)
        self.policy = Versioned(seen, net.policy)
        self.actor = ProbabilisticActor(
            TensorDictModule(self.policy, in_keys=["observation"], out_keys=["logits", "version"]),
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
        critic = ValueOperator(Flat(seen, net.value), in_keys=["observation"])
        self.advantage = VTrace(
            gamma=0.99, actor_network=self.actor, value_network=critic, shifted=shifted
        )
        self.loss = A2CLoss(self.actor, critic, entropy_coeff=0.01, critic_coeff=0.5)
        self.optimizer = torch.optim.RMSprop(self.loss.parameters(), lr=6e-4, eps=0.01)
        self.steps = self.versions = 0

    def learn(self, batch: TensorDictBase) -> dict[str, float]:
        """Train on a batch, and return the values to report."""
        lag = (self.versions - batch["version"]).double()
        terms = self.loss(self.advantage(batch))
        sum(term for key, term in terms.items() if key.startswith("loss_")).backward()
        nn.utils.clip_grad_norm_(self.loss.parameters(), 40.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += batch.numel()
        self.versions += 1
        self.policy.version.fill_(self.versions)
        return {
            "steps": self.steps,
            "versions": self.versions,
            "lag_mean": float(lag.mean()),
            "lag_max": float(lag.max()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--shifted", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--torso", choices=["nature", "impala"], default="nature")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    learner = Learner(options.torso, shifted=options.shifted, channels_last=options.channels_last)
    collector = MultiAsyncCollector(
        [partial(vector_env, options.envs)] * options.workers,
        learner.actor,
        frames_per_batch=options.envs * options.rollout,
        num_threads=1,
        num_sub_threads=1,
        storing_device="cpu",
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    began = reported = None
    for batch in collector:
        said = learner.learn(batch)
        collector.update_policy_weights_()
        now = time.monotonic()
        began = began or now  # the start of the workers does not count, as for the other contenders
        if reported is None or now >= reported + REPORT_EVERY_S:
            reported = now
            print("@", json.dumps(said), flush=True)
        if now >= began + options.seconds:
            break
    collector.shutdown()


if __name__ == "__main__":
    main()

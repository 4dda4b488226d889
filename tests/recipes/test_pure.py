"""Updates as functions of tensors give what TorchRL's losses, torch's Adam and TorchRL's targets give."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, optim
from torch.testing import assert_close
from torchrl.data import Bounded, OneHot
from torchrl.modules import MLP
from torchrl.trainers import TargetNetUpdaterHook, Trainer

from rlsync.recipes import dqn, ppo, pure, sac, td3
from rlsync.recipes.dqn import DQNConfig
from rlsync.recipes.hooks.stepping import PureStepper
from rlsync.recipes.networks import MixedMLP
from rlsync.recipes.replay.normalize import NormalizeConfig, write_statistics
from rlsync.recipes.replay.settings import OffPolicyConfig
from rlsync.recipes.sac import SACConfig
from rlsync.recipes.settings import PPOConfig, RecipeConfig
from rlsync.recipes.spaces import Spaces
from rlsync.recipes.td3 import TD3Config
from rlsync.torchrl_plugin.compat.trainers import optimizers

UPDATES: dict[str, Callable[[Trainer], pure.Update]] = {
    "sac": lambda t: sac.pure_update(t.loss_module, t.optimizer),
    "dqn": lambda t: dqn.pure_update(t.loss_module, t.optimizer),
    "ppo": lambda t: ppo.pure_update(t.loss_module, t.optimizer),
    "td3": lambda t: td3.pure_update(t.loss_module, t.optimization_stepper, t.target_net_updater),
}
SETTINGS: dict[str, type[RecipeConfig]] = {
    "dqn": DQNConfig,
    "ppo": PPOConfig,
    "sac": SACConfig,
    "td3": TD3Config,
}
every_recipe = pytest.mark.parametrize("name", list(UPDATES))
CLIP_NORM = 5.0


@dataclass
class Drawn:
    """A recipe with sizes and settings that are drawn at random, and batches for it."""

    name: str
    seed: int
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.features, self.actions = draw.randint(1, 6), draw.randint(1, 4) + self.discrete
        self.rows = draw.choice([1, 7, 32])
        self.low, self.high = draw.choice([(-1.0, 1.0), (-2.0, 2.0), (0.0, 3.0)])
        self.weighed, self.steps = draw.random() < 0.4, draw.random() < 0.4
        self.keys: dict[str, Any] = {
            "hidden": [draw.choice([4, 16]) for _ in range(draw.randint(1, 3))],
            "gamma": draw.choice([0.9, 0.99]),
        }
        if self.name != "ppo":
            self.keys["normalize"] = NormalizeConfig(observations=draw.random() < 0.4, clip=1.5)

    @property
    def discrete(self) -> bool:
        return self.name in ("dqn", "ppo")

    @property
    def spaces(self) -> Spaces:
        box = Bounded(self.low, self.high, (self.actions,))
        return Spaces(self.features, self.actions, OneHot(self.actions) if self.discrete else box, None)

    def trainer(self) -> Trainer:
        """The recipe's loss, optimizers and targets in a trainer without workers; the same each time."""
        torch.manual_seed(self.seed)
        settings = SETTINGS[self.name](**self.keys)
        if isinstance(settings, DQNConfig):
            settings.double = self.seed % 2 == 0
            loss = dqn.make_loss(settings, self.spaces, dqn.make_policy(settings, self.spaces)[0])
        elif isinstance(settings, PPOConfig):
            settings.entropy_coeff = 0.1 * (self.seed % 2)
            loss = ppo.make_loss(settings, self.spaces)
        else:
            loss = (sac if self.name == "sac" else td3).make_loss(settings, self.spaces)
        loss.to(self.dtype)
        if isinstance(settings, OffPolicyConfig) and settings.normalize.observations:
            write_statistics(loss, *torch.rand(2, self.features, dtype=self.dtype) + 0.5)
        if self.name == "ppo":
            return made(loss, optimizer=optim.Adam(loss.parameters(), lr=settings.lr, eps=1e-5))
        if self.name == "dqn":
            target = dqn.CopyEvery(loss, value_network_update_interval=5)
        else:
            target = pure.SoftTargets(loss, tau=0.1)
        if self.name == "td3":
            return made(
                loss, target_net_updater=target, optimization_stepper=td3.make_stepper(settings, loss, target)
            )
        optimizer = optim.Adam(loss.parameters(), lr=settings.lr, fused=True)
        trainer = made(loss, optimizer=optimizer)
        trainer.register_op("post_optim", TargetNetUpdaterHook(target))
        return trainer

    def batch(self, number: int) -> TensorDict:
        """Rows of which some end an episode and some are cut off."""
        draw = torch.Generator().manual_seed(1000 * self.seed + number)

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.rows, *shape, generator=draw, dtype=self.dtype)

        terminated, truncated = normal(1) > 1, normal(1) > 1
        action = self.low + (self.high - self.low) / 2 * (1 + normal(self.actions).tanh())
        if self.discrete:
            action = torch.eye(self.actions, dtype=torch.int64)[action.argmax(-1)]
        rows: dict[str, Any] = {
            "observation": normal(self.features),
            "action": action,
            "next": {
                "observation": normal(self.features),
                "reward": normal(1),
                "terminated": terminated,
                "done": terminated | truncated,
                "truncated": truncated,
            },
        }
        if self.name == "ppo":
            log_prob = -normal().abs()
            rows |= {"action_log_prob": log_prob, "advantage": normal(1), "value_target": normal(1)}
            return TensorDict(rows, [self.rows])
        if self.weighed:
            rows["priority_weight"] = normal().abs()
        if self.steps:
            rows["steps_to_next_obs"] = torch.randint(1, 4, (self.rows, 1), generator=draw)
        return TensorDict(rows, [self.rows])


def made(loss: Any, **parts: Any) -> Trainer:
    return Trainer(
        collector=None,
        total_frames=1,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=loss,
        clip_norm=CLIP_NORM,
        progress_bar=False,
        **parts,
    )


def stepped(drawn: Drawn, steps: int, *, pure_way: bool, before: State | None = None) -> State:
    """All that some updates have changed, and what they logged."""
    trainer = drawn.trainer()
    if before is not None:
        before.load(trainer)
    stepper = PureStepper(lambda: UPDATES[drawn.name](trainer))
    if pure_way:
        stepper.register(trainer)
    for number in range(steps):
        torch.manual_seed(number)
        trainer.optim_steps(drawn.batch(number))
    if pure_way:
        assert stepper.why_not is None
    return State.of(trainer)


@dataclass
class State:
    """What a checkpoint of a trainer has of its learner, and what was logged of the last update."""

    loss: dict[str, Any]
    optimizers: list[dict[str, Any]]
    logged: dict[str, float]
    norm: float

    @classmethod
    def of(cls, trainer: Trainer) -> State:
        logged = {name: float(values[-1]) for name, values in trainer._log_dict.items()}
        states = [optimizer.state_dict() for optimizer in optimizers(trainer)]
        norm = logged.pop("grad_norm_0", 0.0)
        return copy.deepcopy(cls(dict(trainer.loss_module.state_dict()), states, logged, norm))

    def load(self, trainer: Trainer) -> None:
        trainer.loss_module.load_state_dict(self.loss)
        for optimizer, state in zip(optimizers(trainer), self.optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))

    def assert_close(self, other: State, within: float) -> None:
        moments = [[state["state"] for state in each.optimizers] for each in (self, other)]
        for mine, theirs in [(self.loss, other.loss), moments, (self.logged, other.logged)]:
            assert_close(mine, theirs, rtol=within, atol=within)
        assert self.norm == pytest.approx(other.norm, rel=1e-6)  # TorchRL rounds it to float32


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that return what they compute, in place of float32."""
    monkeypatch.setattr(MixedMLP, "forward", MLP.forward)


@every_recipe
@pytest.mark.parametrize("seed", range(8))
def test_losses_gradients_and_what_an_update_writes_are_torchrls(name: str, seed: int) -> None:
    """Adam's first moment after one update is the gradient, clipped, times a number."""
    for steps in (1, 2):
        drawn = Drawn(name, seed)
        stepped(drawn, steps, pure_way=True).assert_close(stepped(drawn, steps, pure_way=False), 1e-12)


@every_recipe
def test_a_hundred_updates_are_torchrls(name: str) -> None:
    drawn = Drawn(name, 3)
    stepped(drawn, 100, pure_way=True).assert_close(stepped(drawn, 100, pure_way=False), 1e-5)


@every_recipe
def test_a_checkpoint_of_either_way_resumes_in_the_other(name: str) -> None:
    drawn = Drawn(name, 5)
    for first in (True, False):
        before = stepped(drawn, 3, pure_way=first)
        resumed = stepped(drawn, 3, pure_way=not first, before=before)
        resumed.assert_close(stepped(drawn, 3, pure_way=False, before=before), 1e-10)

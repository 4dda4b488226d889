"""Updates as functions of tensors give what TorchRL's losses, torch's Adam and TorchRL's targets give."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, MultiBinary
from gymnasium.spaces import Dict as DictSpace
from tensordict import TensorDict
from torch import Tensor, nn, optim
from torch.testing import assert_close
from torchrl.data import Bounded, MultiCategorical, OneHot
from torchrl.modules import MLP
from torchrl.trainers import TargetNetUpdaterHook, Trainer

from rlsync.core.errors import RlsyncWarning
from rlsync.runs.actors.envs.observations import Observations, like, observations_of
from rlsync.runs.recipes import checks, dqn, ppo, pure, sac, td3
from rlsync.runs.recipes.checks import update_errors
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.dreamer.config import DreamerV3Config
from rlsync.runs.recipes.impala.heads import MultiCategorical as MultiCategoricalHead
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.networks import MixedMLP
from rlsync.runs.recipes.pure import Graphs, PureStepper
from rlsync.runs.recipes.replay.settings import OffPolicyConfig
from rlsync.runs.recipes.sac import CrossQConfig, SACConfig, SoftConfig
from rlsync.runs.recipes.settings import (
    Config,
    DeviceConfig,
    ModelConfig,
    NormalizeConfig,
    OnPolicyNormalizeConfig,
    PPOConfig,
    RecipeConfig,
)
from rlsync.runs.recipes.spaces import Spaces
from rlsync.runs.recipes.td3 import TD3Config
from rlsync.tensors import device
from rlsync.torchrl_plugin.compat.trainers import optimizers

UPDATES: dict[str, Callable[[Trainer], pure.Update]] = {
    "sac": lambda t: sac.pure_update(t.loss_module, t.optimizer),
    "crossq": lambda t: sac.crossq_update(t.loss_module, t.optimizer),
    "dqn": lambda t: dqn.pure_update(t.loss_module, t.optimizer),
    "ppo": lambda t: ppo.pure_update(t.loss_module, t.optimizer),
    "ppo, numbers": lambda t: ppo.pure_update(t.loss_module, t.optimizer),
    "ppo, several choices": lambda t: ppo.pure_update(t.loss_module, t.optimizer),
    "td3": lambda t: td3.pure_update(t.loss_module, t.optimization_stepper),
}
SETTINGS: dict[str, type[RecipeConfig]] = {
    "crossq": CrossQConfig,
    "dqn": DQNConfig,
    "ppo": PPOConfig,
    "ppo, numbers": PPOConfig,
    "ppo, several choices": PPOConfig,
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
    device: str = "cpu"
    copies_every: int = 5  #: updates after which dqn copies its target
    seen: str = ""  #: what is observed; by default it is drawn, too

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.features, self.actions = draw.randint(1, 6), draw.randint(1, 4) + self.discrete
        self.rows = draw.choice([1, 7, 32])
        self.nvec = [self.actions, *(draw.choice([2, 3, self.actions]) for _ in range(draw.randint(0, 2)))]
        self.low, self.high = draw.choice([(-1.0, 1.0), (-2.0, 2.0), (0.0, 3.0)])
        self.weighed, self.steps = draw.random() < 0.4 and self.name != "crossq", draw.random() < 0.4
        self.keys: dict[str, Any] = {
            "hidden": [draw.choice([4, 16]) for _ in range(draw.randint(1, 3))],
            "gamma": draw.choice([0.9, 0.99]),
        }
        if SETTINGS[self.name] is PPOConfig:
            self.keys["normalize_advantage"] = draw.random() < 0.5 and self.rows > 1
            self.keys["normalize"] = OnPolicyNormalizeConfig(observations=draw.random() < 0.5, clip=1.5)
            self.keys["activation"] = draw.choice(["tanh", "relu"])
            self.keys["critic_loss"] = draw.choice(["smooth_l1", "l2"])
            self.keys["initial_log_scale"] = draw.choice([0.0, -1.0])
        else:
            self.keys["normalize"] = NormalizeConfig(observations=draw.random() < 0.4, clip=1.5)
        if self.name in ("sac", "crossq", "td3"):
            self.keys["critic_lr"] = draw.choice([None, 3e-3])
        kinds = ["numbers"] * 4 + ["picture", "parts"]
        if self.chooses:
            kinds += ["mask", "parts and mask"]
        self.seen = self.seen or draw.choice(kinds)
        self.keys["model"] = ModelConfig(hidden=[8], channels_last=draw.random() < 0.5)

    @property
    def discrete(self) -> bool:
        return self.name in ("dqn", "ppo")

    @property
    def chooses(self) -> bool:
        return self.discrete or self.name == "ppo, several choices"

    @property
    def observations(self) -> Observations:
        """What the recipe sees: a vector, or more."""
        if self.seen == "numbers":
            return like((self.features,))
        camera = Box(0, 255, (8, 9, 3), np.uint8)
        if self.seen == "picture":
            return observations_of(camera, "drawn")
        spaces = {"speed": Box(-np.inf, np.inf, (self.features,))}
        if self.seen.startswith("parts"):
            spaces["camera"] = camera
        choices: tuple[int, ...] = ()
        if self.seen.endswith("mask"):
            choices = (self.actions,) if self.discrete else tuple(self.nvec)
            spaces["action_mask"] = MultiBinary(sum(choices))
        return observations_of(DictSpace(spaces), "drawn", choices=choices)

    @property
    def spaces(self) -> Spaces:
        if self.name == "ppo, several choices":
            return Spaces(self.observations, sum(self.nvec), MultiCategorical(self.nvec))
        box = Bounded(self.low, self.high, (self.actions,))
        return Spaces(self.observations, self.actions, OneHot(self.actions) if self.discrete else box)

    def rows_of(self, speed: Tensor, draw: torch.Generator, chosen: Tensor) -> Tensor:
        """Rows with these numbers; a mask allows the action that was chosen, ``[rows, n]``, and others."""
        observations = self.observations
        parts: dict[str, Tensor] = {}
        for part in observations.parts:
            shape = (self.rows, *part.shape)
            if part.kind == "numbers":
                parts[part.name] = speed.float() if observations.pictures else speed
            elif part.kind == "picture":
                parts[part.name] = torch.randint(256, shape, generator=draw, dtype=torch.uint8)
            else:
                parts[part.name] = torch.rand(shape, generator=draw).round().maximum(chosen.float())
        return observations.join(parts)

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
            makers = {"sac": sac.make_loss, "crossq": sac.make_crossq_loss, "td3": td3.make_loss}
            loss = makers[self.name](settings, self.spaces, torch.device(self.device))
        loss.to(self.device, self.dtype)
        if isinstance(settings, OffPolicyConfig | PPOConfig) and settings.normalize.observations:
            for name, leaf in loss.named_buffers():
                if name.endswith((".mean", ".std", ".variance")):
                    leaf.copy_(torch.rand_like(leaf) + 0.5)
        if isinstance(settings, PPOConfig):
            return made(loss, optimizer=optim.Adam(loss.parameters(), lr=settings.lr, eps=1e-5, fused=True))
        if self.name == "dqn":
            target = dqn.CopyEvery(loss, value_network_update_interval=self.copies_every)
        elif self.name != "crossq":
            target = pure.SoftTargets(loss, tau=0.1)
        if self.name == "td3":
            return made(
                loss, target_net_updater=target, optimization_stepper=td3.make_stepper(settings, loss, target)
            )
        if isinstance(settings, SoftConfig):
            optimizer = sac.make_optimizer(settings, loss)
        else:
            optimizer = optim.Adam(loss.parameters(), lr=settings.lr, fused=True)
        trainer = made(loss, optimizer=optimizer)
        if self.name != "crossq":
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
        chosen = action
        if self.name == "ppo, several choices":
            action = (normal(len(self.nvec)).sigmoid() * torch.tensor(self.nvec)).long()
            chosen = MultiCategoricalHead(tuple(self.nvec)).encode(action)
        rows: dict[str, Any] = {
            "observation": self.rows_of(normal(self.features), draw, chosen),
            "action": action,
            "next": {
                "observation": self.rows_of(normal(self.features), draw, chosen),
                "reward": normal(1),
                "terminated": terminated,
                "done": terminated | truncated,
                "truncated": truncated,
            },
        }
        if SETTINGS[self.name] is PPOConfig:
            log_prob = -normal().abs()
            rows |= {"action_log_prob": log_prob, "advantage": normal(1), "value_target": normal(1)}
            return TensorDict(rows, [self.rows]).to(self.device)
        if self.weighed:
            rows["priority_weight"] = normal().abs()
        if self.steps:
            rows["steps_to_next_obs"] = torch.randint(1, 4, (self.rows, 1), generator=draw)
        return TensorDict(rows, [self.rows]).to(self.device)


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
        logged = {
            k: float(seen[-1])
            for k, seen in trainer._log_dict.items()
            if torch.as_tensor(seen[-1]).numel() == 1
        }
        logged.pop("log_prob", None), logged.pop("td_error", None)  # of CrossQLoss, where there is one row
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


@pytest.mark.seconds
@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("seed", range(8))
def test_losses_gradients_and_what_an_update_writes_are_torchrls(name: str, seed: int) -> None:
    """Adam's first moment after one update is the gradient, clipped, times a number."""
    within = 1e-9 if name == "crossq" else 1e-12  # a division by the spread of a few rows
    for steps in (1, 2):
        drawn = Drawn(name, seed)
        stepped(drawn, steps, pure_way=True).assert_close(stepped(drawn, steps, pure_way=False), within)


@pytest.mark.one_case
@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", *(name for name in UPDATES if name != "dqn")])
def test_a_hundred_updates_are_torchrls(name: str) -> None:
    drawn = Drawn(name, 3)
    stepped(drawn, 100, pure_way=True).assert_close(stepped(drawn, 100, pure_way=False), 1e-5)


@pytest.mark.one_case
@every_recipe
def test_a_checkpoint_of_either_way_resumes_in_the_other(name: str) -> None:
    drawn = Drawn(name, 5)
    for first in (True, False):
        before = stepped(drawn, 3, pure_way=first)
        resumed = stepped(drawn, 3, pure_way=not first, before=before)
        resumed.assert_close(stepped(drawn, 3, pure_way=False, before=before), 1e-10)


def with_graphs(drawn: Drawn, graphs: Graphs) -> Trainer:
    trainer = drawn.trainer()
    PureStepper(lambda: UPDATES[drawn.name](trainer), graphs).register(trainer)
    return trainer


def updated(trainer: Trainer, drawn: Drawn, numbers: range, smaller: int | None = None) -> State:
    """Updates with the batches of these numbers; one of them may have fewer rows."""
    for number in numbers:
        torch.manual_seed(number)
        trainer.optim_steps(drawn.batch(number)[: 3 if number == smaller else None])
    return State.of(trainer)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["td3", "crossq"])  # which has two phases; which writes statistics
def test_a_compiled_update_is_the_same_and_is_compiled_once(name: str) -> None:
    # convolutions take minutes to compile
    drawn, graphs = Drawn(name, 3, seen="numbers"), Graphs()
    compiled = updated(with_graphs(drawn, graphs), drawn, range(6))
    assert graphs.why_not is None
    assert str(graphs).startswith("compiled in")
    within = 1e-7 if name == "crossq" else 1e-10  # ranges of actions are float32, and rows are few
    compiled.assert_close(stepped(drawn, 6, pure_way=True), within)


@pytest.mark.parametrize("fault", ["no compiler", "another size"])
def test_where_there_can_be_no_graph_one_warning_says_so_and_updates_go_on(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(function: Callable[..., Any], **_: bool) -> Callable[..., Any]:
        def fails(*args: object) -> object:
            if fault == "no compiler":
                raise RuntimeError("no C++ compiler\nand a long story")
            return function(*args)

        return fails

    monkeypatch.setattr(torch, "compile", compiled)
    drawn, graphs = Drawn("dqn", 3), Graphs()
    trainer = with_graphs(drawn, graphs)
    with pytest.warns(RlsyncWarning, match="go on uncompiled: (no C|a batch)") as warned:
        updated(trainer, drawn, range(3), smaller=1 if fault == "another size" else None)
    assert len([w for w in warned if isinstance(w.message, RlsyncWarning)]) == 1
    assert str(graphs).startswith("not compiled: ")
    if fault == "no compiler":
        State.of(trainer).assert_close(stepped(drawn, 3, pure_way=True), 1e-12)


@every_recipe
def test_a_hook_or_a_network_that_would_be_passed_by_sends_updates_torchrls_way_and_is_named(
    name: str,
) -> None:
    drawn = Drawn(name, 3)
    trainer = drawn.trainer()
    stepper = PureStepper(lambda: UPDATES[name](trainer))
    stepper.register(trainer)
    assert stepper.way() == "as functions of tensors, not compiled"
    calls: list[Tensor] = []
    handle = next(trainer.loss_module.parameters()).register_hook(calls.append)
    trainer.optim_steps(drawn.batch(0))
    trainer.optim_steps(drawn.batch(1))
    assert "in TorchRL's way: somebody's hook is on the gradient of" in stepper.way()
    assert calls
    handle.remove()
    stepper.look()
    assert stepper.why_not is None
    network = trainer.loss_module.critic_network if "ppo" in name else stepper._update.networks[-1]
    layer = next(module for module in network.modules() if isinstance(module, MLP))
    layer.append(nn.SiLU())
    other = PureStepper(lambda: UPDATES[name](trainer))
    other.register(trainer)
    assert other.way() == "in TorchRL's way: SiLU is no layer that it knows"


def test_keys_of_updates_are_refused_where_they_cannot_be_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(recipe: RecipeConfig, learner: str = "cpu") -> list[str]:
        config = Config(recipe=recipe, learner=DeviceConfig(learner))
        return [str(error.where) for error in update_errors(config)]

    asked = {"compile": "on", "update_dtype": "bfloat16"}
    monkeypatch.setattr(device, "bfloat16_instructions", lambda: ["avx512_bf16"])
    assert told(DreamerV3Config(**asked)) == ["recipe.compile", "recipe.update_dtype"]
    assert told(ImpalaConfig(**asked)) == ["recipe.compile"]
    monkeypatch.setattr(checks, "has_compiler", lambda: False)
    monkeypatch.setattr(device, "bfloat16_instructions", list)
    assert told(SACConfig(**asked)) == ["recipe.compile=on", "recipe.update_dtype=bfloat16"]
    assert told(SACConfig(**asked), learner="cuda") == told(SACConfig()) == []
    torso_of_workers = ImpalaConfig(update_dtype="bfloat16")
    assert told(torso_of_workers, learner="cuda") == ["recipe.update_dtype=bfloat16"]


def test_auto_compiles_only_a_long_run_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = (Config(recipe=SACConfig(total_frames=frames)) for frames in (80_000, 4_000))
    for there in (True, False):
        monkeypatch.setattr(pure, "has_compiler", lambda there=there: there)
        assert pure.compiles(long) == there
        assert not pure.compiles(short)


def test_losses_in_bfloat16_are_near_those_in_float32_and_weights_stay_float32() -> None:
    drawn = Drawn("sac", 3, torch.float32)
    trainer = drawn.trainer()
    PureStepper(lambda: UPDATES["sac"](trainer), bfloat16=True).register(trainer)
    found = updated(trainer, drawn, range(1))
    plain = stepped(drawn, 1, pure_way=True)
    assert found.logged != plain.logged
    assert found.logged == pytest.approx(plain.logged, rel=0.05, abs=0.05)
    assert {p.dtype for p in trainer.loss_module.parameters()} == {torch.float32}

"""A loss or a gradient that is not finite ends the run before the step, with a checkpoint of before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.trainers import Trainer

from rlsync.core.errors import ConfigError, NotFinite, RlsyncError
from rlsync.runs.recipes import dqn, ppo
from rlsync.runs.recipes.hooks.finite import StopIfNotFinite, _LastLosses
from rlsync.runs.recipes.run_files import CHECKPOINT
from tests.runs.recipes.test_off_policy import built, tiny
from tests.runs.recipes.test_recipes import WhenConfig, small_dqn, small_ppo

pytestmark = pytest.mark.usefixtures("fork_workers")
FEW = {"workers": 1, "batch": 32}


def weights(trainer: Trainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.loss_module.parameters()]


class Spoiled:
    """A forward hook that makes one loss of step ``at`` what it should not be, and counts the steps."""

    def __init__(self, trainer: Trainer, at: int, name: str, value: float) -> None:
        self.trainer, self.at, self.name, self.value = trainer, at, name, value
        self.steps = 0
        self.before: list[Tensor] = []
        # Before the hooks that are there, as if the loss module itself did it.
        trainer.loss_module.register_forward_hook(self, prepend=True)

    def __call__(self, module: nn.Module, given: Any, losses: TensorDict) -> TensorDict | None:
        self.steps += 1
        if self.steps != self.at:
            return None
        self.before = weights(self.trainer)
        return losses.set(self.name, losses[self.name] * self.value)


def stopped(trainer: Trainer) -> NotFinite:
    try:
        with pytest.raises(NotFinite) as raised:
            trainer.train()
    finally:
        trainer.shutdown()
    return raised.value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.one_case
def test_a_loss_that_is_not_finite_at_a_step_leaves_the_weights_of_before(
    value: float, tmp_path: Path
) -> None:
    trainer = ppo.RECIPE.build(small_ppo(run_dir=str(tmp_path), **FEW))
    spoiled = Spoiled(trainer, at=3, name="loss_critic", value=value)
    error = stopped(trainer)
    assert spoiled.steps == 3
    assert all(torch.equal(*pair) for pair in zip(weights(trainer), spoiled.before, strict=True))
    assert error.what == f"the loss 'loss_critic' is {value:g}"
    assert error.where == "optimizer step 3, after 32 frames"
    assert "no step was made" in error.cure
    assert str(tmp_path / CHECKPOINT) in error.cure
    assert len(str(error).splitlines()) == 3

    resumed = ppo.RECIPE.build(small_ppo(seed=1, **FEW))
    try:
        resumed.load_from_file(tmp_path / CHECKPOINT)
        assert all(torch.equal(*pair) for pair in zip(weights(resumed), spoiled.before, strict=True))
    finally:
        resumed.shutdown()


def test_dqn_stops_too_and_writes_nothing_where_there_is_no_run_folder() -> None:
    trainer = dqn.RECIPE.build(small_dqn(WhenConfig(), **FEW))
    Spoiled(trainer, at=2, name="loss", value=float("nan"))
    error = stopped(trainer)
    assert error.what == "the loss 'loss' is nan"
    assert error.cure == "no step was made; the weights are those of before"


def test_an_infinite_loss_of_td3_stops_the_run() -> None:
    """Its gradient is finite, and clipping makes zeros of it."""
    trainer = built(tiny("td3"))
    before: list[list[Tensor]] = []

    def spoil(batch: TensorDict) -> TensorDict:
        before.append(weights(trainer))
        if len(before) == 3:
            batch["next", "reward"][:3] = 1e25
        return batch

    trainer.register_op("process_optim_batch", spoil)
    error = stopped(trainer)
    assert len(before) == 3
    assert error.what == "the loss 'loss_qvalue' is inf"
    assert error.where == "optimizer step 3, after 64 frames"
    assert all(torch.equal(*pair) for pair in zip(weights(trainer), before[2], strict=True))


def test_a_gradient_that_is_not_finite_is_named_by_its_parameter() -> None:
    trainer = ppo.RECIPE.build(small_ppo(**FEW))
    name, parameter = list(trainer.loss_module.named_parameters())[-1]
    parameter.register_hook(lambda grad: grad * float("inf"))
    error = stopped(trainer)
    assert name in error.what
    assert "the gradient of" in error.what
    assert error.what.count("network") == 1, "the others are fine, though clipping has spoiled them"


def test_weights_that_were_spoiled_before_are_not_saved_over_the_good_checkpoint(tmp_path: Path) -> None:
    trainer = ppo.RECIPE.build(small_ppo(run_dir=str(tmp_path), **FEW))
    for name, parameter in trainer.loss_module.named_parameters():
        if "critic" in name:
            parameter.data.fill_(float("nan"))
    error = stopped(trainer)
    assert "the weights were not finite before" in error.cure
    assert not (tmp_path / CHECKPOINT).exists()


# ----------------------------------------------------------------------------- without workers


class Line(nn.Module):
    """``loss = weight * x``, and what a trainer of one's own has besides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"loss_line": (self.weight * batch["x"]).sum()})


class OwnTrainer:
    """As much of a trainer as the hook needs; the user's own loop calls the optimizer."""

    save_trainer_file = None
    collected_frames = 7
    optimization_stepper = None

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.loss_module, self.optimizer = Line(), optimizer
        self._modules: dict[str, object] = {}

    def step(self, x: float) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        self.loss_module(TensorDict({"x": torch.tensor([x, 1.0])}))["loss_line"].backward()
        self.optimizer.step()


def own_trainer() -> OwnTrainer:
    trainer = OwnTrainer(None)
    trainer.optimizer = torch.optim.SGD(trainer.loss_module.parameters(), lr=0.1)
    StopIfNotFinite().register(trainer)  # type: ignore[arg-type]
    return trainer


def test_a_loop_that_computes_no_norm_is_watched_too() -> None:
    trainer = own_trainer()
    trainer.step(2.0)
    trainer.step(1e30)  # its square overflows, and so would a norm: the gradient itself is finite
    before = weights(trainer)
    with pytest.raises(NotFinite, match=r"the loss 'loss_line' is -?inf") as raised:
        trainer.step(float("inf"))
    assert raised.value.where == "optimizer step 3, after 7 frames"
    assert torch.equal(before[0], weights(trainer)[0])
    assert isinstance(raised.value, RlsyncError)


def test_a_trainer_without_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="no optimizer"):
        StopIfNotFinite().register(OwnTrainer(None))  # type: ignore[arg-type]


def test_a_deep_copy_of_the_loss_module_copies_neither_batch_nor_trainer() -> None:
    trainer = own_trainer()
    trainer.loss_module(TensorDict({"x": torch.ones(2)}))
    (hook,) = copy.deepcopy(trainer.loss_module)._forward_hooks.values()
    assert isinstance(hook, _LastLosses)
    assert hook.losses() == {}

"""The update of dreamer_v3 as a function of tensors gives what TorchRL's losses and stepper give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close
from torchrl.data import Bounded, MultiCategorical, OneHot
from torchrl.objectives import DreamerV3Loss
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from rlsync.runs.actors.envs.observations import like
from rlsync.runs.recipes.dreamer import v3
from rlsync.runs.recipes.dreamer.config import DreamerV3Config
from rlsync.runs.recipes.dreamer.v3_update import pure_update
from rlsync.runs.recipes.pure import PureStepper, SoftTargets
from rlsync.runs.recipes.spaces import Spaces
from tests.runs.recipes.test_pure import made
from tests.tools.parts.space_envs import SEVERAL_PARTS, rows_of

RECIPE = DreamerV3Config(
    batch_size=3,
    sequence_length=6,
    horizon=4,
    cells=16,
    belief=12,
    categoricals=3,
    classes=4,
    channels=2,
    bins=31,
    free_nats=0.1,
)
SPACES = {
    "discrete": Spaces(like((5,)), 3, OneHot(3)),
    "several": Spaces(like((5,)), 5, MultiCategorical((2, 3))),
    "continuous": Spaces(like((5,)), 2, Bounded(-2.0, 3.0, (2,))),
    "pictures": Spaces(like((3, 16, 16)), 3, OneHot(3)),
    "several parts": Spaces(SEVERAL_PARTS, 3, OneHot(3)),
}


def batch_of(spaces: Spaces, seed: int, dtype: torch.dtype) -> TensorDict:
    """Sequences in the middle of which episodes end, are cut off, and begin."""
    shape = (RECIPE.batch_size, RECIPE.sequence_length)
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*shape, *size, generator=draw, dtype=dtype)

    seen = rows_of(spaces.observations, *shape, seed=seed)
    if seen.is_floating_point():
        seen = seen.to(dtype)
    action = 3 * normal(spaces.actions).tanh()
    if isinstance(spaces.action_spec, OneHot):
        action = torch.eye(spaces.actions, dtype=dtype)[action.argmax(-1)]
    if isinstance(spaces.action_spec, MultiCategorical):  # which a memory stores one-hot
        parts = [
            torch.eye(n)[each.argmax(-1)] for n, each in zip((2, 3), action.split((2, 3), -1), strict=True)
        ]
        action = torch.cat(parts, -1).to(dtype)
    begins, terminated = normal(1) > 1, normal(1) > 1
    begins[:, 0] = True
    return TensorDict(
        {
            "state": torch.zeros(*shape, RECIPE.categoricals * RECIPE.classes, dtype=dtype),
            "belief": torch.zeros(*shape, RECIPE.belief, dtype=dtype),
            "action": action,
            "is_init": begins,
            "next": {
                "observation": seen,
                "reward": 5 * normal(1),
                "terminated": terminated,
                "done": terminated | (normal(1) > 1),
            },
        },
        shape,
    )


def learner(spaces: Spaces, *, pure_way: bool) -> tuple[Trainer, DreamerV3Loss, PureStepper]:
    """A loss whose weights are not those of the start, in a trainer without workers."""
    torch.manual_seed(0)
    loss = v3.make_loss(RECIPE, spaces)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    optimizer = DreamerV3Optimizer(loss.parameters(), lr=RECIPE.lr, warmup_steps=0)
    target = SoftTargets(loss.value_loss, tau=0.1)
    stock = DreamerV3OptimizationStepper(loss, optimizer, target, compile_train_step=False, cudagraph=False)
    trainer = made(loss, optimizer=optimizer, optimization_stepper=stock)
    stepper = PureStepper(lambda: pure_update(loss, optimizer, target))
    if pure_way:
        stepper.register(trainer)
    return trainer, loss, stepper


def differentiated(loss: DreamerV3Loss, compute: Callable[[], Any]) -> list[dict[str, Tensor]]:
    """What a way of computing finds, the gradients of its losses, the loss's buffers and the next draw."""
    torch.manual_seed(1)
    found = {name: value for name, value in compute().items() if isinstance(value, Tensor)}
    names, parameters = zip(*loss.named_parameters(), strict=True)
    total: Any = sum(value for name, value in found.items() if name.startswith("loss_"))
    gradients = torch.autograd.grad(total, parameters)
    buffers = {name: buffer.clone() for name, buffer in loss.named_buffers()}
    return [found, dict(zip(names, gradients, strict=True)), buffers, {"draw": torch.rand(1)}]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "kind",
    [
        "discrete",
        "several",
        "continuous",
        "several parts",
        pytest.param("pictures", marks=pytest.mark.thorough),
    ],
)
def test_losses_gradients_and_draws_are_torchrls(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = SPACES[kind]
    _, loss, stepper = learner(spaces, pure_way=False)
    update = stepper._update
    # numbers beside pictures lie in bytes as float32
    dtype, near = (torch.float32, 1e-4) if kind == "several parts" else (torch.float64, 1e-10)
    loss.to(dtype)
    if dtype is torch.float64:
        monkeypatch.setattr(Tensor, "float", Tensor.double)  # which TorchRL's layers and losses call
    for seed in range(3):
        batch, before = batch_of(spaces, seed, dtype), loss.state_dict()
        before = {name: value.clone() for name, value in before.items() if isinstance(value, Tensor)}
        theirs = differentiated(loss, lambda batch=batch: loss(batch.clone()))
        loss.load_state_dict(before, strict=False)
        read = {str(key): batch.clone().get(key) for key in update.keys}
        ours = differentiated(loss, lambda read=read: update.phases[0].losses(read, ()))
        assert_close(ours, theirs, rtol=near, atol=near)


@pytest.mark.seconds
def test_updates_write_what_torchrls_stepper_writes_and_a_hook_inside_sends_them_its_way() -> None:
    spaces = SPACES["discrete"]
    ways = [learner(spaces, pure_way=pure_way) for pure_way in (True, False)]
    stepper = ways[0][2]
    for number in range(3):
        for trainer, _, _ in ways:
            torch.manual_seed(number)
            trainer.optim_steps(batch_of(spaces, number, torch.float32))
    assert stepper.why_not is None
    ours, theirs = ({n: v for n, v in loss.state_dict().items() if n} for _, loss, _ in ways)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    logged = [{name: float(values[-1]) for name, values in t._log_dict.items()} for t, _, _ in ways]
    assert logged[0] == pytest.approx(logged[1], rel=1e-4, abs=1e-4)
    trainer, loss, _ = ways[0]
    calls: list[object] = []
    rollout = loss.model_loss.world_model.module[1]
    rollout.register_forward_hook(lambda *_: calls.append(1))
    for number in range(2):  # a hook is looked for after each batch
        trainer.optim_steps(batch_of(spaces, number, torch.float32))
    assert stepper.way() == "in TorchRL's way: somebody's hook is on RSSMRolloutV3"
    assert calls


def test_the_model_sees_actions_in_halves_of_their_ranges_also_those_beyond_1() -> None:
    """The paper's actions are from -1 to 1, and its recurrent model cuts others."""
    spaces = SPACES["continuous"]
    prior = v3.make_loss(RECIPE, spaces).model_loss.world_model[1].rssm_prior.module
    state, belief = torch.zeros(4, 12), torch.zeros(4, 12)
    beliefs = prior(state, belief, torch.tensor([[0.5, -2.0], [1.75, 0.5], [3.0, 3.0], [9.0, 9.0]]))[-1]
    papers = prior.rnn(state, belief, torch.tensor([[0.0, -1.0], [0.5, 0.0], [1.0, 1.0], [1.0, 1.0]]))
    assert_close(beliefs, papers)
    assert not torch.allclose(beliefs[1], beliefs[2])

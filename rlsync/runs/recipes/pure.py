"""Updates as functions of tensors, which TorchRL's loss and the optimizer hold; the optimizer makes the step.

So sync maps, checkpoints and hooks on the optimizer see what they see in TorchRL's way. An algorithm's file
has its losses as functions of a :data:`Batch` and noise, and lists its phases in an :class:`Update`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict import nn as tdnn
from torch import Tensor, nn, optim
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.nn.functional import batch_norm, linear
from torchrl.modules import (
    MLP,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    TanhModule,
    ValueOperator,
)
from torchrl.modules.tensordict_module import SafeProbabilisticModule
from torchrl.objectives import LossModule, SoftUpdate
from torchrl.trainers import OptimizationStepper, Trainer

from rlsync import RlsyncWarning
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.compat.replay import Fields, RowBuffer, by_name
from rlsync.runs.compat.trainers import draw_only, fields_read, foreign_hand, stock_step
from rlsync.runs.compat.trainers import is_actors_turn as is_actors_turn
from rlsync.runs.recipes import networks
from rlsync.runs.recipes.checks import has_compiler
from rlsync.runs.recipes.encoder import Encoded, Encoder, Masked, only_allowed
from rlsync.runs.recipes.impala import heads
from rlsync.runs.recipes.normalize import Standardize, Standardized
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.settings import BFLOAT16, Config
from rlsync.runs.recipes.timeline import rounds
from rlsync.seams import first_line, warn

#: The tensors ``[B, *]`` that losses read, by key; ``("next", "reward")`` is ``next_reward``.
Batch = Mapping[str, Tensor]
#: What losses find out, by name. The sum of those whose names begin with "loss" is differentiated.
Found = dict[str, Tensor]

TRANSITION: tuple[NestedKey, ...] = (
    "observation",
    "action",
    *(("next", name) for name in ("observation", "reward", "terminated")),
    "steps_to_next_obs",  # these two are not in every batch
    "priority_weight",
)


class NotServed(Exception):
    """Why an update cannot be a function of tensors."""


class Network(NamedTuple):
    """A chain of layers; its tensors come with its input, in the order of the layers."""

    eyes: Sequence[tuple[Callable[..., Tensor], int]]  #: what the observation goes through alone
    layers: Sequence[
        tuple[Callable[..., Tensor], int]
    ]  #: what follows, with the number of its tensors
    eye: Encoder | None  #: the encoder, if there is one: two networks may share it
    masked: Observations | None  #: what a row is made of, if its mask leaves out outputs

    def __call__(self, tensors: Sequence[Tensor], observation: Tensor, *others: Tensor) -> Tensor:
        return self.decides(tensors, observation, self.sees(tensors, observation), *others)

    def sees(self, tensors: Sequence[Tensor], observation: Tensor) -> Tensor:
        """What it makes of an observation before anything else comes to it."""
        return _chained(self.eyes, tensors, observation)

    def decides(
        self, tensors: Sequence[Tensor], observation: Tensor, looked: Tensor, *others: Tensor
    ) -> Tensor:
        """Its outputs; ``looked`` is what :meth:`sees` has made of the observation."""
        behind = tensors[sum(count for _, count in self.eyes) :]
        x = torch.cat([looked, *others], -1) if others else looked
        x = _chained(self.layers, behind, x.to(behind[0].dtype))
        x = x.to(looked.dtype)  # which autocast may have changed
        if self.masked is not None:
            x = only_allowed(x, self.masked, observation)
        return x

    def each(self, stacked: Sequence[Tensor], observation: Tensor, action: Tensor) -> list[Tensor]:
        """Values ``[B]`` of each of several networks, whose tensors TorchRL holds as one, stacked."""
        of_each = zip(*(tensor.unbind(0) for tensor in stacked), strict=True)
        return [self(tensors, observation, action).squeeze(-1) for tensors in of_each]


def _chained(
    layers: Sequence[tuple[Callable[..., Tensor], int]], tensors: Sequence[Tensor], x: Tensor
) -> Tensor:
    at = iter(tensors)
    for layer, count in layers:
        x = layer(x, *[next(at) for _ in range(count)])
    return x


def _by_encoder(encoder: Encoder, names: Sequence[str], rows: Tensor, *tensors: Tensor) -> Tensor:
    """What an encoder makes of rows with other tensors than its own."""
    features: Tensor = torch.func.functional_call(
        encoder, dict(zip(names, tensors, strict=True)), (rows,)
    )
    return features


def _standardized(x: Tensor, mean: Tensor, std: Tensor, *, clip: float) -> Tensor:
    return ((x - mean) / std).clamp(-clip, clip)


#: What layers compute with their own tensors, buffers first.
_LAYERS: dict[type, Callable[..., Tensor]] = {
    nn.Linear: linear, nn.ReLU: torch.relu, nn.Tanh: torch.tanh, nn.BatchNorm1d: batch_norm,
    networks.FreeScale: networks.with_scale,
}  # fmt: skip
#: What holds layers, or comes after them and is part of the losses.
_AROUND = {
    Encoded, heads.LocAndScale, networks.MixedMLP, networks.NormedLinear, MLP, ProbabilisticActor, QValueActor,
    QValueModule, SafeProbabilisticModule, Standardized, TanhModule, ValueOperator, nn.ModuleList, nn.Sequential,
    tdnn.NormalParamExtractor, tdnn.TensorDictModule, tdnn.TensorDictSequential, tdnn.biased_softplus,
}  # fmt: skip


def network(
    module: nn.Module, *params: tdnn.TensorDictParams, training: bool = False
) -> tuple[Network, list[list[Tensor]]]:
    """What a module computes, also in ``training``, and its tensors in each of ``params``; or NotServed."""
    eyes: list[tuple[Callable[..., Tensor], int]] = []
    layers: list[tuple[Callable[..., Tensor], int]] = []
    names = []
    eye = None
    masked = None
    for path, layer in module.named_modules():
        if eye is not None and any(layer is part for part in eye.modules()):
            continue
        if isinstance(layer, Encoder):
            eye = layer
            inside = [name for name, _ in (*layer.named_buffers(), *layer.named_parameters())]
            eyes.append((partial(_by_encoder, layer, inside), len(inside)))
            names += [(*path.split("."), *name.split(".")) for name in inside]
        elif isinstance(layer, Masked):
            masked = layer.observations
        elif isinstance(layer, Standardize):
            eyes.append((partial(_standardized, clip=layer.clip), 2))
            names += [(*path.split("."), name) for name in ("mean", "std")]
        elif type(layer) in _LAYERS:
            tensors = [name for name, _ in (*layer.named_buffers(), *layer.named_parameters())]
            compute = _LAYERS[type(layer)]
            if isinstance(layer, nn.BatchNorm1d):
                compute = partial(
                    compute, training=training, momentum=layer.momentum, eps=layer.eps
                )
            elif isinstance(layer, nn.Linear) and len(tensors) < 2:
                raise NotServed("a layer has no bias")
            layers.append((compute, len(tensors)))
            names += [(*path.split("."), name) for name in tensors]
        elif type(layer) not in _AROUND:
            raise NotServed(f"{type(layer).__name__} is no layer that it knows")
    return Network(eyes, layers, eye, masked), [
        [leaves.get(name) for name in names] for leaves in params
    ]


def tanh_inside(x: Tensor) -> Tensor:
    """The hyperbolic tangent, no nearer to its limits than TorchRL's, with its own gradient."""
    y = x.tanh()
    most = 1 - torch.finfo(x.dtype).resolution
    return y + (y.clamp(-most, most) - y).detach()


def goal(batch: Batch, gamma: Tensor, value: Tensor) -> Tensor:
    """``[B]``: the rewards, and the discounted value of what follows them."""
    if "steps_to_next_obs" in batch:
        gamma = gamma ** batch["steps_to_next_obs"].view_as(value)
    return (
        batch["next_reward"].squeeze(-1) + gamma * (~batch["next_terminated"].squeeze(-1)) * value
    )


def mean(batch: Batch, errors: Tensor) -> Tensor:
    """The mean of ``[B]`` errors, by weight if the batch was drawn by priority."""
    weight = batch.get("priority_weight")
    if weight is None:
        return errors.mean()
    return (errors * weight).sum() / weight.sum()


class SoftTargets(SoftUpdate):
    """Moves all targets of a loss at once, as TorchRL's class does one network after the other."""

    def __init__(self, loss: LossModule, *, tau: float) -> None:
        super().__init__(loss, tau=tau)
        self._pairs: list[list[Tensor]] = [[], []]
        for name, targets in loss.named_children():
            if name.startswith("target_") and isinstance(targets, tdnn.TensorDictParams):
                for key, trained in loss.get_submodule(name.removeprefix("target_")).items(
                    True, True
                ):
                    if trained.requires_grad:
                        self._pairs[0].append(targets.get(key))
                        self._pairs[1].append(trained.detach())

    def step(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self._pairs[0], self._pairs[1], 1 - self.eps)


#: losses, and what else is found of a batch and noise
Losses = Callable[[Batch, Sequence[Tensor]], Found]


class Phase(NamedTuple):
    """One step of one optimizer, which lowers the losses by its own parameters."""

    optimizer: optim.Optimizer
    losses: Losses
    clips: bool = True  #: whether the gradients are clipped by their norm, which is logged then


class Update(NamedTuple):
    """An update of an algorithm: its phases, one after the other, on tensors that TorchRL's loss holds."""

    networks: Sequence[nn.Module]  #: the modules that hold the tensors, for hooks on them
    phases: Sequence[Phase]
    keys: Sequence[NestedKey] = TRANSITION
    #: is drawn as TorchRL's loss draws it
    noise: Callable[[Batch], Sequence[Tensor]] = lambda b: ()
    #: counts an update, and returns how many phases are due. None: all
    due: Callable[[], int] | None = None
    idle: Mapping[str, Tensor] = {}  #: what is found of phases that are not due
    #: what TorchRL's stepper does after its optimizers' steps
    after: Callable[[], None] = lambda: None


def gradients(
    losses: Losses,
    parameters: Sequence[Tensor],
    batch: Batch,
    noise: Sequence[Tensor],
    bfloat16: bool,
) -> tuple[Sequence[Tensor], Tensor, Found]:
    """The gradients of the sum of all losses, their norm, and what the losses found."""
    with torch.autocast(parameters[0].device.type, torch.bfloat16, enabled=bfloat16):
        values = losses(batch, noise)
    total = sum(value for name, value in values.items() if name.startswith("loss"))
    grads = torch.autograd.grad(total, parameters)  # type: ignore[arg-type]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return grads, norm, {name: value.detach() for name, value in values.items()}


def _laid_out_as(parameter: Tensor, grad: Tensor) -> Tensor:
    """A gradient in the strides of its parameter: torch's fused Adam takes both as they lie in memory.

    That of a convolution comes channels-last where its pictures are.
    """
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)


class PureStepper(OptimizationStepper):
    """Takes the place of a trainer's own stepper, and computes losses and gradients as functions of tensors.

    While somebody else has a hook on these, or if ``make`` raises NotServed, it takes TorchRL's way and says
    why. Both ways write the same tensors and draw the same noise. With ``graphs`` each phase is one graph.
    """

    def __init__(
        self, make: Callable[[], Update], graphs: Graphs | None = None, *, bfloat16: bool = False
    ) -> None:
        self.why_not: str | None = None  #: what the updates take TorchRL's way for
        #: are called with what is found, before each step
        self.told: list[Callable[[Found], None]] = []
        self._never: str | None = None
        self._graphs = graphs
        self._bfloat16 = bfloat16
        self._fields: Fields | None = None  # what updates draw; None: all fields
        self._averages: Found = {}
        self._averaged_steps = 0
        self._update = Update((), ())
        try:
            self._update = make()
        except NotServed as error:
            self._never = str(error)

    @classmethod
    def of(cls, run: Run[Any], make: Callable[[], Update]) -> PureStepper:
        graphs = Graphs(run.device) if compiles(run.config) else None
        return cls(make, graphs, bfloat16=run.recipe.update_dtype == BFLOAT16)

    def register(self, trainer: Trainer, name: str = "") -> None:
        """Make the updates of this trainer. Checkpoints have what they had without it."""
        self._of = trainer
        self._stock = trainer.optimization_stepper
        self._device = next(trainer.loss_module.parameters()).device.type
        trainer.optimization_stepper = self
        trainer.register_op("pre_optim_steps", self.look)
        trainer.register_op("pre_epoch_log", self._new_epoch)
        if isinstance(trainer.replay_buffer, RowBuffer):
            draw_only(trainer, trainer.replay_buffer, lambda: self._fields)
        self.look()

    def look(self) -> None:
        self._averages = {}
        self.why_not = self._never or foreign_hand(self._of, self._update.networks)
        read = None if self.why_not is not None else fields_read(self._of)
        # else the batches go to a stepper around it, too
        is_alone = self._of.optimization_stepper is self
        if read is None or not is_alone:
            self._fields = None
        else:
            self._fields = by_name(read.union(self._update.keys))

    def way(self) -> str:
        dtype = ", losses in bfloat16" if self._bfloat16 else ""
        if self.why_not is not None:
            return f"in TorchRL's way{dtype}: {self.why_not}"
        return f"as functions of tensors{dtype}, {self._graphs or 'not compiled'}"

    def kind(self) -> str:
        """What of it may decide the last bits of a number."""
        graphs = self._graphs is not None and self._graphs.why_not is None
        if self.why_not is not None:
            way = "in TorchRL's way"
        else:
            way = "in one graph" if graphs else "eagerly"
        if self._bfloat16:
            return f"{way}, losses in bfloat16"
        return way

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        if self.why_not is not None:
            with torch.autocast(self._device, torch.bfloat16, enabled=self._bfloat16):
                values = stock_step(trainer, self._stock, sub_batch)
            return values.select(*(name for name, value in values.items() if value.numel() == 1))
        update = self._update
        read = ((key, sub_batch.get(key, None)) for key in update.keys)
        batch = {
            k if isinstance(k, str) else "_".join(k): value
            for k, value in read
            if value is not None
        }
        noise = update.noise(batch)
        due = len(update.phases) if update.due is None else update.due()
        values = dict(update.idle) if due < len(update.phases) else {}
        for phase in update.phases[:due]:
            values |= self._make(
                phase, batch, noise, trainer.clip_norm if phase.clips else math.inf
            )
        update.after()
        if "td_error" in values:
            sub_batch.set("td_error", values.pop("td_error"))
        return self._averaged(values)

    def _averaged(self, found: Found) -> TensorDict:
        """What Trainer averages, in one operation for all: it gets the averages once, and then no more."""
        if not self._averages:
            self._averages = {name: value.clone() for name, value in found.items()}
            self._averaged_steps = 1
            return TensorDict(self._averages)
        self._averaged_steps += 1
        values = [found[name] for name in self._averages]
        torch._foreach_lerp_(list(self._averages.values()), values, 1 / self._averaged_steps)
        return TensorDict()

    def _new_epoch(self, batch: object) -> None:
        self._averaged_steps = 0  # as Trainer does: the averages are those of the newest epoch

    def _make(self, phase: Phase, batch: Batch, noise: Sequence[Tensor], clip_norm: float) -> Found:
        parameters = [p for group in phase.optimizer.param_groups for p in group["params"]]
        compute = gradients if self._graphs is None else self._graphs.gradients
        grads, norm, values = compute(phase.losses, parameters, batch, noise, self._bfloat16)
        if (size := float(norm)) > clip_norm:
            torch._foreach_mul_(list(grads), clip_norm / (size + 1e-6))
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = _laid_out_as(parameter, grad)
        for tell in self.told:
            tell(values | {"grad_norm": norm})
        phase.optimizer.step()
        phase.optimizer.zero_grad()
        return values | (
            {"grad_norm_0": norm} if phase.clips and len(self._update.phases) == 1 else {}
        )


class Graphs:
    """Compiles each phase at its first use, for CUDA as a graph to replay. If that fails, it warns once."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.seconds = 0.0
        self.why_not: str | None = None
        self._shapes: dict[Losses, object] = {}  # of the batches that each phase is compiled for
        self._replays = device.type == "cuda"
        mode = "reduce-overhead" if self._replays else None
        self._graph = torch.compile(gradients, fullgraph=True, dynamic=False, mode=mode)

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"not compiled: {self.why_not}"
        if self._shapes:
            return f"compiled in {self.seconds:.0f} s"
        return "compiled at the first of them"

    def gradients(self, losses: Losses, parameters: Any, batch: Batch, *rest: Any) -> Any:
        shapes = [(name, tensor.shape) for name, tensor in batch.items()]
        try:
            if self.why_not is None:
                grads, norm, values = self._by_graph(losses, shapes, parameters, batch, *rest)
                # the next replay writes to the same memory; gradients are used before
                if self._replays:
                    norm = norm.clone()
                    values = {name: value.clone() for name, value in values.items()}
                return grads, norm, values
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise
            self.why_not = first_line(error)
            cure = "give recipe.compile=off; or install g++ and Python's headers, keep batches of one size"
            warn(RlsyncWarning(f"updates go on uncompiled: {self.why_not}", "recipe.compile", cure))
        return gradients(losses, parameters, batch, *rest)

    def _by_graph(self, losses: Losses, shapes: object, *rest: Any) -> Any:
        graphs = counters["stats"]["unique_graphs"]
        began = time.monotonic()
        known = self._shapes.get(losses)
        if known not in (None, shapes):
            raise ValueError("a batch has other shapes than the first one")
        if known is None:
            # This process compiles, so that none of Inductor's own is left behind. It pads no product:
            # timings on CUDA would say which, and fused Adam refuses the strides of a padded gradient.
            here = inductor.patch(compile_threads=1, shape_padding=False)
            with dynamo.patch(trace_autograd_ops=True), here:
                outputs = self._graph(losses, *rest)
            self.seconds += time.monotonic() - began
            self._shapes[losses] = shapes
            return outputs
        outputs = self._graph(losses, *rest)
        if counters["stats"]["unique_graphs"] > graphs:
            raise ValueError("torch.compile did it a second time")
        return outputs


#: Compiling takes about 20 seconds of a core. It saves an update 0.5 ms (dqn) to 3 (sac), on CUDA 1 to 5.
PAYS_FROM_UPDATES = 50_000


def compiles(config: Config) -> bool:
    """Whether the updates of a run are compiled; ``auto``: where there is a compiler, if they are many."""
    if config.recipe.compile != "auto":
        return config.recipe.compile == "on"
    if torch.device(config.learner.device).type not in ("cpu", "cuda") or not has_compiler():
        return False
    return any(each.updates >= PAYS_FROM_UPDATES for each in rounds(config))

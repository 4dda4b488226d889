"""Updates as functions of tensors: losses, gradients, clipping, Adam and targets, with no module between.

TorchRL's loss, its target updater and torch's Adam hold the tensors. A pure update writes into these, in
place, so that sync maps, checkpoints and proofs see what they see otherwise. An algorithm's file has its
losses as functions of tensors, and lists its phases in an :class:`Update`. A trainer makes it by
:class:`~rlsync.recipes.hooks.stepping.PureStepper`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictParams, biased_softplus
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.adam import adam
from torchrl.modules import MLP, QValueModule, TanhModule, ValueOperator
from torchrl.objectives import LossModule, SoftUpdate

from rlsync.recipes.networks import (
    MixedMLP,
    PlainActor,
    PlainDraw,
    PlainModule,
    PlainQActor,
    PlainSequential,
)
from rlsync.recipes.replay.normalize import Standardize, Standardized

#: The tensors of an update by the name of their network: parameters, buffers and targets, in forward order.
Weights = Mapping[str, list[Tensor]]

#: What an update finds out, by name. The sum of those whose names begin with "loss" is differentiated.
Found = dict[str, Tensor]


class NotServed(Exception):
    """Why a pure update cannot take the place of TorchRL's."""


def require(owner: object, kind: type, **values: object) -> None:
    """Raise NotServed if ``owner`` is of a class of its own, or has other values."""
    if type(owner) is not kind:
        raise NotServed(f"{type(owner).__name__} is not {kind.__name__}")
    for name, value in values.items():
        if vars(owner)[name] != value:
            raise NotServed(f"{kind.__name__} has {name}={vars(owner)[name]!r}")
    if isinstance(owner, LossModule) and owner.tensor_keys != owner.default_keys():
        raise NotServed(f"{kind.__name__} reads tensors by other keys")


class Network(NamedTuple):
    """A perceptron, behind a normalisation if ``clip`` is a number; its tensors are given with its input."""

    activation: Callable[[Tensor], Tensor]
    clip: float | None

    def __call__(self, tensors: Sequence[Tensor], observation: Tensor, *others: Tensor) -> Tensor:
        if self.clip is not None:
            mean, std, *tensors = tensors
            observation = ((observation - mean) / std).clamp(-self.clip, self.clip)
        x = torch.cat([observation, *others], -1) if others else observation
        for at in range(0, len(tensors) - 2, 2):
            x = self.activation(functional.linear(x, tensors[at], tensors[at + 1]))
        return functional.linear(x, tensors[-2], tensors[-1]).to(observation.dtype)  # also under autocast


_ACTIVATIONS: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {nn.ReLU: torch.relu, nn.Tanh: torch.tanh}
#: What passes on what its children compute, one after the other.
_CHAINS = {
    MixedMLP, MLP, PlainActor, PlainModule, PlainQActor, PlainSequential, Standardized, ValueOperator,
    nn.ModuleList, nn.Sequential,
}  # fmt: skip
#: What the losses of an algorithm compute by themselves.
_HEADS = {NormalParamExtractor, PlainDraw, QValueModule, TanhModule, biased_softplus}


def network(module: nn.Module, *params: TensorDictParams) -> tuple[Network, list[list[Tensor]]]:
    """What a module computes, and its tensors in each of ``params``; NotServed if it is another kind."""
    names, kinds, clip = [], [], None
    for path, layer in module.named_modules():
        kind = type(layer)
        if kind in _CHAINS | _HEADS:
            continue
        kinds.append(kind)
        if kind is Standardize:
            clip, tensors = layer.clip, ("mean", "std")
        elif kind is nn.Linear and layer.bias is not None:
            tensors = ("weight", "bias")
        elif kind not in _ACTIVATIONS:
            raise NotServed(f"{kind.__name__} is no layer that a pure update knows")
        else:
            continue
        names += [(*path.split("."), name) for name in tensors]
    layers = [kind for kind in kinds if kind is not Standardize]
    acts = set(layers[1::2])
    if len(acts) != 1 or {*layers[::2]} != {nn.Linear} or len(layers) % 2 == 0 or Standardize in kinds[1:]:
        raise NotServed("its network is no perceptron with one kind of activation")
    return Network(_ACTIVATIONS[acts.pop()], clip), [[p.get(name) for name in names] for p in params]


def unstacked(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors of each of several networks, which TorchRL holds as one tensor each."""
    return [list(each) for each in zip(*(tensor.unbind(0) for tensor in tensors), strict=True)]


class SoftTargets(SoftUpdate):
    """Moves all targets of a loss at once, as TorchRL's class does one network after the other."""

    def __init__(self, loss: LossModule, *, tau: float) -> None:
        super().__init__(loss, tau=tau)
        pairs = [
            (trained.detach(), target)
            for name, targets in loss.named_children()
            if isinstance(targets, TensorDictParams) and name.startswith("target_")
            for key, target in targets.items(True, True)
            if (trained := loss.get_submodule(name.removeprefix("target_")).get(key)).requires_grad
        ]
        self._trained, self._moved = map(list, zip(*pairs, strict=True))

    def step(self) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(self._moved, self._trained, 1 - self.eps)


def tanh_inside(x: Tensor) -> Tensor:
    """The hyperbolic tangent, no nearer to its limits than TorchRL's, with its own gradient."""
    y, most = x.tanh(), 1 - torch.finfo(x.dtype).resolution
    return y + (y.clamp(-most, most) - y).detach()


def detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


class Transitions(NamedTuple):
    """A batch ``[B]``; ``steps`` is None if all are of one step, ``weight`` if all rows weigh alike."""

    observation: Tensor
    action: Tensor
    reward: Tensor
    next_observation: Tensor
    terminated: Tensor
    steps: Tensor | None
    weight: Tensor | None

    @classmethod
    def read(cls, batch: TensorDictBase | Mapping[NestedKey, Tensor]) -> Transitions:
        return cls(
            batch["observation"],
            batch["action"],
            batch["next", "reward"].squeeze(-1),
            batch["next", "observation"],
            batch["next", "terminated"].squeeze(-1),
            batch.get("steps_to_next_obs", None),
            batch.get("priority_weight", None),
        )

    def target(self, gamma: Tensor, value: Tensor) -> Tensor:
        """``[B]``: the rewards, and the discounted value of what follows them."""
        if self.steps is not None:
            gamma = gamma ** self.steps.view_as(self.reward)
        return self.reward + gamma * (~self.terminated) * value

    def mean(self, errors: Tensor) -> Tensor:
        """The mean over the batch, by weight if it was drawn by priority."""
        return errors.mean() if self.weight is None else (errors * self.weight).sum() / self.weight.sum()


#: What Adam keeps of each parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of one optimizer, which lowers the sum of the losses by its own parameters."""

    optimizer: optim.Adam
    losses: Callable[[Weights, Any, Sequence[Tensor]], Found]

    def places(self, weights: Weights) -> list[tuple[str, int]]:
        """Where in ``weights`` the parameters of the optimizer are; NotServed if it has another one."""
        known = {id(tensor): (name, at) for name, held in weights.items() for at, tensor in enumerate(held)}
        if type(self.optimizer) is not optim.Adam or len(self.optimizer.param_groups) != 1:
            raise NotServed("the optimizer is not Adam with one group of parameters")
        (group,) = self.optimizer.param_groups
        if group["amsgrad"] or group["maximize"] or group["weight_decay"] or group["differentiable"]:
            raise NotServed("Adam has amsgrad, maximize, weight_decay or differentiable")
        if any(id(p) not in known or not p.requires_grad for p in group["params"]):
            raise NotServed("the optimizer holds a parameter that the losses do not train")
        return [known[id(p)] for p in group["params"]]

    def step(self, grads: Sequence[Tensor]) -> None:
        """Adam's, with gradients that no parameter holds; what it keeps is where Adam keeps it."""
        (group,), state = self.optimizer.param_groups, self.optimizer.state
        params = group["params"]
        for p in params:
            if not state[p]:
                zeros = torch.zeros_like(p, memory_format=torch.preserve_format)
                state[p].update(
                    step=torch.zeros((), device=p.device), exp_avg=zeros, exp_avg_sq=zeros.clone()
                )
        mean, square, steps = ([state[p][name] for p in params] for name in _MOMENTS)
        beta1, beta2 = group["betas"]
        with torch.no_grad():
            adam(
                params,
                list(grads),
                mean,
                square,
                [],
                steps,
                fused=True,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                eps=group["eps"],
                weight_decay=0.0,
                amsgrad=False,
                maximize=False,
            )


@dataclass(frozen=True, slots=True)
class Update:
    """An update of an algorithm: its phases, one after the other, on tensors that TorchRL's loss holds."""

    networks: tuple[nn.Module, ...]  #: the modules that ``weights`` are of, for hooks on them
    weights: Weights
    phases: tuple[Phase, ...]
    #: Reads what the losses need from a drawn batch, and draws the noise as TorchRL's losses do.
    read: Callable[[Any], Any]
    noise: Callable[[Any], Sequence[Tensor]] = lambda batch: ()
    #: Counts an update, and returns how many of the phases are due in it; None: all.
    due: Callable[[], int] | None = None
    #: Is called when all phases were due and done.
    after: Callable[[], None] | None = None
    #: What an update has found where not all phases were due.
    idle: Mapping[str, Tensor] = field(default_factory=dict)


class Gradients(NamedTuple):
    """What a phase finds out before its step: the gradients of its parameters, and their norm."""

    grads: Sequence[Tensor]
    norm: Tensor
    total: Tensor
    found: Found


def eager_gradients(
    phase: Phase, weights: Weights, batch: Any, noise: Sequence[Tensor], autocast: bool
) -> Gradients:
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=autocast):
        found = phase.losses(weights, batch, noise)
    total = _total(found)
    grads = torch.autograd.grad(total, phase.optimizer.param_groups[0]["params"])
    found = {name: value.detach() for name, value in found.items()}
    return Gradients(grads, nn.utils.get_total_norm(grads), total.detach(), found)


def graph_gradients(
    phase: Phase,
    places: Sequence[tuple[str, int]],
    weights: Weights,
    batch: Any,
    noise: Sequence[Tensor],
    autocast: bool,
) -> Gradients:
    """The same as a function that torch.compile makes one graph of; ``weights`` are detached."""

    def lowered(trained: list[Tensor]) -> tuple[Tensor, Found]:
        now = {name: list(held) for name, held in weights.items()}
        for (name, at), tensor in zip(places, trained, strict=True):
            now[name][at] = tensor
        with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=autocast):
            found = phase.losses(now, batch, noise)
        total = _total(found)
        return total, {"": total.detach()} | {name: value.detach() for name, value in found.items()}

    grads, found = torch.func.grad(lowered, has_aux=True)([weights[name][at] for name, at in places])
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    return Gradients(grads, norm, found.pop(""), found)


def _total(found: Found) -> Tensor:
    losses = [value for name, value in found.items() if name.startswith("loss")]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

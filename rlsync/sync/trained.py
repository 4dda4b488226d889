"""Which weights of a map are trained, which trained ones it leaves out, and whether what it sends moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rlsync.core import errors
from rlsync.core.path import Path, walk
from rlsync.core.plan import Route, listed
from rlsync.core.user_input import check_count
from rlsync.sync.held import OF_EVERY_MODULE
from rlsync.tensors.device import Covered
from rlsync.tensors.digest import digest, writes
from rlsync.tensors.leaves import Leaf, Leaves, memory_key, uncompiled


@dataclass(frozen=True, slots=True)
class Training:
    """What trains the sources of a map."""

    #: Returns the optimizers that write to the sources, as they are now.
    optimizers: Callable[[], Iterable[torch.optim.Optimizer]] = tuple
    #: Returns the modules that compute losses, by path. They hold networks, and are none themselves.
    losses: Callable[[], Mapping[str, nn.Module]] = dict

    def parameters(self) -> list[Tensor]:
        return [parameter for parameter, _ in self._with_groups()]

    def of(self, sent: Iterable[Tensor]) -> list[tuple[Tensor, Mapping[str, Any]]]:
        """The optimizers' parameters in the memory of some tensors, each with its group."""
        covered = Covered(sent)
        return [each for each in self._with_groups() if each[0] in covered]

    def _with_groups(self) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, group

    def why_nothing_learns(
        self, source: str, sent: Iterable[Tensor], network: tuple[str, nn.Module] | None
    ) -> errors.NothingLearns | None:
        """Why the optimizers cannot change what a source sends, a part of a network; ``None`` if they can."""
        # A copy of the learner's network: no optimizer has any of it.
        sent = list(sent)
        mine = self.of(sent)
        learnt = any(tensor.requires_grad for tensor in sent)
        if learnt and not mine and self.parameters() and source.partition(".")[0] == "collector":
            problem = f"{source} is the collector's own, and no optimizer changes it"
            cure = "name the learner's module, for example loss_module.actor_network"
            return errors.NothingLearns(problem, f"source {source}", cure)

        # A frozen network: there are parameters, and none gets gradients.
        where = f"source {source}, {len(mine)} parameters in the optimizers"
        is_frozen = network is not None and self._is_frozen(network[1])
        if (mine or is_frozen) and not any(p.requires_grad for p, _ in mine):
            holder = "an optimizer" if mine else "no optimizer"
            problem = f"{holder} holds {source}, and none of its parameters requires a gradient"
            cure = "call requires_grad_(True) on the module before the optimizer is made; "
            cure += "if it is to stay as it is, SyncWeights(..., max_unchanged_publishes=None)"
            return errors.NothingLearns(problem, where, cure)

        # Steps of length 0. A scheduler, which may begin at 0, writes initial_lr.
        still = [p for p, group in mine if float(group["lr"]) == 0 and "initial_lr" not in group]
        if still:
            if len(still) == len(mine):
                part = source
            else:
                part = f"{len(still)} parameters of {source}"
            problem = f"the learning rate of {part} is 0"
            return errors.NothingLearns(
                problem, where, "give their group in the optimizer another one"
            )
        return None

    def _is_frozen(self, network: nn.Module) -> bool:
        """Whether a loss has a network that nobody trains.

        It is no average, target or reference of one that is trained: those have its shapes.
        """
        parameters = list(network.parameters())
        trained = self.parameters()
        if not parameters or not trained or any(p.requires_grad for p in parameters):
            return False
        of_losses = Covered(self.named().values())
        follows = Counter(p.shape for p in parameters) <= Counter(p.shape for p in trained)
        return not follows and all(parameter in of_losses for parameter in parameters)

    def named(self) -> dict[str, Tensor]:
        """The parameters of the losses, by name."""
        named: dict[str, Tensor] = {}
        for path, loss in self.losses().items():
            for name, parameter in loss.named_parameters():
                named[f"{path}.{name}"] = parameter
        return named

    def network_of(self, root: object, path: Path) -> tuple[str, nn.Module] | None:
        """The outermost network on a source's path, with its own path; ``None`` if there is no module."""
        losses = self.losses().values()
        for depth in range(1, len(path.segments) + 1):
            part = Path(path.segments[:depth])
            module = walk(root, part, error=errors.SourceNotFound, root_name="the trainer")
            is_source = depth == len(path.segments)
            if not isinstance(module, nn.Module):
                continue
            if is_source or all(module is not loss for loss in losses):
                return str(part), module
        return None


def unheld(sent: Iterable[tuple[str, Tensor]], held: Covered) -> tuple[str, ...]:
    """The names of those sent parameters that no optimizer holds; none if no optimizer is known."""
    if held:
        return tuple(name for name, tensor in sent if tensor not in held)
    return ()


def unsent(
    networks: Mapping[str, nn.Module], sent: Iterable[Tensor], held: Covered
) -> tuple[str, ...]:
    """The parameters of some networks that an optimizer holds and that are not sent, each once."""
    covered = Covered(sent)
    names: dict[int, str] = {}  # networks may share parameters: the first one's name stands
    for path, network in networks.items():
        parts = [(path, network)]
        for at, part in _unregistered(network):
            if isinstance(part, nn.Module):
                parts.append((f"{path}.{at}", part))
        for at, part in parts:
            for name, parameter in part.named_parameters():
                if parameter in held and parameter not in covered:
                    names.setdefault(id(parameter), uncompiled(f"{at}.{name}"))
    return tuple(names.values())


def refuse_hidden(leaves: Leaves, training: Training) -> None:
    """Refuse a source with a trained tensor that is no parameter of its module, so that nobody sends it."""
    if not isinstance(leaves.root, nn.Module):
        return
    known = Covered(leaves.tensors())
    trained = Covered(training.parameters())
    for name, tensor in _unregistered(leaves.root):
        if not isinstance(tensor, Tensor) or tensor in known:
            continue
        if tensor in trained or (tensor.is_leaf and tensor.requires_grad):
            problem = f"{name} is trained, and is no parameter: nobody sends it"
            cure = "make it an nn.Parameter of the module, or put it into an nn.ParameterDict or "
            cure += "nn.ParameterList; a tensor that needs no gradient may be a buffer"
            raise errors.LayoutMismatch(
                problem, f"source {leaves.where}, {type(leaves.root).__name__}", cure
            )


def _unregistered(root: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Tensors, and modules in dicts, lists and tuples, that torch does not know to be a module's own."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in OF_EVERY_MODULE and not isinstance(value, nn.Module):
                yield from _contents(value, f"{path}.{name}".lstrip("."))


def _contents(value: object, path: str) -> Iterator[tuple[str, Tensor | nn.Module]]:
    inside: Iterable[tuple[object, object]] = ()
    if isinstance(value, Tensor | nn.Module):
        yield path, value
    elif isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    for key, item in inside:
        yield from _contents(item, f"{path}.{key}".lstrip("."))


#: after so many publishes in a row that sent the same weights there is a warning
UNCHANGED_PUBLISHES = 10
_LEAST = 2


def check_limit(publishes: int | None) -> None:
    """Refuse a limit of unchanged publishes that is neither ``None`` nor a whole number of at least 2."""
    if publishes is not None:
        cure = f"for example {UNCHANGED_PUBLISHES}; None never warns"
        where = f"max_unchanged_publishes={publishes!r}"
        check_count("a number of publishes in a row", publishes, _LEAST, where, cure)


@dataclass(frozen=True, slots=True)
class Values:
    """Digests of tensors at one moment."""

    sources: int  #: one of all sources that are watched
    held: list[int]  #: one of each parameter of the optimizers


#: After so many steps of an optimizer there is a warning of sent parameters that got no gradient.
_FIRST_STEPS = 10
#: And if none of them got one: the policy may wait for the critic, but not for ever.
_STEPS_OF_A_CRITIC = 1000


class Gradients:
    """Notices sent parameters without a gradient in an optimizer's first steps."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._hooks: list[RemovableHandle] = []
        self._graded: set[int] = set()
        self._without: Counter[int] = Counter()  # steps without a gradient
        self._writes: dict[int, int] = {}  # of those without, at their first step
        self.steps = 0
        self._told = False

    def look(self, routes: Sequence[Route], leaves: Sequence[Leaf]) -> None:
        """Warn, once, if it is time; asked before each publish."""
        if not self._hooks and not self._told:
            for optimizer in self._training.optimizers():
                self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        if self._told or self.steps < _FIRST_STEPS:
            return
        mine = [p for p, _ in self._training.of(leaf.read() for leaf in leaves)]
        if self.steps < _STEPS_OF_A_CRITIC and all(id(p) not in self._graded for p in mine):
            return
        self._told = True
        for hook in self._hooks:
            hook.remove()
        idle = Covered(p for p in mine if self._never(p))
        names = [leaf.name for leaf in leaves if leaf.read() in idle]
        if names:
            problem = f"{len(names)} of {len(leaves)} sent parameters got no gradient in {self.steps} steps"
            where = f"sync map {', '.join(map(str, routes))}; {listed(names, 3)}"
            cure = "let the loss depend on them, or freeze them with requires_grad_(False)"
            errors.warn(errors.NothingLearns(problem, where, cure))

    def _never(self, parameter: Tensor) -> bool:
        key = id(parameter)
        still = self._without[key] >= _FIRST_STEPS and writes(parameter) == self._writes[key]
        return still and key not in self._graded and parameter.requires_grad

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._graded.add(id(parameter))
                    continue
                self._without[id(parameter)] += 1
                self._writes.setdefault(id(parameter), writes(parameter))


class Unchanged:
    """Watches the sources of a map, and warns if they stand still.

    That is, if those that require a gradient do so for ``after`` publishes in a row, each after an optimizer
    step: usually map or optimizer are on a copy. Autograd's write counters miss some writes, see
    :func:`writes`, so values are compared before a warning. Sources that an optimizer holds and does not
    move, while it moves others, are taken to be frozen on purpose.
    """

    def __init__(self, after: int | None, training: Training) -> None:
        self._after = after
        self._training = training
        self._gradients = Gradients(training)
        self.restart([])

    def restart(self, leaves: Sequence[Leaf]) -> None:
        """Watch these sources from now on; it counts as a change."""
        self._leaves = [leaf for leaf in leaves if leaf.kind == "parameter"]
        self._steps = -1
        self._marks: dict[int, tuple[object, int]] = {}
        # the leaf that was seen to change; the others are looked at only if it does not
        self._witness = 0
        self._moved()

    def _moved(self) -> None:
        self._still = 0
        self._patience = self._after
        self._suspect: Values | None = None
        self._warned = False

    def look(self, routes: Sequence[Route], optim_steps: int) -> None:
        """Look at the sources before a publish; the warning names ``routes``."""
        if self._after is None or optim_steps == self._steps or not self._leaves:
            return
        self._steps = optim_steps
        self._gradients.look(routes, self._leaves)
        if self._has_moved():
            self._moved()
        elif self._marks and not self._warned:
            self._count(routes)

    def _has_moved(self) -> bool:
        """Whether autograd saw a write to a source, or a source is other memory, since the last look."""
        # One tensor is read at each publish, at no cost; the others only if it stands still.
        before = self._marks.get(self._witness)
        if before is not None:
            now = _mark(self._leaves[self._witness].read())
            if now != before:
                self._marks[self._witness] = now
                return True
        marks = {i: _mark(tensor) for i, tensor in self._watched().items()}
        moved = [i for i, mark in marks.items() if self._marks.get(i, mark) != mark]
        first = not self._marks
        self._marks = marks
        if moved:
            self._witness = moved[0]
        return first or bool(moved)

    def _watched(self) -> dict[int, Tensor]:
        """The sources that require a gradient, by number."""
        watched = {}
        for i, leaf in enumerate(self._leaves):
            tensor = leaf.read()
            if tensor.requires_grad:
                watched[i] = tensor
        return watched

    def _count(self, routes: Sequence[Route]) -> None:
        assert self._patience is not None
        self._still += 1
        if self._still == self._patience - 1:
            self._suspect = self._values()
        elif self._suspect is not None and self._still >= self._patience:
            warning = self._judge(routes, self._suspect, self._values())
            if warning is not None:
                self._warned = True
                errors.warn(warning)
            else:  # the counters are blind, or it is meant so: look again later, and half as often
                self._still = 0
                self._suspect = None
                self._patience = 2 * self._patience

    def _values(self) -> Values:
        sources = digest(self._watched().values())
        return Values(sources, [digest([each]) for each in self._training.parameters()])

    def _judge(
        self, routes: Sequence[Route], before: Values, now: Values
    ) -> errors.NothingChanged | None:
        parameters = self._training.parameters()
        names = self._training.named()
        trained = Covered(parameters)
        if before.sources != now.sources or len(before.held) != len(now.held):
            return None  # they moved, or there is another optimizer: too early to tell
        moving = []
        for parameter, old, new in zip(parameters, before.held, now.held, strict=True):
            if old != new:
                moving.append(parameter)
        lost = [p for p in names.values() if p.grad is not None and p not in trained]
        if moving and not lost and any(tensor in trained for tensor in self._watched().values()):
            return None
        who_moves = f"the optimizers move {_listed(moving, names)}"
        if not self._gradients.steps:
            who_moves += ", and made no step"
        if lost:
            who_moves += f"; no optimizer holds {_listed(lost, names)}, which gets gradients"
        problem = f"{self._still} publishes in a row sent the same weights, although optimizer steps were made"
        cure = "one of them is a copy: name the module that is trained as the source, or give the parameters "
        cure += "of this one to the optimizer; max_unchanged_publishes=None never warns"
        return errors.NothingChanged(
            problem, f"sync map {', '.join(map(str, routes))}; {who_moves}", cure
        )


def _mark(tensor: Tensor) -> tuple[object, int]:
    return memory_key(tensor), writes(tensor)


def _listed(parameters: Sequence[Tensor], named: dict[str, Tensor]) -> str:
    if not parameters:
        return "nothing"
    first = parameters[0]
    label = f"a parameter of shape {tuple(first.shape)}"
    for name, parameter in named.items():
        if parameter is first:
            label = name
    if len(parameters) == 1:
        return label
    return f"{label} and {len(parameters) - 1} more"

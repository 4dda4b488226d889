"""Which of the weights that a map sends are trained, and which trained weights it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlsync.core.errors import SourceNotFound
from rlsync.core.path import Path, walk
from rlsync.tensors.memory import Covered
from rlsync.tensors.wrappers import uncompiled


@dataclass(frozen=True, slots=True)
class Training:
    """What trains the sources of a map."""

    #: Returns the optimizers that write to the sources, as they are now.
    optimizers: Callable[[], Iterable[torch.optim.Optimizer]] = tuple
    #: Returns the modules that compute losses, by path. They hold networks, and are none themselves.
    losses: Callable[[], Mapping[str, nn.Module]] = dict

    def parameters(self) -> list[Tensor]:
        return [p for o in self.optimizers() for group in o.param_groups for p in group["params"]]

    def named(self) -> dict[str, Tensor]:
        """The parameters of the losses, by name."""
        losses = self.losses().items()
        return {f"{path}.{name}": p for path, loss in losses for name, p in loss.named_parameters()}

    def network_of(self, root: object, path: Path) -> tuple[str, nn.Module] | None:
        """The outermost network on a source's path, with its own path; ``None`` if there is no module."""
        losses = self.losses().values()
        for depth in range(1, len(path.segments) + 1):
            part = Path(path.segments[:depth])
            module = walk(root, part, error=SourceNotFound, root_name="the trainer")
            is_source = depth == len(path.segments)
            if isinstance(module, nn.Module) and (is_source or all(module is not loss for loss in losses)):
                return str(part), module
        return None


def frozen(sent: Iterable[tuple[str, Tensor]], held: Covered) -> tuple[str, ...]:
    """The names of those sent parameters that no optimizer holds; none if no optimizer is known."""
    return tuple(name for name, tensor in sent if tensor not in held) if held else ()


def unsent(networks: Mapping[str, nn.Module], sent: Iterable[Tensor], held: Covered) -> tuple[str, ...]:
    """The parameters of some networks that an optimizer holds and that are not sent, each once."""
    covered = Covered(sent)
    names: dict[int, str] = {}  # networks may share parameters: the first one's name stands
    for path, network in networks.items():
        for name, parameter in network.named_parameters():
            if parameter in held and parameter not in covered:
                names.setdefault(id(parameter), uncompiled(f"{path}.{name}"))
    return tuple(names.values())

"""Can a policy be sent to another process, and copied? If not: which layer is at fault, and the way out."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from rlsync.core.errors import ConfigError, first_line

T = TypeVar("T")


def check_sendable(
    sent: object,
    name: str,
    modules: Mapping[str, nn.Module],
    *,
    where: str,
    start_method: str,
    way_out: str,
) -> None:
    """Refuse (ConfigError) what workers could not be given.

    What cannot be pickled, and what is defined in a program that workers cannot import, unless workers are
    forked. ``modules`` are parts of it by name.
    """
    if start_method == "fork":
        return
    error = _failure(_pickle, sent)
    if error is None:
        return
    fault = _at_fault(_pickle, modules, way_out)
    if fault is None:
        part = name
        why, cure = _told(error, "", way_out)
    else:
        part, why, cure = fault
    problem = f"{part} cannot be sent to worker processes: {why}"
    raise ConfigError(problem, f"{where}, start method {start_method!r}", cure)


def copied(value: T, name: str, modules: Mapping[str, nn.Module], where: str) -> T:
    """A deep copy; ConfigError if there can be none."""
    try:
        return copy.deepcopy(value)
    except Exception as error:
        way_out = "keep it outside of the module"
        fault = _at_fault(copy.deepcopy, modules, way_out)
        if fault is None:
            part = name
            why, cure = _told(error, "", way_out)
        else:
            part, why, cure = fault
        raise ConfigError(f"{part} cannot be copied: {why}", where, cure) from error


class _Trial(ForkingPickler):
    """Pickles as for a process that is started, but for the memory of tensors."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.requires_grad and not value.is_leaf:
                raise _GraphError
            return tuple, ()
        if isinstance(value, torch.UntypedStorage):
            return tuple, ()
        if (
            isinstance(value, (type, FunctionType))
            and value.__module__ == "__main__"
            and not _main_has_a_file()
        ):
            raise _NotInAModuleError(value.__qualname__)
        return NotImplemented


class _GraphError(Exception):
    """A tensor holds the graph that computed it."""


class _NotInAModuleError(Exception):
    """A class or function is defined in a program that has no file."""


def _main_has_a_file() -> bool:
    """Whether a process that is started anew can import what the main module defines: no notebook can."""
    main = vars(sys.modules["__main__"])
    return main.get("__spec__") is not None or Path(main.get("__file__") or "").is_file()


class _NoProcess:
    """Stands for a process that is being started: locks and pipes ask for one."""

    DupFd = staticmethod(int)
    duplicate_for_child = staticmethod(int)


_NO_PROCESS: Any = _NoProcess


@contextmanager
def _as_if_starting() -> Iterator[None]:
    before = context.get_spawning_popen()
    context.set_spawning_popen(_NO_PROCESS)
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def _pickle(value: object) -> None:
    with _as_if_starting():
        _Trial(io.BytesIO()).dump(value)


def _failure(tries: Callable[[object], object], value: object) -> Exception | None:
    try:
        tries(value)
    except Exception as error:  # noqa: BLE001 - it is described
        return error
    return None


def _at_fault(
    tries: Callable[[object], object], modules: Mapping[str, nn.Module], way_out: str
) -> tuple[str, str, str] | None:
    """The innermost layer at fault, why, and the cure."""
    for name, part in _innermost_first(modules):
        error = _failure(tries, part)
        if error is not None:
            why, cure = _described(part, tries, error, way_out)
            return f"{name} ({type(part).__name__})", why, cure
    return None


def _is_at_fault(tries: Callable[[object], object], key: str, value: object) -> bool:
    return key not in ("_modules", "_parameters", "_buffers") and _failure(tries, value) is not None


def _described(
    part: nn.Module, tries: Callable[[object], object], error: Exception, way_out: str
) -> tuple[str, str]:
    """Why a layer fails, and the cure."""
    kind = type(part)
    attribute = ""
    for key, value in vars(part).items():
        if _is_at_fault(tries, key, value):
            attribute = key
            break
    norm = _older_norm(part)
    if norm:
        why = f"torch.nn.utils.{norm} keeps a weight with the graph that computed it"
        cure = f"use torch.nn.utils.parametrizations.{norm}"
        if tries is not copy.deepcopy:
            cure += f", and {way_out}"
        return why, cure
    if parametrize.is_parametrized(part):
        return "torch does not pickle parametrizations", way_out
    if "<locals>" not in kind.__qualname__ and _named_now(kind) is not kind:
        why = f"the class {kind.__qualname__} was defined again after this was made, and is another one now"
        return (
            why,
            "put the class into a module (a file), which defines it once, or make the policy anew",
        )
    if isinstance(vars(part).get(attribute), Tensor):
        why = f"its {attribute} is a tensor with the graph that computed it"
        return why, f"keep {attribute}.detach(), or {way_out}"
    return _told(error, attribute, way_out)


def _older_norm(part: nn.Module) -> str:
    """Which norm of ``torch.nn.utils`` a layer has that newer ones replace; empty if it has none."""
    for hook in part._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            return "weight_norm"
        if isinstance(hook, SpectralNorm):
            return "spectral_norm"
    return ""


def _told(error: Exception, attribute: str, way_out: str) -> tuple[str, str]:
    """Why, and the cure, by the error alone, of an attribute if that is known."""
    if isinstance(error, _NotInAModuleError):
        why = f"{error} is defined in a program without a file, such as a notebook, and they cannot import it"
        return why, f"put it into a module (a file) and import it from there, or {way_out}"
    local = "<locals>" in str(error) or "<lambda>" in str(error)
    if local:
        cure = "define it at the top level of a module"
    else:
        cure = "leave it out in __getstate__"
    why = first_line(error)
    if attribute:
        why = f"its {attribute}: {why}"
    return why, f"{cure}, or {way_out}"


def _named_now(kind: type) -> object:
    """What now has the name of a class, in its module."""
    named: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        if isinstance(named, type(sys) | type):
            named = vars(named).get(name)
        else:
            named = None
    return named


def _innermost_first(modules: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    named = []
    for destination, module in modules.items():
        for path, part in module.named_modules():
            named.append((f"{destination}.{path}".rstrip("."), part))
    return sorted(named, key=lambda each: -each[0].count("."))

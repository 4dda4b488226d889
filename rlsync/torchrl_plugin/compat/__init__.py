"""All uses of TorchRL's private names: what each is for, and until when.

All of it was written against torchrl 0.14.1 (2026-11). "Until" begins the sentence that says what will let a
function go. No module of rlsync outside this room reads or writes
an attribute of TorchRL whose name begins with an underscore; tests/torchrl_plugin/test_torchrl_privates.py
looks for them.
The one exception is TorchRL's interface for weight-sync schemes, which has such names: BoardScheme overrides
_init_on_sender_impl, _init_on_receiver_impl, _setup_connection_and_weights_on_sender_impl and
_setup_connection_and_weights_on_receiver_impl.

Users import the module of their subject: ``from rlsync.torchrl_plugin.compat import trainers``.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def present(ref: weakref.ref[T], what: str = "collector") -> T:
    referent = ref()
    if referent is None:
        raise ReferenceError(f"the {what} is gone")
    return referent


def in_place_of(owner: Any, method: str) -> Callable[[F], F]:
    """Let ``owner.method(...)`` call the decorated function, with ``owner``, which is held weakly, first."""
    ref = weakref.ref(owner)

    def replace(function: F) -> F:
        setattr(owner, method, lambda *args, **kwargs: function(present(ref), *args, **kwargs))
        return function

    return replace


def present_method(owner: Any, name: str) -> Callable[..., Any]:
    """What ``owner.name`` is now, without a reference to the owner: perhaps a wrapper on the instance."""
    if name in vars(owner):
        wrapper: Callable[..., Any] = vars(owner)[name]
        return wrapper
    ref = weakref.ref(owner)

    def call(*args: Any, **kwargs: Any) -> Any:
        there: Any = ref()
        return getattr(type(there), name)(there, *args, **kwargs)

    return call


def around_calls(
    owner: object, method: str, enter: Callable[[], AbstractContextManager[object]]
) -> None:
    """Run each ``owner.method(...)`` inside ``enter()``."""
    call = present_method(owner, method)

    def inside(*args: object, **kwargs: object) -> object:
        with enter():
            return call(*args, **kwargs)

    setattr(owner, method, inside)


def wrap_batches(collector: Any, wrap: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Let each iteration over the batches of ``collector`` go through ``wrap(batches)``."""
    batches = present_method(collector, "iterator")
    collector.iterator = lambda: wrap(batches())

"""All uses of TorchRL's private names: what each is for, and when it can be removed.

All of it was written against torchrl 0.14.1 (2026-11). No module of rlsync outside this room reads or writes
an attribute of TorchRL whose name begins with an underscore; tests/torchrl_plugin/test_torchrl_privates.py
looks for them.
The one exception is TorchRL's interface for weight-sync schemes, which has such names: BoardScheme overrides
_init_on_sender_impl, _init_on_receiver_impl, _setup_connection_and_weights_on_sender_impl and
_setup_connection_and_weights_on_receiver_impl.

Users import the module of their subject: ``from rlsync.torchrl_plugin.compat import trainers``.
"""

import weakref
from typing import TypeVar

T = TypeVar("T")


def present(ref: weakref.ref[T], what: str = "collector") -> T:
    """What ``ref`` refers to.

    A function of ours that stands in the place of an object's method refers to the object by a weak
    reference, so that the object is freed when the user drops it, and not by the next garbage collection.
    """
    held = ref()
    if held is None:
        raise ReferenceError(f"the {what} is gone")
    return held

"""What every transport does alike with a publish: refuse an old stamp, keep what is not given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlsync.core.errors import PublishError
from rlsync.core.ledger import Stamp
from rlsync.tensors.layout import Layout

#: A destination and the name of one of its leaves.
Key = tuple[str, str]


def check_newer(stamp: Stamp, newest: Stamp) -> None:
    """Refuse a stamp that is not greater than the newest one.

    Raises:
        PublishError: it is not.

    Example:
        >>> check_newer(Stamp(2, 11), newest=Stamp(1, 15))
        >>> check_newer(Stamp(1, 16), newest=Stamp(2, 11))
        Traceback (most recent call last):
        rlsync.core.errors.PublishError: version 16 of generation 1 is not newer than version 11 of
          generation 2 where  publish cure   draw the stamp from the learner's ledger; of two learners, end
          the older one
    """
    if stamp <= newest:
        raise PublishError(
            f"version {stamp.version} of generation {stamp.generation} is not newer than "
            f"version {newest.version} of generation {newest.generation}",
            "publish",
            "draw the stamp from the learner's ledger; of two learners, end the older one",
        )


def keyed(layout: Layout, tensors: Sequence[Tensor]) -> dict[Key, Tensor]:
    """The tensors of a publish by destination and leaf; tied leaves included."""
    spread = zip(layout.entries, layout.spread(tensors), strict=True)
    return {(entry.destination, entry.leaf.name): tensor for entry, tensor in spread}


def completed(tensors: Sequence[Tensor | None], layout: Layout, kept: Mapping[Key, Tensor]) -> list[Tensor]:
    """The tensors of a publish, with the kept value wherever there is ``None``.

    Args:
        tensors: one for each entry of ``layout`` that owns its bytes.
        layout: what is published.
        kept: values of the version before.

    Raises:
        LayoutMismatch: there are more or fewer tensors than entries.
        PublishError: a leaf has no value to keep.
    """
    layout.check_count(tensors)
    whole = []
    for entry, tensor in zip(layout.owned, tensors, strict=True):
        value = kept.get((entry.destination, entry.leaf.name)) if tensor is None else tensor
        if value is None:
            raise PublishError(
                f"{entry.leaf.name} has no value to keep: no version before had it",
                f"destination {entry.destination!r}",
                "publish every leaf the first time",
            )
        whole.append(value)
    return whole

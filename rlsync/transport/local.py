"""Local transport: learner and worker in one process, perhaps in two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from rlsync.tensors.layout import Layout

#: Copies the tensors of one version into the worker's module. They are the learner's own.
Copy = Callable[[int, Layout, Sequence[Tensor]], None]


class LocalTransport:
    """Copies a version into the worker's module, between its rollouts and never during one.

    When no rollout is running, a publish writes into the module at once. When one is running in another
    thread (``collector.start()``), the publish leaves a copy that the worker takes up at its next rollout.

    Args:
        layout: the leaves that move; aliased ones are not among them.
        copy: copies a version into the worker's module.
        version: the version to go on from.

    Example:
        >>> import torch
        >>> from rlsync.tensors.layout import LeafSpec
        >>> acts = torch.zeros(2)
        >>> layout = Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]})
        >>> transport = LocalTransport(layout, lambda version, layout, tensors: acts.copy_(tensors[0]))
        >>> transport.publish([torch.ones(2)])
        1
        >>> acts.tolist()
        [1.0, 1.0]
    """

    def __init__(self, layout: Layout, copy: Copy, version: int = 0) -> None:
        self.layout = layout
        self._copy = copy
        self._version = version
        self._adopted = version
        self._staged: tuple[int, list[Tensor]] | None = None
        self._acting = threading.Lock()
        self._guard = threading.Lock()

    @property
    def version(self) -> int:
        """The newest published version."""
        return self._version

    @property
    def adopted(self) -> int:
        """The version that acts."""
        return self._adopted

    def advance_to(self, version: int) -> None:
        """Never give out ``version`` or a lower one again."""
        self._version = max(self._version, version)

    def publish(self, tensors: Sequence[Tensor]) -> int:
        """See :class:`rlsync.transport.base.Publisher`; never coalesces.

        Raises:
            LayoutMismatch: a tensor has not the shape of its leaf.
        """
        self.layout.check(tensors)
        with self._guard:
            version = self._version + 1
            if self._acting.acquire(blocking=False):
                try:
                    self._take(version, tensors)
                    self._staged = None
                finally:
                    self._acting.release()
            else:
                self._staged = version, [tensor.detach().clone() for tensor in tensors]
            self._version = version
        return version

    def adopt(self) -> int:
        """See :class:`rlsync.transport.base.Subscriber`."""
        with self.acting() as version:
            return version

    @contextmanager
    def acting(self) -> Iterator[int]:
        """Adopt the newest version and hold it for the duration of a rollout."""
        with self._acting:
            with self._guard:
                if self._staged is not None:
                    self._take(*self._staged)
                    self._staged = None
            yield self._adopted

    def _take(self, version: int, tensors: Sequence[Tensor]) -> None:
        self._copy(version, self.layout, self.layout.spread(tensors))
        self._adopted = version

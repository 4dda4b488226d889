"""The learner's memory for images: one is written, one is the newest, one is on its way to the store."""

from __future__ import annotations

from rlsync.tensors.layout import Layout
from rlsync.transport.relay.image import Sheet


class Sheets:
    """Three sheets of one layout, made once, so that no publish pays for page faults.

    Called under the transport's lock.

    Example:
        >>> import torch
        >>> from rlsync.core.ledger import Stamp
        >>> from rlsync.tensors.layout import LeafSpec
        >>> sheets = Sheets()
        >>> sheets.lay_out(Layout.build({"policy": [LeafSpec("w", "parameter", (2,), torch.float32)]}))
        >>> for version in (1, 2):
        ...     sheet = sheets.free()
        ...     sheet.write(Stamp(1, version), [torch.ones(2)])
        ...     sheets.publish(sheet)
        >>> sheets.take().stamp.version, sheets.take()
        (2, None)
    """

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.newest: Sheet | None = None  #: the newest version
        self.waiting: Sheet | None = None  #: the newest version, while it was not taken
        self._taken: Sheet | None = None
        self._sheets: list[Sheet] = []

    def lay_out(self, layout: Layout) -> None:
        """Make sheets for another layout; those in use stay until they are replaced."""
        self.layout = layout
        self._sheets = [Sheet(layout) for _ in range(3)]

    def free(self) -> Sheet:
        """One that is neither the newest version nor what was taken last."""
        return next(s for s in self._sheets if s is not self.newest and s is not self._taken)

    def publish(self, sheet: Sheet) -> None:
        """Make a sheet that was written the newest version."""
        self.newest = self.waiting = sheet

    def take(self) -> Sheet | None:
        """The newest version, which stays as it is until the next is taken; ``None`` if it was taken."""
        sheet, self.waiting = self.waiting, None
        if sheet is not None:
            self._taken = sheet
        return sheet

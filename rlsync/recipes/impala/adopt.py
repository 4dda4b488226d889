"""A worker's network, brought up to date from a board between rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rlsync.tensors.digest import digest
from rlsync.tensors.layout import Layout
from rlsync.tensors.leaves import Leaves
from rlsync.tensors.memory import return_freed_memory
from rlsync.tensors.target import Target
from rlsync.torchrl_plugin.check import Answer
from rlsync.transport.board import BoardHandle, BoardReader
from rlsync.transport.board_format import Note

#: The one destination that these workers have.
POLICY = "policy"


class AdoptedNetwork:
    """Points the parameters of a network at the newest version on a board; buffers are copied out.

    It says on the board what stands here, so that the learner checks its map leaf by leaf, and answers when
    the learner asks what acts.

    Args:
        handle: the board.
        worker: this worker's number.
        network: what acts.
    """

    def __init__(self, handle: BoardHandle, worker: int, network: nn.Module) -> None:
        self._network = network
        self._where = f"{POLICY} of worker {worker}"
        self._layout: Layout | None = None
        self._target: Target | None = None
        self._taken: list[int] = []
        self._names: list[str] = []
        self._answered = 0
        self._arrived: dict[str, int] = {}
        self._reader = BoardReader(handle, self._apply, worker)
        stands = {POLICY: Leaves(network, POLICY).specs()}
        self._reader.leave_note(Layout.build(stands).to_json())

    @property
    def version(self) -> int:
        """The version that acts."""
        return self._reader.version

    @property
    def newest(self) -> int:
        """The newest published version."""
        return self._reader.newest

    @property
    def learner_gone(self) -> bool:
        """Whether the learner has closed the board or died."""
        return self._reader.closed_by_learner

    def adopt(self) -> int:
        """Adopt the newest version; between rollouts, in the thread that acts."""
        acted = self._reader.version
        version = self._reader.adopt()
        self._arrived = {}
        if version != acted and self._asked():
            self._arrived = {POLICY: self._digest(parameters=False)}
        return version

    def answer(self) -> None:
        """After a rollout: tell the learner what acted, if it has asked."""
        if self._asked():
            kept = {POLICY: self._digest(parameters=True)}
            answer = Answer(self._reader.asked, self._reader.version, kept, self._arrived)
            self._reader.leave_note(answer.to_json(), Note.ANSWER)
            self._answered = answer.asked

    def close(self) -> None:
        """Give line and lease back."""
        self._reader.close()

    def _asked(self) -> bool:
        return self._reader.asked not in (0, self._answered)

    def _digest(self, *, parameters: bool) -> int:
        live = {leaf.name: leaf for leaf in Leaves(self._network, POLICY).leaves}
        return digest(
            live[name].read() for name in self._names if (live[name].kind == "parameter") is parameters
        )

    def _apply(self, version: int, layout: Layout, views: Sequence[Tensor]) -> bool:
        anew = layout is not self._layout
        if anew:
            here = [i for i, entry in enumerate(layout.entries) if entry.destination == POLICY]
            leaves = [layout.entries[i].leaf for i in here]
            self._target = Target(self._network, self._where, leaves)
            self._taken, self._names, self._layout = here, [leaf.name for leaf in leaves], layout
        assert self._target is not None
        self._target.alias([views[i] for i in self._taken])
        if anew:
            return_freed_memory()
        return True

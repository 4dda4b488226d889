"""TorchRL's base class of what adds something to the steps of an environment."""

from __future__ import annotations

from abc import abstractmethod

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform


class OwnTransform(Transform):
    """A transform that is told of resets and of steps.

    TorchRL asks transforms for private ``_reset`` and ``_step``. Remove this class when these are public.
    """

    @abstractmethod
    def at_reset(self, first: TensorDictBase, begins: Tensor | None) -> TensorDictBase:
        """Some environments begin an episode.

        Args:
            first: what they begin with; of the others, what they are at.
            begins: which ones, ``[*batch, 1]`` bool; None: all.
        """

    @abstractmethod
    def at_step(self, after: TensorDictBase) -> TensorDictBase:
        """All environments made a step; ``after`` is what it led to."""

    def _reset(self, tensordict: TensorDictBase | None, tensordict_reset: TensorDictBase) -> TensorDictBase:
        begins = None if tensordict is None else tensordict.get("_reset", None)
        return self.at_reset(tensordict_reset, begins)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.at_step(next_tensordict)
